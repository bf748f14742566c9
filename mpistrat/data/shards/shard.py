"""One open shard: its datasets are looked at, then the file is closed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ShardError, explain
from ..readers.chunks import Chunks
from ..readers.open_files import ShardFile, open_hdf5
from ..readers.reader import Contiguous, Layout, OnlyHDF5, Storage
from .manifest import Field

if TYPE_CHECKING:
    import h5py

__all__ = ["Shard"]

_PIECE = 1 << 18  # bytes read at a time from data that is not chunked


class Shard:
    """What a file of a set holds. Not collective.

    Args:
        path: the file.
        names: the datasets wanted; None for all.

    Raises:
        ShardError: when the file cannot be read or holds what is not supported, naming it.
    """

    def __init__(self, path: Path, names: Sequence[str] | None) -> None:
        self.path = path
        self._file = ShardFile.of(path)
        self.storages: dict[str, Storage] = {}
        with open_hdf5(path) as file:
            try:
                self._look(file, names)
            except (OSError, RuntimeError, KeyError) as error:
                if isinstance(error, ShardError):
                    raise
                remedy = "The file is damaged: copy it again, or write the shards again."
                raise ShardError(
                    explain("HDF5Dataset", str(path), expected="readable metadata", got=str(error), remedy=remedy)
                ) from error
        self.check()

    def _look(self, file: h5py.File, names: Sequence[str] | None) -> None:
        available = _datasets(file, self.path)
        wanted = available if names is None else names
        if not wanted:
            raise self._error("at least one dataset with rows", "none")
        for name in wanted:
            if name not in available:
                raise self._error(f"a dataset {name!r}", f"datasets {available}")
            dataset = file[name]
            _refuse_unsupported(dataset, self.path)
            rows = int(dataset.shape[0])
            field = Field(dataset.dtype, dataset.shape[1:])
            row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64))
            piece_rows = int(dataset.chunks[0]) if dataset.chunks else max(1, _PIECE // max(1, row_bytes))
            self.storages[name] = Storage(self._file, name, field, rows, piece_rows, self._layout(dataset))
            if rows != self.rows:
                raise self._error(f"{self.rows} rows in {name!r}, as in {wanted[0]!r}", f"{rows} rows")

    @property
    def rows(self) -> int:
        return next(iter(self.storages.values())).rows

    @property
    def fields(self) -> dict[str, Field]:
        return {name: storage.field for name, storage in self.storages.items()}

    def _layout(self, dataset: h5py.Dataset) -> Layout:
        """How a dataset's rows are stored, as the readers tell them apart."""
        if dataset.chunks is not None:
            chunks = Chunks.of(dataset)
            return chunks if isinstance(chunks, Chunks) else OnlyHDF5(chunks)
        if not _plain(dataset):
            return OnlyHDF5("not stored as the array's bytes in one piece")
        end = dataset.id.get_offset() + dataset.nbytes
        if end > self._file.bytes:  # touching a page past the end would kill the process
            raise self._error(f"{end} bytes for {dataset.name}", f"{self._file.bytes} bytes: truncated")
        return Contiguous(dataset.id.get_offset())

    def _error(self, expected: str, got: str) -> ShardError:
        return ShardError(explain("HDF5Dataset", str(self.path), expected=expected, got=got))

    def check(self) -> None:
        """Raise if the file is no longer the one that was opened."""
        self._file.check()


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


def _plain(dataset: h5py.Dataset) -> bool:
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
