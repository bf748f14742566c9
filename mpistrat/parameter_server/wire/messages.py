"""Messages to the server's loop, for networks that only emulate one-sided calls: the worker's end.

A worker sends requests. The server (`message_port.py`) receives them without waiting for a worker, and answers each with the
number of taken and applied pushes; reads with the data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar, final

import numpy as np

from ..layout import LINE, Address
from .fragments import Fragment, MessageKind, Pieces
from .transport import Pair, Transport, flat_bytes

__all__ = ["ACKNOWLEDGE", "DATA", "PAYLOAD", "REPLY", "REQUEST", "SHORT", "MessageTransport"]

REQUEST, ACKNOWLEDGE, REPLY, DATA, PAYLOAD = range(1, 6)  # tags
_SENDING = 5e-3  # seconds of polling for a send without progress, before it sleeps
SHORT = 1 << 15  # bytes of data that are copied into the reply; more are received in place


@final
class MessageTransport(Transport):
    """A transport of requests, which the server answers with the numbers of taken and applied pushes, and reads with the data.

    A request includes its payload, or, if that is large, announces it: then it is sent and received in place. The server must
    be in its loop, also for reads.
    """

    name: ClassVar[str] = "messages"

    def __init__(self, pair: Pair, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(pair)
        self._comm, self._byte, self._some = comm, MPI.BYTE, MPI.Request.Testsome
        self._server = pair.server_rank  # in `comm`; the group's ranks may be numbered anew
        slots, nbytes = pair.layout.slots, LINE + pair.layout.chunk_bytes
        self._buffers = [np.zeros(nbytes, np.uint8) for _ in range(slots)]
        self._sending: list[Any] = [MPI.REQUEST_NULL] * slots
        self._posted = self._taken = self._applied = 0
        self._answer = np.zeros(2, np.int64)
        self._reply = np.zeros(LINE + SHORT, np.uint8)
        self._numbers = self._reply[:LINE].view(np.int64)
        self._pieces = Pieces(comm, pair.server_rank, pair.layout.chunk_bytes)

    def acknowledged(self) -> int:
        if self._applied < self.pushed:
            self._listen()
        return self._applied

    def publish_clock(self, steps: int) -> None:
        self._post(Fragment(MessageKind.CLOCK, -1, steps), [])

    def clocks(self) -> np.ndarray:
        table = np.zeros(self.pair.layout.workers, np.int64)
        self._ask(Fragment(MessageKind.CLOCKS, -1, 0), [], flat_bytes(table))
        return table

    def _read(self, address: Address, out: np.ndarray) -> int:
        return self._ask(Fragment(MessageKind.READ, address.index, 0), [], out)

    def _read_rows(self, address: Address, rows: np.ndarray, out: np.ndarray) -> int:
        question = Fragment(MessageKind.READ_ROWS, address.index, 0, rows.size, nbytes=rows.nbytes, total=rows.nbytes)
        return self._ask(question, [flat_bytes(rows)], flat_bytes(out))

    def _leave(self, passes: int, clock: int) -> None:
        self.publish_clock(clock)
        self._post(Fragment(MessageKind.LEAVE, -1, passes, version=self.pushed), [])
        wait = self.pair.wait_for_server("leave")
        while self._taken < self._posted:  # all of this worker's messages, and all answers, are read
            self._listen()
            wait.pause()

    def _ask(self, question: Fragment, payload: Sequence[np.ndarray], out: np.ndarray) -> int:
        """Send a question; receive the data into `out`, and return the number that comes with it."""
        short, pieces = out if out.nbytes <= SHORT else out[:0], self._pieces
        pieces.expect(self._reply[: LINE + short.nbytes], REPLY)
        pieces.receive(out[short.nbytes :], DATA)
        self._post(question, payload)
        self._finish("read")
        number, taken, applied = self._numbers[:3].tolist()
        self._note(taken, applied)
        short[:] = self._reply[LINE : LINE + short.nbytes]
        return number

    def _finish(self, what: str) -> None:
        """Wait for all pieces; after a piece has arrived, poll a bounded time, because MPI moves data only in its calls."""
        pieces, wait, until = self._pieces, None, 0.0
        while pieces:
            if pieces.look():
                wait, until = None, monotonic() + _SENDING
            elif monotonic() < until:
                os.sched_yield()
            else:
                wait = wait or self.pair.wait_for_server(what)
                wait.pause()

    def _post(self, message: Fragment, pieces: Sequence[np.ndarray]) -> None:
        layout = self.pair.layout
        self._wait_for_room()
        slot = self._posted % layout.slots
        buffer, at = self._buffers[slot], LINE
        large = message.total > layout.chunk_bytes
        (message._replace(nbytes=0) if large else message).write(buffer)
        for piece in () if large else pieces:
            buffer[at : at + piece.nbytes] = piece
            at += piece.nbytes
        self._sending[slot] = self._comm.Isend([buffer[:at], self._byte], self._server, REQUEST)
        self._posted += 1
        if large:
            for piece in pieces:
                self._pieces.send(piece, PAYLOAD)
            self._finish("push")  # its memory may be changed afterwards

    def _wait_for_room(self) -> None:
        """Wait until the server has taken enough, and the buffer of the next fragment is free.

        It polls a bounded time while fragments are in flight: MPI sends large messages only in its calls.
        """
        wait, slots, until = None, self.pair.layout.slots, 0.0
        while True:
            self._listen()
            if self._posted - self._taken < slots and self._sending[self._posted % slots].Test():
                return
            done = self._some(self._sending)  # None when all are sent
            now = monotonic()
            if done or not until:
                until = now + _SENDING
            if done is not None and now < until:
                os.sched_yield()
                continue
            wait = wait or self.pair.wait_for_server("push")
            wait.pause()

    def _listen(self) -> None:
        """Receive the server's acknowledgements; this also moves sends."""
        source = self._server
        while self._comm.Iprobe(source, ACKNOWLEDGE):
            self._comm.Recv(self._answer, source, ACKNOWLEDGE)
            self._note(*self._answer.tolist())

    def _note(self, taken: int, applied: int) -> None:
        """Record acknowledged numbers; answers and replies may overtake each other."""
        self._taken, self._applied = max(self._taken, taken), max(self._applied, applied)
