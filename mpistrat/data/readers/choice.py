"""Which reader a field gets, and in which pieces its rows are read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError, explain
from .chunked import ChunkedReader
from .chunks import Chunks
from .library import LibraryReader, all_kept
from .mapped import MappedReader
from .mixed import MixedReader
from .open_files import OpenFiles
from .positional import PositionalReader
from .reader import Contiguous, FieldReader, Pointers, Storage
from .varying import VaryingReader

if TYPE_CHECKING:
    import h5py

__all__ = ["READERS", "choose_reader", "piece_starts"]

READERS = ("auto", "mmap", "pread", "h5py")
_PIECE = 1024  # rows in a piece of files that have no chunks, where other files do


def choose_reader(storages: Sequence[Storage], reader: str, hdf5: OpenFiles[h5py.File]) -> FieldReader:
    """Return the quickest reader of a field that its files and the user allow.

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


def piece_starts(storages: Sequence[Storage], reader: str) -> NDArray[np.int64] | None:
    """Return where the pieces of a field begin that are read as a whole, then its rows; None if single rows are cheap.

    Where data is stored in chunks these are the pieces, whoever reads them: a shuffle's order follows from them, and must
    not depend on the packages that a rank has.

    Args:
        storages, reader: as for `choose_reader`.
    """
    through_hdf5 = [_way(storage, reader) == "h5py" for storage in storages]
    if any(storage.chunk_rows and storage.rows for storage in storages):
        rows = [storage.chunk_rows or _PIECE for storage in storages]
    elif all_kept(list(itertools.compress(storages, through_hdf5))):
        return None
    else:
        pairs = zip(storages, through_hdf5, strict=True)
        rows = [storage.piece_rows if costly else _PIECE for storage, costly in pairs]
    ends = np.cumsum([storage.rows for storage in storages])
    pieces = [np.arange(end - each.rows, end, step) for each, end, step in zip(storages, ends, rows, strict=True)]
    return np.concatenate([*pieces, ends[-1:]])


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
