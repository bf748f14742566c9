"""Read ahead in a thread of its own. The thread knows nothing of MPI and ends with whoever reads from it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Prefetcher"]

_PATIENCE = 10.0  # seconds that the end of the program waits for what is being read


class _Buffer:
    """What the thread and the reader share. The thread must not hold the reader, or neither would ever be freed."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[Any] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.ended = False
        self.error: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Wait until there is room for an item; False when the reader has gone."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.items) < self.depth)
            return not self.closed

    def put(self, item: Any) -> None:
        with self.changed:
            if not self.closed:
                self.items.append(item)
                self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()


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
    while buffer.wait_for_room():
        try:
            item = produce()
        except StopIteration:
            buffer.end(None)
            return
        except BaseException as error:  # whatever it is, it belongs to the reader
            buffer.end(error)
            return
        buffer.put(item)


class Prefetcher:
    """Calls a function ahead of need, at most `depth` results ahead, in order. Not collective.

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
        buffer = self._buffer
        with buffer.changed:
            buffer.changed.wait_for(lambda: buffer.items or buffer.ended or buffer.closed)
            if buffer.items:
                item = buffer.items.popleft()
                buffer.changed.notify_all()
                return item
            if buffer.error is not None:
                raise buffer.error
            raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it; what it had read is dropped. Safe to call twice."""
        self._finalizer()
        self._thread.join()
