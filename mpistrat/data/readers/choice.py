"""Which reader a field gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .chunked import ChunkedReader
from .chunks import Chunks
from .library import LibraryReader
from .mapped import MappedReader
from .mixed import MixedReader
from .open_files import OpenFiles
from .reader import Contiguous, FieldReader, Storage

if TYPE_CHECKING:
    import h5py

__all__ = ["READERS", "choose_reader"]

READERS = ("auto", "mmap", "pread", "h5py")


def choose_reader(storages: Sequence[Storage], reader: str, hdf5: OpenFiles[h5py.File]) -> FieldReader:
    """Return the quickest reader of a field that its files and the user allow. Not collective.

    Args:
        storages: the field in each file, in the set's order.
        reader: one of READERS: how contiguous data is read, or "h5py" for everything through h5py.
        hdf5: opens files for h5py.
    """
    ways = [_way(storage, reader) for storage in storages]
    filled = {way for way, storage in zip(ways, storages, strict=True) if storage.rows} or {ways[0]}
    if len(filled) == 1:
        return _make(filled.pop(), storages, hdf5)
    parts = [[i for i, own in enumerate(ways) if own == way and storages[i].rows] for way in sorted(filled)]
    readers = [_make(ways[part[0]], [storages[i] for i in part], hdf5) for part in parts]
    return MixedReader([storage.rows for storage in storages], parts, readers)


def _way(storage: Storage, reader: str) -> str:
    """How one file's rows are read; all files that are read alike share a reader."""
    if isinstance(storage.layout, Contiguous) and reader != "h5py":
        return "mmap"
    if isinstance(storage.layout, Chunks) and reader != "h5py":
        return "chunks"
    return "h5py"


def _make(way: str, storages: Sequence[Storage], hdf5: OpenFiles[h5py.File]) -> FieldReader:
    if way == "mmap":
        return MappedReader(storages)
    if way == "chunks":
        return ChunkedReader(storages)
    return LibraryReader(storages, hdf5)
