"""What nodes have in common: sources, one parent whose rows and addresses they pass on, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import explain
from ..dataset import Addresses, Dataset

if TYPE_CHECKING:
    from .batch import Batching

__all__ = ["Combined", "RowSource", "Stage", "cut_chunks"]


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

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._parent.locality(epochs, positions)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._parent.expect(epochs, positions)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return self._parent.chunk_starts()

    def keep(self, rows: int) -> None:
        self._parent.keep(rows)


class Combined(Dataset):
    """A stage over several parents, whose elements are all rows or all batches; `function` is for errors."""

    def __init__(self, function: str, parents: Sequence[Dataset]) -> None:
        self._parents = tuple(parents)
        self._batching = _common_batching(function, parents)

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return self._parents

    @property
    def batching(self) -> Batching | None:
        return self._batching

    def keep(self, rows: int) -> None:
        for parent in self._parents:
            parent.keep(rows)


def _common_batching(function: str, parents: Sequence[Dataset]) -> Batching | None:
    """How the elements of all these datasets are batched; ValueError where some are rows and some are batches."""
    batchings = [parent.batching for parent in parents]
    first = batchings[0]
    if all(batching == first for batching in batchings):
        return first
    if None in batchings:
        remedy = "Call batch on all of them before, or on the result."
        raise ValueError(
            explain(function, "", expected="all rows or all batches", got="rows and batches", remedy=remedy)
        )
    from .batch import Batching

    return Batching(max(batching.size for batching in batchings if batching is not None), drop_remainder=False)


class RowSource(Dataset):
    """Rows that come from no other dataset; each is an element, and has its position for an address."""

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return ()

    @property
    def batching(self) -> None:
        return None

    def locate(self, epoch: int, position: int) -> Addresses:
        return np.array([epoch], np.int64), np.array([position], np.int64)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return self
