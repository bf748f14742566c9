"""Batches of successive rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dataset import INFINITE, Addresses, Dataset

__all__ = ["Batched", "Batching"]


@dataclass(frozen=True)
class Batching:
    """How many rows a batch has, and whether a smaller last one is left out."""

    size: int
    drop_remainder: bool


class Batched(Dataset):
    """Batches of successive rows."""

    def __init__(self, parent: Dataset, batching: Batching) -> None:
        self._parent = parent
        self._batching = batching

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching:
        return self._batching

    @property
    def row_spec(self) -> Any:
        return self._parent.row_spec

    def cardinality(self) -> int:
        rows = self._parent.cardinality()
        if rows == INFINITE:
            return INFINITE
        return rows // self._batching.size if self._batching.drop_remainder else -(-rows // self._batching.size)

    def locate(self, epoch: int, position: int) -> Addresses:
        rows = self._parent.cardinality()
        start = position * self._batching.size
        stop = start + self._batching.size
        if rows != INFINITE:
            stop = min(stop, rows)
        positions = np.arange(start, stop, dtype=np.int64)
        return np.full(positions.size, epoch, np.int64), positions

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._parent.gather(epochs, positions)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._parent.expect(epochs, positions)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Batched(parents[0], self._batching)

    def describe(self) -> str:
        return f"batch({self._batching.size}, drop_remainder={self._batching.drop_remainder})"
