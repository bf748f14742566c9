"""Mailboxes: point-to-point messages by polling, small and large; no call waits for another rank.

MPI reads the memory of a message until its request is complete, and sends large ones only during calls. So a mailbox stores
pending sends, and starts to receive arrived messages (matched probe), those of each rank in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, final

import numpy as np

from ..base.waiting import wait_until
from ..cluster.forks import ParentsOnly, refuse_in_children

__all__ = ["Mailbox"]


@final
class Mailbox:
    """Messages over one communicator, as bytes. Use it from one thread at a time.

    Args:
        comm: a communicator. No other code receives on it, except by requests posted before their message is sent; or `poll` is
            not called.
        bear: called with an error of MPI and `comm`; raises it unless ranks died that the program can do without. Messages to
            and from these are dropped. Default: raises it.

    Attributes:
        sending: pending sends: rank, request, and the memory that it reads.
    """

    def __init__(self, comm: Any, bear: Callable[[BaseException, Any], None] | None = None) -> None:
        from mpi4py import MPI

        self._comm, self._byte, self._status = comm, MPI.BYTE, MPI.Status()
        self._any = MPI.ANY_SOURCE, MPI.ANY_TAG
        self.sending: list[tuple[int, Any, Any]] = []
        self._incoming: defaultdict[int, deque[tuple[Any, int, bytearray]]] = defaultdict(deque)  # by rank, in order
        self._abandoned: list[Any] = []
        self._bear = bear or _raise
        self._gone = set[int]()  # ranks whose messages are dropped
        self._sent, self._matched = [0] * comm.size, 0  # messages: to each rank, and from all
        refuse_in_children(self)

    def refuse_in_child(self) -> None:
        """See `cluster.forks`."""
        self._comm = ParentsOnly("a message between ranks")

    def send(self, data: Any, rank: int, tag: int) -> None:
        """Start to send contiguous memory, which must not change until it is sent; `prune` and `poll` continue it."""
        if rank in self._gone:
            return
        try:
            request = self._comm.Isend([data, self._byte], rank, tag)
        except Exception as error:
            self._lose(rank, error)
            return
        self._sent[rank] += 1
        if not self._test(rank, request):
            self.sending.append((rank, request, data))

    def prune(self) -> bool:
        """Remove completed sends. Return True if there was any."""
        before = len(self.sending)
        left = [one for one in self.sending if not self._test(*one[:2])]
        self.sending = [one for one in left if one[0] not in self._gone]
        return len(self.sending) < before

    def poll(self) -> list[tuple[int, int, bytearray]]:
        """Make progress. Return the rank, tag and bytes of received messages, those of each rank in order."""
        if self.sending:
            self.prune()
        try:
            self._match()
        except Exception as error:
            self._bear(error, self._comm)
        come = []
        for rank, messages in list(self._incoming.items()):
            while messages and self._test(rank, messages[0][0]):
                come.append((rank, *messages.popleft()[1:]))
        return come

    def _match(self) -> None:
        """Start to receive arrived messages."""
        comm, status = self._comm, self._status
        comm.Iprobe(*self._any)  # the next call finds the messages that this one receives from the network
        while (message := comm.Improbe(*self._any, status)) is not None:
            rank, tag, data = status.source, status.tag, bytearray(status.Get_count(self._byte))
            self._incoming[rank].append((message.Irecv([data, self._byte]), tag, data))
            self._matched += 1

    def _test(self, rank: int, request: Any) -> bool:
        """Return True if a request is complete; False if its rank is lost."""
        try:
            return bool(request.Test())
        except Exception as error:
            self._lose(rank, error)
            return False

    def _lose(self, rank: int, error: BaseException) -> None:
        self._bear(error, self._comm)
        self.abandon(rank)

    def abandon(self, rank: int) -> None:
        """Abandon messages to and from a rank that left; their memory stays, because MPI may still use it."""
        self._gone.add(rank)
        self._abandoned += [one for one in self.sending if one[0] == rank]
        self._abandoned += self._incoming.pop(rank, ())
        self.sending = [one for one in self.sending if one[0] != rank]

    def drain(self) -> None:
        """Receive and discard pending messages. Collective, before the communicator is freed; no rank sends any more.

        MPI may reuse the freed communicator's context for the next one, whose ranks would then receive such a message.
        """
        expected = np.zeros(1, np.int64)
        self._comm.Reduce_scatter_block(np.array(self._sent, np.int64), expected)

        def done() -> bool:
            self.poll()
            return self._matched == expected[0] and not self.sending and not any(self._incoming.values())

        wait_until(done)


def _raise(error: BaseException, comm: Any) -> None:
    raise error
