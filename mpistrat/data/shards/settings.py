"""How a set of shards is to be written: as the user says it, and as HDF5 is told, contiguous or in chunks of whole rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...errors import explain
from .columns import varies
from .manifest import Field

if TYPE_CHECKING:
    import h5py

__all__ = ["Compression", "Layout", "SHARD_BYTES", "ShardSettings", "StorageFormat", "positive", "row_bytes"]

SHARD_BYTES = 1 << 30  # few, large shards: rows gathered over many files are slow

Layout = Literal["contiguous", "chunked"]
Compression = Literal["gzip", "lzf"] | int


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What `ShardWriter` says of its arguments with these names."""

    rows_per_shard: int | None = None
    bytes_per_shard: int | None = None
    layout: Layout | None = None
    compression: Compression | None = None
    shuffle: bool | None = None
    fletcher32: bool | None = None
    chunk_rows: int | None = None
    attributes: Mapping[str, Mapping[str, Any]] | None = None

    def storage(self, function: str) -> StorageFormat:
        """Return how fields are stored.

        Raises:
            ValueError: for settings that do not exist or do not go together.
        """
        layout, compression, chunk_rows = self.layout, self.compression, self.chunk_rows
        if layout not in (None, "contiguous", "chunked"):
            raise ValueError(explain(function, "layout", expected='"contiguous" or "chunked"', got=repr(layout)))
        level = isinstance(compression, int) and not isinstance(compression, bool) and 0 <= compression <= 9
        if compression not in (None, "gzip", "lzf") and not level:
            expected = 'None, "gzip", "lzf" or gzip\'s level 0 to 9'
            raise ValueError(explain(function, "compression", expected=expected, got=repr(compression)))
        chunked = layout == "chunked" or (layout is None and compression is not None)
        for argument in ("compression", "shuffle", "fletcher32", "chunk_rows"):
            value = getattr(self, argument)
            if value not in (None, False) and not chunked:
                expected = "none where data is contiguous: HDF5 has filters and checksums for chunks only"
                remedy = 'Pass layout="chunked". Contiguous data is guarded by the digest in the manifest.'
                raise ValueError(explain(function, argument, expected=expected, got=repr(value), remedy=remedy))
        return StorageFormat(
            chunked,
            compression,
            compression is not None if self.shuffle is None else bool(self.shuffle),
            chunked if self.fletcher32 is None else bool(self.fletcher32),
            None if chunk_rows is None else positive(function, "chunk_rows", chunk_rows),
        )

    def divided(self, function: str) -> ShardSettings:
        """Return these settings with a size of the shards.

        Raises:
            ValueError: for a size below 1, and for two.
        """
        rows, size = self.rows_per_shard, self.bytes_per_shard
        if rows is not None and size is not None:
            got = f"both {rows} rows and {size} bytes"
            raise ValueError(explain(function, "", expected="rows_per_shard or bytes_per_shard", got=got))
        rows = None if rows is None else positive(function, "rows_per_shard", rows)
        size = positive(function, "bytes_per_shard", SHARD_BYTES if size is None else size)
        return replace(self, rows_per_shard=rows, bytes_per_shard=size)

    def rows_of_shard(self, fields: Mapping[str, Field]) -> int | None:
        """Return the rows of a full shard; None where it is full at so many bytes, as rows vary."""
        if self.rows_per_shard is not None:
            return self.rows_per_shard
        if any(map(varies, fields.values())):
            return None
        return max(1, (self.bytes_per_shard or SHARD_BYTES) // max(1, sum(map(row_bytes, fields.values()))))


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
