"""What a file stores of a field, and what every reader of a field does."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..shards.manifest import Field
from ..stats import StageStats
from .chunks import Chunks
from .open_files import ShardFile

__all__ = ["Contiguous", "ContiguousReader", "FieldReader", "Layout", "OnlyHDF5", "Pointers", "RowIndex", "Storage"]


@dataclass(frozen=True)
class Contiguous:
    """The bytes in the file are the array's bytes, in one piece that begins at this offset and lies in the file."""

    offset: int


@dataclass(frozen=True)
class OnlyHDF5:
    """Stored in a way that only HDF5 itself reads, for this reason."""

    reason: str


@dataclass(frozen=True)
class Pointers:
    """Rows of varying length: what is stored are pointers into HDF5's global heap, as this storage."""

    storage: Storage


_SAMPLE = 1 << 14  # bytes of a row that are compared

Layout = Contiguous | Chunks | Pointers | OnlyHDF5


@dataclass(frozen=True)
class Storage:
    """One dataset of one file: all that a reader needs to know, so that the file need not stay open.

    Attributes:
        file: the file.
        name: the dataset.
        field: what its rows are.
        rows: how many.
        row_bytes: bytes of a row; about so many where they vary.
        piece_rows: rows that h5py had better read together.
        chunk_rows: rows of a stored chunk, whoever reads it; 0 where the data has no chunks.
        layout: how they are stored.
    """

    file: ShardFile
    name: str
    field: Field
    rows: int
    row_bytes: int
    piece_rows: int
    chunk_rows: int
    layout: Layout

    @property
    def where(self) -> str:
        return f"{self.file.path}: {self.name}"

    def some_rows(self, count: int) -> Iterator[bytes]:
        """Yield the first bytes of rows at fixed places, where single rows are cheap to read; else nothing."""
        if not isinstance(self.layout, Contiguous) or not self.rows or self.field.dtype.fields is not None:
            return
        with self.file.path.open("rb", buffering=0) as file:
            for row in np.unique(np.linspace(0, self.rows - 1, count, dtype=np.int64)).tolist():
                start = self.layout.offset + row * self.row_bytes
                yield os.pread(file.fileno(), min(self.row_bytes, _SAMPLE), start)


class RowIndex:
    """Which file each row of a set lies in.

    Args:
        rows: the number of rows of each file.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.starts = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
        self._equal = rows[0] if all(count == rows[0] for count in rows[:-1]) and rows[-1] <= rows[0] else 0

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the file that each row lies in."""
        if self._equal:
            return rows // self._equal
        return np.searchsorted(self.starts, rows, side="right") - 1

    def by_shard(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
        """Return the files that increasing rows lie in, each with the part of the rows that lies in it."""
        shards = self.shard_of(rows)
        cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), rows.size]
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                yield int(shards[start]), slice(start, stop)


class FieldReader(Protocol):
    """Reads rows of one field of a whole set of files. Rows are numbered through the files, in the set's order."""

    kind: str  # how it reads, in a few words
    reason: str  # why not in a quicker way; empty where there is none

    @property
    def counters(self) -> StageStats:
        """What it has read so far."""

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy rows, in range and in any order, into a C-contiguous buffer of the field's dtype."""

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Take note that these rows will be read soon."""

    def keep(self, rows: int) -> None:
        """Take note that rows are read in windows of so many: what is read as a whole is kept for as long."""


class ContiguousReader(ABC):
    """Rows of contiguous data, copied as bytes: alignment and byte order do not matter, and single rows are cheap."""

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = storages
        self._index = RowIndex([storage.rows for storage in storages])
        self._row_bytes = storages[0].row_bytes
        self.counters = StageStats()

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        if out.nbytes == 0:
            return
        flat = out.reshape(-1).view(np.uint8).reshape(len(rows), self._row_bytes)
        self.counters.add(bytes_read=flat.nbytes)
        self._copy(rows, flat)

    @abstractmethod
    def _copy(self, rows: NDArray[np.int64], flat: NDArray[np.uint8]) -> None:
        """Copy the bytes of rows, at least one, each to its place."""

    def expect(self, rows: NDArray[np.int64]) -> None:  # noqa: B027 - there is nothing to prepare
        pass

    def keep(self, rows: int) -> None:  # noqa: B027
        pass
