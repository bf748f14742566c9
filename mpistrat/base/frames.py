"""Where the threads of this process are."""

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
    """Return the innermost frame of every thread, by its identity, as sys._current_frames() does.

    Python 3.11.0 to 3.11.8 make frames there, and may collect garbage, while they hold the lock of their threads: a finalizer
    that gives way to a thread that starts or ends another one stops the process for ever (python/cpython#106883). So nothing is
    collected meanwhile.
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
    """Return the innermost frame of a thread, that of the caller for its own; None where no such thread runs."""
    return sys._getframe(1) if thread == threading.get_ident() else frames().get(thread)


def stacks() -> dict[int, list[str]]:
    """Return the stack of every other thread, by its identity, as `traceback.format_stack` does, all as of one moment.

    A thread that runs between two looks at its frames would be shown with callers that no longer called what is below them. So
    they are looked at until two looks see the same; lines of files are read later.
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
