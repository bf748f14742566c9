"""Arrays of one size exchanged among the ranks along an axis of a mesh: through a node's shared memory, or by MPI."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..comm.call import Call
from ..comm.node import STAGING_BYTES
from ..comm.process_group import ProcessGroup

__all__ = ["all_gather", "all_to_all"]

_PIECE = 1 << 26  # bytes of a rank that MPI moves at a time


def all_gather(group: ProcessGroup, call: Call, own: np.ndarray) -> np.ndarray:
    """Return every rank's array, by rank; all have one shape. Collective, inside `group.collective()`, whose call is given."""
    size = group.topology.size
    mine, found = _bytes(own), np.empty((size, own.nbytes), np.uint8)

    def write(buffer: np.ndarray, low: int, high: int) -> None:
        buffer[: high - low] = mine[low:high]

    def read(buffer: np.ndarray, rank: int, low: int, high: int) -> None:
        found[rank, low:high] = buffer[: high - low]

    if group.num_nodes == 1:
        _stage(group, call, own.nbytes, STAGING_BYTES, write, read)
    else:
        for low in range(0, own.nbytes, _PIECE):
            part = np.empty((size, min(_PIECE, own.nbytes - low)), np.uint8)
            group.topology.comm.Allgather(mine[low : low + part.shape[1]], part)
            found[:, low : low + part.shape[1]] = part
    return found.view(own.dtype).reshape(size, *own.shape)


def all_to_all(group: ProcessGroup, call: Call, parts: np.ndarray) -> np.ndarray:
    """Return what every rank has in `parts` for this one, by rank. Collective, inside `group.collective()`, whose call is given.

    `parts[rank]` goes to a rank; all have one shape.
    """
    size, rank = group.topology.size, group.topology.rank
    nbytes = parts.nbytes // size
    mine, found = _bytes(parts).reshape(size, nbytes), np.empty((size, nbytes), np.uint8)
    room = STAGING_BYTES // size // 64 * 64

    def write(buffer: np.ndarray, low: int, high: int) -> None:
        for other in range(size):
            buffer[other * room : other * room + high - low] = mine[other, low:high]

    def read(buffer: np.ndarray, other: int, low: int, high: int) -> None:
        found[other, low:high] = buffer[rank * room : rank * room + high - low]

    if group.num_nodes == 1:
        _stage(group, call, nbytes, room, write, read)
    else:
        for low in range(0, nbytes, _PIECE):
            sent = np.ascontiguousarray(mine[:, low : low + _PIECE])
            part = np.empty_like(sent)
            group.topology.comm.Alltoall(sent, part)
            found[:, low : low + part.shape[1]] = part
    return found.view(parts.dtype).reshape(parts.shape)


def _stage(
    group: ProcessGroup,
    call: Call,
    nbytes: int,
    step: int,
    write: Callable[[np.ndarray, int, int], None],
    read: Callable[[np.ndarray, int, int, int], None],
) -> None:
    """Move bytes in steps of what staging memory has room for; of its two halves one is read while the other is written."""
    node = group.node
    for low in range(0, nbytes, step):
        high, buffers = min(low + step, nbytes), node.staging()
        write(buffers[node.rank], low, high)
        node.barrier(call)
        for rank, buffer in enumerate(buffers):
            read(buffer, rank, low, high)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
