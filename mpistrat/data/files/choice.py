"""The choice of a field's reader, and of the chunks in which its rows are read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import ShardError, shard_error
from ...base.text import counted
from ..stats import StageStats
from .chunked import ChunkedReader
from .contiguous import MappedReader, PositionalReader
from .handles import OpenFiles, ShardFile
from .library import LibraryReader, all_kept
from .remote import RemotePath
from .storage import Chunks, Contiguous, FieldReader, Pointers, RowIndex, Storage
from .varying import VaryingReader

if TYPE_CHECKING:
    import h5py

__all__ = ["READERS", "MixedReader", "choose_reader", "chunk_starts"]

READERS = ("auto", "mmap", "pread", "h5py")
_CHUNK_ROWS = 1024  # chunk size of files without chunks, if other files have them


def choose_reader(storages: Sequence[Storage], reader: str, hdf5: OpenFiles[h5py.File]) -> FieldReader:
    """Return the fastest reader that a field's files and the user allow.

    "auto" falls back from maps to "pread" if the system does not map the files.

    Args:
        storages: the field in each file, in the set's order.
        reader: one of READERS, for contiguous data, or "h5py" for all data.
        hdf5: opens files for h5py.
    """
    storages = [storage for storage in storages if storage.rows] or storages[:1]
    ways = [_way(storage, reader) for storage in storages]
    if len(set(ways)) == 1:
        return _make(ways[0], storages, reader, hdf5)
    parts = [[i for i, own in enumerate(ways) if own == way] for way in dict.fromkeys(ways)]
    readers = [_make(ways[part[0]], [storages[i] for i in part], reader, hdf5) for part in parts]
    return MixedReader([storage.rows for storage in storages], parts, readers)


def chunk_starts(storages: Sequence[Storage], reader: str) -> NDArray[np.int64] | None:
    """Return `Node.chunk_starts` of a field, or None if single rows are cheap.

    The file's chunks count for every reader: a shuffle's order follows from them, and must not depend on a rank's packages.
    """
    through_hdf5 = [_way(storage, reader) == "h5py" for storage in storages]
    if any(storage.chunk_rows and storage.rows for storage in storages):
        rows = [storage.chunk_rows or _CHUNK_ROWS for storage in storages]
    elif all_kept(list(itertools.compress(storages, through_hdf5))):
        return None
    else:
        pairs = zip(storages, through_hdf5, strict=True)
        rows = [storage.block_rows if costly else _CHUNK_ROWS for storage, costly in pairs]
    ends = np.cumsum([storage.rows for storage in storages])
    chunks = [np.arange(end - each.rows, end, step) for each, end, step in zip(storages, ends, rows, strict=True)]
    return np.concatenate([*chunks, ends[-1:]])


def _way(storage: Storage, reader: str) -> str:
    """Return the name of a file's reader; files with the same name share one."""
    layout = storage.layout.storage.layout if isinstance(storage.layout, Pointers) else storage.layout
    if isinstance(layout, Contiguous) and isinstance(storage.file.path, RemotePath):
        return "h5py"  # in blocks
    if isinstance(storage.layout, Contiguous) and reader != "h5py":
        return "pread" if reader == "pread" else "mmap"
    if isinstance(storage.layout, Chunks) and reader != "h5py":
        return "chunks"
    if isinstance(storage.layout, Pointers) and reader != "h5py":
        return "varying"
    return "h5py"


def _make(way: str, storages: Sequence[Storage], reader: str, hdf5: OpenFiles[h5py.File]) -> FieldReader:
    if way == "mmap":
        instead = functools.partial(_not_mapped, storages, reader)
        try:
            return MappedReader(storages, instead)
        except ShardError:
            raise
        except OSError as error:
            return instead(error)
    if way == "pread":
        return PositionalReader(storages, reason='reader="pread"')
    if way == "varying":
        pointers = [storage.layout.storage for storage in storages if isinstance(storage.layout, Pointers)]
        return VaryingReader(storages, choose_reader(pointers, reader, hdf5))
    if way == "chunks":
        return ChunkedReader(storages)
    return LibraryReader(storages, hdf5)


def _not_mapped(storages: Sequence[Storage], reader: str, error: OSError) -> PositionalReader:
    """Return a reader for files that the system does not map."""
    if reader == "mmap":
        where, remedy = storages[0].where, 'Pass reader="auto" or reader="pread".'
        raise shard_error(where, "files that can be mapped into memory", str(error), remedy) from error
    return PositionalReader(storages, reason=f"not mapped: {error}")


class MixedReader(FieldReader):
    """A reader that distributes rows to several readers, each of some files and with its own row numbers."""

    def __init__(self, rows: Sequence[int], parts: Sequence[Sequence[int]], readers: Sequence[FieldReader]) -> None:
        self._index = RowIndex(rows)
        self._parts = parts
        self._readers = readers
        self._reader_of = np.zeros(len(rows), np.int64)
        self._shift = np.zeros(len(rows), np.int64)  # offset from a row's number to its reader's number
        for number, part in enumerate(parts):
            own = np.concatenate(([0], np.cumsum([rows[shard] for shard in part])))
            self._reader_of[list(part)] = number
            self._shift[list(part)] = own[:-1] - self._index.starts[list(part)]
        counts = ", ".join(f"{r.kind} for {counted(len(p), 'file')}" for r, p in zip(readers, parts, strict=True))
        self.kind = f"mixed: {counts}"
        self.reason = "; ".join(dict.fromkeys(reader.reason for reader in readers if reader.reason))

    @property
    def counters(self) -> StageStats:
        return StageStats.reading(reader.counters for reader in self._readers)

    def _shares(self, rows: NDArray[np.int64]) -> list[tuple[FieldReader, NDArray[np.int64], NDArray[np.int64]]]:
        """Return each reader with a share of the rows: their indices, and the reader's numbers of them."""
        shards = self._index.shard_of(rows)
        reader_of, own = self._reader_of[shards], rows + self._shift[shards]
        chosen = ((reader, np.flatnonzero(reader_of == number)) for number, reader in enumerate(self._readers))
        return [(reader, at, own[at]) for reader, at in chosen if at.size]

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        for reader, at, own in self._shares(rows):
            first, last = int(at[0]), int(at[-1])
            if last - first == at.size - 1:
                reader.read(own, out[first : last + 1])
            else:
                grouped = np.empty((at.size, *out.shape[1:]), out.dtype)
                reader.read(own, grouped)
                out[at] = grouped

    def opened(self) -> Set[ShardFile]:
        return frozenset().union(*(reader.opened() for reader in self._readers))

    def expect(self, rows: NDArray[np.int64]) -> None:
        for reader, _, own in self._shares(rows):
            reader.expect(own)

    def keep(self, rows: int) -> None:
        for reader in self._readers:
            reader.keep(rows)
