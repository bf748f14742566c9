"""Memory of rows that fills as they are asked for, each piece read once by whoever comes first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...errors import ClosedError, CollectiveTimeoutError
from ..buffers import RowBuffers
from ..stats import StageStats
from .cached_rows import READ_BYTES, Pieces, RowMemory, SourceRows
from .claims import Claims

__all__ = ["FilledMemory"]


@final
class FilledMemory:
    """Rows of a source in memory; what is missing is read, by threads and processes that share the claims.

    Args:
        source: whose rows.
        memory: where they are kept.
        pieces: what is read as a whole.
        claims: who reads what.
        counters: where to count: rows, pieces (chunk_reads) and seconds of reading, pieces waited for, and how long.
        text: how much lies where.
        provide: called with the bytes that are about to be written; raises where the system has no room for them.
    """

    def __init__(
        self,
        source: SourceRows,
        memory: RowMemory,
        pieces: Pieces,
        claims: Claims,
        counters: StageStats,
        text: str,
        provide: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._memory: RowMemory | None = memory
        self._pieces = pieces
        self._claims = claims
        self._counters = counters
        self._text = text
        self._provide = provide
        self._limit = max(1, READ_BYTES // source.row_bytes * pieces.count // max(1, pieces.rows))
        self._buffers = RowBuffers()
        self._reading = threading.Lock()  # a dataset is read by one thread at a time

    def take(self, numbers: NDArray[np.int64]) -> Any:
        """Return copies of rows, stacked; read what is not there yet.

        Raises:
            CollectiveTimeoutError: another rank reads a piece of them, and does not come to its end.
            ClosedError: the strategy was closed.
        """
        memory = self._memory  # held: it is not freed meanwhile
        if memory is None:
            raise ClosedError("cache: the strategy that kept the rows was closed")
        missing = self._claims.missing(self._pieces.numbers(numbers))
        if missing.size:
            self._fill(memory, missing)
        return nest.pack_like(self._source.row_spec, memory.take(numbers, self._buffers))

    def _fill(self, memory: RowMemory, missing: NDArray[np.int64]) -> None:
        """Read what nobody else reads, a little at a time so that others find some too; then wait for them.

        Who waits holds no claims.
        """
        waited, wait_seconds = 0, 0.0
        while missing.size:
            mine = self._claims.claim(missing, self._limit)
            if not mine.size:
                missing = self._claims.missing(missing)
                waited = max(waited, missing.size)
                started = time.perf_counter()
                try:
                    mine = self._claims.wait(missing, self._limit)
                except TimeoutError as error:
                    raise CollectiveTimeoutError(f"cache: {error}") from None
                wait_seconds += time.perf_counter() - started
            self._read(memory, mine)
            missing = self._claims.missing(missing)
        self._counters.add(waits=waited, wait_seconds=wait_seconds)

    def _read(self, memory: RowMemory, claimed: NDArray[np.int64]) -> None:
        """Read the pieces that were claimed, and end the claims."""
        if not claimed.size:
            return
        ready = False
        started = time.perf_counter()
        try:
            with self._reading:
                rows = self._pieces.all_rows(claimed, self._source)
                for numbers, stacked in self._source.read(rows):
                    self._store(memory, numbers, stacked)
            ready = True
        finally:
            self._claims.release(claimed, ready=ready)
        seconds = time.perf_counter() - started
        self._counters.add(rows=rows.size, chunk_reads=self._pieces.reads(claimed), seconds=seconds)

    def _store(self, memory: RowMemory, numbers: NDArray[np.int64], stacked: Any) -> None:
        if not numbers.size:
            return
        if self._provide is not None:
            for low, high in memory.ranges(numbers):
                self._provide(low, high)
        memory.put(numbers, stacked)

    def describe(self) -> str:
        """Say how much lies where."""
        return self._text

    def close(self) -> None:
        """Let go of the memory; threads that are copying rows hold it until they are done. Collective with the group."""
        self._memory = None
        self._claims.close()

    def leave(self) -> None:
        """Nothing: the system takes the memory."""
