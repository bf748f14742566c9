"""HDF5 files as a dataset of rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import nest
from ..buffer_pool import BufferPool
from ..errors import ShardError, explain
from .dataset import Addresses, Dataset
from .readers.choice import choose_reader
from .readers.open_files import open_hdf5_files
from .readers.reader import FieldReader
from .shards.files import PathLike, resolve
from .shards.manifest import Field
from .shards.shard import Shard
from .spec import ArraySpec

__all__ = ["HDF5Dataset"]

_BATCHES = 6  # whose memory is kept for a field: what is read ahead, and what the program holds

Fields = str | Sequence[str] | Mapping[str, str] | None


class _Opened:
    """All shards, compared with each other and with the manifest, and a reader for each field."""

    def __init__(self, shards: list[Shard], fields: dict[str, Field], reader: str) -> None:
        self.shards = shards
        self.fields = fields
        self.rows = sum(shard.rows for shard in shards)
        files = open_hdf5_files()
        self.readers = {
            name: choose_reader([shard.storages[name] for shard in shards], reader, files) for name in fields
        }
        self.pools = {name: BufferPool(_BATCHES) for name in fields}


class HDF5Dataset(Dataset):
    """The rows of HDF5 shards, one file after the other. Not collective: every rank opens the files by itself.

    Files are opened when something is first asked of them. Contiguous uncompressed data is read through a memory map,
    everything else through h5py, whole chunks at a time. Files must not change while they are read.

    Args:
        files: a file; a directory; a pattern like "data/train-*.h5"; or a list of files, read in the list's order.
            Others are read in the manifest's order, else in natural order (2 before 10).
        fields: None for a dict of all datasets; a list of names for a dict of these; a tuple of names for a tuple; a
            dict from new names to names in the file; one name for that array alone.
        verify: compare every file's bytes with the digest in the manifest before HDF5 opens it.

    Raises:
        ShardError: for a missing, truncated or damaged file and for one that does not match its siblings or the
            manifest, naming the file, what was expected and what came; at once where no file need be opened for it.

    Example:
        data = ms.data.HDF5Dataset("digits/train-*.h5", fields=("image", "label")).shuffle(seed=1).batch(256)
    """

    def __init__(
        self, files: PathLike | Sequence[PathLike], fields: Fields = None, *, verify: bool = False, reader: str = "auto"
    ) -> None:
        self._files = resolve(files)
        self._files.check(verify=verify)
        self._structure = _structure(fields)
        self._reader = reader
        self._opened: _Opened | None = None
        self._lock = threading.Lock()

    def _open(self) -> _Opened:
        with self._lock:
            if self._opened is None:
                names = None if self._structure is None else list(dict.fromkeys(nest.flatten(self._structure)))
                self._opened = self._open_all(names)
                if self._structure is None:
                    self._structure = {name: name for name in self._opened.fields}
            return self._opened

    def _open_all(self, names: list[str] | None) -> _Opened:
        shards: list[Shard] = []
        fields, reference = self._files.fields, "the manifest"
        if fields is not None and names is None:
            names = list(fields)
        for path, entry in zip(self._files.paths, self._files.entries, strict=True):
            shard = Shard(path, names)
            if fields is None:
                fields, reference = shard.fields, str(path)
            _compare(shard, fields, reference, check_extra=names is None)
            if entry is not None and shard.rows != entry.rows:
                got, remedy = f"{shard.rows} rows", "The file is not the one that was written with the manifest."
                expected = f"{entry.rows} rows (manifest)"
                raise ShardError(explain("HDF5Dataset", str(path), expected=expected, got=got, remedy=remedy))
            shards.append(shard)
        return _Opened(shards, shards[0].fields, self._reader)

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return ()

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        opened = self._open()

        def spec(name: str) -> ArraySpec:
            return ArraySpec(opened.fields[name].shape, opened.fields[name].dtype.newbyteorder("="))

        return nest.map_structure(spec, self._structure)

    def cardinality(self) -> int:
        return self._open().rows

    def file_starts(self) -> NDArray[np.int64]:
        """Return the numbers of the rows with which the files begin; behind them, that of all rows. Not collective."""
        return np.cumsum([0, *(shard.rows for shard in self._open().shards)])

    def check(self) -> None:
        for shard in self._open().shards:
            shard.check()

    def locate(self, epoch: int, position: int) -> Addresses:
        return np.array([epoch], np.int64), np.array([position], np.int64)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        opened = self._open()
        if positions.size and not 0 <= positions.min() <= positions.max() < opened.rows:  # readers do not look
            got = f"{positions.min()} to {positions.max()}"
            raise IndexError(explain("HDF5Dataset", "rows", expected=f"rows in [0, {opened.rows})", got=got))

        def read(name: str) -> NDArray[Any]:
            field = opened.fields[name]
            shape = (positions.size, *field.shape)
            out = opened.pools[name].empty(math.prod(shape), field.dtype).reshape(shape)
            opened.readers[name].read(positions, out)
            return out.astype(field.dtype.newbyteorder("="), copy=False)

        arrays = {name: read(name) for name in dict.fromkeys(nest.flatten(self._structure))}
        return nest.map_structure(lambda name: arrays[name], self._structure)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        for reader in self._open().readers.values():
            reader.expect(positions)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return those of the field with the largest rows, of all fields that are read in pieces. Not collective."""
        opened = self._open()
        found = {name: reader.chunk_starts() for name, reader in opened.readers.items()}
        costly = [name for name, starts in found.items() if starts is not None]
        return found[max(costly, key=lambda name: opened.shards[0].storages[name].row_bytes)] if costly else None

    def keep(self, rows: int) -> None:
        for reader in self._open().readers.values():
            reader.keep(rows)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return self

    def describe(self) -> str:
        count = len(self._files.paths)
        where = self._files.paths[0].parent
        if self._opened is None:
            return f"HDF5Dataset: {count} file{'s' * (count != 1)} in {where} (not opened yet)"

        def how(reader: FieldReader) -> str:
            return f"{reader.kind}: {reader.reason}" if reader.reason else reader.kind

        fields = ", ".join(
            f"{name} {ArraySpec(field.shape, field.dtype)} ({how(self._opened.readers[name])})"
            for name, field in self._opened.fields.items()
        )
        return f"HDF5Dataset: {count} file{'s' * (count != 1)} in {where}, {self._opened.rows} rows of {fields}"


def _structure(fields: Fields) -> Any:
    """The nest of dataset names whose form the elements have."""
    structure: Any = fields
    if isinstance(fields, Sequence) and not isinstance(fields, (str, tuple)):
        structure = {name: name for name in fields}
    names = [] if structure is None else nest.flatten(structure)
    if structure is not None and (not names or not all(isinstance(name, str) for name in names)):
        expected = "None, a name, a list or tuple of names, or a dict of names"
        raise ValueError(explain("HDF5Dataset", "fields", expected=expected, got=repr(fields)))
    return nest.map_structure(lambda name: name.strip("/"), structure) if structure is not None else None


def _compare(shard: Shard, fields: dict[str, Field], reference: str, *, check_extra: bool) -> None:
    """Raise unless a shard holds the same fields as the reference."""
    missing = [] if not check_extra else sorted(set(fields) ^ set(shard.fields))
    if missing:
        expected, got = f"datasets {sorted(fields)}, as {reference} has", f"{sorted(shard.fields)}"
        raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=got))
    for name, field in shard.fields.items():
        if name not in fields:
            expected = f"datasets {sorted(fields)}, as {reference} says"
            raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=f"{name!r}"))
        if field != fields[name]:
            expected = f"{name!r} as {fields[name]}, like {reference}"
            remedy = "All shards of a set need the same dtype and row shape: write this one again."
            raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=str(field), remedy=remedy))
