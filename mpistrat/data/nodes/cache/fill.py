"""Memory that fills with rows on demand: each chunk is read once, by the first thread or process that needs it.

The memory belongs to a process, or is shared by a node's ranks. A claim on a chunk is a system lock on one byte of a file
that these ranks have open: taking and releasing it costs a microsecond, as much as MPI's compare-and-swap, and the system
releases the locks of a process that dies. If reading fails, the reader gets the error and the chunk is free again;
waiting ranks then try to read it and get the error themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from ....base import nest
from ....base.errors import ClosedError, CollectiveTimeoutError
from ....base.text import binary_size, counted, decimal_size
from ....base.waiting import Deadline
from ....comm import shared_memory
from ....comm.monitor.leftovers import open_own
from ....comm.shared_memory import SharedBlock
from ...buffers import RowBuffers
from ...memory_limit import available_memory, require_memory
from ...stats import StageStats
from .rows import READ_BYTES, ParentRows, RowChunks, RowMemory, row_backoff

if TYPE_CHECKING:
    from ....comm.process_group import ProcessGroup

__all__ = ["Claims", "FilledMemory", "agree_memory", "node_memory", "provider"]

_READY = -1  # else 0, or 1 + the reader's index in the node, for timeout errors
_RETRY = 16  # polls between two attempts to claim another's chunks


@final
class Claims:
    """The state of chunks: ready, free, or claimed by a reader.

    Args:
        state: an int16 per chunk, initially 0; shared if the chunks are.
        index: the index of this process among those that share the chunks.
        ranks: their ranks, for errors.
        file: descriptor of a file open in all these processes; None if only threads share the chunks.
        sync: separates loads and stores of shared memory.
        timeout: seconds to wait for another process; None for no limit.
    """

    def __init__(
        self,
        state: NDArray[np.int16],
        index: int = 0,
        ranks: Sequence[int] = (0,),
        file: int | None = None,
        sync: Callable[[], None] = lambda: None,
        timeout: float | None = None,
    ) -> None:
        self._state = state
        self._index, self._ranks = index, ranks
        self._file = file
        self._sync = sync
        self._timeout = timeout
        self._lock = threading.Lock()
        self._busy: set[int] = set()  # claimed by a thread of this process; system locks only distinguish processes

    def missing(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunks that are not ready, sorted and unique; the others can be read."""
        missing = chunks[self._state[chunks] != _READY]
        self._sync()
        return np.unique(missing) if missing.size else missing

    def claim(self, chunks: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Claim free chunks, at most `limit`. Return them; the caller must read and `release` them."""
        with self._lock:
            if self._file is None:
                claimed = chunks[self._state[chunks] == 0][:limit]
            else:
                free = (p for p in chunks.tolist() if p not in self._busy and self._take(self._file, p))
                claimed = np.array(list(itertools.islice(free, limit)), np.int64)
                self._sync()
                ready = self._state[claimed] == _READY  # ready since the caller checked
                for chunk in claimed[ready].tolist():
                    self._give(self._file, chunk)
                claimed = claimed[~ready]
                self._busy.update(claimed.tolist())
            self._state[claimed] = self._index + 1
        return claimed

    def release(self, chunks: NDArray[np.int64], *, ready: bool) -> None:
        """Release claims: the chunks are ready, or free again."""
        self._sync()
        with self._lock:
            self._state[chunks] = _READY if ready else 0
            if self._file is not None:
                self._sync()
                for chunk in chunks.tolist():
                    self._give(self._file, chunk)
                self._busy.difference_update(chunks.tolist())

    def wait(self, chunks: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Wait for chunks that others read. Return those that the caller must read itself, as from `claim`.

        Raises:
            TimeoutError: naming a rank.
        """
        backoff, deadline, looks = row_backoff(), Deadline(self._timeout), itertools.count()
        while True:
            chunks = self.missing(chunks)
            if not chunks.size:
                return chunks
            if next(looks) % _RETRY == 0:
                mine = self.claim(chunks, limit)
                if mine.size:
                    return mine
            if deadline.passed:
                index = int(self._state[chunks[0]]) - 1
                reader = f"rank {self._ranks[index]} reads" if index >= 0 else "another rank was reading"
                raise TimeoutError(f"waited {self._timeout:g} s for rows that {reader}")
            backoff.pause()

    def _take(self, file: int, chunk: int) -> bool:
        import fcntl

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, chunk)
        except OSError:
            return False
        return True

    def _give(self, file: int, chunk: int) -> None:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_UN, 1, chunk)

    def close(self) -> None:
        """Close the file, after the last claim."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


@final
class FilledMemory:
    """Rows of a source in memory; threads and processes that share the claims read missing rows.

    Args:
        chunks: the units of reading.
        counters: count rows, chunks (chunk_reads), seconds of reading, chunks waited for and seconds of waiting.
        text: the description of the memory.
        provide: called with the byte range of each write; raises if the system lacks memory.
    """

    def __init__(
        self,
        source: ParentRows,
        memory: RowMemory,
        chunks: RowChunks,
        claims: Claims,
        counters: StageStats,
        text: str,
        provide: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._memory: RowMemory | None = memory
        self._chunks = chunks
        self._claims = claims
        self._counters = counters
        self._text = text
        self._provide = provide
        self._limit = max(1, READ_BYTES // source.row_bytes * chunks.count // max(1, chunks.rows))
        self._buffers = RowBuffers()
        self._reading = threading.Lock()  # one thread at a time reads a dataset

    def take(self, numbers: NDArray[np.int64]) -> Any:
        """Return copies of rows, stacked; read missing ones first.

        Raises:
            CollectiveTimeoutError: another rank claimed a chunk and did not finish reading it.
            ClosedError: the strategy was closed.
        """
        memory = self._memory  # keep a reference, so that it is not freed meanwhile
        if memory is None:
            raise ClosedError("cache: the strategy with the rows was closed")
        missing = self._claims.missing(self._chunks.numbers(numbers))
        if missing.size:
            self._fill(memory, missing)
        return nest.pack_like(self._source.row_spec, memory.take(numbers, self._buffers))

    def _fill(self, memory: RowMemory, missing: NDArray[np.int64]) -> None:
        """Read chunks that no other reads, a few at a time to share the work; then wait for the others'.

        A waiting thread never holds a claim, so there is no deadlock.
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
        if not claimed.size:
            return
        ready = False
        started = time.perf_counter()
        try:
            with self._reading:
                rows = self._chunks.all_rows(claimed, self._source)
                for numbers, stacked in self._source.read(rows):
                    self._store(memory, numbers, stacked)
            ready = True
        finally:
            self._claims.release(claimed, ready=ready)
        seconds = time.perf_counter() - started
        self._counters.add(rows=rows.size, chunk_reads=self._chunks.reads(claimed), seconds=seconds)

    def _store(self, memory: RowMemory, numbers: NDArray[np.int64], stacked: Any) -> None:
        if not numbers.size:
            return
        if self._provide is not None:
            for low, high in memory.ranges(numbers):
                self._provide(low, high)
        memory.put(numbers, stacked)

    def describe(self) -> str:
        return self._text

    def close(self) -> None:
        """Free the memory; threads that copy rows hold it until they finish. Collective with the group."""
        self._memory = None
        self._claims.close()

    def leave(self) -> None:
        """Do nothing: the system frees the memory."""

    abandon = leave


CHUNK_BYTES = 256 << 10  # unit of reading if the source has no chunks


def node_memory(source: ParentRows, group: ProcessGroup, counters: StageStats) -> FilledMemory:
    """Allocate the memory of each node. Collective.

    Raises:
        SharedMemoryError: on every rank, if /dev/shm of any node is too small.
        MemoryError: on every rank, if any node has too little memory.
        CollectiveMismatchError: the ranks have different rows.
    """
    chunks = RowChunks.of(source, CHUNK_BYTES)
    rows_bytes = RowMemory.nbytes(source.row_spec, source.count)
    total = rows_bytes + max(64, 2 * chunks.count)
    node = group.node
    what = f'cache("node") of {source.count} rows'
    with group.collective(
        "cache", "node", detail=f"{source.count} rows of {source.row_spec!r} in {chunks.count} chunks"
    ):
        agree_memory(group, total if node.rank == 0 else 0, what)
        block = node.allocate([total if rank == 0 else 0 for rank in range(node.size)], what)
        file = _open_lock_file(group) if node.shared else None
    segment = block.segments[0]
    state = segment[rows_bytes : rows_bytes + 2 * chunks.count].view(np.int16)
    timeout = group.environment.abort_after if node.shared else None
    claims = Claims(state, node.rank, node.ranks, file, node.sync, timeout)
    where = f"shared memory of {counted(group.num_nodes, 'node')}" if node.shared else "memory"
    memory = FilledMemory(
        source,
        RowMemory(source.row_spec, source.count, segment),
        chunks,
        claims,
        counters,
        f"{decimal_size(rows_bytes)} in {where}",
        provider(block, group.topology.rank),
    )
    group.attach(memory)
    return memory


def provider(block: SharedBlock, rank: int) -> Callable[[int, int], None]:
    """Return a function that makes the system allocate bytes of a block's first segment before they are written."""

    def provide(low: int, high: int) -> None:
        if not block.populate(0, low, high):
            free = shared_memory.free_space() or 0
            raise shared_memory.out_of_memory(block.what, rank, f"{binary_size(free)} are free")

    return provide


def agree_memory(group: ProcessGroup, needed: int, what: str) -> None:
    """Check that every node has enough memory for its ranks. Collective, inside `collective()`.

    Raises:
        MemoryError: on every rank.
    """
    available = available_memory()
    table = group.all_gather_int([needed, -1 if available is None else available])
    remedy = 'Use cache("job") over more nodes, or leave cache out.'
    for index in range(group.topology.num_nodes):
        ranks = group.topology.ranks_of_node(index)
        together = sum(int(table[rank, 0]) for rank in ranks)
        least = min(int(table[rank, 1]) for rank in ranks)
        require_memory(
            "Dataset.cache", together, None if least < 0 else least, f"{what} on the node of rank {ranks[0]}", remedy
        )


def _open_lock_file(group: ProcessGroup) -> int:
    """Open one unlinked file in all ranks of the node. Collective, inside `collective()`."""
    path, file = "", -1
    if group.node.rank == 0:
        folder = shared_memory.SHARED_FOLDER
        with contextlib.suppress(OSError):
            file, path = tempfile.mkstemp(prefix="mpistrat_", dir=folder if folder.is_dir() else None)
    path = group.all_gather_text(path)[group.node.ranks[0]]
    if group.node.rank and path:
        with contextlib.suppress(OSError):
            file = open_own(path, os.O_RDWR)
    missing = group.agree(file, "min") < 0
    if group.node.rank == 0 and path:
        os.unlink(path)
    if missing:
        raise OSError(f"cache: the ranks of a node could not open one file in {shared_memory.SHARED_FOLDER}")
    return file
