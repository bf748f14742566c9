"""Stacks of the threads of this process."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from types import FrameType

__all__ = ["frame_of", "frames", "stacks"]

_lock = threading.RLock()
_TRIES = 100


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of every thread by its identity, like sys._current_frames().

    Python 3.11.0 to 3.11.8 allocate frames there, and may collect garbage, while holding the lock of their threads: a finalizer
    that yields to a thread that starts or ends another one deadlocks the process (python/cpython#106883). So the garbage
    collector is off meanwhile.
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, the caller's for its own; None if no such thread runs."""
    return sys._getframe(1) if thread == threading.get_ident() else frames().get(thread)


def stacks() -> dict[int, list[str]]:
    """Return the stack of every other thread by its identity, like `traceback.format_stack`, all at one moment.

    A thread that runs between two reads of its frames would have inconsistent callers. So frames are read until two reads agree;
    source lines are read later.
    """
    found = _look()
    for _ in range(_TRIES):
        before, found = found, _look()
        if before == found:
            break
    return {ident: traceback.StackSummary.extract(iter(stack[::-1])).format() for ident, stack in found.items()}


def _look() -> dict[int, list[tuple[FrameType, int]]]:
    own = threading.get_ident()
    return {ident: [*traceback.walk_stack(frame)] for ident, frame in frames().items() if ident != own}
