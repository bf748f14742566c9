"""A function of every element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...errors import explain
from ..dataset import Addresses, Dataset
from ..spec import empty_rows, spec_of_rows

if TYPE_CHECKING:
    from .batched import Batching

__all__ = ["Mapped"]


class Mapped(Dataset):
    """A function of every element."""

    def __init__(self, parent: Dataset, function: Callable[..., Any]) -> None:
        self._parent = parent
        self._function = function
        self._row_spec: Any = None

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching | None:
        return self._parent.batching

    @property
    def row_spec(self) -> Any:
        if self._row_spec is None:
            first = np.zeros(1 if self._parent.cardinality() else 0, np.int64)
            if first.size and self._parent.batching is not None:
                epochs, positions = self._parent.locate(0, 0)
                rows = self._apply(self._parent.gather(epochs[:1], positions[:1]), 1)
            elif first.size:
                rows = self._apply(self._parent.gather(first, first), 1)
            else:
                rows = self._batch_call(empty_rows(self._parent.row_spec), 0)
            self._row_spec = spec_of_rows(rows)
        return self._row_spec

    def _call(self, element: Any) -> Any:
        plain_tuple = isinstance(element, tuple) and not hasattr(element, "_fields")
        return self._function(*element) if plain_tuple else self._function(element)

    def _batch_call(self, rows: Any, count: int) -> Any:
        mapped = nest.map_structure(np.asarray, self._call(rows))
        for name, leaf in zip(nest.paths(mapped), nest.flatten(mapped), strict=True):
            if leaf.ndim == 0 or leaf.shape[0] != count:
                expected = f"{count} rows{name and ' in ' + name}, as many as the batch has"
                remedy = "A function after batch must keep the first axis; before batch it gets single rows."
                raise ValueError(
                    explain(self.describe(), "", expected=expected, got=f"shape {leaf.shape}", remedy=remedy)
                )
        return mapped

    def _row_calls(self, rows: Any, count: int) -> Any:
        elements = [self._call(nest.map_structure(lambda leaf, i=i: leaf[i], rows)) for i in range(count)]
        return nest.map_structure(lambda *leaves: np.stack(leaves), *elements)

    def _apply(self, rows: Any, count: int) -> Any:
        return self._row_calls(rows, count) if self._parent.batching is None else self._batch_call(rows, count)

    def cardinality(self) -> int:
        return self._parent.cardinality()

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._parent.locate(epoch, position)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if positions.size == 0:
            return empty_rows(self.row_spec)
        return self._apply(self._parent.gather(epochs, positions), positions.size)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._parent.expect(epochs, positions)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return self._parent.chunk_starts()

    def keep(self, rows: int) -> None:
        self._parent.keep(rows)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Mapped(parents[0], self._function)

    def describe(self) -> str:
        return f"map({getattr(self._function, '__name__', repr(self._function))})"
