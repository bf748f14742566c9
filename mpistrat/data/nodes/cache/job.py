"""A whole dataset in the memory of a job: each node stores a share, and fetches other rows from other nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from ....base import nest
from ....base.agree import Failure, together
from ....base.errors import ClosedError, ShardError, explain
from ....base.text import decimal_size
from ....base.waiting import wait_until
from ....comm.window import has_asynchronous_progress
from ...buffers import RowBuffers
from ...stats import StageStats
from .fill import agree_memory, provider
from .rows import READ_BYTES, ParentRows, RowChunks, RowMemory, row_backoff
from .transport import Reply, RowGets, RowMessages

if TYPE_CHECKING:
    from ....comm.process_group import ProcessGroup

__all__ = ["JobMemory", "RowPartition", "job_memory"]


class RowTransport(Protocol):
    """The transfer of rows from the memory of other nodes."""

    name: str

    def start(self, node: int, rows: NDArray[np.int64], places: NDArray[np.int64]) -> list[Reply]:
        """Request rows of a node's memory, for given indices of a batch."""

    def finish(self, replies: list[Reply]) -> list[Reply]:
        """Wait for the rows."""

    def close(self) -> None:
        """Free resources. Collective."""

    def leave(self) -> Callable[[], None] | None:
        """Announce that this rank needs no more rows; return a function that waits until no rank does."""

    def abandon(self) -> None:
        """End the thread, if any. Local."""


@final
@dataclass(frozen=True)
class RowPartition:
    """The rows that each node stores, and that each rank reads from disk.

    Attributes:
        ranks: the ranks of each node (each memory domain), in its order.
        borders: the first row that each rank reads, in the order of `ranks`; then the number of rows.
    """

    ranks: Sequence[Sequence[int]]
    borders: Sequence[int]

    @classmethod
    def of(cls, chunks: RowChunks, ranks: Sequence[Sequence[int]]) -> RowPartition:
        """Return whole chunks for each rank, as equal as possible.

        Example:
            >>> RowPartition.of(RowChunks(10, 2), [[0, 1], [2]]).borders
            [0, 2, 6, 10]
        """
        size = sum(map(len, ranks))
        return cls(ranks, [chunks.border(chunks.rows * place // size) for place in range(size)] + [chunks.rows])

    def of_node(self, node: int) -> tuple[int, int]:
        first = sum(map(len, self.ranks[:node]))
        return self.borders[first], self.borders[first + len(self.ranks[node])]

    def of_rank(self, rank: int) -> tuple[int, int]:
        place = [each for ranks in self.ranks for each in ranks].index(rank)
        return self.borders[place], self.borders[place + 1]


def job_memory(source: ParentRows, group: ProcessGroup, transport: str, counters: StageStats) -> JobMemory:
    """Allocate the memory of all nodes and read all rows into it. Collective.

    Raises:
        SharedMemoryError, MemoryError: on every rank, if a node has too little.
        ShardError, RuntimeError: on every rank, if reading failed on any.
        CollectiveMismatchError: the ranks have different rows.
    """
    chunks = RowChunks.of(source, 1)
    parts = RowPartition.of(chunks, _domains(group))
    own_node = next(node for node, ranks in enumerate(parts.ranks) if group.topology.rank in ranks)
    low, high = parts.of_node(own_node)
    total = max(64, RowMemory.nbytes(source.row_spec, high - low))
    what = f'cache("job") of {source.count} rows'
    node = group.node
    with group.collective(
        "cache",
        "job",
        detail=f"{source.count} rows of {source.row_spec!r} in {chunks.count} chunks, transport {transport}",
    ):
        agree_memory(group, total if node.rank == 0 else 0, what)
        block = node.allocate([total if rank == 0 else 0 for rank in range(node.size)], what)
        rows = RowMemory(source.row_spec, high - low, block.segments[0])
    rank = group.topology.rank

    def exchange(text: str) -> list[str]:
        """Exchange texts. Collective."""
        with group.collective("cache", "job: everything read"):
            node.sync()
            texts = group.all_gather_text(text)
            node.sync()
            return texts

    with together(exchange, _could_not_read):
        _fill(source, chunks, rows, parts.of_rank(rank), low, provider(block, rank), counters)
    with group.collective("cache", "job: transport"):
        carrier = None
        if len(parts.ranks) > 1:
            carrier = _make_transport(group, parts, own_node, rows, block.segments[0], transport, counters)
    memory = JobMemory(source, parts, own_node, rows, carrier, counters)
    group.attach(memory)
    return memory


def _domains(group: ProcessGroup) -> list[list[int]]:
    """Return the ranks of each memory domain: of each node, or single ranks if memory is private."""
    topology = group.topology
    if group.num_nodes == topology.num_nodes:
        return [list(topology.ranks_of_node(node)) for node in range(topology.num_nodes)]
    return [[rank] for rank in range(topology.size)]


def _fill(
    source: ParentRows,
    chunks: RowChunks,
    memory: RowMemory,
    own: tuple[int, int],
    low: int,
    provide: Callable[[int, int], None],
    counters: StageStats,
) -> None:
    """Read this rank's rows into the node's memory, which starts at row `low`."""
    if own[0] == own[1]:
        return
    first, last = chunks.numbers(np.array([own[0], own[1] - 1])).tolist()
    for run in chunks.runs(np.arange(first, last + 1), max(1, READ_BYTES // source.row_bytes)):
        started = time.perf_counter()
        wanted = chunks.all_rows(run, source)
        for numbers, stacked in source.read(wanted):
            if not numbers.size:
                continue
            for start, stop in memory.ranges(numbers - low):
                provide(start, stop)
            memory.put(numbers - low, stacked)
        counters.add(rows=wanted.size, chunk_reads=chunks.reads(run), seconds=time.perf_counter() - started)


def _could_not_read(failures: Mapping[int, Failure]) -> Exception:
    rank, failure = next(iter(failures.items()))
    kind = ShardError if failure.kind == "ShardError" else RuntimeError
    return kind(f'cache("job"): rank {rank} could not read its share: {failure}')


def _make_transport(
    group: ProcessGroup,
    parts: RowPartition,
    own_node: int,
    memory: RowMemory,
    segment: NDArray[np.uint8],
    wanted: str,
    counters: StageStats,
) -> RowTransport:
    """Create the requested transport, or the one that suits the network. Collective, in `collective()`."""
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        remedy = "Let mpi4py start MPI, or ask for MPI_THREAD_MULTIPLE."
        got = "a lower one"
        raise RuntimeError(
            explain("Dataset.cache", 'cache("job")', expected="MPI_THREAD_MULTIPLE", got=got, remedy=remedy)
        )
    comm: Any = group.topology.comm

    def counted(nbytes: int) -> None:
        counters.add(bytes_received=nbytes)

    if wanted != "messages":
        lengths = [high - low for low, high in map(parts.of_node, range(len(parts.ranks)))]
        starts = [RowMemory.starts_of(memory.row_spec, length) for length in lengths]
        firsts = [ranks[0] for ranks in parts.ranks]
        shown = segment if group.topology.rank in firsts else segment[:0]
        gets = RowGets(comm.Dup(), shown, firsts, starts, memory.row_spec, counted)
        if wanted == "get" or _gets_progress(group, parts, gets):
            return gets
        gets.close()
    place = parts.ranks[own_node].index(group.topology.rank)
    holders = [ranks[place % len(ranks)] for ranks in parts.ranks]
    return RowMessages(comm.Dup(), memory, holders, group.environment.abort_after, counted)


def _gets_progress(group: ProcessGroup, parts: RowPartition, gets: RowGets) -> bool:
    """Return True if the first rank can get rows of the second node while all others are outside MPI. Collective."""
    comm, reader = group.topology.comm, parts.ranks[0][0]
    low, high = parts.of_node(1)
    if low == high:
        return False
    rows = np.unique([0, high - low - 1])  # two separate rows, as in a batch

    def read() -> None:
        gets.finish(gets.start(1, rows, rows))

    if comm.rank == reader:
        read()  # the first get sets up connections; the others are in MPI
    return has_asynchronous_progress(comm, reader, read, group.quiet())


@final
class JobMemory:
    """The rows of a job, of which this node stores a share. Created by `job_memory`.

    Args:
        parts: the rows of each node.
        own_node: the index of this node.
        memory: this node's rows.
        transport: fetches other nodes' rows; None for one node.
    """

    def __init__(
        self,
        source: ParentRows,
        parts: RowPartition,
        own_node: int,
        memory: RowMemory,
        transport: RowTransport | None,
        counters: StageStats,
    ) -> None:
        self._source, self._parts, self._own = source, parts, own_node
        self._lows = np.array([parts.of_node(node)[0] for node in range(len(parts.ranks))], np.int64)
        self._memory: RowMemory | None = memory
        self._transport = transport
        self._buffers = RowBuffers()
        self._counters = counters
        self._fetching = 0
        self._lock = threading.Lock()

    def take(self, numbers: NDArray[np.int64]) -> Any:
        """Return copies of rows, stacked.

        Raises:
            CollectiveTimeoutError, PeerExitError: another rank does not answer.
            ClosedError: the strategy was closed.
        """
        with self._lock:
            memory, transport = self._memory, self._transport  # keep references, so that they are not freed meanwhile
            if memory is None:
                raise ClosedError('cache("job"): the strategy with the rows was closed')
            self._fetching += 1
        try:
            if transport is None:
                return nest.pack_like(self._source.row_spec, memory.take(numbers, self._buffers))
            return self._take_parts(memory, transport, numbers)
        finally:
            with self._lock:
                self._fetching -= 1

    def _take_parts(self, memory: RowMemory, transport: RowTransport, numbers: NDArray[np.int64]) -> Any:
        nodes = np.searchsorted(self._lows, numbers, side="right") - 1
        out = [self._buffers.empty(i, (numbers.size, *a.shape[1:]), a.dtype) for i, a in enumerate(memory.arrays)]
        replies: list[Reply] = []
        mine: NDArray[np.int64] = np.empty(0, np.int64)
        for node in np.unique(nodes).tolist():
            places = np.flatnonzero(nodes == node)
            if node == self._own:
                mine = places
            else:
                replies += transport.start(node, numbers[places] - self._lows[node], places)
        if mine.size:
            own = numbers[mine] - self._lows[self._own]
            for array, whole in zip(memory.arrays, out, strict=True):
                whole[mine] = array[own]
        started = time.perf_counter()
        replies = transport.finish(replies)
        self._counters.add(wait_seconds=time.perf_counter() - started)
        for reply in replies:
            for array, whole in zip(reply.rows.arrays, out, strict=True):
                whole[reply.places] = array
        return nest.pack_like(self._source.row_spec, out)

    def describe(self) -> str:
        nbytes = RowMemory.nbytes(self._source.row_spec, self._source.count)
        where = f"{decimal_size(nbytes)} in the memory of {len(self._parts.borders) - 1} ranks"
        return where if self._transport is None else f"{where}, fetched between nodes by {self._transport.name}"

    def close(self) -> None:
        """Free the transport and release the memory. Collective with the group."""
        with self._lock:
            self._memory = None  # later calls raise
        wait_until(lambda: not self._fetching, backoff=row_backoff())
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def leave(self) -> Callable[[], None] | None:
        return None if self._transport is None else self._transport.leave()

    def abandon(self) -> None:
        """See `comm.process_group.Attachment`."""
        if self._transport is not None:
            self._transport.abandon()
