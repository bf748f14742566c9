"""The reader through h5py, for data without a faster one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import MpistratError, shard_error
from ..buffers import LastRead, take_rows
from .handles import DAMAGED, NOT_UTF8, OpenFiles, ShardFile
from .storage import FieldReader, OnlyHDF5, Storage

if TYPE_CHECKING:
    import h5py

__all__ = ["LibraryReader", "all_kept"]

_KEPT = 1 << 24  # minimum cache of blocks, in bytes
_AT_ONCE = 1 << 30  # most bytes of one read: MPI-IO counts them in 31 bits


class LibraryReader(FieldReader):
    """Rows read through h5py. Neighbouring blocks are one read; the latest blocks are cached.

    A block is a unit that HDF5 should read together: the rows of a chunk, or some 256 KiB of data without chunks.
    """

    kind = "h5py"

    def __init__(self, storages: Sequence[Storage], files: OpenFiles[h5py.File]) -> None:
        super().__init__(storages)
        self._files = files
        self._kept = LastRead[NDArray[Any]](_KEPT)  # blocks, by file and number
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
        touched = np.unique(wanted // self._storages[shard].block_rows).tolist()
        for first_row, run in self._runs(shard, touched):
            start, stop = np.searchsorted(wanted, (first_row, first_row + len(run)))
            take_rows(run, wanted[start:stop] - first_row, out[start:stop])

    def _runs(self, shard: int, blocks: list[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the rows of some blocks of a file: cached blocks one by one, and runs of others."""
        block_rows = self._storages[shard].block_rows
        longest = max(1, _AT_ONCE // max(1, block_rows * self._storages[shard].row_bytes))
        run: list[int] = []
        for block in [*blocks, None]:
            kept = None if block is None else self._kept.get((shard, block))
            if run and (block is None or kept is not None or block != run[-1] + 1 or len(run) == longest):
                yield run[0] * block_rows, self._load(shard, run[0], run[-1] + 1)
                run = []
            if kept is not None and block is not None:
                yield block * block_rows, kept
            elif block is not None:
                run.append(block)

    def _load(self, shard: int, first: int, end: int) -> NDArray[Any]:
        storage = self._storages[shard]
        block_rows = storage.block_rows
        start, stop = first * block_rows, min(end * block_rows, storage.rows)
        try:
            with self._files.lend(storage.file) as file:
                run = _rows(file[storage.name], storage, start, stop)
        except MpistratError:
            raise
        except Exception as error:  # h5py raises many kinds for damaged data
            expected = f"rows {start} to {stop - 1}"
            remedy = NOT_UTF8 if isinstance(error, UnicodeDecodeError) else DAMAGED
            raise shard_error(storage.where, expected, f"{type(error).__name__}: {error}", remedy) from error
        self._counters.add(bytes_read=len(run) * storage.row_bytes, chunk_reads=end - first)
        self._remember(shard, first, run)
        return run

    def _remember(self, shard: int, first: int, run: NDArray[Any]) -> None:
        """Cache a run's blocks, or as many as fit."""
        storage = self._storages[shard]
        whole = len(run) * storage.row_bytes <= self._kept.limit  # else a slice would keep the whole run in memory
        for block, start in enumerate(range(0, len(run), storage.block_rows), first):
            rows = run[start : start + storage.block_rows]
            last = start + storage.block_rows >= len(run)
            if whole or last:
                self._kept.put((shard, block), rows if whole else rows.copy(), len(rows) * storage.row_bytes)

    def opened(self) -> Set[ShardFile]:
        return self._files.opened

    def keep(self, rows: int) -> None:
        rows += 2 * max(storage.block_rows for storage in self._storages)  # blocks at the window's ends
        self._kept.limit = max(self._kept.limit, rows * max(storage.row_bytes for storage in self._storages))


def all_kept(storages: Sequence[Storage]) -> bool:
    """Return True if all blocks of some storages fit into the cache: then their rows are cheap.

    Example:
        >>> all_kept([])
        True
    """
    return sum(storage.rows * storage.row_bytes for storage in storages) <= _KEPT


def _rows(dataset: h5py.Dataset, storage: Storage, start: int, stop: int) -> NDArray[Any]:
    if None in storage.field.shape:
        rows = np.empty(stop - start, object)
        for i, row in enumerate(dataset[start:stop]):
            rows[i] = np.asarray(row, storage.field.dtype)
        return rows
    if storage.field.dtype == object:
        return dataset.asstr("utf-8")[start:stop]
    return dataset[start:stop]
