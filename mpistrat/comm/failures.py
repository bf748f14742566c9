"""Failure reports of several ranks: equal ones are printed once, with the numbers of the other ranks.

Rank 0 of a group collects failures for a short time, groups them by text, and lets the lowest rank of each group print.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import final

__all__ = ["KEY_BYTES", "Failures", "key", "ranges"]

KEY_BYTES = 16
_GATHER = 0.25  # seconds in which failures count as the same moment's


def key(text: str) -> bytes:
    """Return what texts have in common that differ in the rank that they are about, and its position in memory."""
    alike = re.sub(r"\brank \d+(?: of \d+)?|\b0x[0-9a-f]+", "", text)
    return hashlib.blake2b(alike.encode(errors="replace"), digest_size=KEY_BYTES).digest()


def ranges(ranks: Iterable[int]) -> str:
    """Return some ranks in words.

    Example:
        >>> ranges([1, 2, 3, 7]), ranges([5])
        ('ranks 1-3, 7', 'rank 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' * (len(runs) > 1 or (bool(runs) and runs[0][0] != runs[0][1]))} {words}"


@final
class Failures:
    """What rank 0 knows of the failures of a group of ranks.

    Attributes:
        reason: of the first one; empty while there is none.
    """

    def __init__(self, size: int) -> None:
        self.reason = b""
        self._size, self._first = size, 0.0
        self._waiting: dict[int, bytes] = {}  # rank: key
        self._printed: set[bytes] = set()

    def note(self, rank: int, key: bytes, reason: bytes, now: float) -> None:
        """Note that a rank fails."""
        self.reason = self.reason or reason
        self._first = self._first or now
        self._waiting[rank] = key

    def verdicts(self, now: float) -> dict[int, str | None]:
        """Return what ranks that wait for it shall do, once the moment is over: who else failed alike, in words, for
        one that prints; None for one that is silent.
        """
        if not self._waiting or (len(self._waiting) < self._size and now - self._first < _GATHER):
            return {}
        found: dict[int, str | None] = dict.fromkeys(self._waiting)
        groups: dict[bytes, list[int]] = {}
        for rank in sorted(self._waiting):
            groups.setdefault(self._waiting[rank], []).append(rank)
        for text, ranks in groups.items():
            if text not in self._printed:
                found[ranks[0]] = f"(the same on {ranges(ranks[1:])})\n" if ranks[1:] else ""
        self._printed.update(groups)
        self._waiting.clear()
        return found
