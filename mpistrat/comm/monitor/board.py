"""Board: memory in which the ranks of a node publish their positions, on demand and without messages.

It is in the node's control pages. A rank that requests positions writes the time into the first page. In each round every
watchdog checks it, and then writes its rank's position into its own page. Entries since that time are fresh, and a rank without
one does not answer. The ranks of a node have one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import final

from .rank_monitor import Answer

__all__ = ["BOARD_BYTES", "Board"]

BOARD_BYTES = 1920  # of each rank
_DATA = 72  # bytes before an answer
_FAILURE = slice(48, 64)  # of them: the key of the text with which a rank fails
_WRITTEN, _LENGTH = 0, 1  # words of a rank: the time and length of its answer
_ASKED, _ABOUT, _SURVEYED, _CLAIMED, _STOPPED = 2, 3, 4, 5, 8  # words of the node, on the page of its first rank


@final
class Board:
    """The pages of the ranks of a node, for one of them. Local; one thread of a rank uses it.

    Args:
        pages: of each rank of the node BOARD_BYTES writable bytes, zeros at first.
        index: this rank's page.
        sync: orders loads and stores of shared memory before and after it.
    """

    def __init__(self, pages: Sequence[memoryview], index: int, sync: Callable[[], object]) -> None:
        self._pages, self._index, self._sync = pages, index, sync
        self._words = [page[:_DATA].cast("d") for page in pages]
        self._common = self._words[0]

    def release(self) -> None:
        """Release the pages, whose memory is freed with the node's."""
        for words in self._words:
            words.release()
        for page in self._pages:
            page.release()

    @property
    def surveyed(self) -> float:
        """The time of this node's last survey, by `monotonic`, as all times here."""
        return self._common[_SURVEYED]

    @property
    def claimed(self) -> float:
        """The time of the last request for a survey by a rank of this node."""
        return self._common[_CLAIMED]

    @property
    def stopped(self) -> bool:
        """True if a rank of this node was requested to stop."""
        return self._common[_STOPPED] > 0

    def note_stop(self) -> None:
        """Record that this rank was requested to stop."""
        self._common[_STOPPED] = 1.0

    def note_survey(self) -> None:
        """Record that this node takes part in a survey."""
        self._common[_SURVEYED] = monotonic()

    def claim(self) -> None:
        """Record that this rank requests a survey."""
        self._common[_CLAIMED] = monotonic()

    def note_failure(self, key: bytes) -> None:
        """Publish the key of the text with which this rank fails."""
        self._pages[self._index][_FAILURE] = key

    def failing(self, key: bytes) -> list[int]:
        """Return the ranks of the node, by their numbers there, that fail with a text."""
        return [index for index, page in enumerate(self._pages) if page[_FAILURE] == key]

    def ask(self, about: int) -> float:
        """Request positions from this node's ranks, and about a collective by number. Return the time of the request."""
        self._common[_ABOUT] = about
        self._sync()
        now = self._common[_ASKED] = monotonic()
        return now

    def write(self, answer: Callable[[int], Answer]) -> None:
        """Write this rank's position, from `answer` for the requested collective, if one was requested."""
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
        """Return the answer that a rank of the node has written since a time; None if there is none, or it is being written."""
        words = self._words[index]
        written = words[_WRITTEN]
        if written < since:
            return None
        self._sync()
        data = bytes(self._pages[index][_DATA : _DATA + int(words[_LENGTH])])
        self._sync()
        return Answer.decode(data) if words[_WRITTEN] == written else None
