"""How a set of shards is to be written, as the user says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import explain
from .columns import varies
from .manifest import Field
from .storage_format import StorageFormat, positive, row_bytes

__all__ = ["SHARD_BYTES", "Compression", "Layout", "ShardSettings"]

SHARD_BYTES = 1 << 30  # few, large shards: rows gathered over many files are slow

Layout = Literal["contiguous", "chunked"]
Compression = Literal["gzip", "lzf"] | int


@dataclass(frozen=True)
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
