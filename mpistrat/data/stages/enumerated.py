"""Rows with their positions in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dataset import Dataset
from ..spec import ArraySpec
from .stage import Stage

__all__ = ["Enumerated"]


class Enumerated(Stage):
    """Rows with their positions, counted from a start, in front."""

    def __init__(self, parent: Dataset, start: int = 0) -> None:
        super().__init__(parent)
        self._start = start

    @property
    def row_spec(self) -> Any:
        return ArraySpec((), np.int64), self._parent.row_spec

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return positions + self._start, self._parent.gather(epochs, positions)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return ((np.int64(self._start + i), row) for i, row in enumerate(self._parent.elements(epoch, start), start))

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Enumerated(parents[0], self._start)

    def describe(self) -> str:
        return f"enumerate({self._start or ''})"
