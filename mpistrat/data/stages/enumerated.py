"""Rows with their positions in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dataset import Addresses, Dataset
from ..spec import ArraySpec

__all__ = ["Enumerated"]


class Enumerated(Dataset):
    """Rows with their positions in front."""

    def __init__(self, parent: Dataset) -> None:
        self._parent = parent

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        return ArraySpec((), np.int64), self._parent.row_spec

    def cardinality(self) -> int:
        return self._parent.cardinality()

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._parent.locate(epoch, position)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return positions.copy(), self._parent.gather(epochs, positions)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._parent.expect(epochs, positions)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return self._parent.chunk_starts()

    def keep(self, rows: int) -> None:
        self._parent.keep(rows)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Enumerated(parents[0])

    def describe(self) -> str:
        return "enumerate()"
