"""Arrays of a Zarr group, of format 2 or 3, read in chunks by the zarr package."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain, shard_error
from ...base.lazy import load_optional
from ..nodes.sources import row_content, short_digest
from ..shards.files import PathLike
from ..spec import ArraySpec
from .handles import ShardFile
from .inputs import Fields, left_out_words, structure_of
from .remote import RemoteFile, file_system, is_url, web_options
from .units import FieldFiles, StoredField

__all__ = ["ZarrGroup"]

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zmetadata")


_error = functools.partial(shard_error, function="from_zarr")


def _dtype(array: Any) -> np.dtype[Any] | None:
    """Return the dtype of rows: `object` for text, and None for what NumPy has no values of."""
    dtype = array.dtype
    if dtype.kind in "TO":
        return np.dtype(object)
    return dtype.newbyteorder("=") if dtype.kind in "biufcSUmM" else None


@final
class _ZarrArray(StoredField):
    """The rows of an array along its first axis."""

    def __init__(self, where: str, array: Any, dtype: np.dtype[Any], check: Callable[[], None], remote: bool) -> None:
        self._where = where
        self._array = array
        self._check = check
        self._remote = remote
        self.spec = ArraySpec(array.shape[1:], dtype)
        self.unit_rows = max(1, int(array.chunks[0]))

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def _may_be_missing(self, rows: NDArray[Any]) -> bool:
        """Return True if rows have the fill value, that of missing chunks; of remote ones only, where a look takes long."""
        if not self._remote or rows.dtype.kind not in "biufc":
            return True
        fill = np.asarray(self._array.fill_value or 0, rows.dtype)
        return bool(np.isnan(rows).any() if np.isnan(fill) else (rows == fill).any())

    def read(self, start: int, stop: int) -> NDArray[Any]:
        try:
            rows = np.asarray(self._array[start:stop])
        except Exception as error:  # each codec raises its own
            got, remedy = f"{type(error).__name__}: {error}", "The chunk is damaged: copy the directory again."
            if self._remote:
                remedy = "The chunk is damaged, or the connection broke."
            raise _error(f"{self._where}: rows {start} to {stop}", "chunks that can be decoded", got, remedy) from error
        if self._may_be_missing(rows):  # zarr reads the fill value where the directory is gone
            self._check()
        return np.ascontiguousarray(rows.astype(self.spec.dtype, copy=False))


class _Place(ABC):
    """The place of a group.

    Attributes:
        path: for errors.
    """

    path: str | Path

    @abstractmethod
    def store(self, zarr: Any) -> Any:
        """Return what zarr opens."""

    @abstractmethod
    def metadata(self, names: Iterable[str]) -> Sequence[ShardFile | _RemoteMetadata]:
        """Return the files that describe arrays with these names, as they are now."""


@final
class _LocalFolder(_Place):
    def __init__(self, path: Path) -> None:
        self.path: Path = path
        if not path.exists():
            raise _error(path, "a directory", "no such directory")

    def store(self, zarr: Any) -> Any:
        return zarr.storage.ZipStore(self.path, mode="r") if self.path.is_file() else str(self.path)

    def metadata(self, names: Iterable[str]) -> list[ShardFile]:
        files = [self.path, *(self.path / name / file for name in names for file in _METADATA)]
        return [ShardFile.of(file, "from_zarr") for file in files if file.is_file()]


@final
class _RemoteMetadata:
    """A remote file as it was opened."""

    def __init__(self, system: Any, name: str) -> None:
        self._system, self._name = system, name
        self._file = RemoteFile.of("from_zarr", system, name, system.info(name))

    def check(self) -> None:
        self._file.require_same("from_zarr", RemoteFile.of("from_zarr", self._system, self._name))


@final
class _RemoteFolder(_Place):
    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.path: str = url.rstrip("/")
        self._options = web_options("from_zarr", url, options)
        self._system, self._root = file_system("from_zarr", self.path, options)

    def store(self, zarr: Any) -> Any:
        return zarr.storage.FsspecStore.from_url(self.path, storage_options=self._options, read_only=True)

    def metadata(self, names: Iterable[str]) -> list[_RemoteMetadata]:
        found = []
        for parts in itertools.product([self._root.rstrip("/")], names, _METADATA):
            with contextlib.suppress(FileNotFoundError):
                found.append(_RemoteMetadata(self._system, "/".join(filter(None, parts))))
        if not found:
            raise _error(self.path, "a Zarr group or array", "no such files")
        return found


@final
class ZarrGroup(FieldFiles):
    """A group, or one array; see `from_zarr`."""

    function = "from_zarr"

    def __init__(self, path: PathLike, fields: Fields, storage_options: Mapping[str, Any] | None = None) -> None:
        structure = structure_of("from_zarr", "fields", fields)
        place = _RemoteFolder(str(path), storage_options or {}) if is_url(path) else _LocalFolder(Path(path).absolute())
        self._path = place.path
        zarr = load_optional("zarr", "from_zarr", "zarr, which reads these files", 'pip install "mpistrat[zarr]"')
        try:
            opened = zarr.open(place.store(zarr), mode="r")
            alone = isinstance(opened, zarr.Array)
            members = [("", opened)] if alone else sorted(opened.members(max_depth=None))
        except Exception as error:  # the package raises many kinds
            raise _error(self._path, "a Zarr group or array", f"{type(error).__name__}: {error}") from error
        arrays = {name: each for name, each in members if isinstance(each, zarr.Array)}
        if alone and structure is not None:
            raise ValueError(explain("from_zarr", "fields", expected="None for a single array", got=repr(fields)))
        self.structure = "" if alone else structure
        self._left_out: dict[str, str] = {}
        names = nest.flatten(self.structure) if self.structure is not None else self._belonging(arrays)
        if self.structure is None:
            self.structure = {name: name for name in names}
        self.fields = {name: self._field(arrays, name.strip("/"), name) for name in dict.fromkeys(names)}
        rows = {name: len(field) for name, field in self.fields.items()}
        if len(set(rows.values())) > 1:
            raise _error(self._path, "arrays with equally many rows", rows, "Name those that belong together.")
        self._status = place.metadata(sorted({"", *(name.strip("/") for name in self.fields)}))

    def _belonging(self, arrays: Mapping[str, Any]) -> list[str]:
        """Return the names of the arrays that have the rows of the largest one; note why others are left out."""
        readable = {name: each for name, each in arrays.items() if each.ndim and _dtype(each) is not None}
        if not readable:
            raise _error(self._path, "an array of numbers, times or text", f"arrays {sorted(arrays)}")
        largest = max(readable, key=lambda name: readable[name].nbytes)
        for name, array in arrays.items():
            if name not in readable:
                self._left_out[name] = str(array.dtype) if array.ndim else "no rows"
            elif array.shape[0] != arrays[largest].shape[0]:
                self._left_out[name] = f"{array.shape[0]} rows, unlike {largest}"
        return [name for name in arrays if name not in self._left_out]

    def _field(self, arrays: Mapping[str, Any], key: str, name: str) -> _ZarrArray:
        where = f"{self._path}: {name}" if name else str(self._path)
        if key not in arrays:
            raise _error(self._path, f"an array {name!r}", f"arrays {sorted(arrays)}")
        array, dtype = arrays[key], _dtype(arrays[key])
        if dtype is None or not array.ndim:
            raise _error(where, "rows of numbers, times or text", f"{array.dtype} of shape {array.shape}")
        return _ZarrArray(where, array, dtype, self.check, isinstance(self._path, str))

    def check(self) -> None:
        for file in self._status:
            file.check()

    def fingerprint(self) -> int:
        hasher = hashlib.sha256()
        for name, field in self.fields.items():
            hasher.update(f"{name} {len(field)} {field.spec} {field.unit_rows}".encode())
            for start in {0, len(field) - 1} if len(field) else ():
                hasher.update(row_content(field.read(start, start + 1)[0]))
        return short_digest(hasher)

    def describe(self) -> str:
        fields = ", ".join(f"{name} {field.spec}".strip() for name, field in self.fields.items())
        others = [f"{name} ({why})" for name, why in self._left_out.items()]
        rows = len(next(iter(self.fields.values())))
        return f"from_zarr: {self._path}, {rows} rows of {fields}{left_out_words(others)}"
