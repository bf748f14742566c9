"""The storage of a field in a file, and the base class of field readers."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..shards.manifest import Field
from ..stats import StageStats
from .codecs import Pipeline
from .handles import ShardFile

if TYPE_CHECKING:
    import h5py

__all__ = ["Chunks", "Contiguous", "FieldReader", "Layout", "OnlyHDF5", "Pointers", "RowIndex", "Storage"]

_ASKED_FOR = 4096  # most chunks to query one by one: each query takes HDF5 longer than the one before
_FAR = 1 << 61  # beyond the end of every file: offsets in a damaged one may not even fit an integer


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of whole rows with filters that this package undoes.

    Attributes:
        rows: rows of a chunk; the last one is also stored whole.
        row_bytes: bytes of a row.
        pipeline: the filters.
        offsets: each chunk's offset in the file; -1 if it was never written.
        sizes: each chunk's bytes in the file.
        masks: for each chunk, the filters that were skipped.
        fill: the bytes of an unwritten row.
    """

    rows: int
    row_bytes: int
    pipeline: Pipeline
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    masks: NDArray[np.uint32]
    fill: NDArray[np.uint8]

    @staticmethod
    def of(dataset: h5py.Dataset, row_bytes: int) -> Chunks | str:
        """Return the chunks of a chunked dataset, or the reason why only HDF5 can read it."""
        import h5py

        if dataset.chunks[1:] != dataset.shape[1:] or not dataset.shape[0]:
            return f"chunks of shape {dataset.chunks}, not of whole rows"
        pipeline = Pipeline.of(dataset)
        if isinstance(pipeline, str):
            return pipeline
        rows, plist = int(dataset.chunks[0]), dataset.id.get_create_plist()
        count = -(-int(dataset.shape[0]) // rows)
        if not hasattr(dataset.id, "chunk_iter") and (count > _ASKED_FOR or not hasattr(dataset.id, "get_chunk_info")):
            return f"{count} chunks, which this HDF5 does not list"
        if dataset.file.userblock_size:  # in some versions of HDF5 addresses of chunks count from its end
            return "a user block"
        if dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype, logical=True):
            return "a type that NumPy does not have"
        offsets, sizes = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        masks = np.zeros(count, np.uint32)

        def note(chunk: Any) -> None:
            place = chunk.chunk_offset[0] // rows
            if place < count and chunk.byte_offset is not None:
                offsets[place] = min(chunk.byte_offset, _FAR)
                sizes[place], masks[place] = min(chunk.size, _FAR), chunk.filter_mask

        if hasattr(dataset.id, "chunk_iter"):
            dataset.id.chunk_iter(note)
        else:
            for number in range(dataset.id.get_num_chunks()):
                note(dataset.id.get_chunk_info(number))
        partial = dataset.shape[0] % rows
        if pipeline.filters and partial and sizes[-1] == rows * row_bytes and not masks[-1]:
            # The last, partial chunk may be marked as not filtered; h5py does not report that.
            return "a last chunk that may be unfiltered"
        fill = np.zeros(row_bytes, np.uint8)  # pointers in it are null
        if not dataset.dtype.hasobject and plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED:
            base = dataset.dtype.subdtype[0] if dataset.dtype.subdtype else dataset.dtype
            value = np.asarray(dataset.fillvalue)
            fill.view(base).reshape(-1, value.size)[:] = value.reshape(-1)
        return Chunks(rows, row_bytes, pipeline, offsets, sizes, masks, fill)


@dataclass(frozen=True)
class Contiguous:
    """Contiguous storage: the array's bytes are in the file from this offset on."""

    offset: int


@dataclass(frozen=True)
class OnlyHDF5:
    """Storage that only HDF5 reads, with the reason."""

    reason: str


@dataclass(frozen=True)
class Pointers:
    """Rows of varying length, stored as pointers into HDF5's global heap."""

    storage: Storage


_SAMPLE = 1 << 14  # most bytes of a row to compare

Layout = Contiguous | Chunks | Pointers | OnlyHDF5


@dataclass(frozen=True)
class Storage:
    """One dataset of one file: all that a reader needs without an open file.

    Attributes:
        field: the dtype and shape of its rows.
        row_bytes: bytes of a row; approximate if they vary.
        block_rows: rows that h5py should read together.
        chunk_rows: rows of a stored chunk, for any reader; 0 without chunks.
    """

    file: ShardFile
    name: str
    field: Field
    rows: int
    row_bytes: int
    block_rows: int
    chunk_rows: int
    layout: Layout

    @property
    def where(self) -> str:
        return f"{self.file.path}: {self.name}"

    def some_rows(self, count: int) -> Iterator[bytes]:
        """Yield the first bytes of rows at fixed positions if single rows are cheap to read; else nothing."""
        if not isinstance(self.layout, Contiguous) or not self.rows or self.field.dtype.fields is not None:
            return
        with self.file.path.open("rb", buffering=0) as file:
            for row in np.unique(np.linspace(0, self.rows - 1, count, dtype=np.int64)).tolist():
                start = self.layout.offset + row * self.row_bytes
                file.seek(start)
                yield file.read(min(self.row_bytes, _SAMPLE))


class RowIndex:
    """An index from rows of a set to its files."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.starts = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
        self._equal = rows[0] if all(count == rows[0] for count in rows[:-1]) and rows[-1] <= rows[0] else 0

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the file number of each row."""
        if self._equal:
            return rows // self._equal
        return np.searchsorted(self.starts, rows, side="right") - 1

    def by_shard(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
        """Yield the files of increasing rows, each with its slice of the rows."""
        shards = self.shard_of(rows)
        cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), rows.size]
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                yield int(shards[start]), slice(start, stop)


class FieldReader(ABC):
    """A reader of one field of a whole set of files. Rows are numbered through the files, in the set's order."""

    kind: str  # a short description
    reason = ""  # why no faster reader is used; empty if there is none

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = storages
        self._index = RowIndex([storage.rows for storage in storages])
        self._counters = StageStats()

    @property
    def counters(self) -> StageStats:
        """Counters of its reads."""
        return self._counters

    @abstractmethod
    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy rows, in range and in any order, into a C-contiguous buffer of the field's dtype."""

    @abstractmethod
    def opened(self) -> Set[ShardFile]:
        """Return the files opened for reading."""

    def expect(self, rows: NDArray[np.int64]) -> None:  # noqa: B027
        """Announce that these rows will be read soon."""

    def keep(self, rows: int) -> None:  # noqa: B027
        """Announce that rows are read in windows of this size, for which decoded data should stay cached."""
