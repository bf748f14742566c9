"""Chunks of whole rows: read raw from the files, decoded ahead outside HDF5's lock, and cached."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import ShardError, shard_error
from ..buffers import take_rows
from ..stats import StageStats
from .codecs import DecodeError
from .handles import DAMAGED, ShardFile, open_bytes
from .storage import Chunks, FieldReader, Storage

__all__ = ["CACHE_BYTES", "ChunkCache", "ChunkFiles", "ChunkedReader"]


class ChunkFiles:
    """A thread-safe reader and decoder of chunks, without a cache.

    Attributes:
        layouts: each file's chunks.
        row_starts: the first row of each chunk, then the number of rows.

    Raises:
        ShardError: for a chunk that lies outside its file.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = storages
        self.layouts = [_chunks(storage) for storage in storages]
        counts = [len(layout.offsets) for layout in self.layouts]
        self._first_chunk = np.cumsum([0, *counts])[:-1]
        first_rows = np.cumsum([0, *(storage.rows for storage in storages)])
        starts = [
            np.arange(count, dtype=np.int64) * layout.rows + first
            for layout, count, first in zip(self.layouts, counts, first_rows[:-1], strict=True)
        ]
        self.row_starts = np.concatenate([*starts, first_rows[-1:]])
        self.row_starts.setflags(write=False)
        self._largest = max(int(layout.sizes.max()) for layout in self.layouts)
        self._files = open_bytes()
        self._scratch = threading.local()

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @property
    def opened(self) -> Set[ShardFile]:
        """The files that were read from."""
        return self._files.opened

    def decode(self, chunk: int, slot: NDArray[np.uint8]) -> int:
        """Decode a chunk into the start of a slot; return the number of bytes read from its file.

        Raises:
            ShardError: naming the file, the dataset and the chunk.
        """
        index = int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1
        storage, layout = self._storages[index], self.layouts[index]
        chunk -= int(self._first_chunk[index])
        offset, out = int(layout.offsets[chunk]), slot[: layout.rows * layout.row_bytes]
        if offset < 0:
            out.reshape(layout.rows, -1)[...] = layout.fill
            return 0
        scratch = getattr(self._scratch, "raw", None)
        if scratch is None:
            scratch = self._scratch.raw = np.empty(self._largest, np.uint8)
        raw = scratch[: int(layout.sizes[chunk])]
        with self._files.lend(storage.file) as file:
            read = file.read_into(raw.data, offset)
        if read < raw.size:
            raise _error(storage, chunk, f"{read} bytes: the file was truncated")
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
        raise _error(storage, int(outside[0]), f"a file of {storage.file.bytes} bytes, which ends before it")
    return layout


def _error(storage: Storage, chunk: int, got: str) -> ShardError:
    layout = storage.layout
    assert isinstance(layout, Chunks)
    first = chunk * layout.rows
    last = min(first + layout.rows, storage.rows) - 1
    expected = f"chunk {chunk} (rows {first} to {last}), {layout.sizes[chunk]} bytes at {layout.offsets[chunk]}"
    return shard_error(storage.where, expected, got, DAMAGED)


_FREE, _QUEUED, _BUSY, _READY = range(4)  # states of a slot

Decode = Callable[[int, NDArray[np.uint8]], int]  # (chunk, slot) -> bytes read from the file


@functools.cache
def _decoder() -> ThreadPoolExecutor:
    """Return the one thread that decodes ahead, for all datasets of the process; its tasks do not call HDF5.

    Readers decode too, which makes two cores per rank; more threads only compete with these.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="mpistrat-decode")


os.register_at_fork(after_in_child=_decoder.cache_clear)  # threads do not exist in a forked child


class ChunkCache:
    """Decoded chunks in slots of one array. If all slots are in use, the least recently used one is replaced.

    One thread reads (`acquire`, copies rows, `release`); any thread may announce reads. An expected chunk stays until it
    is read, so a hint without room is dropped.

    Args:
        chunks: the number of chunks.
        slot_bytes: the size of the largest.
        slots: the most slots.
        decode: decodes a chunk; called in several threads at once.
        counters: count chunks, bytes read, seconds of reading and decoding over all threads, and the reader's waits.
    """

    def __init__(self, chunks: int, slot_bytes: int, slots: int, decode: Decode, counters: StageStats) -> None:
        slots = max(1, min(slots, chunks))
        self._decode = decode
        self._counters = counters
        self.memory = np.empty((slots, slot_bytes), np.uint8)  # pages are allocated at the first write
        self._slot_of = np.full(chunks, -1, np.int32)
        self._chunk_in = np.full(slots, -1, np.int64)
        self._state = np.zeros(slots, np.uint8)
        self._expected = np.zeros(slots, bool)  # announced, and not read since
        self._used = np.zeros(slots, np.int64)  # time of the last use, counted in reads
        self._now = 1
        self._reading = False
        self._errors: dict[int, BaseException] = {}  # by slot
        self._changed = threading.Condition()
        self._waiting = False

    @property
    def slots(self) -> int:
        return len(self._state)

    @property
    def limit(self) -> int:
        """The most chunks that can be acquired together."""
        if self.slots == len(self._slot_of):
            return self.slots
        return max(1, self.slots - 1)  # the thread may be filling a reassigned slot

    def expect(self, chunks: NDArray[np.int64]) -> None:
        """Start to decode those chunks that are not cached, as far as there is room."""
        absent = self._slot_of[chunks] < 0  # checked without the lock: an error only loses a hint
        if not absent.any():
            return
        missing = np.unique(chunks[absent])
        with self._changed:
            missing = missing[self._slot_of[missing] < 0]
            if missing.size > self.limit // 2 and self.slots < len(self._slot_of):
                return  # they would evict each other before they are read
            slots = self._assign(missing, hint=True)
        self._start(slots)

    def acquire_ready(self, chunks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the slots of some chunks, possibly repeated, and hold them; None if one is not decoded yet."""
        with self._changed:
            slots = self._slot_of[chunks]
            if slots.min() < 0 or (self._state[slots] != _READY).any():
                return None
            self._now += 1
            self._reading = True
            self._used[slots] = self._now
            self._expected[slots] = False
            return slots.astype(np.int64)

    def acquire(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of some different chunks, at most `limit`, when all are decoded; hold them.

        Raises:
            Exception: the error of decoding one of them.
        """
        with self._changed:
            self._now += 1
            self._reading = True
            slots = self._slot_of[chunks].astype(np.int64)
            self._used[slots[slots >= 0]] = self._now  # before the oldest slots are reassigned
            missing = chunks[slots < 0]
            given = self._assign(missing, hint=False)
            while given.size < missing.size:  # threads still fill slots that are no longer needed
                self._wait()
                more = self._assign(missing[given.size :], hint=False)
                given = np.concatenate((given, more))
            slots = self._slot_of[chunks].astype(np.int64)
            self._used[slots] = self._now
            self._expected[slots] = False
            ready = bool((self._state[slots] == _READY).all())
        if not ready:
            if given.size > 1:
                self._start(given)
            for slot in slots[::-1].tolist():  # help, from the end that the thread reaches last
                if self._state[slot] == _QUEUED:
                    self._fill(slot)
            with self._changed:
                while (self._state[slots] < _READY).any() and not self._failed(slots):
                    self._wait()
                failed = self._failed(slots)
                if failed:
                    error = self._errors[failed[0]]
                    for slot in failed:
                        self._drop(slot)  # the next attempt decodes it again
                    self._reading = False
                    raise error
        return slots

    def release(self) -> None:
        """Release the acquired slots, which may then be reused."""
        with self._changed:
            self._reading = False

    def _wait(self) -> None:
        self._waiting, started = True, time.perf_counter()
        self._changed.wait()
        self._waiting = False
        self._counters.add(wait_seconds=time.perf_counter() - started)

    def _assign(self, chunks: NDArray[np.int64], *, hint: bool) -> NDArray[np.int64]:
        """Assign slots to as many of the chunks as possible, in order; return the slots."""
        if not chunks.size:
            return np.empty(0, np.int64)
        usable = self._state != _BUSY
        if self._reading or hint:  # the next rows are often in the latest chunk
            usable &= self._used != self._now
        if hint:
            usable &= ~self._expected
        slots = np.flatnonzero(usable)
        if slots.size > chunks.size:  # free ones first, then the least recently used
            age = self._used[slots] + self._expected[slots] * self.slots  # expected ones age too
            age[self._state[slots] == _FREE] = -1
            slots = slots[np.argsort(age, kind="stable")[: chunks.size]]
        chunks = chunks[: slots.size]
        for slot in slots[self._chunk_in[slots] >= 0].tolist():
            self._drop(slot)
        self._chunk_in[slots] = chunks
        self._slot_of[chunks] = slots
        self._state[slots] = _QUEUED
        self._used[slots] = self._now - hint  # an expected chunk must not seem in use
        self._expected[slots] = hint
        return slots

    def _drop(self, slot: int) -> None:
        self._slot_of[self._chunk_in[slot]] = -1
        self._chunk_in[slot] = -1
        self._state[slot] = _FREE
        self._expected[slot] = False
        self._errors.pop(slot, None)

    def _failed(self, slots: NDArray[np.int64]) -> list[int]:
        return [slot for slot in slots.tolist() if slot in self._errors] if self._errors else []

    def _start(self, slots: NDArray[np.int64]) -> None:
        """Submit slots to the thread in one task; one per small chunk would cost too much."""
        if slots.size:
            with contextlib.suppress(RuntimeError):  # at interpreter shutdown readers decode themselves
                _decoder().submit(self._fill_all, slots.tolist())

    def _fill_all(self, slots: list[int]) -> None:
        for slot in slots:
            self._fill(slot)

    def _fill(self, slot: int) -> None:
        with self._changed:
            if self._state[slot] != _QUEUED or slot in self._errors:
                return
            self._state[slot] = _BUSY
            chunk = int(self._chunk_in[slot])
        error: BaseException | None = None
        started, read = time.perf_counter(), 0
        try:
            read = self._decode(chunk, self.memory[slot])
        except BaseException as caught:  # any error is raised in the reader
            error = caught
        self._counters.add(chunk_reads=1, bytes_read=read, seconds=time.perf_counter() - started)
        with self._changed:
            if error is None:
                self._state[slot] = _READY
            else:
                self._state[slot] = _QUEUED
                self._errors[slot] = error
            if self._waiting:
                self._changed.notify_all()


CACHE_BYTES = 1 << 25  # cache of one field's decoded chunks, unless a shuffle's window needs more
_SLACK = 5  # chunks in addition to the windows: the one being decoded, and the windows' difference


class ChunkedReader(FieldReader):
    """Rows of chunked data over all shards. Decoded chunks are cached, up to a fixed number of bytes.

    Raises:
        ShardError: for a chunk that lies outside its file.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        super().__init__(storages)
        files = ChunkFiles([storage for storage in storages if storage.rows])
        self._files = files
        self._starts = files.row_starts
        self._row_bytes = files.layouts[0].row_bytes
        self._slot_rows = max(layout.rows for layout in files.layouts)
        self._slots = max(_SLACK, CACHE_BYTES // max(1, self._slot_rows * self._row_bytes))
        self._lock = threading.Lock()  # for creating the cache
        self._reading = threading.Lock()  # one thread reads rows at a time, while several decode
        self._cache: ChunkCache | None = None
        names = sorted({layout.pipeline.name for layout in files.layouts if layout.pipeline.name})
        self.kind = f"raw chunks, decoded by {', '.join(names)}" if names else "raw chunks"

    def opened(self) -> Set[ShardFile]:
        return self._files.opened

    def keep(self, rows: int) -> None:
        """Make room for two windows of this size: the current and the next one."""
        smallest = min(int(self._starts[-1]) / len(self._files), *(layout.rows for layout in self._files.layouts))
        slots = min(2 * math.ceil(rows / smallest) + _SLACK, len(self._files))
        with self._lock:
            if slots > self._slots:
                self._slots, self._cache = slots, None

    def _opened(self) -> ChunkCache:
        with self._lock:
            if self._cache is None:
                slot_bytes = self._slot_rows * self._row_bytes
                self._cache = ChunkCache(len(self._files), slot_bytes, self._slots, self._files.decode, self._counters)
            return self._cache

    def _chunks_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(self._files.layouts) == 1:
            return rows // self._slot_rows
        return np.searchsorted(self._starts, rows, side="right") - 1

    def expect(self, rows: NDArray[np.int64]) -> None:
        if rows.size:
            self._opened().expect(self._chunks_of(rows))

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
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
            for first in range(0, wanted.size, cache.limit):  # more chunks than slots: several passes
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
        try:
            places = slots * self._slot_rows + (rows - self._starts[chunks])
            take_rows(cache.memory.reshape(-1, self._row_bytes), places, out)
        finally:
            cache.release()
