"""How shards store their fields: contiguous, which can be mapped into memory, or in chunks of whole rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import explain
from .columns import varies
from .manifest import Field

if TYPE_CHECKING:
    import h5py

__all__ = ["StorageFormat", "positive", "row_bytes"]

_CHUNK_BYTES = 1 << 18  # where decompressing was measured to be quickest
_LARGEST_CHUNK = (1 << 32) - 1  # HDF5's
_VARYING_ROW = 64  # bytes that a row of varying length is taken for


def positive(function: str, argument: str, value: Any) -> int:
    """Return an integer of at least 1; whole floats like 1e9 are taken for one.

    Raises:
        ValueError, TypeError: for anything else.
    """
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        raise TypeError(explain(function, argument, expected="a whole number", got=repr(value))) from None
    if number < 1:
        raise ValueError(explain(function, argument, expected="at least 1", got=number))
    return number


@dataclass(frozen=True)
class StorageFormat:
    """The layout and the filters of all fields of a set. `create` makes one dataset accordingly."""

    chunked: bool
    compression: str | int | None
    shuffle: bool
    fletcher32: bool
    chunk_rows: int | None

    def check(self, function: str, argument: str, fields: Mapping[str, Field]) -> None:
        """Check that fields can be stored so.

        Raises:
            ValueError: naming the field.
        """
        for name, field in fields.items():
            where = f"{argument}[{name!r}]"
            if not self.chunked and varies(field):
                got = "strings (dtype <U or object)" if field.dtype == object else "rows that differ in length"
                remedy = 'Pass layout="chunked", or compression; or make them numbers or fixed-length bytes.'
                expected = "rows of one length, as contiguous data has them"
                raise ValueError(explain(function, where, expected=expected, got=got, remedy=remedy))
            if self.chunked and self.rows_of_chunk(field, None) * row_bytes(field) > _LARGEST_CHUNK:
                got = f"{self.rows_of_chunk(field, None)} rows of {row_bytes(field)} bytes"
                raise ValueError(explain(function, where, expected="chunks below 4 GiB", got=got))

    def rows_of_chunk(self, field: Field, rows: int | None) -> int:
        """Return the rows of one chunk, in a shard of so many rows at most."""
        wanted = self.chunk_rows or max(1, _CHUNK_BYTES // max(1, row_bytes(field)))
        return wanted if rows is None else max(1, min(wanted, rows))

    def create(self, file: h5py.File, name: str, field: Field, rows: int | None) -> h5py.Dataset:
        """Make a dataset: of this many rows if contiguous, empty and growing to at most that if chunked."""
        if not self.chunked:
            return file.create_dataset(name, shape=(rows, *field.shape), dtype=field.dtype)
        import h5py

        dtype: Any = field.dtype
        if field.dtype == object:
            dtype = h5py.string_dtype()
        elif varies(field):
            dtype = h5py.vlen_dtype(field.dtype)
        row = () if None in field.shape else field.shape
        return file.create_dataset(
            name,
            shape=(0, *row),
            # With a largest number of rows HDF5 keeps the table of chunks in one piece.
            maxshape=(None if rows is None else max(1, rows), *(max(1, length or 0) for length in row)),
            chunks=(self.rows_of_chunk(field, rows), *(max(1, length or 0) for length in row)),
            dtype=dtype,
            **({} if varies(field) else self._filters(field)),  # HDF5 filters the references to such rows, not the rows
        )

    def _filters(self, field: Field) -> dict[str, Any]:
        shuffle = self.shuffle and field.dtype.itemsize > 1
        return {"compression": self.compression, "shuffle": shuffle, "fletcher32": self.fletcher32}


def row_bytes(field: Field) -> int:
    """Return the bytes of a row; a guess where rows vary."""
    if varies(field):
        return _VARYING_ROW
    return field.dtype.itemsize * int(np.prod([length or 0 for length in field.shape], dtype=np.int64))
