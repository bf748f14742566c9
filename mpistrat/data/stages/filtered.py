"""The elements that a function chooses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import explain
from ..dataset import UNKNOWN, Dataset
from .call import call, name_of
from .stage import Stage

__all__ = ["Filtered"]


class Filtered(Stage):
    """The elements for which a function is true. They are known in order only."""

    def __init__(self, parent: Dataset, predicate: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._predicate = predicate

    @property
    def random_access(self) -> bool:
        return False

    def cardinality(self) -> int:
        return 0 if self._parent.cardinality() == 0 else UNKNOWN

    def chunk_starts(self) -> None:
        return None

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(filter(self._keeps, self._parent.elements(epoch)), start, None)

    def _keeps(self, element: Any) -> bool:
        kept = call(self._predicate, element)
        if isinstance(kept, bool):
            return kept
        answer = np.asarray(kept)
        if answer.dtype != np.bool_ or answer.size != 1:
            got = f"{kept!r:.60}"
            raise TypeError(explain("Dataset.filter", "predicate", expected="a function that returns a bool", got=got))
        return bool(answer.item())

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Filtered(parents[0], self._predicate)

    def describe(self) -> str:
        return f"filter({name_of(self._predicate)})"
