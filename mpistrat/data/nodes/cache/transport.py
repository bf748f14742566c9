"""Rows fetched from other nodes: by messages that a thread of each rank answers, or by one-sided MPI_Get.

A collective per batch would be as fast as messages, but all ranks must enter it equally often, and threads that read
ahead are not in step: after a `break` in the training loop one of them would wait forever. Gets are fast if the network
reads remote memory without the owner's help.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ....base.errors import ClosedError, CollectiveTimeoutError
from ....base.waiting import Deadline, wait_until
from ....cluster.forks import ParentsOnly, refuse_in_children
from ....comm.mailbox import Mailbox
from ....comm.window import RemoteWindow
from ...buffers import RowBuffers
from .rows import RowMemory, row_backoff

__all__ = ["Reply", "RowGets", "RowMessages"]

_ASK = 1
_FIRST_REPLY, _LAST_REPLY = 16, 32000  # tags; MPI promises 32767
_MESSAGE_BYTES = 16 << 20  # approximate limit of one reply


@dataclass
class Reply:
    """Requested rows: their indices in a batch, and the memory that receives them."""

    places: NDArray[np.int64]
    rows: RowMemory
    kept: tuple[Any, ...]  # MPI requests and their buffers
    rank: int


@final
class RowMessages:
    """A client and server of rows of all ranks' memory, by messages. Created and closed collectively.

    Args:
        comm: a communicator of all ranks for this purpose only; freed by `close`.
        memory: the rows of this rank's node.
        holders: the rank to ask on each node.
        timeout: seconds to wait for an answer.
        counted: called with the number of bytes received.
    """

    name = "messages"

    def __init__(
        self,
        comm: Any,
        memory: RowMemory,
        holders: Sequence[int],
        timeout: float,
        counted: Callable[[int], None],
    ) -> None:
        from mpi4py import MPI

        self._holders = holders
        self._mpi, self._comm = MPI, comm
        self._memory: RowMemory | None = memory
        self._row_spec = memory.row_spec
        self._timeout, self._counted = timeout, counted
        self._limit = max(1, _MESSAGE_BYTES // max(1, RowMemory.nbytes(memory.row_spec, 64) // 64))
        self._tags = itertools.cycle(range(_FIRST_REPLY, _LAST_REPLY))
        self._buffers = RowBuffers()
        self._closed = False
        self._stop = threading.Event()
        self._leaving = threading.Event()
        self._mailbox = Mailbox(comm)  # of the answering thread; requests receive the answers
        self._lost: list[Reply] = []  # never answered; MPI may still write into their memory
        refuse_in_children(self)
        self._thread = threading.Thread(target=self._serve, name="mpistrat-rows", daemon=True)
        self._thread.start()

    def refuse_in_child(self) -> None:
        """See `cluster.forks`."""
        self._comm = ParentsOnly('cache("job"): rows of another node')

    # asking

    def start(self, node: int, rows: NDArray[np.int64], places: NDArray[np.int64]) -> list[Reply]:
        rank = self._holders[node]
        replies = []
        for low in range(0, rows.size, self._limit):
            replies.append(self._ask(rank, rows[low : low + self._limit], places[low : low + self._limit]))
        return replies

    def _ask(self, rank: int, rows: NDArray[np.int64], places: NDArray[np.int64]) -> Reply:
        tag = next(self._tags)
        nbytes = RowMemory.nbytes(self._row_spec, rows.size)
        memory = self._buffers.empty(0, (nbytes,), np.dtype(np.uint8))
        receive = self._comm.Irecv([memory, self._mpi.BYTE], rank, tag)
        message = np.concatenate(([tag], rows)).astype(np.int64)
        send = self._comm.Isend([message, self._mpi.BYTE], rank, _ASK)
        return Reply(places, RowMemory(self._row_spec, rows.size, memory), ([receive, send], memory, message), rank)

    def finish(self, replies: list[Reply]) -> list[Reply]:
        """Wait for the rows.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not answer.
            ClosedError: the strategy was closed meanwhile.
        """
        backoff, deadline = row_backoff(), Deadline(self._timeout)
        waiting = replies
        while waiting:
            waiting = [reply for reply in waiting if not self._mpi.Request.Testall(reply.kept[0])]
            if not waiting:
                break
            ranks = sorted({reply.rank for reply in waiting})
            error: Exception | None = None
            if self._stop.is_set():
                error = ClosedError('cache("job"): the strategy was closed while rows were fetched')
            elif deadline.passed:
                who = ", ".join(map(str, ranks))
                error = CollectiveTimeoutError(f'cache("job"): waited {self._timeout:g} s for rows from rank {who}')
            if error is not None:
                self._lost += waiting
                raise error
            backoff.pause()
        self._counted(sum(reply.kept[1].nbytes for reply in replies))
        return replies

    # answering

    def _serve(self) -> None:
        backoff, all_leave = row_backoff(), None
        while not self._stop.is_set():
            if self._leaving.is_set() and all_leave is None:
                all_leave = self._comm.Ibarrier()  # a message to each other rank would be too many
            if self._answer():
                backoff.reset()
            if all_leave is not None and not self._mailbox.sending and all_leave.Test():
                return
            backoff.pause()

    def _answer(self) -> bool:
        """Answer received requests. Return True if there were any, or a send is pending."""
        messages = self._mailbox.poll()
        for rank, _, data in messages:
            asked = np.frombuffer(data, np.int64)
            self._reply(rank, int(asked[0]), asked[1:])
        return bool(messages or self._mailbox.sending)

    def _reply(self, rank: int, tag: int, rows: NDArray[np.int64]) -> None:
        if self._memory is None:
            return
        data = self._buffers.empty(1, (RowMemory.nbytes(self._row_spec, rows.size),), np.dtype(np.uint8))
        self._memory.take_into(rows, RowMemory(self._row_spec, rows.size, data))
        self._mailbox.send(data, rank, tag)

    # the end

    def close(self) -> None:
        """End the thread and free the communicator; no rank may be waiting for rows. Collective."""
        if self._closed:
            return
        self._closed = True
        request = self._comm.Ibarrier()  # threads answer until no rank needs rows
        wait_until(request.Test, backoff=row_backoff())
        self._stop.set()
        self._thread.join()
        self._memory = None
        self._comm.Free()

    def leave(self) -> Callable[[], None]:
        self._leaving.set()
        return self._thread.join

    def abandon(self) -> None:
        self._stop.set()


@final
class RowGets:
    """One-sided reads of rows in the memory of other ranks. Created and closed collectively.

    A wait inside MPI has no timeout; it does not depend on the other ranks' programs.

    Args:
        comm: a communicator of all ranks for this purpose only; freed by `close`.
        segment: the bytes that this rank exposes; empty for none.
        holders: the rank whose segment contains the rows of each node.
        starts: for each node, the offsets of the arrays in that segment, in bytes.
        row_spec: the specs of a row.
        counted: called with the number of bytes received.
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
        self._comm, self._holders = comm, holders
        self._starts, self._row_spec, self._counted = starts, row_spec, counted
        row_bytes = sum(array.nbytes for array in RowMemory(row_spec, 1).arrays)
        self._limit = max(1, _MESSAGE_BYTES // max(1, row_bytes))
        self._buffers = RowBuffers()
        self._lock = threading.Lock()  # a flush completes all started gets
        self._window = RemoteWindow.over(comm, segment, 'cache("job")')

    def start(self, node: int, rows: NDArray[np.int64], places: NDArray[np.int64]) -> list[Reply]:
        replies = []
        for low in range(0, rows.size, self._limit):
            some = rows[low : low + self._limit]
            memory = self._buffers.empty(0, (RowMemory.nbytes(self._row_spec, some.size),), np.dtype(np.uint8))
            into = RowMemory(self._row_spec, some.size, memory)
            rank = self._holders[node]
            with self._lock:
                for start, out in zip(self._starts[node], into.arrays, strict=True):
                    if out.nbytes:
                        table = out.reshape(some.size, -1).view(np.uint8)
                        self._window.start_get_rows(rank, start, some, table)
            replies.append(Reply(places[low : low + self._limit], into, ((), memory), rank))
        return replies

    def finish(self, replies: list[Reply]) -> list[Reply]:
        with self._lock:
            for rank in sorted({reply.rank for reply in replies}):
                self._window.flush(rank)
        self._counted(sum(reply.kept[1].nbytes for reply in replies))
        return replies

    def close(self) -> None:
        """Free window and communicator. Collective."""
        if not self._window.closed:
            self._window.close()
            self._comm.Free()

    def leave(self) -> None:
        """Do nothing: the end of the program frees the window."""

    abandon = leave
