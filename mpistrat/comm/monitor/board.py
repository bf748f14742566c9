"""Board: the memory in which the ranks of a node show each other where they are, on demand and without messages.

It lies in the node's control pages. A rank that wants to know writes the time into the first page; the watchdog of each rank,
which looks there in every round, then writes where its rank is into its own page. What stands there since that time is fresh, and
a rank that has written nothing does not answer. The ranks of a node have one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import final

from .rank_monitor import Answer

__all__ = ["BOARD_BYTES", "Board"]

BOARD_BYTES = 1920  # of each rank
_DATA = 72  # bytes before an answer
_FAILURE = slice(48, 64)  # of them: what stands for the text with which a rank fails
_WRITTEN, _LENGTH = 0, 1  # words of a rank: since when its answer stands there, and how long it is
_ASKED, _ABOUT, _SURVEYED, _CLAIMED, _STOPPED = 2, 3, 4, 5, 8  # words of the node, on the page of its first rank


@final
class Board:
    """The pages of the ranks of a node, as one of them sees these. Local; one thread of a rank uses it.

    Args:
        pages: of each rank of the node BOARD_BYTES writable bytes, zeros at first.
        index: which of them is this rank's.
        sync: separates loads and stores of shared memory before it from those after it.
    """

    def __init__(self, pages: Sequence[memoryview], index: int, sync: Callable[[], object]) -> None:
        self._pages, self._index, self._sync = pages, index, sync
        self._words = [page[:_DATA].cast("d") for page in pages]
        self._common = self._words[0]

    def release(self) -> None:
        """Let go of the pages, whose memory is freed with the node's."""
        for words in self._words:
            words.release()
        for page in self._pages:
            page.release()

    @property
    def surveyed(self) -> float:
        """When this node last took part in a survey; by `monotonic`, as all times here."""
        return self._common[_SURVEYED]

    @property
    def claimed(self) -> float:
        """When a rank of this node last wanted a survey."""
        return self._common[_CLAIMED]

    @property
    def stopped(self) -> bool:
        """Whether a rank of this node is requested to stop."""
        return self._common[_STOPPED] > 0

    def note_stop(self) -> None:
        """Note that this rank is requested to stop."""
        self._common[_STOPPED] = 1.0

    def note_survey(self) -> None:
        """Note that this node takes part in a survey."""
        self._common[_SURVEYED] = monotonic()

    def claim(self) -> None:
        """Note that this rank wants a survey."""
        self._common[_CLAIMED] = monotonic()

    def note_failure(self, key: bytes) -> None:
        """Show which text this rank fails with."""
        self._pages[self._index][_FAILURE] = key

    def failing(self, key: bytes) -> list[int]:
        """Return which ranks of the node, by their numbers there, fail with a text."""
        return [index for index, page in enumerate(self._pages) if page[_FAILURE] == key]

    def ask(self, about: int) -> float:
        """Ask the ranks of this node where they are, and about a collective, by number. Return since when answers are fresh."""
        self._common[_ABOUT] = about
        self._sync()
        now = self._common[_ASKED] = monotonic()
        return now

    def write(self, answer: Callable[[int], Answer]) -> None:
        """Write where this rank is, which `answer` returns for the collective that is asked about, if that is asked for."""
        own = self._words[self._index]
        if self._common[_ASKED] <= own[_WRITTEN]:
            return
        self._sync()
        data = answer(int(self._common[_ABOUT])).encode(BOARD_BYTES - _DATA)
        own[_WRITTEN] = 0.0
        self._sync()
        self._pages[self._index][_DATA : _DATA + len(data)] = data
        own[_LENGTH] = len(data)
        self._sync()
        own[_WRITTEN] = monotonic()

    def read(self, index: int, since: float) -> Answer | None:
        """Return what a rank of the node has written since then; None if nothing, or it is just writing."""
        words = self._words[index]
        written = words[_WRITTEN]
        if written < since:
            return None
        self._sync()
        data = bytes(self._pages[index][_DATA : _DATA + int(words[_LENGTH])])
        self._sync()
        return Answer.decode(data) if words[_WRITTEN] == written else None
