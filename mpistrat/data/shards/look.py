"""Inspection of files: the information that readers need, found by opening each file once; its form as bytes; the resulting set.

The files of a set are compared with their manifest, or with each other.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import log
from ...base.errors import ShardError, shard_error
from ...base.text import decimal_size
from ..files.codecs import Pipeline
from ..files.handles import DAMAGED, ShardFile, open_hdf5
from ..files.remote import RemotePath, StoredPath
from ..files.storage import Chunks, Contiguous, Layout, OnlyHDF5, Pointers, Storage
from ..files.varying import POINTER
from ..memory_limit import available_memory
from .belonging import belonging, readable
from .files import FileSet, check_ends
from .manifest import Field, ShardEntry, dtype_from_json, dtype_to_json, fields_to_json
from .objects import Refused, all_names, check_storage, field_of, find, never_written

if TYPE_CHECKING:
    import h5py

__all__ = [
    "Found",
    "ShardContents",
    "ShardSet",
    "Unfit",
    "from_bytes",
    "join_shards",
    "look",
    "look_into",
    "member_of",
    "to_bytes",
]

_LARGE_ROW = 1 << 30  # bytes of a row for which free memory is checked
_EXPECTED = "numbers, strings or structures that lie in the declared files"
_BLOCK = 1 << 18  # bytes read at a time from data that is not chunked
_REMOTE_BLOCK = 1 << 20  # of a remote file


@dataclass(frozen=True)
class ShardContents:
    """The datasets of a file, for its readers.

    Attributes:
        file: the identity of the file.
        storages: the storage of each dataset.
        sources: resolved paths of other files that virtual datasets of this one use.
        left_out: the file's other objects, if all datasets were wanted, and why they are not read.
        notes: warnings for the user.
        sample: a digest of some rows, if ranks compare it.
        problem: the difference between its ends and the manifest, if any.
    """

    file: ShardFile
    storages: dict[str, Storage]
    sources: frozenset[StoredPath] = frozenset()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sample: bytes = b""
    problem: str = ""

    @property
    def path(self) -> StoredPath:
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
        text: the reason, as an error text.
        unopened: whether it was found without HDF5: the file is missing, or not the one in the manifest.
    """

    text: str
    unopened: bool


Found = ShardContents | Unfit


def _wanted_names(files: FileSet, names: Sequence[str] | None) -> list[str] | None:
    """Return the datasets to read of each file: the named ones, else those of the manifest; None for all."""
    return list(files.fields) if names is None and files.fields is not None else None if names is None else list(names)


def look(
    files: FileSet, numbers: Iterable[int], names: Sequence[str] | None, driver: str | None = None, *,
    verify: bool = False, ends: bool = False,
) -> list[Found]:  # fmt: skip
    """Inspect some files of a set, by their numbers: first without HDF5, then the datasets of these names, or all.

    Args:
        verify: compare the files' digests before HDF5 opens one.
        ends: compare the digests of the files' ends.
    """
    numbers, declared, names = list(numbers), _Declared(files.paths), _wanted_names(files, names)
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


def look_into(
    path: StoredPath, names: Sequence[str] | None, declared: Container[StoredPath], driver: str | None = None, *,
    together: bool = True,
) -> ShardContents:  # fmt: skip
    """Inspect one file.

    Args:
        path: the file.
        names: the wanted datasets; None for all that have rows and belong together (see belonging.py).
        declared: resolved paths of the files that virtual datasets may use.
        driver: as for `open_hdf5`.
        together: whether the datasets must have equally many rows; else all readable ones are inspected.

    Raises:
        ShardError: naming the file, when it cannot be read or has unsupported content.
    """
    looker = _Looker(path, declared, driver)
    with open_hdf5(path, driver) as file:
        try:
            looker.look(file, names, together)
        except ShardError:
            raise
        except Exception as error:  # h5py raises many kinds of errors for damaged metadata
            got = f"{type(error).__name__}: {error}"
            raise shard_error(path, "readable metadata", got, DAMAGED) from error
    looker.file.check()
    return ShardContents(
        looker.file, looker.storages, frozenset(looker.sources), tuple(looker.left_out), tuple(looker.notes)
    )  # fmt: skip


class _Declared:
    """Files by resolved path. Resolving takes several system calls per file, and only virtual datasets need it."""

    def __init__(self, paths: Sequence[StoredPath]) -> None:
        self._paths = paths

    @functools.cached_property
    def _resolved(self) -> frozenset[StoredPath]:
        return frozenset(path.resolve() for path in self._paths)

    def __contains__(self, path: object) -> bool:
        return path in self._resolved


class _Looker:
    """The inspection of one file."""

    def __init__(self, path: StoredPath, declared: Container[StoredPath], driver: str | None) -> None:
        self.path, self._declared, self._driver = path, declared, driver
        try:
            self.file = ShardFile.of(path)
        except ShardError:
            raise
        except OSError as error:
            raise self._error("", "an HDF5 file", str(error)) from error
        self.storages: dict[str, Storage] = {}
        self.sources: set[StoredPath] = set()
        self.left_out: list[str] = []
        self.notes: list[str] = []

    def look(self, file: h5py.File, names: Sequence[str] | None, together: bool) -> None:
        if names is None:
            names = self._all_names(file, together)
            if not names:
                got = f"only {', '.join(self.left_out[:5])}" if self.left_out else "none"
                raise self._error("", "at least one dataset with rows", got)
        for name in names:
            self.storages[name] = storage = self._storage(file, name)
            first, rows = next((name, each.rows) for name, each in self.storages.items())
            if storage.rows != rows and together:
                expected = f"{rows} rows in {name!r}, as in {first!r}"
                remedy = "Name the datasets that belong together: fields=(...)."
                raise self._error("", expected, f"{storage.rows} rows", remedy)

    def _all_names(self, file: h5py.File, together: bool) -> list[str]:
        """Return the names of the datasets to read if the user names none, and record why the others are left out."""
        remedy = "Name the datasets to read: fields=(...)."
        try:
            names, self.left_out, external = all_names(file)
        except Refused as refused:
            raise self._error("", "data inside the file", str(refused), remedy) from None
        if external:
            raise self._error("", "data inside the file", external[0], remedy)
        datasets = {name: file[name] for name in names}
        names, others = readable(datasets)
        if together:
            names, apart = belonging({name: datasets[name] for name in names})
            others |= apart
        self.left_out += [f"{name} ({why})" for name, why in others.items()]
        if others:
            self.notes.append(
                f"{', '.join(others)}: left out, as fields do not name them; print(dataset) has the reasons"
            )
        return names

    def _storage(self, file: h5py.File, name: str) -> Storage:
        try:
            name, dataset = _found(file, name)
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
            raise self._error(name, _EXPECTED, str(refused), refused.remedy) from None
        rows, row_bytes = int(dataset.shape[0]), self._row_bytes(dataset)
        block = _REMOTE_BLOCK if isinstance(self.path, RemotePath) else _BLOCK
        block_rows = max(1, block // max(1, row_bytes))
        if dataset.chunks:
            block_rows = min(block_rows, dataset.chunks[0]) if dataset.dtype.hasobject else dataset.chunks[0]
        chunk_rows = dataset.chunks[0] if dataset.chunks else 0
        layout = self._layout(dataset)
        return Storage(self.file, name, field, rows, row_bytes, int(block_rows), int(chunk_rows), layout)

    def _check_rows(self, dataset: h5py.Dataset) -> None:
        """Refuse rows that were never written, or that do not fit into memory."""
        size = self._row_bytes(dataset)
        available = available_memory() if size > _LARGE_ROW else None
        if available is not None and size > available:
            raise Refused(f"rows of {decimal_size(size)}, where {decimal_size(available)} of memory are free")
        if not never_written(dataset):
            return
        text = f"{self.path}: {dataset.name.strip('/')}: none of {len(dataset)} rows was ever written"
        self.notes.append(f"{text}; all of them read as {dataset.fillvalue}, the fill value")

    def _row_bytes(self, dataset: h5py.Dataset) -> int:
        row_bytes = dataset.dtype.itemsize * math.prod(map(int, dataset.shape[1:]))
        if dataset.dtype.hasobject:  # the referenced data is in the file, uncompressed
            row_bytes += self.file.bytes // max(1, int(dataset.shape[0]))
        return row_bytes

    def _layout(self, dataset: h5py.Dataset) -> Layout:
        """Return the storage layout of a dataset's rows."""
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
        """Return the storage layout of the pointers to rows of varying length."""
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


def _found(file: h5py.File, name: str) -> tuple[str, h5py.Dataset | None]:
    """Return the dataset of a name, or the one of structures whose member it is, such as "table.a", and the dataset's name."""
    dataset, outer = find(file, name), name
    while dataset is None and "." in outer:
        outer = outer.rpartition(".")[0]
        found = find(file, outer)
        if found is not None and member_of(found.dtype, name[len(outer) + 1 :].split(".")) is not None:
            return outer, found
    return name, dataset


def member_of(dtype: np.dtype[Any], members: Sequence[str]) -> np.dtype[Any] | None:
    """Return the dtype of a member of a structure, perhaps of a structure in it; None if there is none.

    Example:
        >>> member_of(np.dtype([("a", [("b", "i4")])]), ["a", "b"])
        dtype('int32')
    """
    for member in members:
        if dtype.fields is None or member not in dtype.fields:
            return None
        dtype = dtype.fields[member][0]
    return dtype


def _plain(dataset: h5py.Dataset) -> bool:
    """Return True if the array's bytes are contiguous in the file."""
    import h5py

    return (
        dataset.nbytes > 0
        and dataset.id.get_storage_size() == dataset.nbytes
        and dataset.id.get_offset() is not None
        and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    )


def _usual_pointers(dataset: h5py.Dataset) -> bool:
    """Return True if pointers are 16 bytes, relative to the file's start, to bytes that NumPy can use unchanged."""
    import h5py

    base = h5py.check_vlen_dtype(dataset.dtype)
    if base is not str and base is not bytes and dataset.id.get_type().get_super() != h5py.h5t.py_create(base):
        return False
    unwritten = dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    sizes = dataset.file.id.get_create_plist().get_sizes()
    return sizes == (8, 8) and not dataset.file.userblock_size and not unwritten


# Findings as bytes for other ranks: JSON, never pickle, compressed; some 100 bytes per file.


def to_bytes(found: dict[int, Found]) -> bytes:
    """Return the findings in files, by their numbers in the set, as bytes."""
    return zlib.compress(json.dumps(found, default=_to_json, separators=(",", ":")).encode(), 1)


def from_bytes(data: bytes, paths: Sequence[StoredPath]) -> dict[int, Found]:
    """Invert `to_bytes`, where this rank has these paths of the set's files."""
    makers = {**_MAKERS, "RemotePath": {str(path): path for path in paths}.__getitem__}

    def made(document: dict[str, Any]) -> Any:
        key, content = next(iter(document.items()), ("", None))
        return makers[key[1:]](content) if key[:1] == "\0" else document

    found = json.loads(zlib.decompress(data), object_hook=made)
    return {int(number): one for number, one in found.items()}


def _to_json(value: Any) -> dict[str, Any]:
    """Return an object that JSON does not have as a dict of one item, whose key has a NUL, unlike names in HDF5 files."""
    kind, content = type(value).__name__, value
    if isinstance(value, Path):
        kind, content = "Path", str(value)
    elif isinstance(value, RemotePath):
        content = str(value)  # not its options, which may have secrets
    elif isinstance(value, np.dtype):
        kind, content = "dtype", dtype_to_json(value)
    elif isinstance(value, np.ndarray):
        content = [value.dtype.str, base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]
    elif isinstance(value, bytes):
        content = value.hex()
    elif isinstance(value, frozenset):
        content = list(value)
    elif isinstance(value, Pipeline):
        content = value.filters  # each rank decodes with its own packages
    else:
        content = [getattr(value, each.name) for each in dataclasses.fields(value)]
    return {f"\0{kind}": content}


def _made(kind: type) -> Callable[[list[Any]], Any]:
    return lambda values: kind(*(tuple(value) if isinstance(value, list) else value for value in values))


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "Path": Path,
    "dtype": dtype_from_json,
    "ndarray": lambda value: np.frombuffer(base64.b64decode(value[1]), value[0]).copy(),
    "bytes": bytes.fromhex,
    "frozenset": frozenset,
    "Pipeline": lambda filters: Pipeline.undoing([(code, parameter) for code, parameter in filters]),
    "Chunks": lambda values: OnlyHDF5(values[2]) if isinstance(values[2], str) else Chunks(*values),
    **{
        kind.__name__: _made(kind)
        for kind in (ShardContents, Unfit, ShardFile, Storage, Field, Contiguous, OnlyHDF5, Pointers)
    },
}


# The resulting set.


@dataclass(frozen=True)
class ShardSet:
    """Files that belong together.

    Attributes:
        shards: the files with rows, in order.
        sources: files without own rows, since virtual datasets of the others use them.
        fields: the fields of each file with rows.
        skipped: the skipped files, and why.
    """

    shards: tuple[ShardContents, ...]
    sources: tuple[ShardFile, ...]
    fields: dict[str, Field]
    skipped: tuple[tuple[StoredPath, str], ...]


def join_shards(files: FileSet, found: Sequence[Found], names: Sequence[str] | None, on_error: str) -> ShardSet:
    """Return the set of files, given the findings in each.

    Without a manifest, files are compared with the most common fields. A file that another one's virtual dataset uses,
    even partly, is its source and has no rows of its own, since they would appear twice.

    Raises:
        ShardError: naming the bad file.
    """
    names = _wanted_names(files, names)
    skipped: list[tuple[StoredPath, str]] = []
    shards: list[ShardContents] = []
    bad: list[tuple[StoredPath, ShardError]] = []
    missing: set[StoredPath] = set()
    for path, entry, one in zip(files.paths, files.entries, found, strict=True):
        try:
            if isinstance(one, Unfit):
                raise ShardError(one.text)
            _check_rows(one, entry)
            shards.append(one)
        except ShardError as error:
            if isinstance(one, Unfit) and one.unopened:
                _skip(path, error, on_error, skipped)
                missing.add(path)
            else:
                bad.append((path, error))
    sources = set().union(*(shard.sources for shard in shards))
    if sources:
        shards, sources = _without_missing(shards, {path.resolve() for path in missing}, bad)
    for path, problem in bad:
        # Only the used data of a source was checked: it need not have more.
        if not sources or path.resolve() not in sources:
            _skip(path, problem, on_error, skipped)
    if sources:
        shards = _without_sources(shards, sources)
    if files.fields is not None:
        fields, reference = files.fields, "the manifest"
    elif shards:
        fields, reference = _usual(shards)
    good = []
    for shard in shards:
        try:
            _compare(shard, fields, reference, check_extra=names is None)
            if shard.problem:
                raise ShardError(shard.problem)
            good.append(shard)
        except ShardError as error:
            _skip(shard.path, error, on_error, skipped)
    if skipped:
        _report(skipped, len(good))
    for shard in good:
        for note in shard.notes:
            log.once(logging.WARNING, f"HDF5Dataset: {note}")
    lent = tuple(ShardFile.of(path) for path in files.paths if path.resolve() in sources) if sources else ()
    return ShardSet(tuple(good), lent, good[0].fields, tuple(skipped))


def _without_missing(
    shards: list[ShardContents], missing: Set[StoredPath], bad: list[tuple[StoredPath, ShardError]]
) -> tuple[list[ShardContents], set[StoredPath]]:
    """Return the files that use no skipped file, and the files that they use; the others are bad."""
    kept = []
    for shard in shards:
        lost = sorted(shard.sources & missing)
        if lost:
            got = f"one that draws from {lost[0]}, which was skipped"
            bad.append((shard.path, shard_error(shard.path, "virtual datasets over files that can be read", got)))
        else:
            kept.append(shard)
    return kept, set().union(*(shard.sources for shard in kept))


def _without_sources(shards: list[ShardContents], sources: Set[StoredPath]) -> list[ShardContents]:
    """Return the files that no other one uses. Raise if this would lose a file's rows."""
    kept = [shard for shard in shards if shard.path.resolve() not in sources]
    by_path = {shard.path.resolve(): shard for shard in shards}
    drawn: set[StoredPath] = set()
    new = set().union(*(shard.sources for shard in kept))
    while new:
        drawn |= new
        new = set().union(*(by_path[path].sources for path in new if path in by_path)) - drawn
    for path in sorted(sources - drawn):
        expected, got = "virtual datasets over files that do not draw back", "files that draw from each other"
        raise shard_error(path, expected, got, "Write the virtual datasets into a file of their own.")
    return kept


def _skip(path: StoredPath, error: ShardError, on_error: str, skipped: list[tuple[StoredPath, str]]) -> None:
    if on_error != "skip":
        raise error
    skipped.append((path, str(error)))


def _report(skipped: list[tuple[StoredPath, str]], good: int) -> None:
    first = skipped[0][1]
    text = f"{len(skipped)} of {len(skipped) + good} files skipped; the first: {first}"
    if not good:
        path, remedy = str(skipped[0][0]), "With on_error='skip', one file at least must be good."
        raise shard_error(path, "a set with a good file", text, remedy)
    log.once(logging.WARNING, f"HDF5Dataset: {text}")


def _usual(shards: list[ShardContents]) -> tuple[dict[str, Field], str]:
    """Return the most common fields, and the first file with them."""

    def key(shard: ShardContents) -> str:
        return json.dumps(fields_to_json(shard.fields), sort_keys=True)

    most = Counter(map(key, shards)).most_common(1)[0][0]
    shard = next(shard for shard in shards if key(shard) == most)
    return shard.fields, str(shard.path)


def _check_rows(shard: ShardContents, entry: ShardEntry | None) -> None:
    if entry is not None and shard.rows != entry.rows:
        got, remedy = f"{shard.rows} rows", "The file is not the one that was written with the manifest."
        raise shard_error(shard.path, f"{entry.rows} rows (manifest)", got, remedy)


def _compare(shard: ShardContents, fields: dict[str, Field], reference: str, *, check_extra: bool) -> None:
    """Raise unless a shard has the same fields as the reference."""
    missing = [] if not check_extra else sorted(set(fields) ^ set(shard.fields))
    if missing:
        raise shard_error(shard.path, f"datasets {sorted(fields)}, as {reference} has", f"{sorted(shard.fields)}")
    for name, field in shard.fields.items():
        if name not in fields:
            name = shard.storages[name].name  # of which it is a member
        if name not in fields:
            raise shard_error(shard.path, f"datasets {sorted(fields)}, as {reference} says", f"{name!r}")
        if field != fields[name]:
            expected = f"{name!r} as {fields[name]}, like {reference}"
            remedy = "All shards of a set need the same dtype and row shape: write this one again."
            raise shard_error(shard.path, expected, str(field), remedy)
