"""Draw log: a hash of the batches that a rank has drawn from its datasets, compared by the next collectives."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from ..base.agree import gather_text
from ..base.errors import CollectiveMismatchError, by_rank

__all__ = ["Draws"]

_KEPT = 256  # draws that can be compared
_MASK = (1 << 62) - 1

# Dataset, epoch and step, and a digest of the first elements that were read.
_Draw = tuple[int, int, int, int]


@final
class Draws:
    """The batches that one rank has drawn in the thread that created its strategy.

    Draws of other threads are not synchronized, and not compared.

    Attributes:
        mark: a hash of all draws so far, in order.
    """

    def __init__(self) -> None:
        self.mark = 0
        self._thread = threading.get_ident()
        self._count = 0
        self._recent: deque[_Draw] = deque(maxlen=_KEPT)
        self._places: list[str] = []

    def dataset(self, place: str) -> Callable[[int, int, int], None]:
        """Return a function to call with the epoch and step of each batch of a new dataset, created at a line. All ranks do.

        Its third argument is a digest of the first elements that the rank has read, 0 if they are known to be equal.
        """
        self._places.append(place)
        number = len(self._places)

        def note(epoch: int, step: int, first_read: int = 0) -> None:
            if threading.get_ident() == self._thread:
                draw = number, epoch, step, first_read
                self.mark = hash((self.mark, draw)) & _MASK
                self._count += 1
                self._recent.append(draw)

        return note

    def differ(self, comm: Any, ranks: Sequence[int], call: str) -> CollectiveMismatchError:
        """Return the error about the first draw that differs between ranks, and clear all. Collective over `comm`.

        `ranks` are the numbers of its ranks in the group, `call` is the collective that found the difference.
        """
        first = self._count - len(self._recent)
        found = [json.loads(text) for text in gather_text(comm, json.dumps([first, list(self._recent)]))]
        self.mark = self._count = 0
        self._recent.clear()
        start, end = max(first for first, _ in found), max(first + len(draws) for first, draws in found)
        number, drawn = end, [""] * len(found)
        for at in range(start, end):
            draws_there = [draws[at - first : at - first + 1] for first, draws in found]
            drawn = [self._words(some) for some in draws_there]
            number = at
            if len(set(drawn)) > 1:
                break
            if len({tuple(map(tuple, some)) for some in draws_there}) > 1:
                return self._other_rows({rank: some[0] for rank, some in zip(ranks, draws_there, strict=True)}, call)
        where = by_rank(dict(zip(ranks, drawn, strict=True)))
        remedy = "Look for a next, an iter, a set_epoch or a restore that not all ranks call, or not in the same order"
        return CollectiveMismatchError(
            f"the ranks are at different places in their data: batch {number + 1} of the program was, on {where} (steps and "
            f"epochs count from 0). {remedy}. Found at {call[:100]}"
        )

    def _words(self, draws: Sequence[_Draw]) -> str:
        for number, epoch, step, _ in draws:
            return f"step {step} of epoch {epoch} of dataset {number} (made at {self._place(number)})"
        return "none"

    def _place(self, number: int) -> str:
        return self._places[number - 1] if number <= len(self._places) else "an unknown line"

    def _other_rows(self, draws: Mapping[int, _Draw], call: str) -> CollectiveMismatchError:
        number = next(iter(draws.values()))[0]
        where = by_rank({rank: f"#{digest:08x}" for rank, (*_, digest) in draws.items()})
        remedy = (
            "A function of from_generator must yield the same elements on every rank, which takes its part of each batch; pass "
            "different rows per rank to strategy.distribute_datasets_from_function"
        )
        return CollectiveMismatchError(
            f"the ranks read different rows: the first element of dataset {number} (made at {self._place(number)}) was, by its "
            f"digest, {where}. {remedy}. Found at {call[:100]}"
        )
