"""Memory layout of a server: the words and slots of its workers, and its variables; the assignment of variables to servers.

Pure arithmetic, with the same result on every rank.

The mailbox of a server, in bytes:

| what | written by | words |
|---|---|---|
| a line for each worker | that worker | announced, posted, left, clock, signed |
| a line for each worker | the server | taken, applied |
| slots for each worker | that worker | header and payload of one fragment of a message |

A line is 64 bytes, so that no two writers share a cache line. A slab holds variables: a line with the version word and those
of `atomic_reads.py`, then the bytes of the variable. A large one that workers of the same node may read in place has a
word for each of them before that line, and after it further buffers like the first, and one for the gradient of each worker.

Also the memory of the servers, one segment each, the windows through which workers access it, and the staging of large pushes.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from ..base.errors import explain
from ..comm.arrays import check_movable
from ..comm.process_group import ProcessGroup
from ..comm.window import RemoteWindow, SharedWindow, Window, words_of

__all__ = [
    "HALVES",
    "LARGEST_AREA",
    "LINE",
    "PLACEMENTS",
    "Address",
    "Balanced",
    "MailboxLayout",
    "RoundRobin",
    "ServerAssignment",
    "ServerMemory",
    "SharedMemory",
    "Staging",
    "VariableSpec",
    "aligned",
    "area_bytes",
]


LINE = 64
_ANNOUNCED, _POSTED, _LEFT, _CLOCK, _SIGNED = 0, 8, 16, 24, 32
_TAKEN, _APPLIED = 0, 8


def aligned(nbytes: int) -> int:
    """Return a size rounded up to whole lines.

    Example:
        >>> aligned(65)
        128
    """
    return -(-nbytes // LINE) * LINE


@final
@dataclass(frozen=True)
class VariableSpec:
    """The specification of a variable on a server.

    Args:
        name: for errors.
        shape: its shape.
        dtype: any that can be moved as bytes (`comm.arrays`).
        server: the number of its server, from 0.

    Raises:
        TypeError: the dtype cannot be moved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    server: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        check_movable(self.dtype, "VariableSpec", "dtype")

    @functools.cached_property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def row_bytes(self) -> int:
        """The size in bytes of one row, an entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@final
@dataclass(frozen=True)
class Address:
    """The address of a variable.

    Attributes:
        index: its number, the same on every rank.
        spec: its specification.
        slab: the number of the slab.
        offset: of its bytes in its server's segment of the slab.
        near: the workers that may hold buffers of the variable, in ascending order.
    """

    index: int
    spec: VariableSpec
    slab: int
    offset: int
    near: tuple[int, ...] = ()

    @classmethod
    def after(cls, start: int, index: int, spec: VariableSpec, slab: int, near: tuple[int, ...] = ()) -> Address:
        """Return the address of a variable whose memory starts at an offset."""
        return cls(index, spec, slab, start + aligned(8 * len(near)) + LINE, near)

    @property
    def start(self) -> int:
        """The first byte of the variable's memory."""
        return self.version - aligned(8 * len(self.near))

    @functools.cached_property
    def version(self) -> int:
        """Offset of the version word."""
        return self.offset - LINE

    @property
    def current(self) -> int:
        """Offset of the word with the buffer of the newest version."""
        return self.version + 8

    @property
    def may_hold(self) -> int:
        """Offset of the word that allows workers to hold buffers."""
        return self.version + 16

    def held(self, worker: int) -> int:
        """Return the offset of a near worker's word, which has 1 + the number of its held buffer."""
        return self.start + 8 * self.near.index(worker)

    @property
    def buffers(self) -> int:
        """The number of buffers: the current one, one for each worker to hold, and one for the next version."""
        return len(self.near) + 2 if self.near else 1

    def buffer(self, number: int) -> int:
        """Return the first byte of a buffer; the variable starts in buffer 0."""
        return self.offset + number * aligned(max(self.spec.nbytes, 1))

    def gradient(self, worker: int) -> int:
        """Return the first byte of a near worker's memory for its gradient."""
        return self.buffer(self.buffers + self.near.index(worker))

    @property
    def end(self) -> int:
        """The first byte after the variable's memory."""
        return self.buffer(self.buffers + len(self.near))


@final
@dataclass(frozen=True)
class MailboxLayout:
    """The mailbox of each server, the same for all: offsets in bytes.

    Args:
        workers: their number.
        slots: fragments that a worker may post before the server takes one.
        chunk_bytes: the largest payload of a fragment.
    """

    workers: int
    slots: int
    chunk_bytes: int

    def announced(self, worker: int) -> int:
        """Return the word for a reader's announcement: the variable, and a number."""
        return worker * LINE + _ANNOUNCED

    def posted(self, worker: int) -> int:
        """Return the word for the number of posted fragments."""
        return worker * LINE + _POSTED

    def left(self, worker: int) -> int:
        """Return the word for the number of passes left."""
        return worker * LINE + _LEFT

    def clock(self, worker: int) -> int:
        """Return the word for the number of finished steps."""
        return worker * LINE + _CLOCK

    def signed(self, worker: int) -> int:
        """Return the word for the number of pushes at the last sign-off."""
        return worker * LINE + _SIGNED

    def taken(self, worker: int) -> int:
        """Return the word for the number of fragments that the server has taken."""
        return (self.workers + worker) * LINE + _TAKEN

    def applied(self, worker: int) -> int:
        """Return the word for the number of the last applied push."""
        return (self.workers + worker) * LINE + _APPLIED

    def slot(self, worker: int, fragment: int) -> int:
        """Return the header of a fragment; its payload is one line further."""
        return 2 * self.workers * LINE + (worker * self.slots + fragment % self.slots) * self._slot_bytes

    @property
    def words_bytes(self) -> int:
        """The size of the mailbox without slots."""
        return 2 * self.workers * LINE

    @property
    def nbytes(self) -> int:
        """The size of the whole mailbox."""
        return self.words_bytes + self.workers * self.slots * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        return LINE + aligned(self.chunk_bytes)


class ServerAssignment(ABC):
    """The server of each new variable, or shard of one. The same calls give the same servers on every rank.

    Args:
        num_servers: the number of servers.

    Raises:
        ValueError: num_servers < 1.

    Attributes:
        nbytes: the bytes on each server so far.
    """

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise ValueError(explain(type(self).__name__, "num_servers", expected=">= 1", got=num_servers))
        self.nbytes = [0] * num_servers

    def __call__(self, shape: Sequence[int], dtype: Any, server: int | None = None) -> int:
        """Return the server of the next variable. Call it on every rank.

        Args:
            shape, dtype: of the variable.
            server: a fixed server; it takes no other variable's turn.
        """
        server = self._next() if server is None else server
        self.nbytes[server] += math.prod(shape) * np.dtype(dtype).itemsize
        return server

    @abstractmethod
    def _next(self) -> int:
        """Return the server of the next variable without a fixed one."""


@final
class RoundRobin(ServerAssignment):
    """One server after the other, independent of sizes (TF: ParameterServerStrategy's assignment).

    Example:
        >>> assign = RoundRobin(2)
        >>> [assign((size,), "int8") for size in (100, 1, 100, 1)], assign.nbytes
        ([0, 1, 0, 1], [200, 2])
    """

    def __init__(self, num_servers: int) -> None:
        super().__init__(num_servers)
        self._placed = 0

    def _next(self) -> int:
        server = self._placed % len(self.nbytes)
        self._placed += 1
        return server


@final
class Balanced(ServerAssignment):
    """The server with the fewest bytes so far; of equal ones the first.

    Example:
        >>> assign = Balanced(2)
        >>> [assign((size,), "int8") for size in (100, 1, 100, 1)], assign.nbytes
        ([0, 1, 1, 0], [101, 101])
    """

    def _next(self) -> int:
        return min(range(len(self.nbytes)), key=lambda server: self.nbytes[server])


PLACEMENTS: dict[str, type[ServerAssignment]] = {"round_robin": RoundRobin, "bytes": Balanced}


@final
class ServerMemory:
    """A segment of bytes of each server. Collective over the group.

    Args:
        group: all ranks.
        comm: a communicator of them, for windows.
        servers: the ranks of the servers.
        nbytes: the size of each server's segment.
        shared: whether any worker loads and stores.
        remote: whether any worker uses one-sided calls.
        what: its description in errors.
        places: see `SharedWindow`.

    Raises:
        SharedMemoryError: on every rank: there is no room on some node.

    Attributes:
        own: this rank's segment; empty on a worker.
        words: the same as words.
        sync: makes this rank's stores visible, and sees others' stores; call it between the two.
        shared, remote: the windows; None if not needed.
    """

    def __init__(
        self,
        group: ProcessGroup,
        comm: Any,
        servers: Sequence[int],
        nbytes: Sequence[int],
        shared: bool,
        remote: bool,
        what: str,
        places: Sequence[int] | None = None,
    ) -> None:
        self._group, self._what, self._kept = group, what, False
        topology = group.topology
        sizes = dict(zip(servers, nbytes, strict=True))
        mine = sizes.get(topology.rank, 0)
        self.shared: SharedWindow | None = None
        self.remote: RemoteWindow | None = None
        if shared:
            on_node = topology.ranks_of_node(topology.node_index)
            self.shared = SharedWindow(topology.intra, topology.comm, [sizes.get(r, 0) for r in on_node], what, places)
        if remote and self.shared is not None:
            self.remote = RemoteWindow.over(comm, self.shared.own, what)
        elif remote:
            self.remote = RemoteWindow.allocate(comm, mine, what)
        window = self.shared or self.remote
        self.own = np.zeros(mine, np.uint8) if window is None else window.own
        self.words = words_of(self.own)
        syncs = [window.sync for window in (self.shared, self.remote) if window is not None]
        self.sync: Callable[[], object] = syncs[0] if len(syncs) == 1 else lambda: [sync() for sync in syncs]

    def window(self, name: str, server_rank: int) -> tuple[Window, int]:
        """Return the window of a transport, and the rank that a server has in it."""
        if name == "shared_window" and self.shared is not None:
            return self.shared, self._group.topology.ranks_of_node(self._group.topology.node_index).index(server_rank)
        if name == "one_sided" and self.remote is not None:
            return self.remote, server_rank
        raise LookupError(f"there is no window for {name}")

    def populate(self, *ranges: tuple[int, int]) -> None:
        """Allocate the pages of ranges of each server's own segment; they differ. Collective.

        Raises:
            SharedMemoryError: on every rank: there is no memory.
        """
        self._group.node.agree_populated(all(self.find(low, high) for low, high in ranges), self._what)

    def find(self, low: int, high: int) -> bool:
        """Allocate the pages of bytes [low, high) of this rank's segment; return False if there is no memory."""
        window = self.shared or self.remote
        return window is None or window.populate(low, high)

    def keep(self) -> None:
        """Leave the memory to the end of the process: a rank that died cannot take part in freeing it. Local."""
        self._kept = True

    def close(self) -> None:
        """Free the memory; if a view of it is left, it is freed at the end of the process. Collective."""
        self.words.release()
        self.own = np.empty(0, np.uint8)
        for window in (self.remote, self.shared):
            if window is not None and not self._kept:
                window.close()
        self.remote = self.shared = None
        self.sync = lambda: None


HALVES = 2  # a worker writes one while the server applies the other
LARGEST_AREA = 64 << 20  # bytes; larger pushes are sent in fragments


@final
@dataclass(frozen=True)
class Staging:
    """Two areas for each worker on each server.

    Attributes:
        areas: for each server the bytes of one area.
        memory: the servers' segments.
    """

    areas: Sequence[int]
    memory: ServerMemory

    def offset(self, server: int, worker: int, half: int) -> int:
        """Return the offset of an area in its server's segment."""
        return (HALVES * worker + half) * self.areas[server]


def area_bytes(largest: int, now: int, chunk_bytes: int) -> int:
    """Return the best size of a server's areas.

    Args:
        largest: bytes of the largest of the new variables.
        now: bytes of an area so far.
        chunk_bytes: the payload that fits a fragment.

    Example:
        >>> [area_bytes(largest, 3000, 1024) for largest in (500, 3000, 3001, 9000, 1 << 40)]
        [3000, 3000, 6016, 9024, 3000]
    """
    if largest <= max(now, chunk_bytes) or largest > LARGEST_AREA:
        return now
    return aligned(max(largest, min(2 * now, LARGEST_AREA)))


@final
@dataclass(frozen=True)
class SharedMemory:
    """All memory of the servers that workers access, and the addresses in it. It grows with the variables.

    Attributes:
        layout: of the mailboxes.
        mailbox: one for each server.
        addresses: of the variables, by number.
        slabs: their memory.
        stagings: of large pushes.
    """

    layout: MailboxLayout
    mailbox: ServerMemory
    addresses: list[Address] = field(default_factory=list)
    slabs: list[ServerMemory] = field(default_factory=list)
    stagings: list[Staging] = field(default_factory=list)
