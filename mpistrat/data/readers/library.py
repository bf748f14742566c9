"""Everything that has no quicker way, through h5py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError, explain
from ..arrays import take_rows

if TYPE_CHECKING:
    import h5py

__all__ = ["LibraryReader"]

_PSEUDO_CHUNK = 1 << 18  # bytes read at a time from data that is not chunked


class LibraryReader:
    """Rows of everything else, through h5py. Each run of neighbouring chunks is one read; the last chunk is kept."""

    kind = "h5py"

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        row_bytes = max(1, dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])))
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else max(1, _PSEUDO_CHUNK // row_bytes)
        self._last: tuple[int, NDArray[Any]] | None = None  # one tuple, so that threads see whole ones

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        if rows.size == 0:
            return
        increasing = bool((np.diff(rows) > 0).all())
        wanted, inverse = (rows, None) if increasing else np.unique(rows, return_inverse=True)
        sorted_rows = out if inverse is None else np.empty((wanted.size, *out.shape[1:]), out.dtype)
        chunks = wanted // self._chunk_rows
        touched = np.unique(chunks)
        for run in np.split(touched, np.flatnonzero(np.diff(touched) > 1) + 1):
            for first_row, block in self._blocks(int(run[0]), int(run[-1])):
                start, stop = np.searchsorted(wanted, (first_row, first_row + len(block)))
                take_rows(block, wanted[start:stop] - first_row, sorted_rows[start:stop])
        if inverse is not None:
            take_rows(sorted_rows, inverse.reshape(-1), out)

    def _blocks(self, first: int, last: int) -> Iterable[tuple[int, NDArray[Any]]]:
        """The rows of chunks first to last, as few blocks."""
        kept = self._last
        if kept is not None and kept[0] == first:
            yield first * self._chunk_rows, kept[1]
            first += 1
        if first > last:
            return
        start, stop = first * self._chunk_rows, min((last + 1) * self._chunk_rows, self._dataset.shape[0])
        try:
            block = self._dataset[start:stop]
        except (OSError, RuntimeError) as error:
            expected = f"rows {start} to {stop - 1} of {self._dataset.name}"
            remedy = "The file is damaged: copy it again, or write the shards again."
            raise ShardError(
                explain("HDF5Dataset", str(self._path), expected=expected, got=str(error), remedy=remedy)
            ) from error
        self._last = (last, block[last * self._chunk_rows - start :].copy())
        yield start, block
