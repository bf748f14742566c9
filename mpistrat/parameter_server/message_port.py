"""Message port: the server's end of the connection to workers that send messages."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, final

import numpy as np

from .._util.buffers import BufferPool
from .layout import LINE, MailboxLayout
from .memory import ServerMemory
from .message_transport import ACKNOWLEDGE, DATA, PAYLOAD, REPLY, REQUEST, SHORT, chunks
from .parts import Kind, Part
from .transport import Port, flat_bytes

if TYPE_CHECKING:
    from .server import Server

__all__ = ["MessagePort"]

_MOVING = 5e-3  # seconds in each round for what workers are sending, and for what they are receiving
_QUESTIONS = (Kind.READ, Kind.READ_ROWS, Kind.CLOCKS)
_OTHERS = (*_QUESTIONS, Kind.CLOCK, Kind.LEAVE)  # than pushes


@final
class MessagePort(Port):
    """Receives parts without ever waiting for a worker, and answers.

    What a read returns is copied first, so that a worker that receives slowly keeps nobody from writing; workers that read
    the same version share the copy.

    Args:
        server: whose port it is.
        ranks: the worker of each rank that sends messages.
        layout, mailbox: with the words in which clocks and sign-offs are kept.
        comm: a communicator on which nothing else is sent.
        deliver: takes a worker, the request, and the whole payload.
    """

    def __init__(
        self,
        server: Server,
        ranks: Mapping[int, int],
        layout: MailboxLayout,
        mailbox: ServerMemory,
        comm: Any,
        deliver: Callable[[int, Part, np.ndarray], None],
    ) -> None:
        from mpi4py import MPI

        self._server, self._layout, self._mailbox, self._comm, self._deliver = server, layout, mailbox, comm, deliver
        self._worker_of = dict(ranks)
        self._rank_of = {worker: rank for rank, worker in ranks.items()}
        self._payloads = {worker: _Payload() for worker in self._rank_of}
        self._coming: dict[int, deque[tuple[Any, np.ndarray]]] = {worker: deque() for worker in self._rank_of}
        self._taken = dict.fromkeys(self._rank_of, 0)
        self._refused: set[int] = set()  # workers whose next push is not taken yet
        self._owed: set[int] = set()  # workers to be told what was taken and applied
        self._spare: list[np.ndarray] = []
        self._sending: list[tuple[Any, np.ndarray]] = []  # requests, each with the memory that it reads
        self._stalled = self._waits = (
            False  # whether nothing got on in the last round: of what is sent, of what arrives
        )
        self._snapshots: dict[int, tuple[int, np.ndarray]] = {}
        self._pool = BufferPool()  # fresh memory would cost as much in page faults as the copy
        self._any, self._byte, self._status = MPI.ANY_SOURCE, MPI.BYTE, MPI.Status()

    def poll(self) -> int:
        if self._sending:
            self._send_on()
        moved, waiting = self._match(), 0
        moved = self._receive_on() or moved
        for worker, coming in self._coming.items():
            payload = self._payloads[worker]
            waiting += len(coming) + (payload.part is not None)
            if payload.part is not None and not payload.left:
                self._take(worker, payload.part, payload.end())
                moved = True
            self._refused.discard(worker)
            while payload.part is None and coming and coming[0][0].Test():
                part = Part.read(coming[0][1])
                if part.kind not in _OTHERS and not self._server.accepts(worker):
                    self._refused.add(worker)
                    break
                _, buffer = coming.popleft()
                if part.nbytes < part.total:
                    payload.begin(part, self._receive(worker, part, payload.room(part.total)))
                else:
                    self._take(worker, part, buffer[LINE : LINE + part.nbytes])
                self._spare.append(buffer)
                moved = True
        if self._owed:
            self._answer()
        if self._snapshots and not self._sending:
            self._snapshots.clear()
        return waiting if moved else 0

    def acknowledge(self, worker: int, number: int) -> None:
        self._owed.add(worker)

    def busy(self) -> bool:
        coming = any(coming for worker, coming in self._coming.items() if worker not in self._refused)
        return bool(self._sending or self._owed) or coming or any(self._arriving())

    def _send_on(self) -> None:
        """Give what is being sent some time, as long as it gets on: MPI sends large messages only while it is called.

        What did not get on for a whole round, to a worker that is stopped, gets one look a round until it does.
        """
        start, at_first = monotonic(), len(self._sending)
        while self._sending:
            before = len(self._sending)
            self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
            if len(self._sending) < before:
                self._stalled = False
            elif self._stalled:
                return
            elif monotonic() - start > _MOVING:
                self._stalled = before == at_first
                return
            else:
                os.sched_yield()

    def _receive(self, worker: int, part: Part, memory: np.ndarray) -> list[Any]:
        """Begin to receive a payload: row numbers, if any, and then numbers, each cut as the worker does it."""
        rows, rank = 8 * part.rows, self._rank_of[worker]
        pieces = [p for half in (memory[:rows], memory[rows:]) for p in chunks(half, self._layout.chunk_bytes)]
        return [self._comm.Irecv([piece, self._byte], rank, PAYLOAD) for piece in pieces]

    def _arriving(self) -> list[_Payload]:
        return [payload for payload in self._payloads.values() if payload.left]

    def _receive_on(self) -> bool:
        """Give what is arriving some time, in the same way. Return whether it got on."""
        end, moved = monotonic() + _MOVING, False
        while arriving := self._arriving():
            if sum(payload.look() for payload in arriving):
                moved, self._waits = True, False
            elif self._waits:
                break
            else:
                os.sched_yield()
            if monotonic() > end:
                self._waits = not moved
                break
        return moved

    def _match(self) -> bool:
        """Begin to receive what has arrived. Each worker sends few parts before it hears that they were taken."""
        moved = False
        self._comm.Iprobe(self._any, REQUEST)  # what this call takes from the network the next one finds
        while (message := self._comm.Improbe(self._any, REQUEST, self._status)) is not None:
            buffer = self._spare.pop() if self._spare else np.zeros(LINE + self._layout.chunk_bytes, np.uint8)
            request = message.Irecv([buffer, self._byte])
            self._coming[self._worker_of[self._status.source]].append((request, buffer))
            moved = True
        return moved

    def _take(self, worker: int, part: Part, payload: np.ndarray) -> None:
        self._taken[worker] += 1
        if part.kind in _QUESTIONS:
            self._reply(worker, *self._find(worker, part, payload))
            self._owed.discard(worker)  # the reply has told
            return
        self._owed.add(worker)
        self._handle(worker, part, payload)

    def _answer(self) -> None:
        """Tell workers what was taken and applied; several parts, and a push that is taken and applied, in one answer."""
        for worker in self._owed:
            answer = np.array([self._taken[worker], self._server.applied[worker]], np.int64)
            self._send(worker, ACKNOWLEDGE, flat_bytes(answer))
        self._owed.clear()

    def _handle(self, worker: int, part: Part, payload: np.ndarray) -> None:
        words, layout = self._mailbox.words, self._layout
        if part.kind == Kind.CLOCK:  # this worker's words have no other writer than this
            words[layout.clock(worker) // 8] = part.number
            self._mailbox.sync()
        elif part.kind == Kind.LEAVE:
            words[layout.signed(worker) // 8] = part.version
            words[layout.left(worker) // 8] = part.number
        else:
            self._deliver(worker, part, payload)

    def _find(self, worker: int, part: Part, payload: np.ndarray) -> tuple[int, np.ndarray]:
        """Return a number and data, as bytes that nobody changes: the answer to a question."""
        if part.kind == Kind.READ:
            return self._snapshot(part.variable)
        if part.kind == Kind.READ_ROWS:
            version, rows = self._server.read_rows(part.variable, payload.view(np.int64))
            return version, flat_bytes(rows)
        return 0, flat_bytes(self._server.clocks())

    def _snapshot(self, variable: int) -> tuple[int, np.ndarray]:
        if self._snapshots.get(variable, (-1,))[0] != self._server.version(variable):
            own = self._server.array(variable)
            copy = self._pool.empty(own.size, own.dtype).reshape(own.shape)
            self._snapshots[variable] = self._server.read(variable, copy), flat_bytes(copy)
        return self._snapshots[variable]

    def _reply(self, worker: int, number: int, data: np.ndarray) -> None:
        short = data if data.nbytes <= SHORT else data[:0]
        reply = np.zeros(LINE + short.nbytes, np.uint8)
        reply[:LINE].view(np.int64)[:3] = number, self._taken[worker], self._server.applied[worker]
        reply[LINE:] = short
        self._send(worker, REPLY, reply)
        for piece in chunks(data[short.nbytes :], self._layout.chunk_bytes):
            self._send(worker, DATA, piece)

    def _send(self, worker: int, tag: int, data: np.ndarray) -> None:
        request = self._comm.Isend([data, self._byte], self._rank_of[worker], tag)
        if not request.Test():
            self._sending.append((request, data))


@final
class _Payload:
    """The large payload of one worker's request, while it arrives. Its memory is that of the largest so far.

    Attributes:
        part: the request; None while there is none.
        left: how many pieces have yet to arrive.
    """

    __slots__ = ("_memory", "_requests", "_some", "left", "part")

    def __init__(self) -> None:
        from mpi4py import MPI

        self._memory = np.empty(0, np.uint8)
        self._requests: list[Any] = []
        self._some = MPI.Request.Testsome
        self.part: Part | None = None
        self.left = 0

    def room(self, nbytes: int) -> np.ndarray:
        """Return memory for so many bytes."""
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]

    def begin(self, part: Part, requests: list[Any]) -> None:
        """Let the pieces arrive."""
        self.part, self._requests, self.left = part, requests, len(requests)

    def look(self) -> bool:
        """Return whether pieces have arrived since the last look."""
        arrived = self._some(self._requests) or ()
        self.left -= len(arrived)
        return bool(arrived)

    def end(self) -> np.ndarray:
        """Return the payload, valid until the next one begins, when all has arrived."""
        assert self.part is not None
        nbytes, self.part, self._requests = self.part.total, None, []
        return self._memory[:nbytes]
