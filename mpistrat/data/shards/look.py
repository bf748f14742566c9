"""A look into files: what readers must know of each, found by opening it once. What is found may be sent to other ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import ShardError
from ...base.text import decimal_size
from ..files.handles import DAMAGED, ShardFile, open_hdf5, shard_error
from ..files.storage import Chunks, Contiguous, Layout, OnlyHDF5, Pointers, Storage
from ..files.varying import POINTER
from ..memory_limit import available_memory
from .files import FileSet, check_ends
from .manifest import Field
from .objects import Refused, all_names, check_storage, field_of, find

if TYPE_CHECKING:
    import h5py

__all__ = ["Found", "Shard", "Unfit", "look", "look_into", "wanted_names"]

_LARGE_ROW = 1 << 30  # bytes of a row, from which on it is worth a look whether there is memory for one
_BLOCK = 1 << 18  # bytes read at a time from data that is not chunked


@dataclass(frozen=True)
class Shard:
    """The datasets of a file, as its readers need to know them.

    Attributes:
        file: the file as it was.
        storages: where each dataset's rows lie.
        sources: resolved paths of other files, from which virtual datasets among these draw.
        left_out: what else the file names, where all datasets were wanted, and why it is not read.
        notes: what the user had better know.
        sample: a digest of some of its rows, where ranks compare it.
        problem: how its ends differ from what the manifest says, where they do.
    """

    file: ShardFile
    storages: dict[str, Storage]
    sources: frozenset[Path] = frozenset()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sample: bytes = b""
    problem: str = ""

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def rows(self) -> int:
        return next(iter(self.storages.values())).rows

    @property
    def fields(self) -> dict[str, Field]:
        return {name: storage.field for name, storage in self.storages.items()}


@dataclass(frozen=True)
class Unfit:
    """A file that cannot be read.

    Attributes:
        text: why, as an error says it.
        unopened: whether that was seen without HDF5: it is missing, or not the one that the manifest lists.
    """

    text: str
    unopened: bool


Found = Shard | Unfit


def wanted_names(files: FileSet, names: Sequence[str] | None) -> list[str] | None:
    """Return which datasets of each file are read: those of the manifest, where none are named; None for all."""
    return list(files.fields) if names is None and files.fields is not None else None if names is None else list(names)


def look(
    files: FileSet, numbers: Iterable[int], names: Sequence[str] | None, driver: str | None = None, *,
    verify: bool = False, ends: bool = False,
) -> list[Found]:  # fmt: skip
    """Look into some files of a set, by their numbers: first without HDF5, then at the datasets of these names, or all.

    Args:
        verify: compare their digests, before HDF5 opens one of them.
        ends: compare the digests of their ends.
    """
    numbers, declared, names = list(numbers), _Declared(files.paths), wanted_names(files, names)
    unfit: dict[int, Unfit] = {}
    for number in numbers:
        try:
            files.check([number], verify=verify)
        except ShardError as error:
            unfit[number] = Unfit(str(error), unopened=True)

    def found(number: int) -> Found:
        if number in unfit:
            return unfit[number]
        try:
            shard = look_into(files.paths[number], names, declared, driver)
        except ShardError as error:
            return Unfit(str(error), unopened=False)
        try:
            if ends:
                check_ends(shard.path, files.entries[number])
        except ShardError as error:
            return replace(shard, problem=str(error))
        return shard

    return [found(number) for number in numbers]


def look_into(path: Path, names: Sequence[str] | None, declared: Container[Path], driver: str | None = None) -> Shard:
    """Look into one file.

    Args:
        path: the file.
        names: the datasets that are wanted; None for all that have rows.
        declared: resolved paths of the files from which virtual datasets may draw.
        driver: as for `open_hdf5`.

    Raises:
        ShardError: when the file cannot be read or holds what is not supported, naming it.
    """
    looker = _Looker(path, declared, driver)
    with open_hdf5(path, driver) as file:
        try:
            looker.look(file, names)
        except ShardError:
            raise
        except Exception as error:  # h5py raises many kinds for damaged metadata
            got = f"{type(error).__name__}: {error}"
            raise shard_error(path, "readable metadata", got, DAMAGED) from error
    looker.file.check()
    return Shard(
        looker.file, looker.storages, frozenset(looker.sources), tuple(looker.left_out), tuple(looker.notes)
    )  # fmt: skip


class _Declared:
    """Files by resolved path. Resolving takes several calls of the file system each: only virtual datasets need it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    @functools.cached_property
    def _resolved(self) -> frozenset[Path]:
        return frozenset(path.resolve() for path in self._paths)

    def __contains__(self, path: object) -> bool:
        return path in self._resolved


class _Looker:
    """Collects what one file holds."""

    def __init__(self, path: Path, declared: Container[Path], driver: str | None) -> None:
        self.path, self._declared, self._driver = path, declared, driver
        try:
            self.file = ShardFile.of(path)
        except OSError as error:
            raise self._error("", "an HDF5 file", str(error)) from error
        self.storages: dict[str, Storage] = {}
        self.sources: set[Path] = set()
        self.left_out: list[str] = []
        self.notes: list[str] = []

    def look(self, file: h5py.File, names: Sequence[str] | None) -> None:
        if names is None:
            names, self.left_out = self._all_names(file)
            if not names:
                got = f"only {', '.join(self.left_out[:5])}" if self.left_out else "none"
                raise self._error("", "at least one dataset with rows", got)
        for name in names:
            self.storages[name] = storage = self._storage(file, name)
            first, rows = next((name, each.rows) for name, each in self.storages.items())
            if storage.rows != rows:
                expected = f"{rows} rows in {name!r}, as in {first!r}"
                remedy = "Name the datasets that belong together: fields=(...)."
                raise self._error("", expected, f"{storage.rows} rows", remedy)

    def _all_names(self, file: h5py.File) -> tuple[list[str], list[str]]:
        try:
            return all_names(file)
        except Refused as refused:
            remedy = "Name the datasets that are to be read: fields=(...)."
            raise self._error("", "data inside the file", str(refused), remedy) from None

    def _storage(self, file: h5py.File, name: str) -> Storage:
        try:
            dataset = find(file, name)
            if dataset is None:
                raise self._error("", f"a dataset {name!r}", f"datasets {all_names(file)[0]}")
            if not dataset.shape:
                raise Refused("a dataset without rows")
            if dataset.is_virtual and self._driver == "mpio":
                raise Refused("a virtual dataset, which HDF5 does not read through MPI-IO: leave driver out")
            field = field_of(dataset)
            self._check_rows(dataset)
            self.sources |= check_storage(dataset, self.path, self._declared, self.notes)
        except Refused as refused:
            expected = "numbers, strings or structures that lie in the declared files"
            raise self._error(name, expected, str(refused)) from None
        rows, row_bytes = int(dataset.shape[0]), self._row_bytes(dataset)
        block_rows = max(1, _BLOCK // max(1, row_bytes))
        if dataset.chunks:
            block_rows = min(block_rows, dataset.chunks[0]) if dataset.dtype.hasobject else dataset.chunks[0]
        chunk_rows = dataset.chunks[0] if dataset.chunks else 0
        layout = self._layout(dataset)
        return Storage(self.file, name, field, rows, row_bytes, int(block_rows), int(chunk_rows), layout)

    def _check_rows(self, dataset: h5py.Dataset) -> None:
        """Refuse rows that were never written, or that no memory holds."""
        import h5py

        size = self._row_bytes(dataset)
        available = available_memory() if size > _LARGE_ROW else None
        if available is not None and size > available:
            raise Refused(f"rows of {decimal_size(size)}, where {decimal_size(available)} of memory are free")
        if dataset.is_virtual or dataset.external or not dataset.nbytes or dataset.id.get_storage_size():
            return
        if dataset.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
            raise Refused(f"{len(dataset)} rows that were never written")
        text = f"{self.path}: {dataset.name.strip('/')}: none of {len(dataset)} rows was ever written"
        self.notes.append(f"{text}; all of them read as {dataset.fillvalue}, the fill value")

    def _row_bytes(self, dataset: h5py.Dataset) -> int:
        row_bytes = dataset.dtype.itemsize * math.prod(map(int, dataset.shape[1:]))
        if dataset.dtype.hasobject:  # what the rows refer to lies in the file, uncompressed
            row_bytes += self.file.bytes // max(1, int(dataset.shape[0]))
        return row_bytes

    def _layout(self, dataset: h5py.Dataset) -> Layout:
        """How a dataset's rows are stored, as the readers tell them apart."""
        if dataset.is_virtual:
            return OnlyHDF5("a virtual dataset")
        if dataset.dtype.hasobject:
            return self._varying(dataset)
        if dataset.chunks is not None:
            chunks = Chunks.of(dataset, self._row_bytes(dataset))
            return chunks if isinstance(chunks, Chunks) else OnlyHDF5(chunks)
        if not _plain(dataset):
            return OnlyHDF5("not stored as the array's bytes, contiguously")
        end = dataset.id.get_offset() + dataset.nbytes
        if end > self.file.bytes:  # touching a page past the end would kill the process
            raise self._error(dataset.name, f"a file of {end} bytes", f"{self.file.bytes} bytes: truncated")
        return Contiguous(dataset.id.get_offset())

    def _varying(self, dataset: h5py.Dataset) -> Layout:
        """How the pointers of rows of varying length are stored."""
        if not _usual_pointers(dataset):
            return OnlyHDF5("rows of varying length that are stored in an unusual way")
        rows, in_row = int(dataset.shape[0]), int(np.prod(dataset.shape[1:], dtype=np.int64))
        row_bytes = in_row * POINTER.itemsize
        layout: Layout
        if dataset.chunks is None:
            offset = dataset.id.get_offset()
            if offset is None or dataset.id.get_storage_size() != rows * row_bytes:
                return OnlyHDF5("rows of varying length, not contiguous")
            if offset + rows * row_bytes > self.file.bytes:
                raise self._error(dataset.name, f"a file of {offset + rows * row_bytes} bytes", f"{self.file.bytes}")
            layout = Contiguous(offset)
        else:
            chunks = Chunks.of(dataset, row_bytes)
            if not isinstance(chunks, Chunks):
                return OnlyHDF5(f"rows of varying length in {chunks}")
            layout = chunks
        field, name = Field(POINTER, (in_row,)), dataset.name.strip("/")
        chunk_rows = layout.rows if isinstance(layout, Chunks) else 0
        return Pointers(Storage(self.file, name, field, rows, row_bytes, 1, chunk_rows, layout))

    def _error(self, name: str, expected: str, got: str, remedy: str = "") -> ShardError:
        return shard_error(f"{self.path}: {name.strip('/')}" if name else str(self.path), expected, got, remedy)


def _plain(dataset: h5py.Dataset) -> bool:
    """Whether the bytes in the file are the array's bytes, contiguously."""
    import h5py

    return (
        dataset.nbytes > 0
        and dataset.id.get_storage_size() == dataset.nbytes
        and dataset.id.get_offset() is not None
        and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    )


def _usual_pointers(dataset: h5py.Dataset) -> bool:
    """Whether pointers are 16 bytes that count from the file's begin, to bytes that NumPy takes as they are."""
    import h5py

    base = h5py.check_vlen_dtype(dataset.dtype)
    if base is not str and base is not bytes and dataset.id.get_type().get_super() != h5py.h5t.py_create(base):
        return False
    unwritten = dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    sizes = dataset.file.id.get_create_plist().get_sizes()
    return sizes == (8, 8) and not dataset.file.userblock_size and not unwritten
