"""Lane: one thread of a group that runs the group's operations in the order of their calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

from .exit import end_at_exit
from .work import OperationWork

__all__ = ["Lane"]


@final
class Lane:
    """A queue that runs operations in the order of their calls, one at a time.

    Ranks may use groups in different orders, as each has its own lane. A call that waits anyway runs in its own thread if the
    lane is empty, which saves two changes of thread. A call from a callback of a future that the lane has set runs at once:
    before the waiting calls, which is the same position on every rank, and cannot deadlock. So does a call within an
    operation.

    Args:
        name: the name of the thread.
        threads: False to run every operation in the calling thread, if MPI does not allow concurrent calls of threads.
    """

    def __init__(self, name: str, threads: bool) -> None:
        self._name, self._threads = name, threads
        self._queue: queue.SimpleQueue[tuple[OperationWork, Callable[[], None]] | None] = queue.SimpleQueue()
        self._running = threading.RLock()  # held by the thread that runs an operation
        self._posting = threading.Lock()
        self._waiting = 0  # operations in the queue, and the running one
        self._inside = 0  # the thread of a waiting call that runs in its own thread
        self._thread: threading.Thread | None = None
        self._stopped = False  # after `stop`

    def run(self, work: OperationWork, operation: Callable[[], None], waits: bool) -> OperationWork:
        """Run or queue an operation. Return its work.

        Args:
            work: the work to finish after the operation.
            operation: the function of the operation.
            waits: True if the caller waits for the work at once.
        """
        if threading.current_thread() is self._thread or threading.get_ident() == self._inside:
            _do(work, operation)
            return work
        if not self._threads:
            with self._running:
                _do(work, operation)
            return work
        if waits:
            with self._posting:
                here = self._waiting == 0 and self._running.acquire(False)
            if here:
                self._inside = threading.get_ident()
                try:
                    _do(work, operation)
                finally:
                    self._inside = 0
                    self._running.release()
                return work
        with self._posting:
            self._waiting += 1
            if self._thread is None or self._stopped:
                self._stopped = False
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
                end_at_exit(self)
            self._queue.put((work, operation))
        return work

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._running:
                _do(*item)
            with self._posting:
                self._waiting -= 1
            del item  # or its tensors live until the next one

    def stop(self) -> threading.Thread | None:
        """Tell the thread to end after the queued operations, and return it, if it was started."""
        with self._posting:
            if self._thread is not None and not self._stopped:
                self._stopped = True
                self._queue.put(None)
            return self._thread

    def close(self) -> None:
        """End the thread after the queued operations. Call it once."""
        thread = self.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _do(work: OperationWork, operation: Callable[[], None]) -> None:
    try:
        operation()
    except Exception as error:
        work.finish(error)
    else:
        work.finish()
