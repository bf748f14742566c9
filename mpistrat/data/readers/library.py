"""Everything that has no quicker way, through h5py."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError, explain
from ..arrays import take_rows
from .open_files import OpenFiles
from .reader import OnlyHDF5, RowIndex, Storage

if TYPE_CHECKING:
    import h5py

__all__ = ["LibraryReader"]

_KEPT = 1 << 24  # bytes of pieces that are kept at least


class LibraryReader:
    """Rows of everything else, through h5py. Neighbouring pieces are read in one go; the pieces read last are kept.

    A piece is what HDF5 had better read together: the rows of a chunk, or some 256 KiB of what has no chunks.
    """

    kind = "h5py"

    def __init__(self, storages: Sequence[Storage], files: OpenFiles[h5py.File]) -> None:
        self._storages = storages
        self._files = files
        self._index = RowIndex([storage.rows for storage in storages])
        self._row_bytes = max(storage.row_bytes for storage in storages)
        self._lock = threading.Lock()
        self._pieces: OrderedDict[tuple[int, int], NDArray[Any]] = OrderedDict()  # the one used last at the end
        self._keep = max(1, _KEPT // max(1, self._row_bytes * max(storage.piece_rows for storage in storages)))
        reasons = (storage.layout.reason for storage in storages if isinstance(storage.layout, OnlyHDF5))
        self.reason = "; ".join(dict.fromkeys(reasons))

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        if rows.size == 0 or out.size == 0:
            return
        increasing = bool((np.diff(rows) > 0).all())
        wanted, inverse = (rows, None) if increasing else np.unique(rows, return_inverse=True)
        ordered = out if inverse is None else np.empty((wanted.size, *out.shape[1:]), out.dtype)
        for shard, own in self._index.by_shard(wanted):
            self._read_shard(shard, wanted[own] - self._index.starts[shard], ordered[own])
        if inverse is not None:
            take_rows(ordered, inverse.reshape(-1), out)

    def _read_shard(self, shard: int, wanted: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Read increasing rows of one file."""
        touched = np.unique(wanted // self._storages[shard].piece_rows).tolist()
        for first_row, block in self._blocks(shard, touched):
            start, stop = np.searchsorted(wanted, (first_row, first_row + len(block)))
            take_rows(block, wanted[start:stop] - first_row, out[start:stop])

    def _blocks(self, shard: int, pieces: list[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """The rows of some pieces of a file: those kept one by one, and runs of those that are not."""
        piece_rows = self._storages[shard].piece_rows
        run: list[int] = []
        for piece in [*pieces, None]:
            with self._lock:
                kept = None if piece is None else self._pieces.get((shard, piece))
            if run and (piece is None or kept is not None or piece != run[-1] + 1):
                yield run[0] * piece_rows, self._load(shard, run[0], run[-1] + 1)
                run = []
            if kept is not None and piece is not None:
                yield piece * piece_rows, kept
            elif piece is not None:
                run.append(piece)

    def _load(self, shard: int, first: int, end: int) -> NDArray[Any]:
        storage = self._storages[shard]
        piece_rows = storage.piece_rows
        start, stop = first * piece_rows, min(end * piece_rows, storage.rows)
        try:
            with self._files.lend(storage.file) as file:
                block = file[storage.name][start:stop]
        except (OSError, RuntimeError, KeyError) as error:
            if isinstance(error, ShardError):
                raise
            expected = f"rows {start} to {stop - 1}"
            remedy = "The file is damaged: copy it again, or write the shards again."
            raise ShardError(
                explain("HDF5Dataset", storage.where, expected=expected, got=str(error), remedy=remedy)
            ) from error
        with self._lock:
            for piece in range(max(first, end - self._keep), end):
                rows = block[piece * piece_rows - start : (piece + 1) * piece_rows - start]
                whole = end - first <= self._keep  # else the block must not live on for the sake of a part
                self._pieces[(shard, piece)] = rows if whole else rows.copy()
            while len(self._pieces) > self._keep:
                self._pieces.popitem(last=False)
        return block

    def expect(self, rows: NDArray[np.int64]) -> None:
        pass

    def keep(self, rows: int) -> None:
        self._keep = max(self._keep, rows // min(storage.piece_rows for storage in self._storages) + 2)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        if len(self._index) * self._row_bytes <= _KEPT:
            return None  # all pieces stay
        pairs = zip(self._index.starts, self._storages, strict=False)
        pieces = [np.arange(start, start + storage.rows, storage.piece_rows) for start, storage in pairs]
        return np.concatenate([*pieces, self._index.starts[-1:]])
