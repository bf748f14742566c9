"""Messages to the server's loop, for networks where one-sided calls are only emulated: the worker's end, and the server's.

A worker sends requests. The server receives them without ever waiting for a worker, and answers each with what it has taken
and applied; reads with the data.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from ..._util.buffers import BufferPool
from ...comm.mailbox import Mailbox
from ..layout import LINE, Address
from .fragments import Fragment, MessageKind
from .memory import SharedMemory
from .transport import Pair, Port, Transport, flat_bytes

if TYPE_CHECKING:
    from ..server.server import Server

__all__ = ["ACKNOWLEDGE", "DATA", "PAYLOAD", "REPLY", "REQUEST", "SHORT", "MessagePort", "MessageTransport", "chunks"]

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
        while self._taken < self._posted:  # all that this worker sent is read, and so are all answers
            self._listen()
            wait.pause()

    def _ask(self, question: Fragment, pieces: Sequence[np.ndarray], out: np.ndarray) -> int:
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
        left, wait, until = len(requests), self.pair.wait_for_server(what), 0.0
        while left:
            arrived = self._some(requests)
            if arrived:
                left -= len(arrived)
                wait.reset()
                until = monotonic() + _SENDING
            elif monotonic() < until:
                os.sched_yield()
            else:
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
        self._sending[slot] = self._comm.Isend([buffer[:at], self._byte], self.pair.server_rank, REQUEST)
        self._posted += 1
        if large:
            self._send(pieces)

    def _send(self, pieces: Sequence[np.ndarray]) -> None:
        """Send a payload, and wait until its memory may be changed, without sleeping while it gets on."""
        comm, rank, chunk_bytes = self._comm, self.pair.server_rank, self.pair.layout.chunk_bytes
        fragments = [fragment for piece in pieces for fragment in chunks(piece, chunk_bytes)]
        self._finish([comm.Isend([fragment, self._byte], rank, PAYLOAD) for fragment in fragments], "push")

    def _wait_for_room(self) -> None:
        """Wait until the server has taken enough, and the buffer of the next fragment is free.

        It does not sleep while fragments are on their way, a bounded time: MPI sends large messages only while it is called.
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
        """Read what the server has acknowledged; what is being sent moves on, too."""
        source = self.pair.server_rank
        while self._comm.Iprobe(source, ACKNOWLEDGE):
            self._comm.Recv(self._answer, source, ACKNOWLEDGE)
            self._note(*self._answer.tolist())

    def _note(self, taken: int, applied: int) -> None:
        """What the server has acknowledged; answers and replies may overtake each other."""
        self._taken, self._applied = max(self._taken, taken), max(self._applied, applied)


_MOVING = 5e-3  # seconds in each round for what workers are sending, and for what they are receiving
_QUESTIONS = (MessageKind.READ, MessageKind.READ_ROWS, MessageKind.CLOCKS)
_OTHERS = (*_QUESTIONS, MessageKind.CLOCK, MessageKind.LEAVE)  # than pushes


@final
class MessagePort(Port):
    """Receives fragments without ever waiting for a worker, and answers.

    What a read returns is copied first, so that a worker that receives slowly keeps nobody from writing; workers that read
    the same version share the copy.

    Args:
        server: whose port it is.
        ranks: the worker of each rank that sends messages.
        memory: with the words in which clocks and sign-offs are kept.
        comm: a communicator on which nothing else is sent.
        deliver: takes a worker, the request, and the whole payload.
    """

    def __init__(
        self,
        server: Server,
        ranks: Mapping[int, int],
        memory: SharedMemory,
        comm: Any,
        deliver: Callable[[int, Fragment, np.ndarray], None],
    ) -> None:
        from mpi4py import MPI

        self._server, self._comm, self._deliver = server, comm, deliver
        self._layout, self._memory = memory.layout, memory.mailbox
        self._worker_of = dict(ranks)
        self._rank_of = {worker: rank for rank, worker in ranks.items()}
        self._payloads = {worker: _Payload() for worker in self._rank_of}
        self._coming: dict[int, deque[tuple[Any, np.ndarray]]] = {worker: deque() for worker in self._rank_of}
        self._taken = dict.fromkeys(self._rank_of, 0)
        self._refused: set[int] = set()  # workers whose next push is not taken yet
        self._owed: set[int] = set()  # workers to be told what was taken and applied
        self._spare: list[np.ndarray] = []
        self._mailbox = Mailbox(comm)  # sends only: requests are received into buffers that are used again
        self._stalled = self._waits = (
            False  # whether nothing got on in the last round: of what is sent, of what arrives
        )
        self._snapshots: dict[int, tuple[int, np.ndarray]] = {}
        self._pool = BufferPool()  # fresh memory would cost as much in page faults as the copy
        self._any, self._byte, self._status = MPI.ANY_SOURCE, MPI.BYTE, MPI.Status()

    def poll(self) -> int:
        if self._mailbox.sending:
            self._send_on()
        moved, waiting = self._match(), 0
        moved = self._receive_on() or moved
        for worker, coming in self._coming.items():
            payload = self._payloads[worker]
            waiting += len(coming) + (payload.fragment is not None)
            if payload.fragment is not None and not payload.left:
                self._take(worker, payload.fragment, payload.end())
                moved = True
            self._refused.discard(worker)
            while payload.fragment is None and coming and coming[0][0].Test():
                fragment = Fragment.read(coming[0][1])
                if fragment.kind not in _OTHERS and not self._server.accepts(worker):
                    self._refused.add(worker)
                    break
                _, buffer = coming.popleft()
                if fragment.nbytes < fragment.total:
                    payload.begin(fragment, self._receive(worker, fragment, payload.memory(fragment.total)))
                else:
                    self._take(worker, fragment, buffer[LINE : LINE + fragment.nbytes])
                self._spare.append(buffer)
                moved = True
        if self._owed:
            self._answer()
        if self._snapshots and not self._mailbox.sending:
            self._snapshots.clear()
        return waiting if moved else 0

    def acknowledge(self, worker: int, number: int) -> None:
        self._owed.add(worker)

    def busy(self) -> bool:
        coming = any(coming for worker, coming in self._coming.items() if worker not in self._refused)
        return bool(self._mailbox.sending or self._owed) or coming or any(self._arriving())

    def _send_on(self) -> None:
        """Give what is being sent some time, as long as it gets on: MPI sends large messages only while it is called.

        What did not get on for a whole round, to a worker that is stopped, gets one look a round until it does.
        """
        mailbox, start, moved = self._mailbox, monotonic(), False
        while mailbox.sending:
            if mailbox.prune():
                self._stalled, moved = False, True
            elif self._stalled:
                return
            elif monotonic() - start > _MOVING:
                self._stalled = not moved
                return
            else:
                os.sched_yield()

    def _receive(self, worker: int, fragment: Fragment, memory: np.ndarray) -> list[Any]:
        """Begin to receive a payload: row numbers, if any, and then numbers, each cut as the worker does it."""
        rows, rank = 8 * fragment.rows, self._rank_of[worker]
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
        """Begin to receive what has arrived. Each worker sends few fragments before it hears that they were taken."""
        moved = False
        self._comm.Iprobe(self._any, REQUEST)  # what this call takes from the network the next one finds
        while (message := self._comm.Improbe(self._any, REQUEST, self._status)) is not None:
            buffer = self._spare.pop() if self._spare else np.zeros(LINE + self._layout.chunk_bytes, np.uint8)
            request = message.Irecv([buffer, self._byte])
            self._coming[self._worker_of[self._status.source]].append((request, buffer))
            moved = True
        return moved

    def _take(self, worker: int, fragment: Fragment, payload: np.ndarray) -> None:
        self._taken[worker] += 1
        if fragment.kind in _QUESTIONS:
            self._reply(worker, *self._find(worker, fragment, payload))
            self._owed.discard(worker)  # the reply has told
            return
        self._owed.add(worker)
        self._handle(worker, fragment, payload)

    def _answer(self) -> None:
        """Tell workers what was taken and applied; several fragments, and a push that is taken and applied, in one answer."""
        for worker in self._owed:
            answer = np.array([self._taken[worker], self._server.applied[worker]], np.int64)
            self._mailbox.send(answer, self._rank_of[worker], ACKNOWLEDGE)
        self._owed.clear()

    def _handle(self, worker: int, fragment: Fragment, payload: np.ndarray) -> None:
        words, layout = self._memory.words, self._layout
        if fragment.kind == MessageKind.CLOCK:  # this worker's words have no other writer than this
            words[layout.clock(worker) // 8] = fragment.number
            self._memory.sync()
        elif fragment.kind == MessageKind.LEAVE:
            words[layout.signed(worker) // 8] = fragment.version
            words[layout.left(worker) // 8] = fragment.number
        else:
            self._deliver(worker, fragment, payload)

    def _find(self, worker: int, fragment: Fragment, payload: np.ndarray) -> tuple[int, np.ndarray]:
        """Return a number and data, as bytes that nobody changes: the answer to a question."""
        if fragment.kind == MessageKind.READ:
            return self._snapshot(fragment.variable)
        if fragment.kind == MessageKind.READ_ROWS:
            version, rows = self._server.read_rows(fragment.variable, payload.view(np.int64))
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
        rank, reply = self._rank_of[worker], np.zeros(LINE + short.nbytes, np.uint8)
        reply[:LINE].view(np.int64)[:3] = number, self._taken[worker], self._server.applied[worker]
        reply[LINE:] = short
        self._mailbox.send(reply, rank, REPLY)
        for piece in chunks(data[short.nbytes :], self._layout.chunk_bytes):
            self._mailbox.send(piece, rank, DATA)


@final
class _Payload:
    """The large payload of one worker's request, while it arrives. Its memory is that of the largest so far.

    Attributes:
        fragment: the request; None while there is none.
        left: how many pieces have yet to arrive.
    """

    __slots__ = ("_memory", "_requests", "_some", "fragment", "left")

    def __init__(self) -> None:
        from mpi4py import MPI

        self._memory = np.empty(0, np.uint8)
        self._requests: list[Any] = []
        self._some = MPI.Request.Testsome
        self.fragment: Fragment | None = None
        self.left = 0

    def memory(self, nbytes: int) -> np.ndarray:
        """Return memory for so many bytes."""
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]

    def begin(self, fragment: Fragment, requests: list[Any]) -> None:
        """Let the pieces arrive."""
        self.fragment, self._requests, self.left = fragment, requests, len(requests)

    def look(self) -> bool:
        """Return whether pieces have arrived since the last look."""
        arrived = self._some(self._requests) or ()
        self.left -= len(arrived)
        return bool(arrived)

    def end(self) -> np.ndarray:
        """Return the payload, valid until the next one begins, when all has arrived."""
        assert self.fragment is not None
        nbytes, self.fragment, self._requests = self.fragment.total, None, []
        return self._memory[:nbytes]
