"""The converters of NumPy's .npy and .npz files. Data stays on disk; pickled objects are refused."""

from __future__ import annotations

import contextlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from ....base.errors import ShardError
from ..columns import Columns
from .converter import Converter, bad_input, batch_rows

__all__ = ["NpyFiles", "NpzFile"]


# RuntimeError: encrypted archive; TokenError and SyntaxError: damaged header.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, tokenize.TokenError, SyntaxError)


def _check_rows(rows: Mapping[str, tuple[int, ...]], where: object) -> int:
    for name, shape in rows.items():
        if not shape:
            raise bad_input(where, "arrays with rows along a first axis", f"a scalar: {name!r}")
    first, count = next((name, shape[0]) for name, shape in rows.items())
    for name, shape in rows.items():
        if shape[0] != count:
            raise bad_input(where, f"{count} rows in {name!r}, as {first!r} has", f"{shape[0]} rows")
    return count


@final
class NpyFiles(Converter):
    """One array per file, by memory map."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._arrays = {name: _mapped(path) for name, path in paths.items()}
        where = ", ".join(map(str, paths.values()))
        self.rows = _check_rows({name: array.shape for name, array in self._arrays.items()}, where)
        self.attributes: dict[str, Any] = {}
        self.notes: list[str] = []

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        step = batch_rows(*((array.dtype, array.shape[1:]) for array in self._arrays.values()))
        for first in range(start, stop, step):
            yield {name: array[first : min(first + step, stop)] for name, array in self._arrays.items()}


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, *_DAMAGE) as error:
        raise bad_input(path, "an array in NumPy's .npy format, without pickled objects", error) from error
    if not isinstance(array, np.ndarray):
        raise bad_input(path, "an array in NumPy's .npy format", "an archive")
    return array


@final
class NpzFile(Converter):
    """The arrays of an archive, read in order while the rows are written."""

    def __init__(self, path: Path, names: Sequence[str] | None) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                available = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
                wanted = available if names is None else list(names)
                unknown = sorted(set(wanted) - set(available))
                if unknown or not wanted:
                    raise bad_input(path, f"arrays {unknown or 'at all'}", f"arrays {available}")
                self._headers = {name: self._header(archive, name) for name in wanted}
        except (OSError, ValueError, *_DAMAGE) as error:
            if isinstance(error, ShardError):
                raise
            raise bad_input(path, "an archive in NumPy's .npz format", error) from error
        self.rows = _check_rows({name: shape for name, (_, shape, _) in self._headers.items()}, path)
        self.attributes: dict[str, Any] = {}
        self.notes: list[str] = []

    def _header(self, archive: zipfile.ZipFile, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return an array's dtype and shape, and the offset of its data."""
        with archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in read:
                raise bad_input(self._path, f"{name!r} in version 1.0 or 2.0 of the format", version)
            shape, fortran, dtype = read[version](file)
            if dtype.hasobject:
                raise bad_input(self._path, "numbers and fixed-length strings", f"pickled objects in {name!r}")
            if fortran and len(shape) > 1:
                remedy = "Save np.ascontiguousarray(...) of it, or save it as .npy."
                raise bad_input(self._path, f"{name!r} row by row", "columns one after the other", remedy)
            return dtype, shape, file.tell()

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        step = batch_rows(*((dtype, shape[1:]) for dtype, shape, _ in self._headers.values()))
        sizes = {
            name: dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            for name, (dtype, shape, _) in self._headers.items()
        }
        with contextlib.ExitStack() as opened:
            files: dict[str, Any] = {}
            try:
                for name, (_, _, offset) in self._headers.items():
                    # An archive for each: in Python 3.12.1 and 3.13.0 a seek in one member moves the others of an archive.
                    archive = opened.enter_context(zipfile.ZipFile(self._path))
                    files[name] = opened.enter_context(archive.open(f"{name}.npy"))
                    files[name].seek(offset + start * sizes[name])
                for first in range(start, stop, step):
                    count = min(step, stop - first)
                    yield {name: self._read(files[name], name, count, sizes[name]) for name in files}
            except _DAMAGE as error:
                raise bad_input(self._path, "an archive that is whole", error) from error

    def _read(self, file: Any, name: str, rows: int, row_bytes: int) -> np.ndarray[Any, Any]:
        dtype, shape, _ = self._headers[name]
        data = file.read(rows * row_bytes)
        if len(data) != rows * row_bytes:
            raise bad_input(self._path, f"{rows * row_bytes} more bytes of {name!r}", f"{len(data)}: truncated")
        return np.frombuffer(data, dtype).reshape(rows, *shape[1:])
