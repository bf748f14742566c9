"""Some of the files of an HDF5 dataset: what one worker reads under AutoShardPolicy.FILE."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files.hdf5 import HDF5Rows
from ..nodes.stage import InputRows
from ..stats import StageStats

__all__ = ["FileShard"]


class FileShard(InputRows):
    """The rows of files index, index + num_shards, … of an HDF5 dataset. It is a source: no stage lies below it.

    Args:
        source: all files; opened once, whatever the number of shards.
        num_shards: how many parts, at most the number of files.
        index: which of them.
    """

    def __init__(self, source: HDF5Rows, num_shards: int, index: int) -> None:
        self._source = source
        self._num_shards, self._index = num_shards, index
        starts = source.file_starts()
        self._first = starts[:-1][index::num_shards]  # row of the source with which each of our files begins
        lengths = np.diff(starts)[index::num_shards]
        self._starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self._files = starts.size - 1

    @property
    def counters(self) -> StageStats | None:
        return self._source.counters

    @property
    def row_spec(self) -> Any:
        return self._source.row_spec

    def cardinality(self) -> int:
        return int(self._starts[-1])

    def _rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source's numbers of our rows."""
        file = np.searchsorted(self._starts, positions, side="right") - 1
        return positions + (self._first - self._starts[:-1])[file]

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._source.gather(epochs, self._rows(positions))

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._source.expect(epochs, self._rows(positions))

    def chunk_starts(self) -> NDArray[np.int64] | None:
        starts = self._source.chunk_starts()
        if starts is None:
            return None
        kept = [self._starts]
        for first, below, above in zip(self._first, self._starts[:-1], self._starts[1:], strict=True):
            inside = starts[(starts >= first) & (starts < first + above - below)]
            kept.append(inside - first + below)
        return np.unique(np.concatenate(kept))

    def keep(self, rows: int) -> None:
        self._source.keep(rows)

    def check(self) -> None:
        self._source.check()

    def describe(self) -> str:
        shown = ", ".join(map(str, range(self._files)[self._index :: self._num_shards][:3]))
        more = ", …" if self._first.size > 3 else ""
        return f"{self._source.describe()}; of these files {shown}{more}"
