"""The node that reads the rows of HDF5 files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import ShardError, explain
from ...base.text import counted, shortened
from ..buffers import RowBuffers
from ..nodes.sources import row_content, short_digest
from ..nodes.stage import InputRows
from ..shards.files import PathLike, is_small, remember_whole, resolve
from ..shards.look import Found, ShardContents, ShardSet, join_shards, look, member_of
from ..spec import ArraySpec
from ..stats import StageStats
from .choice import READERS, choose_reader, chunk_starts
from .handles import check_mpi_io, open_hdf5_files
from .inputs import others_words
from .remote import StoredPath
from .storage import Contiguous, Storage

__all__ = ["Fields", "HDF5Rows"]

_NAMED = 5  # most left-out names to show
_COMPARED = 64  # rows of a field that ranks compare, if single rows are cheap to read
_PLACES, _COMPARED_ROWS, _COMPARED_BYTES = 4, 16, 1 << 18  # positions otherwise, and the most rows and bytes at each
_LARGEST_COMPARED = 1 << 22  # most decoded bytes of a chunk to compare; larger ones would be slow

Fields = str | Sequence[str] | Mapping[str, str] | None


class _Opened:
    """All shards, checked against each other and the manifest, and a reader for each field."""

    def __init__(self, opened: ShardSet, reader: str, driver: str | None) -> None:
        self.shards, self.sources = opened.shards, opened.sources
        self.fields, self.skipped = opened.fields, opened.skipped
        self.left_out = list(dict.fromkeys(text for shard in opened.shards for text in shard.left_out))
        self.file_starts = np.cumsum([0, *(shard.rows for shard in opened.shards)])
        self.rows = int(self.file_starts[-1])
        self.members = {
            name: name.strip("/")[len(opened.shards[0].storages[name].name.strip("/")) + 1 :].split(".")
            for name in opened.fields
            if name.strip("/") != opened.shards[0].storages[name].name.strip("/")
        }  # of structures
        self.row_shapes = {name: _fixed(field.shape) for name, field in opened.fields.items()}
        # dtype.isnative does not look into the arrays of a structure
        self.swapped = {name for name, field in opened.fields.items() if field.dtype != field.dtype.newbyteorder("=")}
        files = open_hdf5_files(driver)
        self._reader = reader
        self.storages = {name: [shard.storages[name] for shard in opened.shards] for name in opened.fields}
        self.readers = {name: choose_reader(storages, reader, files) for name, storages in self.storages.items()}
        self.buffers = RowBuffers()

    @functools.cached_property
    def chunk_starts(self) -> NDArray[np.int64] | None:
        """The chunk starts of the field with the largest rows, among chunked fields if any."""
        chunked = [name for name, storages in self.storages.items() if any(each.chunk_rows for each in storages)]
        found = {name: chunk_starts(self.storages[name], self._reader) for name in chunked or self.storages}
        costly = [name for name, starts in found.items() if starts is not None]
        return found[max(costly, key=lambda name: self.storages[name][0].row_bytes)] if costly else None


@final
class HDF5Rows(InputRows):
    """The rows of HDF5 files, one file after the other; see `HDF5Dataset`."""

    def __init__(
        self, files: PathLike | Sequence[PathLike], fields: Fields, verify: object, reader: str, on_error: str,
        driver: str | None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._structure = _structure(fields)
        _one_of("reader", reader, READERS)
        _one_of("on_error", on_error, ("raise", "skip"))
        _check_driver(driver, reader)
        self._reader = "h5py" if driver else reader
        self._on_error = on_error
        self._driver = driver
        _one_of("verify", verify, (True, False, "auto"))
        self._verify = verify
        self._names = None if self._structure is None else list(dict.fromkeys(nest.flatten(self._structure)))
        found = resolve(files, options)
        self._files, self._folder = found.absolute(), found.paths[0].parent
        self._numbers = {path: number for number, path in enumerate(self._files.paths)}
        if len(self._numbers) == 1 and on_error == "raise":  # of several files each rank would check all
            self._files.check([0], verify=False)
        self._found: list[Found] | None = None  # by all ranks together
        self._to_verify = verify == "auto"
        self._opened: _Opened | None = None
        self._lock = threading.Lock()
        self._counters = StageStats()
        self._epoch_read: int | None = None  # the last epoch read since the files were checked

    def _open(self) -> _Opened:
        if self._opened is not None:
            return self._opened
        with self._lock:
            if self._opened is None:
                # Skipped files must be known before anything is read.
                found = self._found or self._look(self._numbers.values(), verify=self._on_error == "skip")
                opened = join_shards(self._files, found, self._names, self._on_error)
                self._opened = _Opened(opened, self._reader, self._driver)
                if self._structure is None:
                    self._structure = {name: name for name in opened.fields}
            return self._opened

    @functools.cached_property
    def _is_small(self) -> bool:
        """True if all files are compared with their digests by default."""
        return self._verify == "auto" and is_small(self._files)

    def _look(self, numbers: Iterable[int], *, verify: bool) -> list[Found]:
        """Inspect some files; with `verify` compare a small set's digests now, not at the first read."""
        whole = self._verify is True or (verify and self._is_small)
        self._to_verify = self._to_verify and not whole
        ends = self._verify == "auto" and not whole
        return look(self._files, numbers, self._names, self._driver, verify=whole, ends=ends)

    # Shared between ranks: see shared_look.py.

    @property
    def looked(self) -> bool:
        """True if this rank needs no inspection before it reads."""
        return self._opened is not None and not self._to_verify

    @property
    def paths(self) -> tuple[StoredPath, ...]:
        """The files, in order."""
        return self._files.paths

    def asked(self) -> tuple[Any, ...]:
        """Return what must be equal on ranks that inspect files for each other, digests included."""
        files = [(str(path), entry) for path, entry in zip(self.paths, self._files.entries, strict=True)]
        return files, self._names, self._verify, self._is_small, self._on_error, self._driver

    @property
    def reads_whole_files(self) -> bool:
        """True if an inspection compares all bytes of a file."""
        return self._verify is True or self._is_small

    def look_for_all(self, numbers: Sequence[int]) -> dict[int, Found]:
        """Inspect some files for all ranks, including the samples that ranks compare."""
        found = dict(zip(numbers, self._look(numbers, verify=True), strict=True))
        for number, one in found.items():
            if isinstance(one, ShardContents) and self._files.entries[number] is None:
                with contextlib.suppress(ShardError):  # else each rank reports it in `fingerprint`
                    found[number] = replace(one, sample=self._sample(one))
        return found

    def take(self, found: Sequence[Found]) -> None:
        """Replace this rank's findings by those of all ranks."""
        if self.reads_whole_files:
            remember_whole(one.file for one in found if isinstance(one, ShardContents))
        with self._lock:
            self._found, self._opened, self._to_verify = list(found), None, False

    @property
    def skipped(self) -> tuple[tuple[StoredPath, str], ...]:
        """The skipped files (on_error="skip"), each with the reason."""
        return self._open().skipped

    def fingerprint(self) -> int:
        """Return a number below 2**63 that is equal wherever the same rows are read.

        It combines the files' names, rows and fields, their digests in a manifest, and skipped files' names; for files
        without a digest also about 64 rows at fixed positions of each field, if its chunks have at most 4 MiB.
        """
        opened = self._open()
        fields = sorted((name, str(field)) for name, field in opened.fields.items())
        listed = dict(zip(self._files.paths, self._files.entries, strict=True))
        digests = {path: entry.digest for path, entry in listed.items() if entry is not None}
        files = [(shard.path.name, shard.rows, digests.get(shard.path)) for shard in opened.shards]
        text = repr((files, fields, [path.name for path, _ in opened.skipped]))
        hasher = hashlib.sha256(text.encode())
        for shard in opened.shards:
            if shard.path not in digests:
                hasher.update(shard.sample or self._sample(shard))
        return short_digest(hasher)

    def _sample(self, shard: ShardContents) -> bytes:
        """Return a digest of rows at fixed positions of a file; rows that must be decoded are from some files only."""
        count, hasher = len(self.paths), hashlib.sha256()
        decoded = np.linspace(0, count - 1, _PLACES, dtype=np.int64)
        for storage in shard.storages.values():
            for row in storage.some_rows(max(2, _COMPARED // count)):
                hasher.update(row)
            if self._numbers[shard.path] in decoded and _is_compared_decoded(storage):
                for row in self._decoded_rows(storage, -(-_PLACES // count)):
                    hasher.update(row_content(row))
        return hasher.digest()[:16]

    def _decoded_rows(self, storage: Storage, places: int) -> Iterator[Any]:
        """Yield a few successive rows at fixed positions, independent of the chunk size."""
        reader = choose_reader(
            [storage], self._reader, open_hdf5_files(self._driver)
        )  # not counted as reads of the dataset
        count = min(storage.rows, _COMPARED_ROWS, max(1, _COMPARED_BYTES // max(1, storage.row_bytes)))
        shape = _fixed(storage.field.shape)
        for first in np.unique(np.linspace(0, storage.rows - count, places, dtype=np.int64)):
            out = np.empty((count, *(shape or ())), object if shape is None else storage.field.dtype)
            reader.read(np.arange(first, first + count), out)
            yield from out

    @property
    def counters(self) -> StageStats:
        """Counters of all readers."""
        readers = self._opened.readers.values() if self._opened else ()
        read = StageStats.reading(reader.counters for reader in readers)
        return replace(
            self._counters, bytes_read=read.bytes_read, chunk_reads=read.chunk_reads, wait_seconds=read.wait_seconds,
            files=len(self._opened.shards) if self._opened else 0,
            skipped=len(self._opened.skipped) if self._opened else 0,
        )  # fmt: skip

    @property
    def row_spec(self) -> Any:
        opened = self._open()

        def spec(name: str) -> ArraySpec:
            shape, dtype = opened.fields[name].shape, opened.fields[name].dtype
            if name in opened.members:
                found = member_of(dtype, opened.members[name])
                assert found is not None
                shape, dtype = (*shape, *found.shape), found.base
            return ArraySpec(shape, dtype.newbyteorder("="))

        return nest.map_structure(spec, self._structure)

    def cardinality(self) -> int:
        return self._open().rows

    def file_starts(self) -> NDArray[np.int64]:
        """Return the first row of each file, then the number of rows."""
        return self._open().file_starts

    def check(self) -> None:
        if self._to_verify and self._is_small:
            self._files.check(self._numbers.values(), verify=True)
        self._to_verify = False
        opened = self._open()
        files = [shard.file for shard in opened.shards]
        if self._found is not None:  # others are checked when opened, so that not every rank checks all files
            used = frozenset().union(*(reader.opened() for reader in opened.readers.values()))
            files = [file for file in files if file in used]
        for file in files:
            file.check()
        for source in opened.sources:
            source.check()
        self._epoch_read = None

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        opened = self._opened or self._open()
        if positions.size:
            # Negative ones become huge; readers do not check.
            if np.maximum.reduce(positions.view(np.uint64)) >= opened.rows:
                got = f"{positions.min()} to {positions.max()}"
                raise IndexError(explain("HDF5Dataset", "rows", expected=f"rows in [0, {opened.rows})", got=got))
            epoch = int(epochs[-1])
            if self._epoch_read is not None and epoch > self._epoch_read:
                self.check()  # a file truncated under a map kills the process
            if self._epoch_read is None:
                self._epoch_read = epoch
        began = time.perf_counter()
        arrays = {}
        for name, field in opened.fields.items():
            row = opened.row_shapes[name]
            if row is None:
                out = np.empty(positions.size, object)
            else:
                out = opened.buffers.empty(name, (positions.size, *row), field.dtype)
            opened.readers[name].read(positions, out)
            if name in opened.members:
                for member in opened.members[name]:
                    out = out[member]
                out = np.ascontiguousarray(out)
            swapped = name in opened.swapped and out.dtype != out.dtype.newbyteorder("=")  # a member may be in order
            arrays[name] = _native(out) if swapped else out
        if isinstance(self._structure, str):
            rows = arrays[self._structure]
        else:
            rows = nest.map_structure(arrays.__getitem__, self._structure)
        self._counters.add(rows=positions.size, seconds=time.perf_counter() - began)
        return rows

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        for reader in self._open().readers.values():
            reader.expect(positions)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return self._open().chunk_starts

    def keep(self, rows: int) -> None:
        for reader in self._open().readers.values():
            reader.keep(rows)

    def describe(self) -> str:
        opened = self._opened
        count = len(self.paths)
        where = f"HDF5Dataset: {counted(count, 'file')} in {self._folder}{others_words(self._files.left_out)}"
        if opened and opened.skipped:
            where = f"{where} ({len(opened.skipped)} of {count} files skipped)"
        if opened is None:
            return f"{where} (not opened yet)"
        if opened.sources:
            number = len(opened.sources)
            are = "1 file is a source" if number == 1 else f"{number} files are sources"
            where = f"{where} ({are} of virtual datasets)"
        fields = ", ".join(f"{name} {_described(opened, name)}" for name in opened.fields)
        if opened.left_out:
            fields = f"{fields}; left out: {shortened(opened.left_out, _NAMED)}"
        return f"{where}, {opened.rows} rows of {fields}"


def _native(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows in the machine's byte order; plain numbers in the same memory."""
    if rows.dtype.fields is None:
        return rows.byteswap(inplace=True).view(rows.dtype.newbyteorder("="))
    return rows.astype(rows.dtype.newbyteorder("="))


def _described(opened: _Opened, name: str) -> str:
    field, reader = opened.fields[name], opened.readers[name]
    how = f"{reader.kind}: {reader.reason}" if reader.reason else reader.kind
    return f"{ArraySpec(field.shape, field.dtype)} ({how})"


def _is_compared_decoded(storage: Storage) -> bool:
    """Return True if ranks compare decoded rows, not bytes of the file: for chunks that are not too large."""
    cheap = isinstance(storage.layout, Contiguous) and storage.field.dtype.fields is None
    return storage.rows > 0 and not cheap and max(1, storage.chunk_rows) * storage.row_bytes <= _LARGEST_COMPARED


def _fixed(shape: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """Return the shape; None if a length varies."""
    lengths = tuple(length for length in shape if length is not None)
    return lengths if len(lengths) == len(shape) else None


def _one_of(argument: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(explain("HDF5Dataset", argument, expected=expected, got=repr(value)))


def _check_driver(driver: str | None, reader: str) -> None:
    if driver is None:
        return
    _one_of("driver", driver, ("mpio",))
    if reader in ("mmap", "pread"):
        expected = f'reader="auto" or "h5py" with driver={driver!r}, which reads everything through h5py'
        raise ValueError(explain("HDF5Dataset", "reader", expected=expected, got=repr(reader)))
    check_mpi_io()


def _structure(fields: Fields) -> Any:
    """Return the nest of dataset names with the structure of the elements."""
    structure: Any = fields
    if isinstance(fields, Sequence) and not isinstance(fields, (str, tuple)):
        structure = {name: name for name in fields}
    names = [] if structure is None else nest.flatten(structure)
    if structure is not None and (not names or not all(isinstance(name, str) for name in names)):
        expected = "None, a name, a list or tuple of names, or a dict of names"
        raise ValueError(explain("HDF5Dataset", "fields", expected=expected, got=repr(fields)))
    return nest.map_structure(lambda name: name.strip("/"), structure) if structure is not None else None
