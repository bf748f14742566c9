"""Decoded chunks in a fixed number of slots, decoded ahead of need by a thread or more that all caches share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..stats import StageStats

__all__ = ["THREADS", "ChunkCache"]

# Threads that decode, in one process for all its datasets. Who reads decodes, too, so that is two cores of a rank; more only
# took them from each other (benchmarks/tune_input.py). A fixed number: ranks that share a node are many already.
THREADS = 1

_FREE, _QUEUED, _BUSY, _READY = range(4)  # what a slot is

Decode = Callable[[int, NDArray[np.uint8]], int]  # (chunk, where its bytes belong) -> bytes read from the file


class _Threads:
    """The threads. They end before the interpreter does, with what they have been given; none of it is in HDF5."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="mpistrat-decode")
            self._pool.submit(function, *arguments)

    def forget(self) -> None:
        """Begin anew in a forked child, which has none of the threads."""
        self._lock = threading.Lock()
        self._pool = None


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.forget)


class ChunkCache:
    """Chunks by number, decoded into slots of one array. When all slots are taken, the one used longest ago goes.

    One thread reads (`acquire`, then takes its rows, then `release`); any thread may tell what will be read soon. A
    chunk that is expected stays until it has been read, so a hint that finds no room is dropped.

    Args:
        chunks: how many chunks there are.
        slot_bytes: the size of the largest.
        slots: how many are held at most.
        decode: makes a chunk's bytes; called in several threads at once.
        counters: where to count chunks, bytes read for them, seconds of reading and decoding, over all threads,
            and seconds that the reader waited for a thread.
    """

    def __init__(self, chunks: int, slot_bytes: int, slots: int, decode: Decode, counters: StageStats) -> None:
        slots = max(1, min(slots, chunks))
        self._decode = decode
        self._counters = counters
        self.memory = np.empty((slots, slot_bytes), np.uint8)  # the system gives pages as they are first written
        self._slot_of = np.full(chunks, -1, np.int32)
        self._chunk_in = np.full(slots, -1, np.int64)
        self._state = np.zeros(slots, np.uint8)
        self._expected = np.zeros(slots, bool)  # asked for by a hint and not read since
        self._used = np.zeros(slots, np.int64)  # when, counted in reads
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
        """How many chunks can be acquired together."""
        if self.slots == len(self._slot_of):
            return self.slots
        return max(1, self.slots - THREADS)  # the threads may be busy in slots that were given to other chunks

    def expect(self, chunks: NDArray[np.int64]) -> None:
        """Begin to decode those of some chunks that are not here, as far as there is room."""
        absent = self._slot_of[chunks] < 0  # a glance without the lock: being wrong costs a hint
        if not absent.any():
            return
        missing = np.unique(chunks[absent])
        with self._changed:
            missing = missing[self._slot_of[missing] < 0]
            if missing.size > self.limit // 2 and self.slots < len(self._slot_of):
                return  # they would push each other out before they are read
            slots = self._assign(missing, hint=True)
        self._start(slots)

    def acquire_ready(self, chunks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the slots of some chunks, which may repeat, and hold them; None if one of them is not decoded yet."""
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
        """Return the slots of some different chunks, at most `limit`, once all are decoded; hold them.

        Raises:
            Exception: what decoding one of them raised.
        """
        with self._changed:
            self._now += 1
            self._reading = True
            slots = self._slot_of[chunks].astype(np.int64)
            self._used[slots[slots >= 0]] = self._now  # before others are put into the oldest slots
            missing = chunks[slots < 0]
            given = self._assign(missing, hint=False)
            while given.size < missing.size:  # threads are still busy in slots that nobody needs any more
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
            for slot in slots[::-1].tolist():  # help, from the end that the threads reach last
                if self._state[slot] == _QUEUED:
                    self._fill(slot)
            with self._changed:
                while (self._state[slots] < _READY).any() and not self._failed(slots):
                    self._wait()
                failed = self._failed(slots)
                if failed:
                    error = self._errors[failed[0]]
                    for slot in failed:
                        self._drop(slot)  # who asks again tries again
                    self._reading = False
                    raise error
        return slots

    def release(self) -> None:
        """Let go of what was acquired: its slots may be used for other chunks."""
        with self._changed:
            self._reading = False

    def _wait(self) -> None:
        self._waiting, started = True, time.perf_counter()
        self._changed.wait()
        self._waiting = False
        self._counters.add(wait_seconds=time.perf_counter() - started)

    def _assign(self, chunks: NDArray[np.int64], *, hint: bool) -> NDArray[np.int64]:
        """Give as many of the chunks as possible a slot each, from the first on; return the slots."""
        if not chunks.size:
            return np.empty(0, np.int64)
        usable = self._state != _BUSY
        if self._reading:
            usable &= self._used != self._now
        if hint:
            usable &= ~self._expected
        slots = np.flatnonzero(usable)
        if slots.size > chunks.size:  # those that are free first, then those used longest ago
            age = np.where(self._state[slots] == _FREE, -1, self._used[slots])
            slots = slots[np.argsort(age, kind="stable")[: chunks.size]]
        chunks = chunks[: slots.size]
        for slot in slots[self._chunk_in[slots] >= 0].tolist():
            self._drop(slot)
        self._chunk_in[slots] = chunks
        self._slot_of[chunks] = slots
        self._state[slots] = _QUEUED
        self._used[slots] = self._now - hint  # what is only expected must not look as if it were being read
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
        """Hand slots to the threads, each thread a share: one task for every small chunk would cost too much."""
        for share in range(min(THREADS, slots.size)):
            try:
                _threads.submit(self._fill_all, slots[share::THREADS].tolist())
            except RuntimeError:  # the interpreter is ending: who still reads decodes by itself
                return

    def _fill_all(self, slots: list[int]) -> None:
        for slot in slots:
            self._fill(slot)

    def _fill(self, slot: int) -> None:
        """Decode the chunk that belongs into a slot, unless somebody has done so or is about to."""
        with self._changed:
            if self._state[slot] != _QUEUED or slot in self._errors:
                return
            self._state[slot] = _BUSY
            chunk = int(self._chunk_in[slot])
        error: BaseException | None = None
        started, read = time.perf_counter(), 0
        try:
            read = self._decode(chunk, self.memory[slot])
        except BaseException as caught:  # whatever it is, it belongs to the reader
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
