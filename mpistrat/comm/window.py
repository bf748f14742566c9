"""RMA windows: memory of some ranks that other ranks read and write without their participation (one-sided).

A window is locked for all ranks, shared, from its creation to `close()`: no call takes a lock, so no lock is lost with a dead
rank. Each call is complete, at the target too, when it returns. The ranks of one node access a `SharedWindow` by load and store;
all ranks of a communicator access a `RemoteWindow` by Get, Put and Accumulate. A word is a signed 64-bit integer at a byte offset
divisible by 8.

Single writer: memory that a rank stores into without these calls (`own`, `words`) must have no other writer, and `fetch_and_add`
must not be used on such memory: a store concurrent with an atomic operation loses updates. Atomic operations of two windows over
the same memory are not atomic with each other: use one of them for these.
"""

from __future__ import annotations

import gc
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base import loops
from ..base.agree import as_told, gather_text, together
from ..base.errors import SharedMemoryError
from ..cluster.forks import ParentsOnly, is_child, refuse_in_children
from . import shared_memory

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["WORD", "Fence", "RemoteWindow", "SharedWindow", "Window", "has_asynchronous_progress"]

WORD = 8  # bytes
CHUNK = 1 << 30  # bytes in one MPI call: Open MPI rejects counts of 2^31
ROWS = 4096  # rows in one MPI datatype
_MARGIN = 1 << 16  # bytes that MPI itself needs for each segment, at most
_LOOKS = 20  # checks in a short wait for a word
_ABSENCE = 0.2  # seconds for which ranks do not call MPI
_READS = (0.05, 0.08, 0.11)  # seconds at which one rank reads; repeated, because a target may start to sleep late
_LIMIT = 0.02  # the most seconds of a read by the network alone


class Window(ABC):
    """Memory of some ranks that other ranks read and write. Use one from one thread at a time.

    Attributes:
        own: this rank's segment, bytes; zeros at first. A view of it stays valid memory after `close()`.
        words: the same memory as words.
    """

    def __init__(self, window: Any, segments: list[np.ndarray], own: int, comm: Any) -> None:
        """Open the epoch. Called by the subclasses; collective."""
        from mpi4py import MPI

        self._segments, self._own_index, self._comm = segments, own, comm
        self._window = window
        refuse_in_children(self)
        self._sum, self._replace = MPI.SUM, MPI.REPLACE
        self.own = segments[own]
        self.words = words_of(self.own)
        self._operand, self._result = np.zeros(1, np.int64), np.zeros(1, np.int64)
        window.Lock_all(MPI.MODE_NOCHECK)
        self.sync = window.Sync  # between stores of this rank and loads of others, and vice versa
        self.sync()
        comm.Barrier()  # no rank writes into memory that another has yet to clear
        self.sync()

    def refuse_in_child(self) -> None:
        """See `cluster.forks`. Loads and stores still work; the callers refuse them."""
        self._window = ParentsOnly("a window")

    @abstractmethod
    def get(self, rank: int, offset: int, out: np.ndarray) -> None:
        """Copy bytes of a rank's segment into `out`, flat and contiguous bytes."""

    @abstractmethod
    def get_rows(self, rank: int, offset: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows of a table, whose row 0 is at a byte offset in a rank's segment, into `out`.

        Args:
            rank, offset: of the table.
            rows: int64 numbers of rows, in any order, repeated or not.
            out: contiguous bytes of shape (number of rows, bytes of a row).
        """

    @abstractmethod
    def put(self, rank: int, parts: Iterable[tuple[int, np.ndarray]]) -> None:
        """Copy flat, contiguous bytes to offsets of a rank's segment."""

    @abstractmethod
    def get_word(self, rank: int, offset: int) -> int:
        """Return a word of a rank's segment."""

    @abstractmethod
    def put_word(self, rank: int, offset: int, value: int) -> None:
        """Write a word of a rank's segment, whole."""

    def publish(self, rank: int, parts: list[tuple[int, np.ndarray]], word: int, value: int) -> None:
        """Execute `put`, then write a word at an offset to signal it."""
        self.put(rank, parts)
        self.put_word(rank, word, value)

    def await_word(self, rank: int, offset: int, least: int) -> bool:
        """Wait briefly, yielding to other processes, until a word is at least `least`; return True if it is."""
        for _ in range(_LOOKS):
            if self.get_word(rank, offset) >= least:
                return True
            os.sched_yield()
        return False

    def fetch_and_add(self, rank: int, offset: int, value: int) -> int:
        """Add to a word of a rank's segment, atomically, and return its old value."""
        self._operand[0] = value
        self._window.Fetch_and_op(self._operand, self._result, rank, offset, self._sum)
        self._window.Flush(rank)
        return int(self._result[0])

    def populate(self, low: int, high: int, index: int | None = None) -> bool:
        """Make the system allocate memory for bytes [low, high) of a segment; return False if it cannot.

        The segment is this rank's own, or in a `SharedWindow` that of rank `index`.
        """
        return shared_memory.populate(self._segments[self._own_index if index is None else index], low, high)

    def close(self) -> None:
        """Free the memory, or leave it to the end of the process if a view of it lives on any rank. Collective.

        Later calls do nothing. Only this call frees a window: there is no finaliser, and the program's end does not.
        """
        if self.closed or is_child():
            return
        window, self._window = self._window, None
        self.words.release()
        self.words = memoryview(b"").cast("q")
        self.own = np.empty(0, np.uint8)
        self.sync = _nothing
        self._forget()
        window.Unlock_all()
        roots = [weakref.ref(segment) for segment in self._segments]
        self._segments = []

        def alive() -> np.ndarray:
            return np.array([any(root() is not None for root in roots)], np.int32)

        if alive()[0]:
            gc.collect()  # views in reference cycles, such as tracebacks; slow with a large library loaded
        anywhere = np.empty(1, np.int32)
        self._comm.Allreduce(alive(), anywhere)
        if not anywhere[0]:
            window.Free()

    @property
    def closed(self) -> bool:
        """True after `close()`."""
        return not self._segments

    @abstractmethod
    def _forget(self) -> None:
        """Drop all views of the memory."""


@final
class SharedWindow(Window):
    """A window over memory that the ranks of a node, `comm`, share: they load and store.

    Collective over `world`: every node creates a window, with a segment of `nbytes[i]` bytes for rank i of the node.

    Args:
        places: the number of each rank's segment; default its rank. Others are empty.

    Raises:
        SharedMemoryError: on every rank, if the shared memory of any node is too small.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        world: MPI.Intracomm,
        nbytes: Sequence[int],
        what: str,
        places: Sequence[int] | None = None,
    ) -> None:
        shared_memory.check_space(world, comm.rank == 0, sum(nbytes) + _MARGIN * comm.size, what)
        with together(partial(gather_text, world), as_told):
            window = _allocate_shared(comm, world, nbytes[comm.rank], what)
        places = range(comm.size) if places is None else places
        self.segments = [np.empty(0, np.uint8) for _ in range(max(places) + 1)]
        for rank, size in enumerate(nbytes):
            if size:
                memory: Any = window.Shared_query(rank)[0]
                self.segments[places[rank]] = np.frombuffer(memory, np.uint8, size)
        if comm.size == 1:
            self.segments[places[0]][:] = 0  # then it is memory of MPI with any content, not new pages
        self._words = [words_of(segment) for segment in self.segments]
        super().__init__(window, list(self.segments), places[comm.rank], comm)

    def get(self, rank: int, offset: int, out: np.ndarray) -> None:
        np.copyto(out, self.segments[rank][offset : offset + out.nbytes])

    def get_rows(self, rank: int, offset: int, rows: np.ndarray, out: np.ndarray) -> None:
        row = out.shape[1]
        if row == 0:
            return
        segment = self.segments[rank]
        table = segment[offset : offset + (segment.nbytes - offset) // row * row].reshape(-1, row)
        if not loops.gather(out, table, rows):
            np.take(table, rows, axis=0, out=out, mode="clip")  # "raise" would make a copy

    def put(self, rank: int, parts: Iterable[tuple[int, np.ndarray]]) -> None:
        segment = self.segments[rank]
        for offset, data in parts:
            segment[offset : offset + data.nbytes] = data
        self.sync()

    def get_word(self, rank: int, offset: int) -> int:
        return self._words[rank][offset >> 3]

    def put_word(self, rank: int, offset: int, value: int) -> None:
        self._words[rank][offset >> 3] = value
        self.sync()

    def publish(self, rank: int, parts: list[tuple[int, np.ndarray]], word: int, value: int) -> None:
        if not loops.publish(self.segments[rank], parts, word, value):
            super().publish(rank, parts, word, value)

    def await_word(self, rank: int, offset: int, least: int) -> bool:
        return loops.await_word(self.segments[rank], offset, least) or super().await_word(rank, offset, least)

    def _forget(self) -> None:
        for words in self._words:
            words.release()
        self._words, self.segments = [], []


@final
class RemoteWindow(Window):
    """A window that all ranks of a communicator access by one-sided MPI calls. Create it with `allocate` or `over`."""

    def __init__(self, window: Any, own: np.ndarray, comm: Any) -> None:
        """Called by `allocate` and `over`."""
        from mpi4py import MPI

        self._byte, self._int64 = MPI.BYTE, MPI.INT64_T
        self._datatypes: dict[int, list[Any]] = {}  # by rank, of pending calls
        super().__init__(window, [own], 0, comm)

    @classmethod
    def allocate(cls, comm: MPI.Intracomm, nbytes: int, what: str) -> RemoteWindow:
        """Create a window with a new segment of `nbytes` bytes of this rank, 0 for none. Collective over `comm`.

        Raises:
            SharedMemoryError: on every rank, if there is no room: on one node MPI allocates it in shared memory.
        """
        from mpi4py import MPI

        shared_memory.check_space(comm, True, nbytes, what)
        window = MPI.Win.Allocate(nbytes, 1, comm=comm)
        memory: Any = window
        own = np.frombuffer(memory, np.uint8, nbytes) if nbytes else np.empty(0, np.uint8)
        own[:] = 0
        return cls(window, own, comm)

    @classmethod
    def over(cls, comm: MPI.Intracomm, own: np.ndarray, what: str) -> RemoteWindow:
        """Create a window over existing memory of the ranks, bytes, possibly none. Collective over `comm`.

        Close it before that memory is freed.
        """
        from mpi4py import MPI

        made = MPI.Win.Create(own if own.nbytes else None, 1, comm=comm)
        return cls(made, own[:], comm)

    def get(self, rank: int, offset: int, out: np.ndarray) -> None:
        for low in range(0, out.nbytes, CHUNK):
            self._window.Get([out[low : low + CHUNK], self._byte], rank, offset + low)
        self._window.Flush(rank)

    def get_rows(self, rank: int, offset: int, rows: np.ndarray, out: np.ndarray) -> None:
        self.start_get_rows(rank, offset, rows, out)
        self.flush(rank)

    def start_get_rows(self, rank: int, offset: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Start a `get_rows`; `flush` completes it."""
        row = out.shape[1]
        for low in range(0, rows.size if row else 0, ROWS):
            some, target = rows[low : low + ROWS], [out[low : low + ROWS], self._byte]
            first = int(some[0])
            if int(some[-1]) - first == some.size - 1 and (np.diff(some) == 1).all():
                self._window.Get(target, rank, offset + first * row)
                continue
            datatype = self._byte.Create_hindexed_block(row, (some * row).tolist()).Commit()
            self._datatypes.setdefault(rank, []).append(datatype)
            self._window.Get(target, rank, [offset, 1, datatype])

    def flush(self, rank: int) -> None:
        """Wait for the pending calls of a rank."""
        self._window.Flush(rank)
        for datatype in self._datatypes.pop(rank, ()):
            datatype.Free()

    def put(self, rank: int, parts: Iterable[tuple[int, np.ndarray]]) -> None:
        for offset, data in parts:
            for low in range(0, data.nbytes, CHUNK):
                self._window.Put([data[low : low + CHUNK], self._byte], rank, offset + low)
        self._window.Flush(rank)

    def get_word(self, rank: int, offset: int) -> int:
        # No Fetch_and_op: a word that its owner stores into must not be used in an atomic operation. All known hardware
        # copies eight aligned bytes atomically.
        self._window.Get([self._result, self._byte], rank, offset)
        self._window.Flush(rank)
        return int(self._result[0])

    def put_word(self, rank: int, offset: int, value: int) -> None:
        self._operand[0] = value
        target = [offset, 1, self._int64]
        self._window.Accumulate([self._operand, self._int64], rank, target, self._replace)
        self._window.Flush(rank)

    def _forget(self) -> None:
        """Do nothing: there are no other views."""


@final
class Fence:
    """An ordering of loads and stores of shared memory before and after it: MPI's, of a window of this process alone.

    Attributes:
        sync: call it; any thread.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._window = MPI.Win.Allocate_shared(WORD, 1, comm=MPI.COMM_SELF)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.sync: Callable[[], None] = self._window.Sync

    def close(self) -> None:
        """Free the window. Local."""
        self.sync = _nothing
        self._window.Unlock_all()
        self._window.Free()


def has_asynchronous_progress(
    comm: Any, reader: int, read: Callable[[], object], quiet: AbstractContextManager[Any]
) -> bool:
    """Return True if the network reads memory without its owner's help: `read` on one rank while all others sleep. Collective.

    All of them stay outside of MPI, not only the rank that is read from, because others on its node might do its work; `quiet`
    keeps other threads from MPI meanwhile. A read that ends before they wake was the network's work.
    """
    found = np.ones(1, np.int32)
    comm.Barrier()
    if comm.rank == reader:
        start = monotonic()
        for at in _READS:
            sleep(max(0.0, start + at - monotonic()))
            read()
            found[0] &= monotonic() - start < at + _LIMIT
    else:
        with quiet:
            sleep(_ABSENCE)
    comm.Bcast(found, reader)
    return bool(found[0])


def _allocate_shared(comm: Any, world: Any, nbytes: int, what: str) -> Any:
    from mpi4py import MPI

    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    try:
        return MPI.Win.Allocate_shared(nbytes, 1, info=info, comm=comm)
    except MPI.Exception as error:
        text = " ".join(f"{error}".split())[:300] or "an error without a text"
        raise SharedMemoryError(
            f"MPI cannot share memory for {what} on the node of rank {world.rank}: {text}. {shared_memory.remedy(nbytes)}"
        ) from None
    finally:
        info.Free()


def words_of(segment: np.ndarray) -> memoryview:
    """Return bytes as words, without a remainder."""
    memory: Any = segment[: segment.nbytes // WORD * WORD] if segment.nbytes else b""
    return memoryview(memory).cast("q")


def _nothing() -> None:
    pass
