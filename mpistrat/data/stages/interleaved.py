"""The elements of datasets that a function makes of each element, taken from several of them in turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import explain
from ..dataset import UNKNOWN, Dataset
from .call import call, name_of
from .joined import compare_specs
from .stage import Stage

if TYPE_CHECKING:
    from .batched import Batching

__all__ = ["Interleaved"]


class Interleaved(Stage):
    """Blocks of elements from each of several open datasets in turn. They are known in order only."""

    def __init__(self, parent: Dataset, function: Callable[..., Any], cycle_length: int, block_length: int) -> None:
        super().__init__(parent)
        self._function = function
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._first: Dataset | None = None
        self._lock = threading.Lock()

    @property
    def random_access(self) -> bool:
        return False

    def _known(self) -> Dataset | None:
        """The dataset that the first element becomes, which says what all look like; None without an element."""
        if self._first is None:
            element = next(self._parent.elements(0), None)
            return None if element is None else self._make(element, 0)
        return self._first

    def _make(self, element: Any, number: int) -> Dataset:
        made = call(self._function, element)
        if not isinstance(made, Dataset):
            got = type(made).__name__
            raise TypeError(
                explain(f"Dataset.{self._name}", "map_func", expected="a function that returns a Dataset", got=got)
            )
        with self._lock:
            if self._first is None:
                self._first = made
        if made is not self._first:
            compare_specs(f"Dataset.{self._name}", self._first.row_spec, made.row_spec, number)
            if (made.batching is None) != (self._first.batching is None):
                expected, got = "all rows or all batches", f"another kind from element {number}"
                raise ValueError(explain(f"Dataset.{self._name}", "map_func", expected=expected, got=got))
        return made

    @property
    def batching(self) -> Batching | None:
        known = self._known()
        return None if known is None else known.batching

    @property
    def row_spec(self) -> Any:
        known = self._known()
        if known is None:
            expected = "at least one element below, to know what the function makes of it"
            raise ValueError(explain(f"Dataset.{self._name}", "", expected=expected, got="none"))
        return known.row_spec

    @property
    def deterministic(self) -> bool:
        known = self._known()
        return super().deterministic and (known is None or known.deterministic)

    def cardinality(self) -> int:
        return 0 if self._parent.cardinality() == 0 else UNKNOWN

    def chunk_starts(self) -> None:
        return None

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Any]:
        """TF's order: a dataset that has ended gives up its turn, and the next takes its place one round later."""
        below = enumerate(self._parent.elements(epoch))
        places: list[Iterator[Any] | None] = [None] * self._cycle_length
        more = True
        while more or any(place is not None for place in places):
            for index, place in enumerate(places):
                if place is None and more:
                    number, element = next(below, (-1, None))
                    more = number >= 0
                    if more:
                        place = self._make(element, number).elements(epoch)
                if place is not None:
                    block = 0
                    for element in itertools.islice(place, self._block_length):
                        block += 1
                        yield element
                    places[index] = place if block == self._block_length else None

    @property
    def _name(self) -> str:
        return "flat_map" if self._cycle_length == 1 else "interleave"

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Interleaved(parents[0], self._function, self._cycle_length, self._block_length)

    def describe(self) -> str:
        lengths = f", cycle_length={self._cycle_length}, block_length={self._block_length}"
        return f"{self._name}({name_of(self._function)}{lengths if self._cycle_length > 1 else ''})"
