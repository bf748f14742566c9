"""The files of a set: each opened, looked at and closed again, compared with each other and with the manifest."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..._util import log
from ..._util.text import decimal_size
from ...errors import ShardError
from ..files.handles import DAMAGED, ShardFile, open_hdf5, shard_error
from ..files.storage import Chunks, Contiguous, Layout, OnlyHDF5, Pointers, Storage
from ..files.varying import POINTER
from ..memory_limit import available_memory
from .files import FileSet, check_ends
from .manifest import Field, ShardEntry, fields_to_json
from .objects import Refused, all_names, check_storage, field_of, find

if TYPE_CHECKING:
    import h5py

__all__ = ["Shard", "ShardSet", "open_shards"]

_LARGE_ROW = 1 << 30  # bytes of a row, from which on it is worth a look whether there is memory for one
_BLOCK = 1 << 18  # bytes read at a time from data that is not chunked


class Shard:
    """The datasets of a file, as its readers need to know them.

    Attributes:
        path: the file.
        storages: where each dataset's rows lie.
        sources: resolved paths of other files, from which virtual datasets among these draw.
        left_out: what else the file names, where all datasets were wanted, and why it is not read.

    Raises:
        ShardError: when the file cannot be read or holds what is not supported, naming it.
    """

    def __init__(self, path: Path, names: Sequence[str] | None, declared: Set[Path], driver: str | None) -> None:
        self.path = path
        self._driver = driver
        try:
            self._file = ShardFile.of(path)
        except OSError as error:
            raise self._error("", "an HDF5 file", str(error)) from error
        self.storages: dict[str, Storage] = {}
        self.sources: set[Path] = set()
        self.left_out: list[str] = []
        with open_hdf5(path, driver) as file:
            try:
                self._look(file, names, declared)
            except ShardError:
                raise
            except Exception as error:  # h5py raises many kinds for damaged metadata
                got = f"{type(error).__name__}: {error}"
                raise self._error("", "readable metadata", got, DAMAGED) from error
        self.check()

    def _look(self, file: h5py.File, names: Sequence[str] | None, declared: Set[Path]) -> None:
        if names is None:
            names, self.left_out = self._all_names(file)
            if not names:
                got = f"only {', '.join(self.left_out[:5])}" if self.left_out else "none"
                raise self._error("", "at least one dataset with rows", got)
        for name in names:
            self.storages[name] = storage = self._storage(file, name, declared)
            if storage.rows != self.rows:
                first = next(iter(self.storages))
                expected = f"{self.rows} rows in {name!r}, as in {first!r}"
                remedy = "Name the datasets that belong together: fields=(…)."
                raise self._error("", expected, f"{storage.rows} rows", remedy)

    def _all_names(self, file: h5py.File) -> tuple[list[str], list[str]]:
        try:
            return all_names(file)
        except Refused as refused:
            remedy = "Name the datasets that are to be read: fields=(…)."
            raise self._error("", "data inside the file", str(refused), remedy) from None

    def _storage(self, file: h5py.File, name: str, declared: Set[Path]) -> Storage:
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
            self.sources |= check_storage(dataset, self.path, declared)
        except Refused as refused:
            expected = "numbers, strings or structures that lie in the declared files"
            raise self._error(name, expected, str(refused)) from None
        rows, row_bytes = int(dataset.shape[0]), self._row_bytes(dataset)
        block_rows = max(1, _BLOCK // max(1, row_bytes))
        if dataset.chunks:
            block_rows = min(block_rows, dataset.chunks[0]) if dataset.dtype.hasobject else dataset.chunks[0]
        chunk_rows = dataset.chunks[0] if dataset.chunks else 0
        layout = self._layout(dataset)
        return Storage(self._file, name, field, rows, row_bytes, int(block_rows), int(chunk_rows), layout)

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
        log.once(logging.WARNING, f"HDF5Dataset: {text}; all of them read as {dataset.fillvalue}, the fill value")

    def _row_bytes(self, dataset: h5py.Dataset) -> int:
        row_bytes = dataset.dtype.itemsize * math.prod(map(int, dataset.shape[1:]))
        if dataset.dtype.hasobject:  # what the rows refer to lies in the file, uncompressed
            row_bytes += self._file.bytes // max(1, int(dataset.shape[0]))
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
        if end > self._file.bytes:  # touching a page past the end would kill the process
            raise self._error(dataset.name, f"a file of {end} bytes", f"{self._file.bytes} bytes: truncated")
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
            if offset + rows * row_bytes > self._file.bytes:
                raise self._error(dataset.name, f"a file of {offset + rows * row_bytes} bytes", f"{self._file.bytes}")
            layout = Contiguous(offset)
        else:
            chunks = Chunks.of(dataset, row_bytes)
            if not isinstance(chunks, Chunks):
                return OnlyHDF5(f"rows of varying length in {chunks}")
            layout = chunks
        field, name = Field(POINTER, (in_row,)), dataset.name.strip("/")
        chunk_rows = layout.rows if isinstance(layout, Chunks) else 0
        return Pointers(Storage(self._file, name, field, rows, row_bytes, 1, chunk_rows, layout))

    @property
    def rows(self) -> int:
        return next(iter(self.storages.values())).rows

    @property
    def fields(self) -> dict[str, Field]:
        return {name: storage.field for name, storage in self.storages.items()}

    def check(self) -> None:
        """Raise if the file is no longer the one that was opened."""
        self._file.check()

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


@dataclass(frozen=True)
class ShardSet:
    """Files that belong together.

    Attributes:
        shards: the files that have rows, in order.
        sources: files without rows of their own, as virtual datasets of the others draw from them.
        fields: what each file with rows has.
        skipped: files that were left out, and why.
    """

    shards: tuple[Shard, ...]
    sources: tuple[ShardFile, ...]
    fields: dict[str, Field]
    skipped: tuple[tuple[Path, str], ...]


def open_shards(
    files: FileSet, names: list[str] | None, *, driver: str | None, on_error: str, ends: bool = False
) -> ShardSet:
    """Look into all files.

    Without a manifest, files are compared with what most of them hold. A file from which a virtual dataset of another
    one draws, be it in part, is that one's source, and has no rows of its own: they would come twice.

    Raises:
        ShardError: naming the file that is bad.
    """
    if names is None and files.fields is not None:
        names = list(files.fields)
    skipped = list(files.skipped)
    declared = {path.resolve(): path for path in files.paths}
    shards: list[Shard] = []
    bad: list[tuple[Path, ShardError]] = []
    for path, entry in zip(files.paths, files.entries, strict=True):
        try:
            shard = Shard(path, names, declared.keys(), driver)
            _check_rows(shard, entry)
            shards.append(shard)
        except ShardError as error:
            bad.append((path, error))
    sources = set().union(*(shard.sources for shard in shards))
    for path, problem in bad:
        if path.resolve() not in sources:  # else what is drawn from it was checked, and it need not have more
            _skip(path, problem, on_error, skipped)
    shards = _without_sources(shards, sources)
    if files.fields is not None:
        fields, reference = files.fields, "the manifest"
    elif shards:
        fields, reference = _usual(shards)
    good, entries = [], dict(zip(files.paths, files.entries, strict=True))
    for shard in shards:
        try:
            _compare(shard, fields, reference, check_extra=names is None)
            if ends:
                check_ends(shard.path, entries[shard.path])
            good.append(shard)
        except ShardError as error:
            _skip(shard.path, error, on_error, skipped)
    if skipped:
        _report(skipped, len(good))
    lent = tuple(ShardFile.of(path) for resolved, path in declared.items() if resolved in sources)
    return ShardSet(tuple(good), lent, good[0].fields, tuple(skipped))


def _without_sources(shards: list[Shard], sources: Set[Path]) -> list[Shard]:
    """The files that no other one draws from. Raise if the rows of a file would be lost that way."""
    kept = [shard for shard in shards if shard.path.resolve() not in sources]
    by_path = {shard.path.resolve(): shard for shard in shards}
    drawn: set[Path] = set()
    new = set().union(*(shard.sources for shard in kept))
    while new:
        drawn |= new
        new = set().union(*(by_path[path].sources for path in new if path in by_path)) - drawn
    for path in sorted(sources - drawn):
        expected, got = "virtual datasets over files that do not draw back", "files that draw from each other"
        raise shard_error(path, expected, got, "Write the virtual datasets into a file of their own.")
    return kept


def _skip(path: Path, error: ShardError, on_error: str, skipped: list[tuple[Path, str]]) -> None:
    if on_error != "skip":
        raise error
    skipped.append((path, str(error)))


def _report(skipped: list[tuple[Path, str]], good: int) -> None:
    first = skipped[0][1]
    text = f"{len(skipped)} of {len(skipped) + good} files skipped; the first: {first}"
    if not good:
        path, remedy = str(skipped[0][0]), "With on_error='skip', one file at least must be good."
        raise shard_error(path, "a set with a good file", text, remedy)
    log.once(logging.WARNING, f"HDF5Dataset: {text}")


def _usual(shards: list[Shard]) -> tuple[dict[str, Field], str]:
    """The fields that most files have, and the first file that has them."""

    def key(shard: Shard) -> str:
        return json.dumps(fields_to_json(shard.fields), sort_keys=True)

    most = Counter(map(key, shards)).most_common(1)[0][0]
    shard = next(shard for shard in shards if key(shard) == most)
    return shard.fields, str(shard.path)


def _check_rows(shard: Shard, entry: ShardEntry | None) -> None:
    if entry is not None and shard.rows != entry.rows:
        got, remedy = f"{shard.rows} rows", "The file is not the one that was written with the manifest."
        raise shard_error(shard.path, f"{entry.rows} rows (manifest)", got, remedy)


def _compare(shard: Shard, fields: dict[str, Field], reference: str, *, check_extra: bool) -> None:
    """Raise unless a shard holds the same fields as the reference."""
    missing = [] if not check_extra else sorted(set(fields) ^ set(shard.fields))
    if missing:
        raise shard_error(shard.path, f"datasets {sorted(fields)}, as {reference} has", f"{sorted(shard.fields)}")
    for name, field in shard.fields.items():
        if name not in fields:
            raise shard_error(shard.path, f"datasets {sorted(fields)}, as {reference} says", f"{name!r}")
        if field != fields[name]:
            expected = f"{name!r} as {fields[name]}, like {reference}"
            remedy = "All shards of a set need the same dtype and row shape: write this one again."
            raise shard_error(shard.path, expected, str(field), remedy)
