"""One HDF5 file of a set while it is written, and its format, from the settings of the set."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, final

import numpy as np
from numpy.typing import NDArray

from ...base.errors import explain
from ...base.files import digest_of_ends, digest_of_file
from ...base.masks import unmasked
from .columns import Columns, content_bytes, varies
from .manifest import Field, ShardEntry
from .unfailing_file import UnfailingFile

if TYPE_CHECKING:
    import h5py

__all__ = ["NewShard", "ShardFormat", "ShardSettings", "positive"]

SHARD_BYTES = 1 << 30  # few, large shards: rows gathered over many files are slow
_CHUNK_BYTES = 1 << 18  # measured optimum for decompression
_LARGEST_CHUNK = (1 << 32) - 1  # HDF5's
_VARYING_ROW = 64  # assumed bytes of a row of varying length
_WRITE_BYTES = 1 << 22  # bytes written to HDF5 at a time
_VARYING_ROWS = 1 << 12  # rows at a time if they vary in length
_CHUNK_CACHE = 1 << 20  # HDF5's default
_ALIGNMENT = 64  # bytes, of contiguous data, which is read by memory map


class ShardSettings(TypedDict, total=False):
    """The settings of a set of shards; `ShardWriter` documents them."""

    rows_per_shard: int | None
    bytes_per_shard: int | None
    layout: Literal["contiguous", "chunked"] | None
    compression: Literal["gzip", "lzf"] | int | None
    shuffle: bool | None
    fletcher32: bool | None
    chunk_rows: int | None
    attributes: Mapping[str, Mapping[str, Any]] | None


class ShardFormat:
    """The format of a set's files: checked settings with defaults, and the creation of HDF5 datasets.

    Args:
        function: the function of the user, for errors.
        settings: the user's settings.

    Raises:
        TypeError: a setting is unknown, or not a number where one is required.
        ValueError: settings are invalid, or exclude each other.
    """

    def __init__(self, function: str, settings: ShardSettings) -> None:
        unknown = sorted(settings.keys() - ShardSettings.__annotations__)
        if unknown:
            raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")
        layout, compression = settings.get("layout"), settings.get("compression")
        chunked = layout == "chunked" or (layout is None and compression is not None)
        if layout not in (None, "contiguous", "chunked"):
            raise ValueError(explain(function, "layout", expected='"contiguous" or "chunked"', got=repr(layout)))
        level = isinstance(compression, int) and not isinstance(compression, bool) and 0 <= compression <= 9
        if compression not in (None, "gzip", "lzf") and not level:
            expected = 'None, "gzip", "lzf" or gzip\'s level 0 to 9'
            raise ValueError(explain(function, "compression", expected=expected, got=repr(compression)))
        for argument in ("compression", "shuffle", "fletcher32", "chunk_rows"):
            value = settings.get(argument)
            if value not in (None, False) and not chunked:
                expected = "none where data is contiguous: HDF5 has filters and checksums for chunks only"
                remedy = 'Pass layout="chunked". Contiguous data is guarded by the digest in the manifest.'
                raise ValueError(explain(function, argument, expected=expected, got=repr(value), remedy=remedy))
        rows, size, shuffle = settings.get("rows_per_shard"), settings.get("bytes_per_shard"), settings.get("shuffle")
        if rows is not None and size is not None:
            got = f"both {rows} rows and {size} bytes"
            raise ValueError(explain(function, "", expected="rows_per_shard or bytes_per_shard", got=got))
        self.rows_per_shard, bytes_per_shard, self.chunk_rows = (
            None if value is None else positive(function, name, value)
            for name, value in (
                ("rows_per_shard", rows),
                ("bytes_per_shard", size),
                ("chunk_rows", settings.get("chunk_rows")),
            )
        )
        self.bytes_per_shard = bytes_per_shard or SHARD_BYTES
        self.layout = "chunked" if chunked else "contiguous"
        self.compression = compression
        self.shuffle = compression is not None if shuffle is None else bool(shuffle)
        checksum = settings.get("fletcher32")
        self.fletcher32 = chunked if checksum is None else bool(checksum)
        self.attributes = {
            field: {key: unmasked(value, function, f"attributes[{field!r}][{key!r}]") for key, value in values.items()}
            for field, values in (settings.get("attributes") or {}).items()
        }

    def __repr__(self) -> str:
        """Return the text that ranks compare."""
        return f"ShardSettings({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @property
    def chunked(self) -> bool:
        return self.layout == "chunked"

    def rows_of_shard(self, fields: Mapping[str, Field]) -> int | None:
        """Return the rows of a full shard; None if bytes limit it, as rows vary."""
        if self.rows_per_shard is not None:
            return self.rows_per_shard
        if any(map(varies, fields.values())):
            return None
        return max(1, self.bytes_per_shard // max(1, sum(map(_row_bytes, fields.values()))))

    def check(self, function: str, argument: str, fields: Mapping[str, Field]) -> None:
        """Check that fields can be stored in this format, and that attributes belong to fields.

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
            if self.chunked and self.rows_of_chunk(field, None) * _row_bytes(field) > _LARGEST_CHUNK:
                got = f"{self.rows_of_chunk(field, None)} rows of {_row_bytes(field)} bytes"
                raise ValueError(explain(function, where, expected="chunks below 4 GiB", got=got))
        unknown = sorted(set(self.attributes) - set(fields))
        if unknown:
            expected, got = f"fields {sorted(fields)}", f"attributes of {unknown}"
            raise ValueError(explain(function, "attributes", expected=expected, got=got))

    def rows_of_chunk(self, field: Field, rows: int | None) -> int:
        """Return the rows of one chunk, in a shard of at most this many rows."""
        wanted = self.chunk_rows or max(1, _CHUNK_BYTES // max(1, _row_bytes(field)))
        return wanted if rows is None else max(1, min(wanted, rows))

    def create(self, file: h5py.File, name: str, field: Field, rows: int | None) -> h5py.Dataset:
        """Create a dataset: of this many rows if contiguous, empty and growing up to them if chunked."""
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
            # With a maximum number of rows HDF5 stores the table of chunks contiguously.
            maxshape=(None if rows is None else max(1, rows), *(max(1, length or 0) for length in row)),
            chunks=(self.rows_of_chunk(field, rows), *(max(1, length or 0) for length in row)),
            dtype=dtype,
            **({} if varies(field) else self._filters(field)),  # HDF5 filters the references to such rows, not the rows
        )

    def _filters(self, field: Field) -> dict[str, Any]:
        shuffle = self.shuffle and field.dtype.itemsize > 1
        return {"compression": self.compression, "shuffle": shuffle, "fletcher32": self.fletcher32}


def positive(function: str, argument: str, value: Any) -> int:
    """Return an integer of at least 1. A float without a fraction, like 1e9, is accepted.

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


def _row_bytes(field: Field) -> int:
    if varies(field):
        return _VARYING_ROW
    return field.dtype.itemsize * int(np.prod([length or 0 for length in field.shape], dtype=np.int64))


@final
class NewShard:
    """A file that grows to at most `capacity` rows; None only if it is chunked.

    Contiguous data has a fixed length from the start: a file that gets fewer rows is written again when it is closed.
    Disk space is allocated as rows are written.
    """

    def __init__(self, path: Path, fields: Mapping[str, Field], form: ShardFormat, capacity: int | None) -> None:
        import h5py

        self.path = path
        self.rows = 0
        self.bytes = 0  # of the rows, before compression
        self.capacity = capacity
        self._fields, self._form = fields, form
        self._fixed_bytes = sum(_row_bytes(field) for field in fields.values() if not varies(field))
        self._varying = [name for name, field in fields.items() if varies(field)]
        self._step = max(1, _WRITE_BYTES // max(1, self._fixed_bytes))
        if self._varying:
            self._step = min(self._step, _VARYING_ROWS)
        largest = max(form.rows_of_chunk(field, capacity) * _row_bytes(field) for field in fields.values())
        # A partial chunk must stay in HDF5's cache, or each write would compress it again.
        cache = max(_CHUNK_CACHE, 2 * largest) if form.chunked else _CHUNK_CACHE
        self._raw = UnfailingFile(path, new=True)
        places = {} if form.chunked else {"alignment_threshold": 512, "alignment_interval": _ALIGNMENT}
        self._file = h5py.File(self._raw, "w", libver="latest", rdcc_nbytes=cache, **places)
        try:
            for name, field in fields.items():
                dataset = form.create(self._file, name, field, capacity)
                for key, value in form.attributes.get(name, {}).items():
                    dataset.attrs[key] = value
        except BaseException:
            self.close()
            raise

    def append(self, columns: Columns, start: int, stop: int, largest: int | None = None) -> int:
        """Append rows `start` to `stop`, up to the capacity and to `largest` bytes. Return the end of the appended rows."""
        if self.capacity is not None:
            stop = min(stop, start + self.capacity - self.rows)
        while start < stop and (largest is None or self.bytes < largest):
            end = min(start + self._step, stop)
            for name, array in columns.items():
                self._append(name, array[start:end])
                self._raw.check()
            self.rows += end - start
            start = end
        return start

    def _append(self, name: str, rows: NDArray[Any]) -> None:
        dataset, end = self._file[name], self.rows + len(rows)
        if dataset.chunks is not None:
            dataset.resize(end, axis=0)
        if name in self._varying:
            rows = rows.astype(object) if rows.dtype.kind == "U" else rows
            self.bytes += content_bytes(rows)
        else:
            self.bytes += dataset.dtype.itemsize * int(np.prod(rows.shape, dtype=np.int64))
        if rows.size and self._fields[name].shape == (None,):
            _write_ragged(dataset, self.rows, rows)
        elif rows.size:
            dataset[self.rows : end] = rows

    @property
    def full(self) -> bool:
        return self.rows == self.capacity

    def close(self) -> None:
        """Close the file in its current state.

        Raises:
            OSError: it could not be written.
        """
        self._file.close()
        self._raw.close()
        self._raw.check()

    def finish(self, name: str) -> ShardEntry:
        """Close the file, flush it to disk, and return its manifest entry.

        Raises:
            OSError: it could not be written.
        """
        short = self.capacity is not None and self.rows < self.capacity and not self._form.chunked
        self.close()
        if short:
            self._rewrite()
        with self.path.open("rb") as written:
            os.fsync(written.fileno())
        digests = digest_of_file(self.path), digest_of_ends(self.path)
        return ShardEntry(name, self.rows, self.path.stat().st_size, *digests)

    def _rewrite(self) -> None:
        """Write the file again with contiguous datasets of the actual length."""
        import h5py

        shorter = NewShard(self.path.with_suffix(".shorter"), self._fields, self._form, self.rows)
        try:
            with h5py.File(self.path, "r") as file:
                for start in range(0, self.rows, self._step):
                    stop = min(start + self._step, self.rows)
                    shorter.append({name: file[name][start:stop] for name in self._fields}, 0, stop - start)
        finally:
            shorter.close()
        shorter.path.replace(self.path)


def _write_ragged(dataset: h5py.Dataset, start: int, rows: NDArray[Any]) -> None:
    """Write rows that are arrays. h5py's own assignment takes several rows of one number each for one row."""
    import h5py

    target = dataset.id.get_space()
    target.select_hyperslab((start,), (len(rows),))
    source = h5py.h5s.create_simple((len(rows),))
    kind = h5py.h5t.py_create(dataset.dtype)
    dataset.id.write(source, target, np.ascontiguousarray(rows), mtype=kind)
