"""Which reader a field gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import ShardError, explain
from .chunked import ChunkedReader
from .chunks import Chunks
from .library import LibraryReader
from .mapped import MappedReader
from .mixed import MixedReader
from .open_files import OpenFiles
from .positional import PositionalReader
from .reader import Contiguous, FieldReader, Pointers, Storage
from .varying import VaryingReader

if TYPE_CHECKING:
    import h5py

__all__ = ["READERS", "choose_reader"]

READERS = ("auto", "mmap", "pread", "h5py")


def choose_reader(storages: Sequence[Storage], reader: str, hdf5: OpenFiles[h5py.File]) -> FieldReader:
    """Return the quickest reader of a field that its files and the user allow. Not collective.

    "auto" falls back from maps to "pread", where the system does not map the files.

    Args:
        storages: the field in each file, in the set's order.
        reader: one of READERS: how contiguous data is read, or "h5py" for everything through h5py.
        hdf5: opens files for h5py.
    """
    storages = [storage for storage in storages if storage.rows] or storages[:1]
    ways = [_way(storage, reader) for storage in storages]
    if len(set(ways)) == 1:
        return _make(ways[0], storages, reader, hdf5)
    parts = [[i for i, own in enumerate(ways) if own == way] for way in dict.fromkeys(ways)]
    readers = [_make(ways[part[0]], [storages[i] for i in part], reader, hdf5) for part in parts]
    return MixedReader([storage.rows for storage in storages], parts, readers)


def _way(storage: Storage, reader: str) -> str:
    """How one file's rows are read; all files that are read alike share a reader."""
    if isinstance(storage.layout, Contiguous) and reader != "h5py":
        return "pread" if reader == "pread" else "mmap"
    if isinstance(storage.layout, Chunks) and reader != "h5py":
        return "chunks"
    if isinstance(storage.layout, Pointers) and reader != "h5py":
        return "varying"
    return "h5py"


def _make(way: str, storages: Sequence[Storage], reader: str, hdf5: OpenFiles[h5py.File]) -> FieldReader:
    if way == "mmap":
        try:
            return MappedReader(storages)
        except ShardError:
            raise
        except OSError as error:
            if reader == "mmap":
                where, remedy = storages[0].where, 'Pass reader="auto" or reader="pread".'
                expected = "files that can be mapped into memory"
                raise ShardError(
                    explain("HDF5Dataset", where, expected=expected, got=str(error), remedy=remedy)
                ) from error
            return PositionalReader(storages, reason=f"not mapped: {error}")
    if way == "pread":
        return PositionalReader(storages, reason='reader="pread"')
    if way == "varying":
        pointers = [storage.layout.storage for storage in storages if isinstance(storage.layout, Pointers)]
        return VaryingReader(storages, choose_reader(pointers, reader, hdf5))
    if way == "chunks":
        return ChunkedReader(storages)
    return LibraryReader(storages, hdf5)
