"""Rows fetched from other nodes by one-sided MPI_Get: quick where the network reads memory without its owner's help."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ..buffers import RowBuffers
from .cached_rows import RowMemory
from .row_messages import Reply

__all__ = ["RowGets"]

_MESSAGE_BYTES = 16 << 20


@final
class RowGets:
    """Gets rows out of the memory of other ranks. Made and closed collectively.

    A wait inside MPI has no timeout; it needs no other rank's program to go on.

    Args:
        comm: a communicator of all ranks for this alone; freed by `close`.
        segment: the bytes that this rank shows the others; empty for none.
        holders: of each node the rank whose segment holds its rows.
        starts: for each node, where the arrays in that segment begin, in bytes.
        row_spec: the specs of a row.
        counted: told the bytes that came.
    """

    name = "get"

    def __init__(
        self,
        comm: Any,
        segment: NDArray[np.uint8],
        holders: Sequence[int],
        starts: Sequence[Sequence[int]],
        row_spec: Any,
        counted: Callable[[int], None],
    ) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        self._holders = holders
        self._starts, self._row_spec, self._counted = starts, row_spec, counted
        one = RowMemory(row_spec, 1)
        self._sizes = [array.nbytes for array in one.arrays]
        self._limit = max(1, _MESSAGE_BYTES // max(1, sum(self._sizes)))
        self._buffers = RowBuffers()
        self._lock = threading.Lock()  # a flush is for all that was begun
        self._window = MPI.Win.Create(segment if segment.nbytes else None, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._closed = False

    def start(self, node: int, rows: NDArray[np.int64], places: NDArray[np.int64]) -> list[Reply]:
        """Begin to get rows of a node's memory, which belong to some places of a batch."""
        replies = []
        for low in range(0, rows.size, self._limit):
            some = rows[low : low + self._limit]
            memory = self._buffers.empty(0, (RowMemory.nbytes(self._row_spec, some.size),), np.dtype(np.uint8))
            into = RowMemory(self._row_spec, some.size, memory)
            kept = [self._get(node, leaf, some, out) for leaf, out in enumerate(into.arrays) if out.nbytes]
            replies.append(Reply(places[low : low + self._limit], into, (kept, memory), self._holders[node]))
        return replies

    def _get(self, node: int, leaf: int, rows: NDArray[np.int64], out: NDArray[Any]) -> Any:
        size, start, rank = self._sizes[leaf], self._starts[node][leaf], self._holders[node]
        flat = out.reshape(-1).view(np.uint8)
        with self._lock:
            if rows.size == int(rows[-1]) - int(rows[0]) + 1 and (np.diff(rows) == 1).all():
                self._window.Get(
                    [flat, self._mpi.BYTE], rank, [start + int(rows[0]) * size, flat.nbytes, self._mpi.BYTE]
                )
                return None
            datatype = self._mpi.BYTE.Create_hindexed_block(size, (rows * size).tolist()).Commit()
            self._window.Get([flat, self._mpi.BYTE], rank, [start, 1, datatype])
            return datatype

    def finish(self, replies: list[Reply]) -> list[Reply]:
        """Wait for the rows."""
        with self._lock:
            for rank in sorted({reply.rank for reply in replies}):
                self._window.Flush(rank)
        for reply in replies:
            for datatype in reply.kept[0]:
                if datatype is not None:
                    datatype.Free()
        self._counted(sum(reply.kept[1].nbytes for reply in replies))
        return replies

    def close(self) -> None:
        """Free window and communicator. Collective."""
        if not self._closed:
            self._closed = True
            self._window.Unlock_all()
            self._window.Free()
            self._comm.Free()

    def leave(self) -> None:
        """Nothing: the end of the program frees the window."""
