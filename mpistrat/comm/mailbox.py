"""Mailboxes: point-to-point messages by polling, small and large; no call waits for another rank.

MPI reads the memory of a message until its request is complete, and moves large ones only while it is called. So a mailbox keeps
what is not sent yet, and begins to receive what has arrived (matched probe), the messages of each rank in their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, final

import numpy as np

from ..base.waiting import wait_until
from ..cluster.forks import ParentsOnly, refuse_in_children

__all__ = ["Mailbox"]


@final
class Mailbox:
    """Messages over one communicator, as bytes. Use it from one thread at a time.

    Args:
        comm: a communicator. Nobody else receives on it, other than by requests that are posted before their message is sent; or
            `poll` is not called.

    Attributes:
        sending: what is not sent yet: rank, request, and the memory that it reads.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm, self._byte, self._status = comm, MPI.BYTE, MPI.Status()
        self._any = MPI.ANY_SOURCE, MPI.ANY_TAG
        self.sending: list[tuple[int, Any, Any]] = []
        self._incoming: defaultdict[int, deque[tuple[Any, int, bytearray]]] = defaultdict(deque)  # by rank, in order
        self._abandoned: list[Any] = []
        self._sent, self._matched = [0] * comm.size, 0  # messages: to each rank, and from all
        refuse_in_children(self)

    def refuse_in_child(self) -> None:
        """See `cluster.forks`."""
        self._comm = ParentsOnly("a message between ranks")

    def send(self, data: Any, rank: int, tag: int) -> None:
        """Begin to send contiguous memory, which must not change until it is sent; `prune` and `poll` go on with it."""
        request = self._comm.Isend([data, self._byte], rank, tag)
        self._sent[rank] += 1
        if not request.Test():
            self.sending.append((rank, request, data))

    def prune(self) -> bool:
        """Forget what is sent. Return whether there was any."""
        before = len(self.sending)
        self.sending = [one for one in self.sending if not one[1].Test()]
        return len(self.sending) < before

    def poll(self) -> list[tuple[int, int, bytearray]]:
        """Go on with everything. Return the rank, tag and bytes of the messages that have come, those of each rank in order."""
        if self.sending:
            self.prune()
        comm, status = self._comm, self._status
        comm.Iprobe(*self._any)  # what this call takes from the network the next one finds
        while (message := comm.Improbe(*self._any, status)) is not None:
            rank, tag, data = status.source, status.tag, bytearray(status.Get_count(self._byte))
            self._incoming[rank].append((message.Irecv([data, self._byte]), tag, data))
            self._matched += 1
        come = []
        for rank, messages in self._incoming.items():
            while messages and messages[0][0].Test():
                come.append((rank, *messages.popleft()[1:]))
        return come

    def abandon(self, rank: int) -> None:
        """Wait no more for what is on its way to and from a rank that left; its memory stays, for MPI may still use it."""
        self._abandoned += [one for one in self.sending if one[0] == rank]
        self._abandoned += self._incoming.pop(rank, ())
        self.sending = [one for one in self.sending if one[0] != rank]

    def drain(self) -> None:
        """Receive what is still on its way, and forget it. Collective, before the communicator is freed; no rank sends any more.

        MPI may give the freed communicator's context to the next one, whose ranks would take such a message for their own.
        """
        expected = np.zeros(1, np.int64)
        self._comm.Reduce_scatter_block(np.array(self._sent, np.int64), expected)

        def done() -> bool:
            self.poll()
            return self._matched == expected[0] and not self.sending and not any(self._incoming.values())

        wait_until(done)
