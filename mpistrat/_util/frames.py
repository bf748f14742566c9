"""Where the threads of this process are."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

__all__ = ["frame_of", "frames"]

_lock = threading.RLock()


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
