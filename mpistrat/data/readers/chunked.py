"""Chunks of whole rows, read raw from the files and decoded outside HDF5's lock."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError, explain
from ..arrays import take_rows
from .chunk_cache import THREADS, ChunkCache, ChunkCounters
from .chunks import Chunks
from .codecs import DecodeError
from .open_files import open_bytes
from .reader import Storage

__all__ = ["CACHE_BYTES", "ChunkedReader"]

CACHE_BYTES = 1 << 25  # decoded chunks of one field that are kept, unless a shuffle's window needs more
_SLACK = THREADS + 4  # chunks beside the windows: those that the threads are in, and those by which windows differ


class ChunkedReader:
    """Rows of chunked data over all shards. Chunks that were read are kept decoded, up to a fixed number of bytes.

    Args:
        storages: the field in each file, in order; its layout is Chunks.

    Raises:
        ShardError: for a chunk that lies outside its file.
    """

    reason = ""

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = [storage for storage in storages if storage.rows]
        self._layouts = [_chunks(storage) for storage in self._storages]
        self._row_bytes = self._layouts[0].row_bytes
        counts = [len(layout.offsets) for layout in self._layouts]
        self._first_chunk = np.cumsum([0, *counts])[:-1]
        first_rows = np.cumsum([0, *(storage.rows for storage in self._storages)])
        starts = [
            np.arange(count, dtype=np.int64) * layout.rows + first
            for layout, count, first in zip(self._layouts, counts, first_rows[:-1], strict=True)
        ]
        self._starts = np.concatenate([*starts, first_rows[-1:]])
        self._starts.setflags(write=False)
        self._slot_rows = max(layout.rows for layout in self._layouts)
        self._slots = max(_SLACK, CACHE_BYTES // max(1, self._slot_rows * self._row_bytes))
        self._largest = max(int(layout.sizes.max()) for layout in self._layouts)
        self._files = open_bytes()
        self._scratch = threading.local()
        self._lock = threading.Lock()  # of the cache's making
        self._reading = threading.Lock()  # one thread reads rows at a time; decoding is what is done in several
        self._cache: ChunkCache | None = None
        self.counters = ChunkCounters()
        names = sorted({layout.pipeline.name for layout in self._layouts if layout.pipeline.name})
        self.kind = f"raw chunks, decoded by {', '.join(names)}" if names else "raw chunks"

    def chunk_starts(self) -> NDArray[np.int64]:
        """Return the row at which each chunk begins, and the number of rows behind them. Not collective."""
        return self._starts

    def keep(self, rows: int) -> None:
        """Make room for two windows of so many rows: the one that is read, and the next. Not collective."""
        chunks = len(self._starts) - 1
        smallest = min(int(self._starts[-1]) / chunks, *(layout.rows for layout in self._layouts))
        slots = min(2 * math.ceil(rows / smallest) + _SLACK, chunks)
        with self._lock:
            if slots > self._slots:
                self._slots, self._cache = slots, None

    def _opened(self) -> ChunkCache:
        with self._lock:
            if self._cache is None:
                chunks, slot_bytes = len(self._starts) - 1, self._slot_rows * self._row_bytes
                self._cache = ChunkCache(chunks, slot_bytes, self._slots, self._decode, self.counters)
            return self._cache

    def _chunks_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(self._layouts) == 1:
            return rows // self._slot_rows
        return np.searchsorted(self._starts, rows, side="right") - 1

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Begin to decode the chunks of rows that will be read soon. Returns at once. Not collective."""
        if rows.size:
            self._opened().expect(np.unique(self._chunks_of(rows)))

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy rows, in range and in any order, into a C-contiguous buffer of the file's dtype. Not collective.

        Raises:
            ShardError: for a damaged chunk.
        """
        if not rows.size or not self._row_bytes:
            return
        chunks = self._chunks_of(rows)
        wanted = np.unique(chunks)
        target = out.reshape(rows.size, -1).view(np.uint8)
        with self._reading:
            cache = self._opened()
            if wanted.size <= cache.limit:
                self._take(cache, wanted, chunks, rows, target)
                return
            for first in range(0, wanted.size, cache.limit):  # more chunks than are kept: some after the others
                some = wanted[first : first + cache.limit]
                own = np.flatnonzero((chunks >= some[0]) & (chunks <= some[-1]))
                part = np.empty((own.size, self._row_bytes), np.uint8)
                self._take(cache, some, chunks[own], rows[own], part)
                target[own] = part

    def _take(
        self,
        cache: ChunkCache,
        wanted: NDArray[np.int64],
        chunks: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> None:
        slots = cache.acquire(wanted)
        try:
            places = slots[np.searchsorted(wanted, chunks)] * self._slot_rows + (rows - self._starts[chunks])
            take_rows(cache.memory.reshape(-1, self._row_bytes), places, out)
        finally:
            cache.release()

    def _decode(self, chunk: int, slot: NDArray[np.uint8]) -> int:
        """Called in several threads."""
        index = int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1
        storage, layout = self._storages[index], self._layouts[index]
        chunk -= int(self._first_chunk[index])
        offset, out = int(layout.offsets[chunk]), slot[: layout.rows * layout.row_bytes]
        if offset < 0:
            out.reshape(layout.rows, -1)[...] = layout.fill
            return 0
        scratch = getattr(self._scratch, "raw", None)
        if scratch is None:
            scratch = self._scratch.raw = np.empty(self._largest, np.uint8)
        raw, read = scratch[: int(layout.sizes[chunk])], 0
        with self._files.lend(storage.file) as file:
            while read < raw.size:
                count = os.preadv(file.fileno(), [raw.data[read:]], offset + read)
                if not count:
                    raise _error(storage, chunk, f"{read} bytes: the file was truncated")
                read += count
        try:
            layout.pipeline.decode(raw, int(layout.masks[chunk]), out)
        except DecodeError as error:
            raise _error(storage, chunk, str(error)) from error
        return read


def _chunks(storage: Storage) -> Chunks:
    layout = storage.layout
    assert isinstance(layout, Chunks)
    outside = np.flatnonzero(layout.offsets + layout.sizes > storage.file.bytes)
    if outside.size:
        raise _error(storage, int(outside[0]), f"a file of {storage.file.bytes} bytes, in which it does not lie")
    return layout


def _error(storage: Storage, chunk: int, got: str) -> ShardError:
    layout = storage.layout
    assert isinstance(layout, Chunks)
    first = chunk * layout.rows
    last = min(first + layout.rows, storage.rows) - 1
    expected = f"chunk {chunk} (rows {first} to {last}), {layout.sizes[chunk]} bytes at {layout.offsets[chunk]}"
    remedy = "The file is damaged: copy it again, or write the shards again."
    return ShardError(explain("HDF5Dataset", storage.where, expected=expected, got=got, remedy=remedy))
