"""Memory of rows that fills as they are asked for: each chunk is read once, by the first thread or process that needs it.

The memory is that of a process, or shared by the ranks of a node. A claim on a chunk is a lock of the system's on one byte of
a file that the ranks of a node have open: taking and leaving it costs a microsecond, as much as MPI's compare-and-swap, and the
system takes it back from a process that dies. Where reading fails, the reader gets the error; the chunk is then free, and
those that wait for it try by themselves and get the error themselves.
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

_READY = -1  # else 0, or 1 + the number in the node of the rank that reads it: for the error of who waits
_RETRY = 16  # looks between two tries to claim what another has claimed


@final
class Claims:
    """What is ready, and who reads what is not.

    Args:
        state: an int16 for each chunk, 0 at first; shared if the chunks are.
        index: of this process among those that share the chunks.
        ranks: theirs, for errors.
        file: descriptor of a file open in all processes that share the chunks; None where only threads do.
        sync: keeps loads and stores of shared memory apart.
        timeout: seconds to wait for another; None without end.
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
        self._busy: set[int] = set()  # claimed by a thread of this process: the system's locks know processes only

    def missing(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of some chunks that are not ready, each once and ascending; the others may be read now."""
        missing = chunks[self._state[chunks] != _READY]
        self._sync()
        return np.unique(missing) if missing.size else missing

    def claim(self, chunks: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Return those of some chunks, which were not ready, that the caller must now read and `release`; not too many."""
        with self._lock:
            if self._file is None:
                claimed = chunks[self._state[chunks] == 0][:limit]
            else:
                free = (p for p in chunks.tolist() if p not in self._busy and self._take(self._file, p))
                claimed = np.array(list(itertools.islice(free, limit)), np.int64)
                self._sync()
                ready = self._state[claimed] == _READY  # since the caller looked
                for chunk in claimed[ready].tolist():
                    self._give(self._file, chunk)
                claimed = claimed[~ready]
                self._busy.update(claimed.tolist())
            self._state[claimed] = self._index + 1
        return claimed

    def release(self, chunks: NDArray[np.int64], *, ready: bool) -> None:
        """End claims: the chunks are ready, or free again."""
        self._sync()
        with self._lock:
            self._state[chunks] = _READY if ready else 0
            if self._file is not None:
                self._sync()
                for chunk in chunks.tolist():
                    self._give(self._file, chunk)
                self._busy.difference_update(chunks.tolist())

    def wait(self, chunks: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Wait for chunks that others read. Return those that the caller must read after all, as from `claim`.

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
    """Rows of a source in memory; what is missing is read, by threads and processes that share the claims.

    Args:
        source: whose rows.
        memory: where they are kept.
        chunks: what is read as a whole.
        claims: who reads what.
        counters: where to count: rows, chunks (chunk_reads) and seconds of reading, chunks waited for, and how long.
        text: how much lies where.
        provide: called with the bytes that are about to be written; raises where the system has no room for them.
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
        self._reading = threading.Lock()  # a dataset is read by one thread at a time

    def take(self, numbers: NDArray[np.int64]) -> Any:
        """Return copies of rows, stacked; read what is not there yet.

        Raises:
            CollectiveTimeoutError: another rank reads a chunk of them, and does not come to its end.
            ClosedError: the strategy was closed.
        """
        memory = self._memory  # held: it is not freed meanwhile
        if memory is None:
            raise ClosedError("cache: the strategy that kept the rows was closed")
        missing = self._claims.missing(self._chunks.numbers(numbers))
        if missing.size:
            self._fill(memory, missing)
        return nest.pack_like(self._source.row_spec, memory.take(numbers, self._buffers))

    def _fill(self, memory: RowMemory, missing: NDArray[np.int64]) -> None:
        """Read what no other reads, a little at a time so that others find some too; then wait for them.

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
        """Read the chunks that were claimed, and end the claims."""
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
        """Say how much lies where."""
        return self._text

    def close(self) -> None:
        """Free the memory; threads that are copying rows hold it until they are done. Collective with the group."""
        self._memory = None
        self._claims.close()

    def leave(self) -> None:
        """Nothing: the system takes the memory."""

    abandon = leave


CHUNK_BYTES = 256 << 10  # read as a whole where the source has no chunks of its own


def node_memory(source: ParentRows, group: ProcessGroup, counters: StageStats) -> FilledMemory:
    """Make the memory of this node, and of every other one. Collective.

    Raises:
        SharedMemoryError: on every rank, where /dev/shm of any node is too small.
        MemoryError: on every rank, where any node has too little memory.
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
    """What makes the system find memory for bytes of a block's first segment, before they are written."""

    def provide(low: int, high: int) -> None:
        if not block.populate(0, low, high):
            free = shared_memory.free_space() or 0
            raise shared_memory.out_of_memory(block.what, rank, f"{binary_size(free)} are free")

    return provide


def agree_memory(group: ProcessGroup, needed: int, what: str) -> None:
    """Check that every node has the memory that its ranks need together. Collective, inside `collective()`.

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
    """Open one file without a name in all ranks of the node. Collective, inside `collective()`."""
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
