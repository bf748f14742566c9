"""Batches as rows of further batches, as in tf.data. Most come from windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ...base.text import counted
from ..spec import batch_spec, row_count, stack_rows
from .node import Addresses, Below, Node
from .stage import Stage, one_address

__all__ = ["as_rows"]


def as_rows(function: str, parent: Node, *, one_length: bool, ragged: bool = False) -> Node:
    """Return a dataset whose rows are the elements of another one, rows or batches.

    Args:
        function: the method of Dataset, for errors.
        parent: the node of the elements.
        one_length: batches must be as long as the first one.
        ragged: accept batches of `ragged_batch`, whose rows are arrays in an array.
    """
    return parent if parent.batching is None else _Nested(parent, function, one_length, ragged)


@final
class _Nested(Stage):
    """The batches below, each as a row."""

    def __init__(self, parent: Node, function: str, one_length: bool, ragged: bool) -> None:
        super().__init__(parent, function, one_length, ragged)
        self._function, self._one_length, self._ragged = function, one_length, ragged
        self._length: int | None = None

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        batching = self._parent.batching
        full = batching is not None and batching.drop_remainder
        length = batching.size if batching is not None and full else self._first_length() if self._one_length else None
        return batch_spec(self._parent.row_spec, length)

    def _first_length(self) -> int | None:
        if self._length is None:
            if self._parent.random_access and self._parent.cardinality():
                self._length = int(self._parent.locate(0, 0)[0].size)
            else:
                first = next(iter(self._parent.elements(0)), None)
                self._length = None if first is None else row_count(first)
        return self._length

    def locate(self, epoch: int, position: int) -> Addresses:
        return one_address(epoch, position)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return []  # batches are located one by one

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        addresses = zip(epochs.tolist(), positions.tolist(), strict=True)
        rows = [self._checked(self._parent.gather(*self._parent.locate(*address)), address[1]) for address in addresses]
        return stack_rows(rows, self.row_spec)

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        for number, batch in enumerate(self._parent.elements(epoch, start), start):
            yield self._checked(batch, number)

    def _checked(self, batch: Any, number: int) -> Any:
        specs = zip(nest.flatten(self._parent.row_spec), nest.flatten(batch), strict=True)
        if not self._ragged and any(leaf.dtype == object != spec.dtype for spec, leaf in specs):
            expected, remedy = "batches that are arrays of one shape each", "Use padded_batch in place of ragged_batch."
            raise ValueError(explain(self._function, "", expected=expected, got="ragged batches", remedy=remedy))
        length = self._first_length() if self._one_length else None
        if length is not None and row_count(batch) != length:
            expected, got = (
                f"batches of {length} rows, as the first has",
                f"{counted(row_count(batch), 'row')} in batch {number}",
            )
            remedy = "Pass drop_remainder=True to the first batch or to window, or use padded_batch."
            raise ValueError(explain(self._function, "", expected=expected, got=got, remedy=remedy))
        return batch

    def keep(self, rows: int) -> None:
        batching = self._parent.batching
        self._parent.keep(rows * (1 if batching is None else batching.size))

    def describe(self) -> str:
        return "batches as rows"
