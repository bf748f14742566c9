"""The end of the interpreter: threads that hold objects of PyTorch let go of them before it.

A destructor of PyTorch gives up the interpreter's lock and takes it again. Python ends a thread that takes the lock at the
interpreter's end; within a destructor that aborts the process: "terminate called without an active exception". Our threads
end before that. gloo's worker frees the last operation after the program has its result, and then waits for the lock;
nothing tells when it is done, so it is left some time (without that, 1 in 5 runs of a short program aborted).
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from typing import Protocol

__all__ = ["Threaded", "end_at_exit", "wait_for_gloo_at_exit"]

_LIMIT = 0.5  # seconds for all threads: one may be in an operation that does not end
_FREED = 0.05  # seconds in which gloo's worker has freed its operation, also on a loaded machine


class Threaded(Protocol):
    """The owner of a thread."""

    def stop(self) -> threading.Thread | None:
        """Tell the thread to end, and return it, if it was started. A later use starts another one."""


_owners: weakref.WeakSet[Threaded] = weakref.WeakSet()


def end_at_exit(owner: Threaded) -> None:
    """End an object's thread at the exit of the interpreter, if both live then."""
    _owners.add(owner)


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Leave the interpreter's lock to gloo's workers at the exit of the interpreter, once."""
    atexit.register(time.sleep, _FREED)


def _end() -> None:
    threads = [thread for owner in list(_owners) if (thread := owner.stop()) is not None]
    until = time.monotonic() + _LIMIT
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end)  # at import, so that it is called after the functions that use groups
