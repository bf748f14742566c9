"""Chunks of whole rows, read raw from the files and decoded outside HDF5's lock."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import take_rows
from ..stats import StageStats
from .chunk_cache import THREADS, ChunkCache
from .chunk_files import ChunkFiles
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
        files = ChunkFiles([storage for storage in storages if storage.rows])
        self._files = files
        self._starts = files.row_starts
        self._row_bytes = files.layouts[0].row_bytes
        self._slot_rows = max(layout.rows for layout in files.layouts)
        self._slots = max(_SLACK, CACHE_BYTES // max(1, self._slot_rows * self._row_bytes))
        self._lock = threading.Lock()  # of the cache's making
        self._reading = threading.Lock()  # one thread reads rows at a time; decoding is what is done in several
        self._cache: ChunkCache | None = None
        self.counters = StageStats()
        names = sorted({layout.pipeline.name for layout in files.layouts if layout.pipeline.name})
        self.kind = f"raw chunks, decoded by {', '.join(names)}" if names else "raw chunks"

    def keep(self, rows: int) -> None:
        """Make room for two windows of so many rows: the one that is read, and the next."""
        smallest = min(int(self._starts[-1]) / len(self._files), *(layout.rows for layout in self._files.layouts))
        slots = min(2 * math.ceil(rows / smallest) + _SLACK, len(self._files))
        with self._lock:
            if slots > self._slots:
                self._slots, self._cache = slots, None

    def _opened(self) -> ChunkCache:
        with self._lock:
            if self._cache is None:
                slot_bytes = self._slot_rows * self._row_bytes
                self._cache = ChunkCache(len(self._files), slot_bytes, self._slots, self._files.decode, self.counters)
            return self._cache

    def _chunks_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(self._files.layouts) == 1:
            return rows // self._slot_rows
        return np.searchsorted(self._starts, rows, side="right") - 1

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Begin to decode the chunks of rows that will be read soon. Returns at once."""
        if rows.size:
            self._opened().expect(self._chunks_of(rows))

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy rows, in range and in any order, into a C-contiguous buffer of the file's dtype.

        Raises:
            ShardError: for a damaged chunk.
        """
        if not rows.size or not self._row_bytes:
            return
        chunks = self._chunks_of(rows)
        target = out.reshape(rows.size, -1).view(np.uint8)
        with self._reading:
            cache = self._opened()
            slots = cache.acquire_ready(chunks)
            if slots is not None:
                self._take(cache, slots, chunks, rows, target)
                return
            wanted = np.unique(chunks)
            if wanted.size <= cache.limit:
                slots = cache.acquire(wanted)[np.searchsorted(wanted, chunks)]
                self._take(cache, slots, chunks, rows, target)
                return
            for first in range(0, wanted.size, cache.limit):  # more chunks than are kept: some after the others
                some = wanted[first : first + cache.limit]
                own = np.flatnonzero((chunks >= some[0]) & (chunks <= some[-1]))
                slots = cache.acquire(some)[np.searchsorted(some, chunks[own])]
                part = np.empty((own.size, self._row_bytes), np.uint8)
                self._take(cache, slots, chunks[own], rows[own], part)
                target[own] = part

    def _take(
        self,
        cache: ChunkCache,
        slots: NDArray[np.int64],
        chunks: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> None:
        """Copy rows out of slots that are held, and let go of these."""
        try:
            places = slots * self._slot_rows + (rows - self._starts[chunks])
            take_rows(cache.memory.reshape(-1, self._row_bytes), places, out)
        finally:
            cache.release()
