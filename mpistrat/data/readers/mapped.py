"""Contiguous, unfiltered data through memory maps of the files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from ..arrays import take_rows
from .joined_map import Piece, join
from .reader import Contiguous, ContiguousReader, Storage

__all__ = ["MappedReader"]


@final
class MappedReader(ContiguousReader):
    """Rows of contiguous data out of as few arrays as the files allow.

    Raises:
        OSError: when the system does not map the files.
        ShardError: for a file that has changed.
    """

    reason = ""

    def __init__(self, storages: Sequence[Storage]) -> None:
        super().__init__(storages)
        self._array_of = np.zeros(len(storages), np.int64)  # which array has a file's rows
        self._shift = np.zeros(len(storages), np.int64)  # what takes a row's number to its place in that array
        self._arrays: list[NDArray[np.uint8]] = []
        waiting = [shard for shard, storage in enumerate(storages) if storage.rows]
        while waiting:
            joined = join([_piece(storages[shard]) for shard in waiting], self._row_bytes)
            firsts = dict(zip(waiting, joined.first, strict=True))
            for shard, first in firsts.items():
                if first is not None:
                    self._array_of[shard] = len(self._arrays)
                    self._shift[shard] = first - self._index.starts[shard]
            self._arrays.append(joined.rows)
            waiting = [shard for shard, first in firsts.items() if first is None]
        self.kind = "memory map" if len(self._arrays) <= 1 else f"{len(self._arrays)} memory maps"

    def _copy(self, rows: NDArray[np.int64], flat: NDArray[np.uint8]) -> None:
        if self._shift.size == 1:
            take_rows(self._arrays[0], rows, flat)
            return
        shards = self._index.shard_of(rows)
        places = rows + self._shift[shards]
        if len(self._arrays) == 1:
            take_rows(self._arrays[0], places, flat)
            return
        array_of = self._array_of[shards]
        for number in np.unique(array_of):
            own = np.flatnonzero(array_of == number)
            if own[-1] - own[0] == own.size - 1:
                take_rows(self._arrays[number], places[own], flat[own[0] : own[-1] + 1])
            else:
                flat[own] = self._arrays[number].take(places[own], axis=0, mode="clip")


def _piece(storage: Storage) -> Piece:
    assert isinstance(storage.layout, Contiguous)
    return Piece(storage.file, storage.layout.offset, storage.rows)
