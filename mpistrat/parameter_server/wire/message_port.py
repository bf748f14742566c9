"""Messages to the server's loop: the server's end."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ...comm.mailbox import Mailbox
from ..layout import LINE, SharedMemory
from .fragments import Fragment, MessageKind, Pieces
from .messages import ACKNOWLEDGE, DATA, PAYLOAD, REPLY, REQUEST, SHORT
from .transport import Port, flat_bytes

if TYPE_CHECKING:
    from ..server.server import VariableServer

__all__ = ["MessagePort"]

_MOVING = 5e-3  # seconds of polling for data in flight, after the last progress
_QUESTIONS = (MessageKind.READ, MessageKind.READ_ROWS, MessageKind.CLOCKS)
_NONE = np.empty(0, np.uint8)
_OTHERS = (*_QUESTIONS, MessageKind.CLOCK, MessageKind.LEAVE)  # than pushes


@final
class MessagePort(Port):
    """A port that receives fragments without waiting for a worker, and answers.

    A variable is sent from memory whose version does not change meanwhile, so a slow receiver does not block writes.

    Args:
        server: of the port.
        ranks: the worker of each rank that sends messages.
        memory: with the words of clocks and sign-offs.
        comm: a communicator without other messages.
        deliver: takes a worker, the request, and the whole payload.
        bear: see `Mailbox`.
    """

    def __init__(
        self,
        server: VariableServer,
        ranks: Mapping[int, int],
        memory: SharedMemory,
        comm: Any,
        deliver: Callable[[int, Fragment, np.ndarray], None],
        bear: Callable[[BaseException, Any], None] | None = None,
    ) -> None:
        from mpi4py import MPI

        self._server, self._comm, self._deliver = server, comm, deliver
        self._layout, self._memory = memory.layout, memory.mailbox
        self._worker_of = dict(ranks)
        self._workers = {
            worker: _WorkerMessages(worker, comm, rank, memory.layout.chunk_bytes) for rank, worker in ranks.items()
        }
        self._owed: set[int] = set()  # workers to acknowledge
        self._dropped: list[_WorkerMessages] = []  # of workers that died; MPI may still use their memory
        self._late = deque[tuple[Any, np.ndarray]]()  # messages of these
        self._spare: list[np.ndarray] = []
        self._mailbox = Mailbox(comm, bear)  # sends only: requests are received into reused buffers
        self._got_on = 0.0  # time of the last progress of large messages
        self._any, self._byte, self._status = MPI.ANY_SOURCE, MPI.BYTE, MPI.Status()

    def poll(self) -> int:
        if self._mailbox.sending:
            self._mailbox.prune()
        moved, waiting, flows = self._match(), 0, False
        for worker in list(self._workers.values()):
            moved, flows = self._move(worker) or moved, flows or worker.flows
            if worker.coming or worker.fragment is not None:
                waiting += len(worker.coming) + (worker.fragment is not None)
                moved = self._take_from(worker) or moved
        if self._owed:
            self._answer()
        if moved:
            return max(waiting, 1)
        return self._wait_for_more() if flows else 0

    def acknowledge(self, worker: int, number: int) -> None:
        self._owed.add(worker)

    def busy(self) -> bool:
        return bool(self._mailbox.sending or self._owed) or any(
            worker.flows or (worker.coming and not worker.refused) for worker in self._workers.values()
        )

    def drop(self, worker: int) -> None:
        self._dropped.append(self._workers.pop(worker))
        self._owed.discard(worker)

    def move(self) -> None:
        self._match()
        for worker in self._workers.values():
            if worker.flows:
                self._move(worker)
            if worker.fragment is None and worker.coming:  # the next large push is received while this one is applied
                self._begin_next(worker)

    def _wait_for_more(self) -> int:
        """Return 1 if the loop must continue at once, else 0: MPI moves large messages only in its calls.

        After some time without progress, because a worker is stopped, there is one test a round until something moves.
        """
        if monotonic() - self._got_on > _MOVING:
            return 0
        os.sched_yield()
        return 1

    def _match(self) -> bool:
        """Start to receive arrived requests. Each worker sends few fragments before they are acknowledged."""
        moved = False
        while (message := self._comm.Improbe(self._any, REQUEST, self._status)) is not None:
            buffer = self._spare.pop() if self._spare else np.zeros(LINE + self._layout.chunk_bytes, np.uint8)
            request = message.Irecv([buffer, self._byte])
            worker = self._worker_of[self._status.source]
            source = self._workers.get(worker)
            (self._late if source is None else source.coming).append((request, buffer))
            moved = True
        return moved

    def _move(self, worker: _WorkerMessages) -> bool:
        """Advance a worker's large messages. Return whether they moved."""
        moved = bool(worker.sending) and worker.sending.look()
        moved = (bool(worker.arriving) and worker.arriving.look()) or moved
        if moved:
            self._got_on = monotonic()
        return moved

    def _take_from(self, worker: _WorkerMessages) -> bool:
        """Take a worker's arrived requests. Return whether there were any."""
        arrived, moved = None if worker.arriving else worker.fragment, False
        if arrived is not None:
            memory, moved = worker.end(), True
            self._take(worker, arrived, memory[: arrived.total])
            worker.give_back(memory)
        worker.refused = False
        while worker.fragment is None and (fragment := self._next(worker)) is not None:
            if fragment.nbytes < fragment.total:
                self._begin_next(worker)
            else:
                _, buffer = worker.coming.popleft()
                self._take(worker, fragment, buffer[LINE : LINE + fragment.nbytes])
                self._spare.append(buffer)
            moved = True
        return moved

    def _next(self, worker: _WorkerMessages) -> Fragment | None:
        """Return a worker's next request; None if it has none yet, or a push that must wait."""
        if not worker.coming or not worker.coming[0][0].Test():
            return None
        fragment = Fragment.read(worker.coming[0][1])
        worker.refused = fragment.kind not in _OTHERS and not self._server.accepts(worker.number)
        return None if worker.refused else fragment

    def _begin_next(self, worker: _WorkerMessages) -> None:
        """Start to receive the payload of a worker's next request, if it has a large one."""
        fragment = self._next(worker)
        if fragment is not None and fragment.nbytes < fragment.total:
            self._spare.append(worker.coming.popleft()[1])
            worker.begin(fragment)
            self._got_on = monotonic()

    def _take(self, worker: _WorkerMessages, fragment: Fragment, payload: np.ndarray) -> None:
        worker.taken += 1
        if fragment.kind in _QUESTIONS:
            self._reply(worker, *self._find(fragment, payload))
            self._owed.discard(worker.number)  # the reply acknowledges, too
            return
        self._owed.add(worker.number)
        self._handle(worker.number, fragment, payload)

    def _answer(self) -> None:
        """Acknowledge taken and applied fragments, several of a worker in one answer."""
        for number in list(self._owed):
            worker = self._workers[number]
            answer = np.array([worker.taken, self._server.applied[number]], np.int64)
            self._mailbox.send(answer, worker.rank, ACKNOWLEDGE)
        self._owed.clear()

    def _handle(self, worker: int, fragment: Fragment, payload: np.ndarray) -> None:
        words, layout = self._memory.words, self._layout
        if fragment.kind == MessageKind.CLOCK:  # this worker's words have no other writer
            words[layout.clock(worker) // 8] = fragment.number
            self._memory.sync()
        elif fragment.kind == MessageKind.LEAVE:
            words[layout.signed(worker) // 8] = fragment.version
            words[layout.left(worker) // 8] = fragment.number
        else:
            self._deliver(worker, fragment, payload)

    def _find(self, fragment: Fragment, payload: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the answer to a question: a number and data, as bytes that do not change."""
        if fragment.kind == MessageKind.READ:
            return self._server.lend(fragment.variable)
        if fragment.kind == MessageKind.READ_ROWS:
            version, rows = self._server.read_rows(fragment.variable, payload.view(np.int64))
            return version, flat_bytes(rows)
        return 0, flat_bytes(self._server.clocks())

    def _reply(self, worker: _WorkerMessages, number: int, data: np.ndarray) -> None:
        short = data if data.nbytes <= SHORT else data[:0]
        reply = np.zeros(LINE + short.nbytes, np.uint8)
        reply[:LINE].view(np.int64)[:3] = number, worker.taken, self._server.applied[worker.number]
        reply[LINE:] = short
        self._mailbox.send(reply, worker.rank, REPLY)
        if data.nbytes > short.nbytes:
            worker.sending.send(data, DATA)
            self._got_on = monotonic()


@final
class _WorkerMessages:
    """The data in flight from and to a worker.

    Attributes:
        number, rank: of the worker.
        coming: its requests, in order, as they arrive.
        taken: the number of taken requests.
        refused: whether the next one is a push that must wait.
        fragment: the request whose large payload is arriving; None without one.
        arriving, sending: large data.
    """

    __slots__ = (
        "_memories",
        "_memory",
        "arriving",
        "coming",
        "fragment",
        "number",
        "rank",
        "refused",
        "sending",
        "taken",
    )

    def __init__(self, number: int, comm: Any, rank: int, chunk_bytes: int) -> None:
        self.number, self.rank = number, rank
        self.coming: deque[tuple[Any, np.ndarray]] = deque()
        self.taken, self.refused = 0, False
        self.fragment: Fragment | None = None
        self.arriving, self.sending = Pieces(comm, rank, chunk_bytes), Pieces(comm, rank, chunk_bytes)
        self._memory = _NONE  # of the arriving payload
        self._memories: list[np.ndarray] = []  # free memory for payloads: two if one arrives while another is applied

    @property
    def flows(self) -> bool:
        """True if large data are in flight."""
        return bool(self.arriving or self.sending)

    def begin(self, fragment: Fragment) -> None:
        """Start to receive a payload: row numbers, if any, and then numbers, cut as by the worker."""
        memory = self._memories.pop() if self._memories else _NONE
        self._memory = memory if memory.nbytes >= fragment.total else np.empty(fragment.total, np.uint8)
        self.fragment, rows = fragment, 8 * fragment.rows
        self.arriving.receive(self._memory[:rows], PAYLOAD)
        self.arriving.receive(self._memory[rows : fragment.total], PAYLOAD)

    def end(self) -> np.ndarray:
        """Return the memory of the complete payload; another payload may start."""
        memory, self._memory, self.fragment = self._memory, _NONE, None
        return memory

    def give_back(self, memory: np.ndarray) -> None:
        """Return the memory to the free list."""
        self._memories.append(memory)
