"""One HDF5 file of a set while it is being written: to which rows are appended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.files import digest_of_ends, digest_of_file
from .columns import Columns, content_bytes, varies
from .manifest import Field, ShardEntry
from .settings import ShardSettings, row_bytes
from .unfailing_file import UnfailingFile

if TYPE_CHECKING:
    import h5py

__all__ = ["NewShard"]

_WRITE_BYTES = 1 << 22  # bytes that go to HDF5 at a time
_VARYING_ROWS = 1 << 12  # rows at a time where they vary in length
_CHUNK_CACHE = 1 << 20  # HDF5's default
_ALIGNMENT = 64  # bytes, of contiguous data, which is read by memory map


@final
class NewShard:
    """A file that grows, to at most `capacity` rows; without one only if it is chunked.

    Contiguous data must be as long as was said when the file was made: a file that gets fewer rows is written once more
    when it is closed. Its space on the disk is taken as rows come.
    """

    def __init__(self, path: Path, fields: Mapping[str, Field], settings: ShardSettings, capacity: int | None) -> None:
        import h5py

        self.path = path
        self.rows = 0
        self.bytes = 0  # of the rows, before compression
        self.capacity = capacity
        self._fields, self._settings = fields, settings
        self._fixed_bytes = sum(row_bytes(field) for field in fields.values() if not varies(field))
        self._varying = [name for name, field in fields.items() if varies(field)]
        self._step = max(1, _WRITE_BYTES // max(1, self._fixed_bytes))
        if self._varying:
            self._step = min(self._step, _VARYING_ROWS)
        largest = max(settings.rows_of_chunk(field, capacity) * row_bytes(field) for field in fields.values())
        # A chunk that is not full yet stays in HDF5's cache, or it would be compressed again with every write.
        cache = max(_CHUNK_CACHE, 2 * largest) if settings.chunked else _CHUNK_CACHE
        self._raw = UnfailingFile(path, new=True)
        places = {} if settings.chunked else {"alignment_threshold": 512, "alignment_interval": _ALIGNMENT}
        self._file = h5py.File(self._raw, "w", libver="latest", rdcc_nbytes=cache, **places)
        try:
            for name, field in fields.items():
                dataset = settings.create(self._file, name, field, capacity)
                for key, value in (settings.attributes or {}).get(name, {}).items():
                    dataset.attrs[key] = value
        except BaseException:
            self.close()
            raise

    def append(self, columns: Columns, start: int, stop: int, largest: int | None = None) -> int:
        """Append rows `start` to `stop`, or fewer: up to the capacity, and to `largest` bytes. Return where it stopped."""
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
        """Close the file as it is.

        Raises:
            OSError: it could not be written.
        """
        self._file.close()
        self._raw.close()
        self._raw.check()

    def finish(self, name: str) -> ShardEntry:
        """Close the file, flush it to the disk, and return its entry in the manifest.

        Raises:
            OSError: it could not be written.
        """
        short = self.capacity is not None and self.rows < self.capacity and not self._settings.chunked
        self.close()
        if short:
            self._rewrite()
        with self.path.open("rb") as written:
            os.fsync(written.fileno())
        digests = digest_of_file(self.path), digest_of_ends(self.path)
        return ShardEntry(name, self.rows, self.path.stat().st_size, *digests)

    def _rewrite(self) -> None:
        """Write the file again with contiguous datasets of as many rows as came."""
        import h5py

        shorter = NewShard(self.path.with_suffix(".shorter"), self._fields, self._settings, self.rows)
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
