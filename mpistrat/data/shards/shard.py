"""One HDF5 file as a shard: what is in it, and a reader for each of its datasets.

Contiguous, unfiltered data is read through a memory map of the file; everything else through h5py, chunk by chunk.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ShardError, explain
from ..readers.library import LibraryReader
from ..readers.mapped import MappedReader
from ..readers.reader import FieldReader
from .manifest import Field

if TYPE_CHECKING:
    import h5py

__all__ = ["Shard"]


class Shard:
    """An open shard. Not collective.

    Args:
        path: the file.
        names: the datasets wanted; None for all.

    Raises:
        ShardError: when the file cannot be read or holds what is not supported, naming it.
    """

    def __init__(self, path: Path, names: Sequence[str] | None) -> None:
        import h5py

        self.path = path
        self._identity = _identity(path)
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            got = f"a file of {path.stat().st_size} bytes that HDF5 refuses: {error}"
            remedy = _remedy(error, "The file is damaged, truncated or not HDF5: copy it again")
            raise ShardError(
                explain("HDF5Dataset", str(path), expected="an HDF5 file", got=got, remedy=remedy)
            ) from error
        self.fields: dict[str, Field] = {}
        self.readers: dict[str, FieldReader] = {}
        try:
            self._open(file, names)
        except (OSError, RuntimeError, KeyError) as error:
            file.close()
            if isinstance(error, ShardError):
                raise
            remedy = _remedy(error, "The file is damaged: copy it again")
            raise ShardError(
                explain("HDF5Dataset", str(path), expected="readable metadata", got=str(error), remedy=remedy)
            ) from error
        if all(isinstance(reader, MappedReader) for reader in self.readers.values()):
            file.close()

    def _open(self, file: h5py.File, names: Sequence[str] | None) -> None:
        available = _datasets(file, self.path)
        wanted = available if names is None else names
        if not wanted:
            raise self._error("at least one dataset with rows", "none")
        mapped: mmap.mmap | None = None
        rows = None
        for name in wanted:
            if name not in available:
                raise self._error(f"a dataset {name!r}", f"datasets {available}")
            dataset = file[name]
            _refuse_unsupported(dataset, self.path)
            if rows is not None and dataset.shape[0] != rows:
                raise self._error(f"{rows} rows in {name!r}, as in {wanted[0]!r}", f"{dataset.shape[0]} rows")
            rows = int(dataset.shape[0])
            self.fields[name] = Field(dataset.dtype, dataset.shape[1:])
            if not _mappable(dataset):
                self.readers[name] = LibraryReader(dataset, self.path)
                continue
            if mapped is None:
                mapped = self._map()
            self.readers[name] = self._mapped_reader(mapped, dataset)
        self.rows = int(rows or 0)

    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _mapped_reader(self, mapped: mmap.mmap, dataset: h5py.Dataset) -> MappedReader:
        offset, row_bytes = dataset.id.get_offset(), dataset.nbytes // dataset.shape[0]
        if offset + dataset.nbytes > len(mapped):  # touching a page past the end would kill the process
            raise self._error(f"{offset + dataset.nbytes} bytes for {dataset.name}", f"{len(mapped)} bytes: truncated")
        return MappedReader(mapped, offset, dataset.shape[0], row_bytes)

    def _error(self, expected: str, got: str) -> ShardError:
        return ShardError(explain("HDF5Dataset", str(self.path), expected=expected, got=got))

    def check(self) -> None:
        """Raise if the file is no longer the one that was opened: a truncated file under a map kills the process."""
        found = _identity(self.path)
        if found != self._identity:
            expected = "the file as it was opened (inode, bytes, time of change)"
            got = f"{found} instead of {self._identity}" if found else "no such file"
            remedy = "Shards must not change while they are read: make a new dataset."
            raise ShardError(explain("HDF5Dataset", str(self.path), expected=expected, got=got, remedy=remedy))


def _remedy(error: Exception, damaged: str) -> str:
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "Each shard stays open: raise the number of open files (ulimit -n), or write fewer, larger shards."
    return f"{damaged}, or write the shards again."


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _datasets(file: h5py.File, path: Path) -> list[str]:
    """Names of all datasets with a first axis, in natural order; links that leave the file are refused."""
    import h5py

    names: list[str] = []

    def walk(group: h5py.Group, prefix: str) -> None:
        for key in group:
            if isinstance(group.get(key, getlink=True), h5py.ExternalLink):
                got = f"an external link at {prefix}{key}"
                raise ShardError(explain("HDF5Dataset", str(path), expected="data inside the file", got=got))
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                continue  # a soft link is another name for what is seen elsewhere
            item = group[key]
            if isinstance(item, h5py.Group):
                walk(item, f"{prefix}{key}/")
            elif isinstance(item, h5py.Dataset) and item.shape:
                names.append(f"{prefix}{key}")

    walk(file, "")
    return names


def _refuse_unsupported(dataset: h5py.Dataset, path: Path) -> None:
    import h5py

    def refuse(what: str) -> ShardError:
        expected = "numbers, booleans or fixed-length bytes stored in the file itself"
        return ShardError(explain("HDF5Dataset", f"{path}: {dataset.name}", expected=expected, got=what))

    if dataset.dtype.hasobject:
        raise refuse(f"dtype {dataset.dtype} (variable length or references)")
    if dataset.is_virtual:
        raise refuse("a virtual dataset")
    if dataset.external:
        raise refuse("external storage")
    plist = dataset.id.get_create_plist()
    for index in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            raise refuse(f"filter {code} ({name.decode(errors='replace')}), which this HDF5 does not have")


def _mappable(dataset: h5py.Dataset) -> bool:
    """Whether the bytes in the file are the array's bytes, in one piece."""
    import h5py

    stored = dataset.id.get_storage_size()
    return (
        dataset.chunks is None
        and dataset.nbytes > 0
        and stored == dataset.nbytes
        and dataset.id.get_offset() is not None
        and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    )
