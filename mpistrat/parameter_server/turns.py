"""Turns of two sides: a thread that works in rounds, and others that seldom want what it works on."""

from __future__ import annotations

import threading
from threading import get_ident
from time import sleep
from types import TracebackType
from typing import final

__all__ = ["Turns"]

_NAP = 2e-5


@final
class Turns:
    """A lock, to be held by `with`, that the thread of the rounds may take again and again without starving the others.

    A plain lock would: who waits for it needs a while to wake up, and by then it is taken again. So the others say that
    they wait, and the rounds give way between two. Whoever holds it may take it once more.
    """

    def __init__(self) -> None:
        self._lock, self._others = threading.RLock(), threading.RLock()
        self._owner = get_ident()
        self._wanted = False

    def own_rounds(self) -> None:
        """Make the calling thread the one that works in rounds; at first it is the one that made this. Not collective."""
        self._owner = get_ident()

    def give_way(self) -> None:
        """Let another thread that waits have its turn; between two rounds. Not collective."""
        while self._wanted:
            sleep(_NAP)

    def acquire(self) -> None:
        """Wait for one's turn. Not collective."""
        if get_ident() == self._owner:
            self._lock.acquire()
            return
        self._others.acquire()
        try:
            self._wanted = True
            self._lock.acquire()
        except BaseException:
            self._others.release()
            raise
        finally:
            self._wanted = False

    def release(self) -> None:
        """End one's turn. Not collective."""
        self._lock.release()
        if get_ident() != self._owner:
            self._others.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
