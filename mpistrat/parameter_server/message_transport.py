"""Message transport to the server's loop: for networks where one-sided calls are only emulated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar, final

import numpy as np

from .layout import LINE, Place
from .parts import Kind, Part
from .transport import Pair, Transport, flat_bytes

__all__ = ["ACKNOWLEDGE", "DATA", "PAYLOAD", "REPLY", "REQUEST", "SHORT", "MessageTransport", "chunks"]

REQUEST, ACKNOWLEDGE, REPLY, DATA, PAYLOAD = range(1, 6)  # tags
_SENDING = 5e-3  # seconds for which a worker gives what it sends all its time, unless it gets on
SHORT = 1 << 15  # bytes of data that go with the reply, through a copy; more go straight to where they belong


def chunks(data: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    """Return flat bytes in pieces of at most `chunk_bytes`."""
    return [data[low : low + chunk_bytes] for low in range(0, data.nbytes, chunk_bytes)]


@final
class MessageTransport(Transport):
    """Sends requests; the server answers each with what it has taken and applied, and reads with the data.

    A request has its payload with it, or, if that is large, announces it: then it goes from where it lies to where it belongs.
    The server must be in its loop, for reads, too.
    """

    name: ClassVar[str] = "messages"

    def __init__(self, pair: Pair, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(pair)
        self._comm, self._byte, self._some = comm, MPI.BYTE, MPI.Request.Testsome
        slots, nbytes = pair.layout.slots, LINE + pair.layout.chunk_bytes
        self._buffers = [np.zeros(nbytes, np.uint8) for _ in range(slots)]
        self._sending: list[Any] = [MPI.REQUEST_NULL] * slots
        self._posted = self._taken = self._applied = 0
        self._answer = np.zeros(2, np.int64)
        self._reply = np.zeros(LINE + SHORT, np.uint8)
        self._numbers = self._reply[:LINE].view(np.int64)

    def acknowledged(self) -> int:
        if self._applied < self.pushed:
            self._listen()
        return self._applied

    def publish_clock(self, steps: int) -> None:
        self._post(Part(Kind.CLOCK, -1, steps), [])

    def clocks(self) -> np.ndarray:
        table = np.zeros(self.pair.layout.workers, np.int64)
        self._ask(Part(Kind.CLOCKS, -1, 0), [], flat_bytes(table))
        return table

    def _read(self, place: Place, out: np.ndarray) -> int:
        return self._ask(Part(Kind.READ, place.index, 0), [], out)

    def _read_rows(self, place: Place, rows: np.ndarray, out: np.ndarray) -> int:
        question = Part(Kind.READ_ROWS, place.index, 0, rows.size, nbytes=rows.nbytes, total=rows.nbytes)
        return self._ask(question, [flat_bytes(rows)], flat_bytes(out))

    def _leave(self, passes: int, clock: int) -> None:
        self.publish_clock(clock)
        self._post(Part(Kind.LEAVE, -1, passes, version=self.pushed), [])
        patience = self.pair.patience("leave")
        while self._taken < self._posted:  # all that this worker sent is read, and so are all answers
            self._listen()
            patience.pause()

    def _ask(self, question: Part, pieces: Sequence[np.ndarray], out: np.ndarray) -> int:
        """Send a question; receive the data into `out`, and return the number that comes with it."""
        comm, source = self._comm, self.pair.server_rank
        short = out if out.nbytes <= SHORT else out[:0]
        requests = [comm.Irecv([self._reply[: LINE + short.nbytes], self._byte], source, REPLY)]
        for piece in chunks(out[short.nbytes :], self.pair.layout.chunk_bytes):
            requests.append(comm.Irecv([piece, self._byte], source, DATA))
        self._post(question, pieces)
        self._finish(requests, "read")
        number, taken, applied = self._numbers[:3].tolist()
        self._note(taken, applied)
        short[:] = self._reply[LINE : LINE + short.nbytes]
        return number

    def _finish(self, requests: list[Any], what: str) -> None:
        """Wait for everything; once some of it has come without sleeping, a bounded time, for MPI moves a little in each call."""
        left, patience, until = len(requests), self.pair.patience(what), 0.0
        while left:
            arrived = self._some(requests)
            if arrived:
                left -= len(arrived)
                patience.reset()
                until = monotonic() + _SENDING
            elif monotonic() < until:
                os.sched_yield()
            else:
                patience.pause()

    def _post(self, message: Part, pieces: Sequence[np.ndarray]) -> None:
        layout = self.pair.layout
        self._wait_for_room()
        slot = self._posted % layout.slots
        buffer, at = self._buffers[slot], LINE
        large = message.total > layout.chunk_bytes
        (message._replace(nbytes=0) if large else message).write(buffer)
        for piece in () if large else pieces:
            buffer[at : at + piece.nbytes] = piece
            at += piece.nbytes
        self._sending[slot] = self._comm.Isend([buffer[:at], self._byte], self.pair.server_rank, REQUEST)
        self._posted += 1
        if large:
            self._send(pieces)

    def _send(self, pieces: Sequence[np.ndarray]) -> None:
        """Send a payload, and wait until its memory may be changed, without sleeping while it gets on."""
        comm, rank, chunk_bytes = self._comm, self.pair.server_rank, self.pair.layout.chunk_bytes
        parts = [part for piece in pieces for part in chunks(piece, chunk_bytes)]
        self._finish([comm.Isend([part, self._byte], rank, PAYLOAD) for part in parts], "push")

    def _wait_for_room(self) -> None:
        """Wait until the server has taken enough, and the buffer of the next part is free.

        It does not sleep while parts are on their way, a bounded time: MPI sends large messages only while it is called.
        """
        patience, slots, until = None, self.pair.layout.slots, 0.0
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
            patience = patience or self.pair.patience("push")
            patience.pause()

    def _listen(self) -> None:
        """Read what the server has acknowledged; what is being sent moves on, too."""
        source = self.pair.server_rank
        while self._comm.Iprobe(source, ACKNOWLEDGE):
            self._comm.Recv(self._answer, source, ACKNOWLEDGE)
            self._note(*self._answer.tolist())

    def _note(self, taken: int, applied: int) -> None:
        """What the server has acknowledged; answers and replies may overtake each other."""
        self._taken, self._applied = max(self._taken, taken), max(self._applied, applied)
