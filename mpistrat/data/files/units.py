"""Rows of fields that are read in units, such as chunks: each field has units of its own, and those read last are kept."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ..buffers import LastRead, RowBuffers, take_rows
from ..nodes.samples import SourceFiles
from ..nodes.stage import InputRows
from ..spec import ArraySpec, is_ragged, stacked_nbytes
from ..stats import StageStats

__all__ = ["StoredField", "FieldFiles", "FieldRows", "empty_rows", "place_rows", "rows_of_units"]

_KEPT = 1 << 26  # bytes of units that are kept at least, in equal parts for the fields
_VARYING = 64  # bytes that a row of unknown size is taken for


class StoredField(ABC):
    """A field of a source.

    Attributes:
        spec: of one row.
        unit_rows: the number of rows of a unit; the last one may have fewer.
    """

    spec: ArraySpec
    unit_rows: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the rows of one unit, stacked; rows that differ in shape as a 1-D object array."""


def empty_rows(buffers: RowBuffers, name: str, spec: ArraySpec, rows: int) -> NDArray[Any]:
    """Return an array for rows of a field; rows that differ in shape, and text, are objects."""
    if is_ragged(spec):
        return np.empty(rows, object)
    shape = rows, *(length or 0 for length in spec.shape)
    return np.empty(shape, object) if spec.dtype.hasobject else buffers.empty(name, shape, spec.dtype)


Places = slice | NDArray[np.int64]


def rows_of_units(units: NDArray[np.int64]) -> Iterator[tuple[int, Places]]:
    """Yield each unit, and the places of its rows, given the unit of each row; a slice where these are successive."""
    if units.size and not np.logical_or.reduce(units != units[0]):  # as of most batches in order
        yield int(units[0]), slice(0, units.size)
        return
    for unit in np.unique(units).tolist():
        places = np.flatnonzero(units == unit)
        first, stop = int(places[0]), int(places[-1]) + 1
        yield unit, slice(first, stop) if stop - first == places.size else places


def place_rows(column: NDArray[Any], rows: NDArray[np.int64], places: Places, out: NDArray[Any]) -> None:
    """Copy rows of a column to their places."""
    if isinstance(places, slice) and not out.dtype.hasobject:
        take_rows(column, rows, out[places])
    else:
        out[places] = column[rows]


class FieldFiles(SourceFiles):
    """The files of fields.

    Attributes:
        fields: by name; all have equally many rows.
        structure: the nest of names that an element has the structure of.
    """

    fields: Mapping[str, StoredField]
    structure: Any


@final
class FieldRows(InputRows):
    """The rows of fields."""

    def __init__(self, files: FieldFiles) -> None:
        self._files = files
        self._fields = files.fields
        self._rows = len(next(iter(files.fields.values())))
        # Of each field its own: large units of two fields would evict each other with each batch.
        self._kept = {name: LastRead[NDArray[Any]](_KEPT // len(files.fields)) for name in files.fields}
        self._buffers = RowBuffers()
        self._counters = StageStats()

    @property
    def counters(self) -> StageStats:
        return self._counters

    def _pack(self, of: Callable[[str], Any]) -> Any:
        return nest.map_structure(of, self._files.structure)

    @property
    def row_spec(self) -> Any:
        return self._pack(lambda name: self._fields[name].spec)

    def cardinality(self) -> int:
        return self._rows

    def check(self) -> None:
        self._files.check()

    def fingerprint(self) -> int:
        return self._files.fingerprint()

    def describe(self) -> str:
        return self._files.describe()

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        began = time.perf_counter()
        if positions.size and not 0 <= positions.min() <= positions.max() < self._rows:
            expected, got = f"rows in [0, {self._rows})", f"{positions.min()} to {positions.max()}"
            raise IndexError(explain(self._files.function, "rows", expected=expected, got=got))
        out = {name: self._gather(name, field, positions) for name, field in self._fields.items()}
        self._counters.add(rows=positions.size, seconds=time.perf_counter() - began)
        return self._pack(out.__getitem__)

    def _gather(self, name: str, field: StoredField, positions: NDArray[np.int64]) -> NDArray[Any]:
        out = empty_rows(self._buffers, name, field.spec, positions.size)
        units = positions // field.unit_rows
        for unit, places in rows_of_units(units):
            place_rows(self._unit(name, field, unit), positions[places] - unit * field.unit_rows, places, out)
        return out

    def _unit(self, name: str, field: StoredField, unit: int) -> NDArray[Any]:
        column = self._kept[name].get(unit)
        if column is None:
            start = unit * field.unit_rows
            column = field.read(start, min(start + field.unit_rows, self._rows))
            nbytes = _nbytes(column, is_ragged(field.spec))
            self._kept[name].put(unit, column, nbytes)
            self._counters.add(chunk_reads=1, bytes_read=nbytes)
        return column

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return the first rows of the units of the field with the most bytes; the units of others are kept meanwhile."""
        unit = max(self._fields.values(), key=_row_bytes).unit_rows
        if unit == 1:
            return None
        return np.unique(np.append(np.arange(0, self._rows, unit, dtype=np.int64), self._rows))

    def keep(self, rows: int) -> None:
        for name, field in self._fields.items():
            kept = self._kept[name]
            kept.limit = max(kept.limit, (rows + 2 * field.unit_rows) * _row_bytes(field))


def _nbytes(column: NDArray[Any], ragged: bool) -> int:
    """Return the memory of rows: of arrays, of text, or of one array."""
    if ragged:
        return sum(row.nbytes for row in column)
    return sum(map(sys.getsizeof, column.flat)) if column.dtype.hasobject else column.nbytes


def _row_bytes(field: StoredField) -> int:
    if is_ragged(field.spec) or field.spec.dtype.hasobject:
        return _VARYING
    return stacked_nbytes(field.spec)
