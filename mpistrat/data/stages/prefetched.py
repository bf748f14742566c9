"""Reading ahead, as a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chain import Source
from ..dataset import Dataset
from ..stats import StageStats
from .stage import Stage

__all__ = ["Prefetched"]


class Prefetched(Stage):
    """The same elements, and the word that a thread should read so many ahead. Who iterates starts that thread."""

    def __init__(self, parent: Dataset, depth: int) -> None:
        super().__init__(parent)
        self._depth = depth
        self._counters = StageStats()

    @property
    def counters(self) -> StageStats:
        return self._counters

    def count_wait(self, seconds: float) -> None:
        self._counters.add(wait_seconds=seconds)

    @property
    def prefetch_depth(self) -> int:
        return self._depth

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Source:
        return self._parent.source(epochs, positions)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self._parent.elements(epoch, start)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Prefetched(parents[0], self._depth)

    def describe(self) -> str:
        return f"prefetch({self._depth})"
