"""What most stages have in common: one parent, whose rows and addresses they pass on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..dataset import Addresses, Dataset

if TYPE_CHECKING:
    from .batched import Batching

__all__ = ["Stage", "cut_chunks"]


def cut_chunks(starts: NDArray[np.int64] | None, low: int, high: int) -> NDArray[np.int64] | None:
    """The starts of chunks (see `Dataset.chunk_starts`) of the rows from low to high, counted from low."""
    if starts is None or starts.size == 0:
        return starts
    high = min(high, int(starts[-1]))
    if high <= low:
        return np.zeros(1, np.int64)
    inside = starts[(starts > low) & (starts < high)]
    return np.concatenate(([low], inside, [high])).astype(np.int64) - low


class Stage(Dataset):
    """A stage over one parent. What it does not say otherwise is as the parent has it."""

    def __init__(self, parent: Dataset) -> None:
        self._parent = parent

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching | None:
        return self._parent.batching

    @property
    def row_spec(self) -> Any:
        return self._parent.row_spec

    def cardinality(self) -> int:
        return self._parent.cardinality()

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._parent.locate(epoch, position)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._parent.gather(epochs, positions)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._parent.expect(epochs, positions)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return self._parent.chunk_starts()

    def keep(self, rows: int) -> None:
        self._parent.keep(rows)
