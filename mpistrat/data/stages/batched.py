"""Batches of successive rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...errors import explain
from ..buffers import RowBuffers
from ..chain import Source
from ..dataset import Addresses, Dataset
from ..spec import is_ragged, stack_rows
from .stage import Stage

__all__ = ["Batched", "Batching", "batches_of"]


@dataclass(frozen=True)
class Batching:
    """How many rows a batch has, and whether a smaller last one is left out."""

    size: int
    drop_remainder: bool

    def count(self, rows: int) -> int:
        """How many batches so many rows make; a negative cardinality stays what it is."""
        if rows < 0:
            return rows
        return rows // self.size if self.drop_remainder else -(-rows // self.size)

    def locate(self, rows: int, epoch: int, position: int) -> Addresses:
        """The addresses of the rows of one batch."""
        start = position * self.size
        stop = start + self.size if rows < 0 else min(start + self.size, rows)
        positions = np.arange(start, stop, dtype=np.int64)
        return np.full(positions.size, epoch, np.int64), positions

    def depth(self, rows: int | None) -> int | None:
        """How many batches to read ahead, from how many rows."""
        return None if rows is None else -(-rows // self.size)


def batches_of(rows: Iterator[Any], batching: Batching) -> Iterator[list[Any]]:
    """Successive rows in lists, each a batch's."""
    while len(batch := list(itertools.islice(rows, batching.size))) == batching.size:
        yield batch
    if batch and not batching.drop_remainder:
        yield batch


class Batched(Stage):
    """Batches of successive rows."""

    def __init__(self, parent: Dataset, batching: Batching) -> None:
        super().__init__(parent)
        self._batching = batching
        self._buffers = RowBuffers()
        self._checked = False

    @property
    def batching(self) -> Batching:
        return self._batching

    @property
    def row_spec(self) -> Any:
        spec = self._parent.row_spec
        if not self._checked:
            for name, leaf in zip(nest.paths(spec), nest.flatten(spec), strict=True):
                if is_ragged(leaf):
                    got = f"{leaf}{name and ' at ' + name}"
                    remedy = "Use padded_batch, or bring the rows to one shape with map."
                    raise ValueError(explain("Dataset.batch", "", expected="rows of one shape", got=got, remedy=remedy))
            self._checked = True
        return spec

    @property
    def prefetch_depth(self) -> int | None:
        return self._batching.depth(self._parent.prefetch_depth)

    def cardinality(self) -> int:
        return self._batching.count(self._parent.cardinality())

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._batching.locate(self._parent.cardinality(), epoch, position)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return self._parent.gather(epochs, positions)

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Source:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return self._parent.source(epochs, positions)

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        rows = self._parent.elements(epoch, start * self._batching.size)
        return (stack_rows(batch, self.row_spec, self._buffers) for batch in batches_of(rows, self._batching))

    def chunk_starts(self) -> None:
        return None

    def resized(self, size: int) -> Dataset:
        """The same stage with batches of another size."""
        return Batched(self._parent, replace(self._batching, size=size))

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Batched(parents[0], self._batching)

    def describe(self) -> str:
        return f"batch({self._batching.size}, drop_remainder={self._batching.drop_remainder})"
