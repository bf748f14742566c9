"""Batches of successive rows."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...errors import explain
from ..buffers import RowBuffers
from ..chain import Source
from ..dataset import Addresses, Dataset
from ..spec import is_ragged, stack_rows
from .stage import Stage

__all__ = ["Batched", "Batches", "Batching"]


@dataclass(frozen=True)
class Batching:
    """How many rows a batch has, and whether a smaller last one is left out."""

    size: int
    drop_remainder: bool


class Batches(Stage):
    """Batches of successive rows, of one shape or not."""

    _function: str  # of Dataset, that makes it

    def __init__(self, parent: Dataset, batching: Batching) -> None:
        super().__init__(parent)
        self._batching = batching
        self._buffers = RowBuffers()

    @abstractmethod
    def _over(self, parent: Dataset, batching: Batching) -> Dataset:
        """The same stage over another parent or of another size."""

    @abstractmethod
    def _stack(self, rows: list[Any]) -> Any:
        """The batch of some rows."""

    @property
    def batching(self) -> Batching:
        return self._batching

    @property
    def prefetch_depth(self) -> int | None:
        rows = self._parent.prefetch_depth
        return None if rows is None else -(-rows // self._batching.size)

    def cardinality(self) -> int:
        rows, size = self._parent.cardinality(), self._batching.size
        if rows < 0:
            return rows
        return rows // size if self._batching.drop_remainder else -(-rows // size)

    def locate(self, epoch: int, position: int) -> Addresses:
        rows, size = self._parent.cardinality(), self._batching.size
        start = position * size
        positions = np.arange(start, start + size if rows < 0 else min(start + size, rows), dtype=np.int64)
        return np.full(positions.size, epoch, np.int64), positions

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        size = self._batching.size
        rows = self._parent.elements(epoch, start * size)
        while len(batch := list(itertools.islice(rows, size))) == size:
            yield self._stack(batch)
        if batch and not self._batching.drop_remainder:
            yield self._stack(batch)

    def chunk_starts(self) -> None:
        return None

    def resized(self, size: int) -> Dataset:
        """The same stage with batches of another size."""
        return self._over(self._parent, replace(self._batching, size=size))

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return self._over(parents[0], self._batching)

    def describe(self) -> str:
        return f"{self._function}({self._batching.size}, drop_remainder={self._batching.drop_remainder})"


@final
class Batched(Batches):
    """Batches of rows of one shape."""

    _function = "batch"

    def __init__(self, parent: Dataset, batching: Batching) -> None:
        super().__init__(parent, batching)
        self._checked = False

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

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return self._parent.gather(epochs, positions)

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Source:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return self._parent.source(epochs, positions)

    def _over(self, parent: Dataset, batching: Batching) -> Dataset:
        return Batched(parent, batching)

    def _stack(self, rows: list[Any]) -> Any:
        return stack_rows(rows, self.row_spec, self._buffers)
