"""Lease: a lock held by at most one rank, which expires, so that it is not lost with a dead owner."""

from __future__ import annotations

from time import monotonic, sleep
from typing import final

from ..errors import explain
from .window import Window

__all__ = ["Lease"]

_OWNER_BITS = 20
_OWNERS = 1 << _OWNER_BITS
_NAP = (5e-5, 2e-3)  # seconds between two looks at the word, at first and at most


@final
class Lease:
    """A lease in one word of a window: taken, renewed and given back by compare-and-swap.

    The word holds its owner and a number that grows with every change of the word. Who wants a lease that another rank
    holds watches the word: unchanged for `term` seconds, by the watcher's own clock, the lease has expired, and is taken
    over. No clocks are compared, and no MPI lock exists that would die with its owner.

    An owner that does not renew in time may lose the lease and know nothing of it until it renews. Whatever a lease
    protects against that must compare `token`, which is larger for every later owner.

    Args:
        window: any window.
        rank: the rank of the window in whose segment the word lies.
        offset: of the word, in bytes; it is 0 at first, and nothing else writes there.
        owner: this rank, a number of its own.
        term: seconds.

    Attributes:
        token: the number of the word as this rank last wrote it; 0 while it holds nothing.
    """

    def __init__(self, window: Window, rank: int, offset: int, owner: int, term: float) -> None:
        if not 0 <= owner < _OWNERS - 1:
            raise ValueError(explain("Lease", "owner", expected=f"0 <= owner < {_OWNERS - 1}", got=owner))
        if not term > 0:
            raise ValueError(explain("Lease", "term", expected="seconds > 0", got=term))
        self._window, self._rank, self._offset = window, rank, offset
        self._tag, self._term = owner + 1, term
        self.token = 0
        self._seen, self._since = -1, 0.0  # the word as it was last, and since when it has been that

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lease if it is free or expires; wait `timeout` seconds for that.

        What was seen counts in later calls, too: one that is called again and again notices an expiry, however short its
        `timeout` is.
        """
        until, nap = monotonic() + timeout, _NAP[0]
        while True:
            word = self._window.get_word(self._rank, self._offset)
            if word != self._seen:
                self._seen, self._since = word, monotonic()
            free = word % _OWNERS in (0, self._tag) or monotonic() - self._since > self._term
            if free and self._swap(word, self._tag):
                return True
            if monotonic() >= until:
                return False
            sleep(nap)
            nap = min(2 * nap, _NAP[1])

    def renew(self) -> bool:
        """Begin a new term; False if another rank has taken the lease, or this one never had it."""
        return self.token > 0 and self._swap(self.token * _OWNERS + self._tag, self._tag)

    def release(self) -> bool:
        """Give the lease back; False if this rank did not hold it any more."""
        held = self.token > 0 and self._swap(self.token * _OWNERS + self._tag, 0)
        self.token = 0
        return held

    def _swap(self, seen: int, tag: int) -> bool:
        """Replace a word by its successor."""
        number = seen // _OWNERS + 1
        done = self._window.compare_and_swap(self._rank, self._offset, seen, number * _OWNERS + tag) == seen
        self.token = number if done and tag else 0
        return done
