"""Arrays of a Zarr group, of format 2 or 3, read in chunks by the zarr package."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ...base.lazy import load_optional
from ..nodes.sources import row_content, short_digest
from ..shards.files import PathLike, refuse_url
from ..spec import ArraySpec
from .handles import ShardFile, shard_error
from .inputs import Fields, left_out_words, structure_of
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

    def __init__(self, where: str, array: Any, dtype: np.dtype[Any], check: Callable[[], None]) -> None:
        self._where = where
        self._array = array
        self._check = check
        self.spec = ArraySpec(array.shape[1:], dtype)
        self.unit_rows = max(1, int(array.chunks[0]))

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def read(self, start: int, stop: int) -> NDArray[Any]:
        try:
            rows = np.asarray(self._array[start:stop])
        except Exception as error:  # each codec raises its own
            got, remedy = f"{type(error).__name__}: {error}", "The chunk is damaged: copy the directory again."
            raise _error(f"{self._where}: rows {start} to {stop}", "chunks that can be decoded", got, remedy) from error
        self._check()  # zarr reads the fill value where the directory is gone
        return np.ascontiguousarray(rows.astype(self.spec.dtype, copy=False))


@final
class ZarrGroup(FieldFiles):
    """A group, or one array; see `from_zarr`."""

    function = "from_zarr"

    def __init__(self, path: PathLike, fields: Fields) -> None:
        structure = structure_of("from_zarr", "fields", fields)
        refuse_url("from_zarr", path)
        self._path = Path(path).absolute()
        if not self._path.exists():
            raise _error(self._path, "a directory", "no such directory")
        zarr = load_optional("zarr", "from_zarr", "zarr, which reads these files", 'pip install "mpistrat[zarr]"')
        try:
            store = zarr.storage.ZipStore(self._path, mode="r") if self._path.is_file() else str(self._path)
            opened = zarr.open(store, mode="r")
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
        folders = sorted({self._path, *(self._path / name.strip("/") for name in self.fields)})
        files = [self._path, *(folder / name for folder in folders for name in _METADATA)]
        self._status = [ShardFile.of(file, "from_zarr") for file in files if file.is_file()]

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
        return _ZarrArray(where, array, dtype, self.check)

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
