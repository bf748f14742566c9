"""A process that ends when its parent is killed.

Run by its path, with the standard library only, before a program that it becomes: `end_with_parent.py PARENT WORD …`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # Linux's prctl(2); it stays set after exec
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up before a fork


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Request a signal for this process, such as a launcher before its start, when its parent is killed."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, number)


def main(parent: str, *words: str) -> None:
    """Replace this process with a program."""
    end_with_parent()
    if os.getppid() == int(parent):  # else it has died already
        os.execvp(words[0], words)


if __name__ == "__main__":
    main(*sys.argv[1:])
