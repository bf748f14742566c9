"""Read ahead in a thread of its own. The thread knows nothing of MPI and ends with whoever reads from it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Prefetcher"]

_PATIENCE = 10.0  # seconds that the end of the program waits for what is being read


class _Buffer:
    """What the thread and the reader share. The thread must not hold the reader, or neither would ever be freed."""

    def __init__(self, depth: int) -> None:
        self.room: SimpleQueue[bool] = SimpleQueue()  # one entry for each item that may be made; False ends the thread
        self.items: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # (True, item), at last (False, error or None)
        self.closed = False
        for _ in range(depth):
            self.room.put(True)

    def close(self) -> None:
        self.closed = True
        self.room.put(False)
        self.items.put((False, None))


_running: dict[threading.Thread, _Buffer] = {}


def _end_all() -> None:
    """End the threads before the interpreter ends: one inside HDF5 would crash it then, or never let it go."""
    running = list(_running.items())
    for _, buffer in running:
        buffer.close()
    for thread, _ in running:
        thread.join(_PATIENCE)


def _run(buffer: _Buffer, produce: Callable[[], Any]) -> None:
    try:
        _fill(buffer, produce)
    finally:
        _running.pop(threading.current_thread(), None)


def _fill(buffer: _Buffer, produce: Callable[[], Any]) -> None:
    """Produce until StopIteration, an error, or the reader's end."""
    while buffer.room.get() and not buffer.closed:
        try:
            item = True, produce()
        except StopIteration:
            item = False, None
        except BaseException as error:  # whatever it is, it belongs to the reader
            item = False, error
        buffer.items.put(item)
        if not item[0]:
            return
        del item  # the reader's alone


class Prefetcher:
    """Calls a function ahead of need, at most `depth` results ahead, in order.

    Args:
        produce: returns the next item or raises StopIteration; called in the thread only.
        depth: how many results may wait, at least 1.
    """

    def __init__(self, produce: Callable[[], Any], depth: int) -> None:
        self._buffer = _Buffer(depth)
        self._thread = threading.Thread(
            target=_run, args=(self._buffer, produce), name="mpistrat-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._buffer.close)
        atexit.unregister(_end_all)  # the last to be registered is called first: before h5py's own end
        atexit.register(_end_all)
        _running[self._thread] = self._buffer
        self._thread.start()

    def get(self) -> Any:
        """Return the next item. Raises StopIteration at the end, and what the function raised, when its turn comes."""
        if self._buffer.closed:
            raise StopIteration
        more, item = self._buffer.items.get()
        if more:
            self._buffer.room.put(True)
            return item
        self._buffer.items.put((more, item))  # for who asks again
        if item is not None:
            raise item
        raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it; what it had read is dropped. Safe to call twice."""
        self._finalizer()
        self._thread.join()
