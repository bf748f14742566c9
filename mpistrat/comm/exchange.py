"""Exchanges of bytes between all ranks of a group: through a node's shared memory, or by MPI."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from .call import Call
from .node import SMALL, STAGING_BYTES, Node
from .process_group import ProcessGroup

__all__ = [
    "MessageExchange", "PartExchange", "SmallExchange", "all_gather_into", "all_to_all", "broadcast_into", "exchange",
    "gather_into", "gather_parts", "scatter_into", "staged",
]  # fmt: skip

_LINE = 64  # bytes; heads are padded to a multiple
_PIECE = 1 << 26  # bytes of a rank that MPI sends at a time
_STAGED = 1 << 16  # bytes; larger parts do not go through the node's memory but MPI, which copies them once, not twice
_PADDED = 1 << 16  # bytes of all ranks; above, parts of nearly equal lengths are padded
_LARGE = 1 << 30  # bytes in one all-to-all, whose counts and displacements must fit MPI's limits
_FARTHEST = (1 << 31) - 1  # bytes between the first and the last place that one call of MPI reaches


@final
class SmallExchange:
    """An exchange of some bytes of each rank of a node with all of them, in the barrier that compares the call.

    The bytes are in staging memory, valid until this rank's next barrier. The head comes first, of equal length on all ranks;
    then the data, whose form may differ between ranks.

    Args:
        node: the ranks.
        head: bytes of the head, a multiple of 8.

    Attributes:
        turn: the half of staging memory that the last `move` has filled, 0 or 1.
    """

    def __init__(self, node: Node, head: int = 0) -> None:
        self._node, self.turn = node, 0
        self._start = -(-head // _LINE) * _LINE
        self._heads = [half[:, :head] for half in node.halves] if head else []
        own: list[Any] = [half[node.rank, :head] for half in node.halves]
        self._own_heads = [memoryview(each) for each in own] if head else []

    def views(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return the data of all ranks as arrays of one form, (ranks, *shape), in each half."""
        end = self._start + math.prod(shape) * dtype.itemsize
        every = [half[:, self._start : end].view(dtype).reshape(self._node.size, *shape) for half in self._node.halves]
        return every[0], every[1]

    def place(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's memory for data of a form, in each half, for `move`."""
        even, odd = self.views(shape, dtype)
        own = self._node.rank
        return even[own, ...], odd[own, ...]

    def data(self, turn: int, rank: int, nbytes: int) -> np.ndarray:
        """Return the data of a rank in a half, flat bytes."""
        return self._node.halves[turn][rank, self._start : self._start + nbytes]

    def move(self, call: Call, place: tuple[np.ndarray, np.ndarray] | None, array: Any, head: bytes = b"") -> bytes:
        """Publish a head and an array (none without a `place`), and return the heads of all. Collective on the node.

        Raises:
            Exception: see `Node.barrier`.
        """
        node = self._node
        self.turn = turn = ~node.barriers & 1
        if place is not None:
            place[turn][...] = array
        if not head:
            node.barrier(call)
            return head
        self._own_heads[turn][:] = head
        node.barrier(call)
        return self._heads[turn].tobytes()


@final
class _Rooms:
    """The memory of a message: in each row a head, and room for data.

    Attributes:
        memory: uint8 array (rows, bytes).
        heads, data: its parts, uint8 arrays (rows, head) and (rows, room).
    """

    def __init__(self, rows: int, head: int, room: int) -> None:
        start = -(-head // _LINE) * _LINE
        self.memory = np.zeros((rows, start - (-room // _LINE) * _LINE), np.uint8)
        self.heads, self.data = self.memory[:, :head], self.memory[:, start : start + room]


@final
class MessageExchange:
    """An exchange of a head and some bytes of each rank with all of them in one MPI_Allgather, for ranks on several nodes.

    Data from `move` is valid until the next one. Each rank's data has the same room in the message.

    Args:
        group: the ranks.
        head: bytes of the head, a multiple of 8.
        form: shape and dtype of this rank's data; None for none.
    """

    def __init__(self, group: ProcessGroup, head: int, form: tuple[tuple[int, ...], np.dtype] | None) -> None:
        self._comm, self._size, self._room = group.topology.comm, group.topology.size, -1
        self._head, self._form = head, form
        self._nbytes = SMALL + 1 if form is None else math.prod(form[0]) * form[1].itemsize

    def _open(self, room: int) -> None:
        self._room, self._place = room, None
        self._sent, self._came = _Rooms(1, self._head, room), _Rooms(self._size, self._head, room)
        if self._form is not None and self._nbytes <= room:
            self._place = self._sent.data[0, : self._nbytes].view(self._form[1]).reshape(self._form[0])

    def data(self, rank: int, nbytes: int) -> np.ndarray:
        """Return the data of a rank, flat bytes."""
        return self._came.data[rank, :nbytes]

    def move(self, room: int, array: Any, head: bytes) -> bytes:
        """Send a head and an array that has room, and return the heads of all. Collective; `room` is equal on all ranks."""
        if room != self._room:
            self._open(room)
        if self._place is not None:
            self._place[...] = array
        if head:
            self._sent.heads[0] = np.frombuffer(head, np.uint8)
        self._comm.Allgather(self._sent.memory, self._came.memory)
        return self._came.heads.tobytes()


@final
class PartExchange:
    """An exchange of a head and some bytes of each rank for each rank in one MPI_Alltoall, for ranks on several nodes.

    The caller fills `heads` and `parts`, then calls `move`. What comes is valid until the next `move`.

    Args:
        group: the ranks.
        head: length of a head.

    Attributes:
        room: bytes of a part; -1 before `open`.
        heads: int64 array (ranks, head) of the heads to send.
        parts, came: uint8 arrays (ranks, room) of the parts to send, and of those from each rank.
    """

    def __init__(self, group: ProcessGroup, head: int = 0) -> None:
        self._comm, self._size, self._head = group.topology.comm, group.topology.size, 8 * head
        self.room = -1

    def open(self, room: int) -> None:
        """Make room for parts of some bytes, equal on all ranks."""
        self.room = room
        self._sent, self._came = _Rooms(self._size, self._head, room), _Rooms(self._size, self._head, room)
        self.heads, self.parts, self.came = self._sent.heads.view(np.int64), self._sent.data, self._came.data

    def move(self) -> bytes:
        """Send the heads and parts, and return the heads from all ranks. Collective."""
        if self._sent.memory.size:
            self._comm.Alltoall(self._sent.memory, self._came.memory)
        return self._came.heads.tobytes()


def all_gather_into(group: ProcessGroup, call: Call, own: np.ndarray, rooms: Sequence[np.ndarray]) -> None:
    """Write every rank's bytes into the caller's memory. Collective, inside `group.collective()`, with its call.

    On one node the first synchronization is a barrier of `call`, if there are any bytes.

    Args:
        group: the ranks.
        call: the current call.
        own: flat uint8 array with this rank's bytes.
        rooms: flat uint8 arrays, by rank, which receive them; of equal lengths on all ranks. None overlaps `own`.
    """
    largest = max(room.size for room in rooms)
    if group.num_nodes == 1:
        _stage_gather(group, call, own, rooms, largest)
        return
    for piece in _pieces(group, largest):
        places = [room[piece] for room in rooms]
        ends = np.cumsum([place.size for place in places])
        whole = np.empty(int(ends[-1]), np.uint8)
        mine = places[group.topology.rank].size
        whole[int(ends[group.topology.rank]) - mine :][:mine] = own[piece]
        gather_parts(group.topology.comm, whole, [place.size for place in places])
        for place, found in zip(places, np.split(whole, ends[:-1]), strict=True):
            place[:] = found


def broadcast_into(group: ProcessGroup, call: Call, flat: np.ndarray, root: int) -> None:
    """Overwrite flat bytes on every rank with the root's. Collective, inside `group.collective()`, with its call.

    On one node the first synchronization is a barrier of `call`, if there are any bytes.
    """
    if group.num_nodes > 1:
        group.broadcast(flat, root)
        return

    def write(buffer: np.ndarray, low: int, high: int) -> None:
        if group.topology.rank == root:
            buffer[: high - low] = flat[low:high]

    def read(buffer: np.ndarray, rank: int, low: int, high: int) -> None:
        if rank == root != group.topology.rank:
            flat[low:high] = buffer[: high - low]

    _stage(group, call, flat.size, STAGING_BYTES, write, read)


def gather_into(group: ProcessGroup, call: Call, own: np.ndarray, rooms: Sequence[np.ndarray], root: int) -> None:
    """Write every rank's bytes into the root's memory. Collective, inside `group.collective()`, with its call.

    Args:
        group, call: the ranks, and the current call.
        own: flat uint8 array with this rank's bytes, as many on every rank.
        rooms: on the root, flat uint8 arrays, by rank, which receive them.
        root: the rank that receives.
    """
    comm, rank = group.topology.comm, group.topology.rank
    if staged(group, own.size):
        _stage_gather(group, call, own, rooms if rank == root else (), own.size)
        return
    from mpi4py import MPI

    for piece in _pieces(group, own.size):
        if rank != root:
            comm.Gatherv([own[piece], MPI.BYTE], None, root)
            continue
        places = [room[piece] for room in rooms]
        places[rank][:] = own[piece]
        with _received(places) as memory:
            comm.Gatherv(MPI.IN_PLACE, [*memory, MPI.BYTE], root)


def scatter_into(group: ProcessGroup, call: Call, parts: Sequence[np.ndarray], own: np.ndarray, root: int) -> None:
    """Write one of the root's parts into each rank's memory. Collective, inside `group.collective()`, with its call.

    Args:
        group, call: the ranks, and the current call.
        parts: on the root, flat uint8 arrays, by rank.
        own: flat uint8 array that receives this rank's part, as many bytes on every rank.
        root: the rank that sends.
    """
    comm, rank, size = group.topology.comm, group.topology.rank, group.topology.size
    if staged(group, own.size):
        room = STAGING_BYTES // size // _LINE * _LINE

        def write(buffer: np.ndarray, low: int, high: int) -> None:
            for other, part in enumerate(parts if rank == root else ()):
                buffer[other * room :][: high - low] = part[low:high]

        def read(buffer: np.ndarray, other: int, low: int, high: int) -> None:
            if other == root:
                own[low:high] = buffer[rank * room :][: high - low]

        _stage(group, call, own.size, room, write, read)
        return
    from mpi4py import MPI

    for piece in _pieces(group, own.size):
        if rank != root:
            comm.Scatterv(None, [own[piece], MPI.BYTE], root)
            continue
        pieces = [part[piece] for part in parts]
        own[piece] = pieces[rank]
        comm.Scatterv([*(_in_place(pieces) or _joined(pieces)), MPI.BYTE], MPI.IN_PLACE, root)


def all_to_all(group: ProcessGroup, call: Call, parts: np.ndarray) -> np.ndarray:
    """Return every rank's part for this one, by rank. Collective, inside `group.collective()`, with its call.

    `parts[rank]` is sent to a rank; all have one shape.
    """
    size, found = group.topology.size, np.empty(parts.shape, parts.dtype)
    nbytes = parts.nbytes // size
    to, come = _bytes(parts).reshape(size, nbytes), _bytes(found).reshape(size, nbytes)
    exchange(group, call, list(to), list(come), nbytes)
    return found


def gather_parts(comm: Any, flat: np.ndarray, counts: Sequence[int]) -> None:
    """Fill a flat array with every rank's elements, in order; this rank's are there already. Collective over `comm`.

    Avoids MPI_Allgatherv for equal or nearly equal lengths: in MPICH 5.0.2 it takes 50 times as long as MPI_Allgather from 1 MB
    on, on one node.

    Args:
        comm: the ranks.
        flat: C-contiguous host array, of at most 2^30 bytes.
        counts: number of elements of each rank.
    """
    from mpi4py import MPI

    size, item, most = len(counts), flat.itemsize, max(counts)
    all_bytes = flat.view(np.uint8)
    ends = np.cumsum([count * item for count in counts]).tolist()
    low, high = ends[comm.rank] - counts[comm.rank] * item, ends[comm.rank]
    if min(counts) == most:
        comm.Allgather(MPI.IN_PLACE, [all_bytes, MPI.BYTE])
    elif all_bytes.size >= _PADDED and size * most * item <= 2 * all_bytes.size:
        rows = np.empty((size, most * item), np.uint8)
        rows[comm.rank, : high - low] = all_bytes[low:high]
        comm.Allgather(MPI.IN_PLACE, [rows, MPI.BYTE])
        for row, count, end in zip(rows, counts, ends, strict=True):
            all_bytes[end - count * item : end] = row[: count * item]
    else:
        places = [end - count * item for end, count in zip(ends, counts, strict=True)]
        comm.Allgatherv(MPI.IN_PLACE, [all_bytes, [count * item for count in counts], places, MPI.BYTE])


def exchange(
    group: ProcessGroup, call: Call, to: Sequence[np.ndarray], come: Sequence[np.ndarray], largest: int
) -> None:
    """Send each rank some bytes. Collective, inside `group.collective()`, with its call.

    Args:
        group, call: the ranks, and the current call.
        to: flat uint8 arrays, for each rank.
        come: flat uint8 arrays, filled with the bytes from each.
        largest: bytes of the longest on any rank, equal on all.
    """
    size, rank = group.topology.size, group.topology.rank
    if not staged(group, largest):
        _exchange_by_mpi(group, to, come, largest)
        return
    room = STAGING_BYTES // size // 64 * 64

    def write(buffer: np.ndarray, low: int, high: int) -> None:
        for other, part in enumerate(to):
            piece = part[low:high]
            if other != rank:
                buffer[other * room : other * room + piece.size] = piece

    def read(buffer: np.ndarray, other: int, low: int, high: int) -> None:
        piece = come[other][low:high]
        if other != rank:
            piece[:] = buffer[rank * room : rank * room + piece.size]

    come[rank][:] = to[rank]
    _stage(group, call, largest, room, write, read)


def staged(group: ProcessGroup, largest: int) -> bool:
    """Return True if `exchange` sends messages of up to `largest` bytes through the node's memory, False if by MPI.

    If ranks share cores, one that waits in MPI blocks the core of another that has not arrived.
    """
    topology = group.topology
    return group.num_nodes == 1 and (largest <= _STAGED or not 1 < topology.size <= topology.node_cores)


def _exchange_by_mpi(group: ProcessGroup, to: Sequence[np.ndarray], come: Sequence[np.ndarray], largest: int) -> None:
    """Exchange by MPI_Alltoallv, except this rank's own part: MPICH 5.0.2 copies that at a tenth of the memory's rate."""
    from mpi4py import MPI

    rank = group.topology.rank
    come[rank][:] = to[rank]
    for piece in _pieces(group, largest):
        pieces, places = ([part[piece] for part in parts] for parts in (to, come))
        pieces[rank], places[rank] = pieces[rank][:0], places[rank][:0]
        sent = _in_place(pieces) or _joined(pieces)
        with _received(places) as received:
            group.topology.comm.Alltoallv([*sent, MPI.BYTE], [*received, MPI.BYTE])


_Parts = tuple[Any, tuple[list[int], list[int]]]  # memory with bytes for each rank, their numbers, and where they begin


def _in_place(pieces: Sequence[np.ndarray]) -> _Parts | None:
    """Return the memory from the first piece of bytes to the last, for MPI to use; None if they lie too far apart."""
    from mpi4py import MPI

    counts = [piece.size for piece in pieces]
    filled = [(piece.__array_interface__["data"][0], piece.size) for piece in pieces if piece.size]
    if not filled:
        return np.empty(0, np.uint8), (counts, [0] * len(pieces))
    low, high = min(filled)[0], max(place + count for place, count in filled)
    if high - low > _FARTHEST:
        return None
    places = iter(filled)
    return MPI.memory.fromaddress(low, high - low), (
        counts,
        [next(places)[0] - low if count else 0 for count in counts],
    )


@contextlib.contextmanager
def _received(places: Sequence[np.ndarray]) -> Iterator[_Parts]:
    """Give memory for MPI to receive bytes in, and copy them to their places unless it is these."""
    memory = _in_place(places)
    if memory is not None:
        yield memory
        return
    memory = _joined(places)
    yield memory
    for place, low in zip(places, memory[1][1], strict=True):
        place[:] = memory[0][low : low + place.size]


def _joined(pieces: Sequence[np.ndarray]) -> _Parts:
    """Return a copy of pieces of bytes, one after the other."""
    counts = [piece.size for piece in pieces]
    return np.concatenate(pieces), (counts, [0, *itertools.accumulate(counts[:-1])])


def _pieces(group: ProcessGroup, nbytes: int) -> Iterator[slice]:
    """Yield the pieces of a rank's bytes that MPI moves at a time."""
    step = min(_PIECE, _LARGE // group.topology.size)
    for low in range(0, nbytes, step):
        yield slice(low, low + step)


def _stage_gather(group: ProcessGroup, call: Call, own: np.ndarray, rooms: Sequence[np.ndarray], largest: int) -> None:
    """Send every rank's bytes through the node's memory, into a room for each rank where there are any."""

    def write(buffer: np.ndarray, low: int, high: int) -> None:
        piece = own[low:high]
        buffer[: piece.size] = piece

    def read(buffer: np.ndarray, rank: int, low: int, high: int) -> None:
        if rooms:
            piece = rooms[rank][low:high]
            piece[:] = buffer[: piece.size]

    _stage(group, call, largest, STAGING_BYTES, write, read)


def _stage(
    group: ProcessGroup,
    call: Call,
    nbytes: int,
    step: int,
    write: Callable[[np.ndarray, int, int], None],
    read: Callable[[np.ndarray, int, int, int], None],
) -> None:
    """Send bytes in steps that fit staging memory; one of its halves is read while the other is written."""
    node = group.node
    for low in range(0, nbytes, step):
        high, buffers = min(low + step, nbytes), node.staging()
        write(buffers[node.rank], low, high)
        node.barrier(call)
        for rank, buffer in enumerate(buffers):
            read(buffer, rank, low, high)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
