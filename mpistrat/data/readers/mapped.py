"""Contiguous, unfiltered data through a memory map of the files."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import take_rows
from .open_files import Descriptor
from .reader import Contiguous, RowIndex, Storage

__all__ = ["MappedReader"]


class MappedReader:
    """Rows of contiguous data, copied as bytes: alignment and byte order do not matter."""

    kind = "memory map"
    reason = ""

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._index = RowIndex([storage.rows for storage in storages])
        self._arrays = [_map(storage) for storage in storages]

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        flat = out.reshape(-1).view(np.uint8).reshape(len(rows), self._arrays[0].shape[1])
        if len(self._arrays) == 1:
            take_rows(self._arrays[0], rows, flat)
            return
        shards = self._index.shard_of(rows)
        for shard in np.unique(shards):
            own = np.flatnonzero(shards == shard)
            flat[own] = self._arrays[shard].take(rows[own] - self._index.starts[shard], axis=0, mode="clip")

    def expect(self, rows: NDArray[np.int64]) -> None:
        pass

    def keep(self, rows: int) -> None:
        pass

    def chunk_starts(self) -> None:
        return None


def _map(storage: Storage) -> NDArray[np.uint8]:
    assert isinstance(storage.layout, Contiguous)
    if not storage.rows:
        return np.empty((0, storage.row_bytes), np.uint8)
    with closing(Descriptor(storage.file)) as descriptor:
        mapped = mmap.mmap(descriptor.fileno(), 0, access=mmap.ACCESS_READ)
    flat = np.frombuffer(mapped, np.uint8, count=storage.rows * storage.row_bytes, offset=storage.layout.offset)
    return flat.reshape(storage.rows, storage.row_bytes)
