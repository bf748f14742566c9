"""The settings of a set of shards, checked, and the HDF5 datasets made accordingly: contiguous or in chunks of whole rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...base.errors import explain
from ...base.masks import unmasked
from .columns import varies
from .manifest import Field

if TYPE_CHECKING:
    import h5py

__all__ = ["Compression", "Layout", "SHARD_BYTES", "ShardSettings", "positive", "row_bytes"]

SHARD_BYTES = 1 << 30  # few, large shards: rows gathered over many files are slow
_CHUNK_BYTES = 1 << 18  # where decompressing was measured to be quickest
_LARGEST_CHUNK = (1 << 32) - 1  # HDF5's
_VARYING_ROW = 64  # bytes that a row of varying length is taken for

Layout = Literal["contiguous", "chunked"]
Compression = Literal["gzip", "lzf"] | int


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """The arguments of `ShardWriter`, which documents them; `checked` fills in the defaults."""

    rows_per_shard: int | None = None
    bytes_per_shard: int | None = None
    layout: Layout | None = None
    compression: Compression | None = None
    shuffle: bool | None = None
    fletcher32: bool | None = None
    chunk_rows: int | None = None
    attributes: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def chunked(self) -> bool:
        return self.layout == "chunked" or (self.layout is None and self.compression is not None)

    def checked(self, function: str) -> ShardSettings:
        """Return these settings with all defaults filled in.

        Raises:
            ValueError: for settings that do not exist or do not go together.
        """
        layout, compression, chunked = self.layout, self.compression, self.chunked
        if layout not in (None, "contiguous", "chunked"):
            raise ValueError(explain(function, "layout", expected='"contiguous" or "chunked"', got=repr(layout)))
        level = isinstance(compression, int) and not isinstance(compression, bool) and 0 <= compression <= 9
        if compression not in (None, "gzip", "lzf") and not level:
            expected = 'None, "gzip", "lzf" or gzip\'s level 0 to 9'
            raise ValueError(explain(function, "compression", expected=expected, got=repr(compression)))
        for argument in ("compression", "shuffle", "fletcher32", "chunk_rows"):
            value = getattr(self, argument)
            if value not in (None, False) and not chunked:
                expected = "none where data is contiguous: HDF5 has filters and checksums for chunks only"
                remedy = 'Pass layout="chunked". Contiguous data is guarded by the digest in the manifest.'
                raise ValueError(explain(function, argument, expected=expected, got=repr(value), remedy=remedy))
        if self.rows_per_shard is not None and self.bytes_per_shard is not None:
            got = f"both {self.rows_per_shard} rows and {self.bytes_per_shard} bytes"
            raise ValueError(explain(function, "", expected="rows_per_shard or bytes_per_shard", got=got))
        numbers = {
            name: positive(function, name, value)
            for name in ("chunk_rows", "rows_per_shard", "bytes_per_shard")
            if (value := getattr(self, name)) is not None
        }
        return replace(
            self,
            layout="chunked" if chunked else "contiguous",
            shuffle=compression is not None if self.shuffle is None else bool(self.shuffle),
            fletcher32=chunked if self.fletcher32 is None else bool(self.fletcher32),
            attributes={
                field: {
                    key: unmasked(value, function, f"attributes[{field!r}][{key!r}]") for key, value in values.items()
                }
                for field, values in (self.attributes or {}).items()
            },
            **{"bytes_per_shard": SHARD_BYTES, **numbers},
        )

    def rows_of_shard(self, fields: Mapping[str, Field]) -> int | None:
        """Return the rows of a full shard; None where it is full at so many bytes, as rows vary."""
        if self.rows_per_shard is not None:
            return self.rows_per_shard
        if any(map(varies, fields.values())):
            return None
        return max(1, (self.bytes_per_shard or SHARD_BYTES) // max(1, sum(map(row_bytes, fields.values()))))

    def check(self, function: str, argument: str, fields: Mapping[str, Field]) -> None:
        """Check that fields can be stored so, and are those that have attributes.

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
        unknown = sorted(set(self.attributes or {}) - set(fields))
        if unknown:
            expected, got = f"fields {sorted(fields)}", f"attributes of {unknown}"
            raise ValueError(explain(function, "attributes", expected=expected, got=got))

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
            # With a largest number of rows HDF5 keeps the table of chunks contiguously.
            maxshape=(None if rows is None else max(1, rows), *(max(1, length or 0) for length in row)),
            chunks=(self.rows_of_chunk(field, rows), *(max(1, length or 0) for length in row)),
            dtype=dtype,
            **({} if varies(field) else self._filters(field)),  # HDF5 filters the references to such rows, not the rows
        )

    def _filters(self, field: Field) -> dict[str, Any]:
        shuffle = self.shuffle and field.dtype.itemsize > 1
        return {"compression": self.compression, "shuffle": shuffle, "fletcher32": self.fletcher32}


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


def row_bytes(field: Field) -> int:
    """Return the bytes of a row; a guess where rows vary."""
    if varies(field):
        return _VARYING_ROW
    return field.dtype.itemsize * int(np.prod([length or 0 for length in field.shape], dtype=np.int64))
