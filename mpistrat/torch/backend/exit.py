"""The end of the interpreter: threads that hold objects of PyTorch end before it.

A destructor of PyTorch gives up the interpreter's lock and takes it again. Python ends a thread that takes the lock at the
interpreter's end; within a destructor that aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Protocol

__all__ = ["Threaded", "end_at_exit"]

_LIMIT = 0.5  # seconds for all threads: one may be in an operation that does not end


class Threaded(Protocol):
    """The owner of a thread."""

    def stop(self) -> threading.Thread | None:
        """Tell the thread to end, and return it, if it was started. A later use starts another one."""


_owners: weakref.WeakSet[Threaded] = weakref.WeakSet()


def end_at_exit(owner: Threaded) -> None:
    """End an object's thread at the exit of the interpreter, if both live then."""
    _owners.add(owner)


def _end() -> None:
    threads = [thread for owner in list(_owners) if (thread := owner.stop()) is not None]
    until = time.monotonic() + _LIMIT
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end)  # at import, so that it is called after the functions that use groups
