"""A server: its variables, the lock for writing them, and the application of pushes.

A service thread works in the background, independently of the server's program, which may wait for workers.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, final

import numpy as np

from ...arena.values import read_only
from ...arena.wire import wire_named
from ...base import log
from ...base.errors import ClosedError, CollectiveMismatchError, PeerExitError, explain
from ...base.options import WIRES
from ...base.waiting import Backoff, Deadline
from ...comm.monitor.rank_monitor import lines
from ...comm.process_group import ProcessGroup
from ..layout import Address, ServerMemory, SharedMemory
from ..operations import Handler, Push
from ..report import ServerStats, count
from ..wire.fragments import Fragment, MessageKind
from ..wire.transport import FOR_GOOD, Port
from .atomic_reads import SeqLockWriter
from .version_buffers import PrivateBuffers, SnapshotBuffers, VersionBuffers

__all__ = [
    "PassWait",
    "Rounds",
    "Service",
    "VariableServer",
]


_CHECK = 0.1  # seconds between two checks for workers that have left
_LOOK = 0.01  # seconds of continuous work between two calls of `rest`
_LAST_SENDS = 2.0  # seconds at the end for data in flight to workers
_QUIET = 5.0  # seconds without a push before workers are queried, and between queries
_ANSWER = 1.5  # seconds for their answer
_SILENCE = 10.0  # seconds without a push before a warning, once per pass


class Rounds(ABC):
    """The repeated work of a service.

    Attributes:
        patience: how often it yields, when idle, before the service sleeps.
    """

    patience = 100

    def give_way(self) -> None:
        """Yield to other processes, and if possible wait a little for work."""
        os.sched_yield()

    @abstractmethod
    def poll(self) -> bool:
        """Do the available work. Return whether there was any."""

    @abstractmethod
    def rest(self) -> bool:
        """Check for other changes, when idle and now and then. Return whether there were any."""

    @abstractmethod
    def busy(self) -> bool:
        """Return whether data are in flight to a worker."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the awaited event cannot come."""


@final
class Service:
    """A thread that runs rounds from `start` to `stop`; without threads they run inside `wait`.

    An error of a round ends the service. `wait` raises it; outside of `wait` it ends the job, like any uncaught exception.

    Args:
        rounds: the rounds.
        back_off: the longest sleep, in seconds, when idle.
        threads: whether a thread is possible: MPI must allow MPI_THREAD_MULTIPLE.
        stats: counts idle time.

    Attributes:
        waiting: whether a thread is in `wait`.
    """

    def __init__(self, rounds: Rounds, back_off: float, threads: bool, stats: ServerStats) -> None:
        self.waiting = False
        self._stats = stats
        self._rounds, self._back_off, self._threads = rounds, back_off, threads
        self._thread: threading.Thread | None = None
        self._stop = self._abandoned = False
        self._done: Callable[[], bool] = _never
        self._change = threading.Condition()
        self._error: BaseException | None = None

    def start(self, name: str) -> None:
        """Start the thread, with a name, if threads are possible; later calls have no effect."""
        if self._threads and self._thread is None and not self._stop:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread when no data are in flight any more, or after two seconds. It can be repeated."""
        self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LAST_SENDS)

    def abandon(self) -> None:
        """End the thread, even with data in flight."""
        self._stop = self._abandoned = True

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns True, as a result of the rounds.

        Raises:
            BaseException: from a round.
        """
        self._done, self.waiting = done, True
        try:
            if self._thread is None:
                self._work(lambda: done() and not self._rounds.busy())
                return
            with self._change:
                self._change.wait_for(lambda: self._error is not None or done())
            if self._error is not None:
                raise self._error
        finally:
            self.waiting, self._done = False, _never

    def _run(self) -> None:
        try:
            self._work(lambda: self._stop)
            self._finish()
        except BaseException as error:
            with self._change:
                self._error = error
                waiting = self.waiting
                self._change.notify_all()
            if not waiting:
                raise

    def _work(self, until: Callable[[], bool]) -> None:
        rounds, next_check = self._rounds, monotonic() + _CHECK
        backoff = Backoff(self._back_off, yields=rounds.patience, give_way=rounds.give_way)
        idle_since, next_look = 0.0, monotonic() + _LOOK
        while True:
            found = rounds.poll()
            if found:
                if idle_since:
                    self._stats.idle += perf_counter() - idle_since
                    idle_since = 0.0
                backoff.reset()
                if (now := monotonic()) < next_look:
                    continue
                next_look = now + _LOOK
            elif not idle_since:
                idle_since = perf_counter()
            if rounds.rest():
                backoff.reset()
            if until():
                return
            if self._thread is not None and self._done():
                with self._change:
                    self._change.notify_all()
            if (found or backoff.pause()) and self.waiting and monotonic() > next_check:
                next_check = monotonic() + _CHECK
                rounds.check()

    def _finish(self) -> None:
        backoff, deadline = Backoff(self._back_off), Deadline(_LAST_SENDS)
        while not self._abandoned and self._rounds.busy() and not deadline.passed:
            if not self._rounds.poll():
                backoff.pause()


def _never() -> bool:
    return False


@final
class PassWait:
    """A server's wait for workers to leave a pass.

    It may be long, because workers compute. But a worker that waits for this rank in a collective of all ranks never leaves the
    pass: that raises. After 10 s without data, or `environment.warn_after` if that is less, the awaited workers are logged,
    once.

    Args:
        group: all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pushed, self._since, self._asked, self._warned = -1, 0.0, 0.0, False

    def look(self, ranks: Sequence[int], pushed: int) -> None:
        """Check the awaited workers.

        Args:
            ranks: of these workers.
            pushed: the number of pushes they have sent so far.

        Raises:
            CollectiveMismatchError: one of them waits for this rank.
        """
        now, monitor, warn_after = monotonic(), self._group.monitor, self._group.environment.warn_after
        if pushed != self._pushed:
            self._pushed, self._since, self._asked = pushed, now, 0.0
        quiet = now - self._since
        if quiet < min(_QUIET, warn_after):
            return
        if now - self._asked > _QUIET:
            self._asked, monitor.wanted = now, tuple(ranks)
        answers = {rank: monitor.answers[rank] for rank in ranks if rank in monitor.answers}
        places = {rank: answer.text for rank, answer in answers.items() if answer.time > self._asked}
        remedy = (
            "A worker leaves a pass by strategy.leave() after its last step, or by the end of a loop over a distributed"
            " dataset, and must do so before calls of all ranks: save, restore, stats, close, a new variable"
        )
        me = f"ParameterServerStrategy.serve: rank {monitor.rank}, a parameter server, waits for workers to leave the pass"
        for rank in places:
            if answers[rank].number > monitor.number:
                raise CollectiveMismatchError(f"{me}, and one of them waits for it:{lines(places)}\n{remedy}")
        if quiet > min(_SILENCE, warn_after) and not self._warned and now - self._asked > _ANSWER:
            self._warned = True
            unknown = dict.fromkeys(ranks, "does not answer")
            log.logger.warning("%s; none has sent anything for %g s:%s\n%s", me, quiet, lines(unknown | places), remedy)


_PUSH, _COMMIT, _ENDS_STEP = MessageKind.PUSH, MessageKind.COMMIT, MessageKind.ENDS_STEP
_MOST_KEPT = 16  # pushes of a worker that are taken and not applied; more are not taken, which throttles it


@final
class _Held:
    """A variable of this server; also the context in which it is written."""

    __slots__ = (
        "_buffers", "_index", "_lock", "_nbytes", "_next", "_seqlock", "_sync", "_view", "array", "dtype", "replacing",
        "row_size", "shape", "word", "words",
    )  # fmt: skip

    def __init__(
        self, address: Address, slab: ServerMemory, seqlock: SeqLockWriter, lock: Any, buffers: VersionBuffers
    ) -> None:
        self.shape, self.dtype = address.spec.shape, address.spec.dtype
        self.row_size = address.spec.row_bytes // self.dtype.itemsize
        self.words, self.word = slab.words, address.version // 8
        self._index, self._nbytes = address.index, address.spec.nbytes
        self._sync, self._seqlock, self._lock, self._buffers = slab.sync, seqlock, lock, buffers
        self.replacing = _Replacing(self)
        self._next: Any = None  # the buffer of the next version, during a write
        self._use(buffers.current)

    def __enter__(self) -> np.ndarray:
        self._lock.acquire()
        try:
            self._begin()
            if self._buffers.close():  # a worker holds the buffer, or it is being sent
                before = self.array
                self._use(self._buffers.free())
                np.copyto(self._view, before)
        except BaseException:
            self._lock.release()
            raise
        return self._view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        self._lock.release()

    def lend(self) -> tuple[int, np.ndarray]:
        """Return the version and bytes for `VariableServer.lend`."""
        version = self.words[self.word]
        return version >> 1, self._buffers.lend(version)

    def enter_replacing(self) -> tuple[np.ndarray, np.ndarray]:
        """Enter the context of `VariableServer.replacing`."""
        self._lock.acquire()
        try:
            if self._buffers.open():
                self._next = self._buffers.free()
                return self.array, self._buffers.view(self._next)
            view = self.__enter__()
            return view, view
        except BaseException:
            self._lock.release()
            raise

    def exit_replacing(self, *raised: Any) -> None:
        """Exit it."""
        try:
            if self._next is None:
                self.__exit__(*raised)
            elif raised[0] is None:
                self._begin()
                self._use(self._next)
                self._end()
        finally:
            self._next = None
            self._lock.release()

    def _begin(self) -> None:
        self._seqlock.wait(self._index, self._nbytes)
        self.words[self.word] += 1
        self._sync()

    def _end(self) -> None:
        self._sync()
        self.words[self.word] += 1
        self._sync()

    def _use(self, buffer: Any) -> None:
        self._buffers.make_current(buffer)
        self._view = self._buffers.view(buffer)
        self.array = read_only(self._view)


@final
class _Replacing:
    """The context in which a variable of this server gets a new value."""

    __slots__ = ("_held",)

    def __init__(self, held: _Held) -> None:
        self._held = held

    def __enter__(self) -> tuple[np.ndarray, np.ndarray]:
        return self._held.enter_replacing()

    def __exit__(self, *raised: Any) -> None:
        self._held.exit_replacing(*raised)


@final
class VariableServer(Rounds):
    """The variables of one server, and its service. `ParameterServers` creates it.

    From `start` to `stop` a thread takes pushes, calls the handler, and answers reads, independently of the program. If MPI
    allows one thread only, this happens inside `wait`.

    Args:
        memory: that workers access.
        readers: the workers that read this rank's memory themselves.
        progress: lets MPI complete accesses to this rank's memory.
        back_off: the longest sleep, in seconds, when idle.
        threads: whether several threads may call MPI at a time.
        bear: called with an error of MPI; raises it unless it is the death of expendable workers.

    Attributes:
        index: among the servers.
        passes: the passes that `wait` has waited for, including the current one.
        applied: for each worker the number of its last applied push; all before it are applied.
        stats: the server's statistics.
    """

    def __init__(
        self,
        group: ProcessGroup,
        index: int,
        worker_ranks: Sequence[int],
        memory: SharedMemory,
        readers: Sequence[int],
        progress: Callable[[], object],
        back_off: float,
        threads: bool,
        bear: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.index, self.passes, self._bear = index, 0, bear or _raise
        layout, mailbox = memory.layout, memory.mailbox
        self.applied = [0] * layout.workers
        self._group, self._worker_ranks, self._layout = group, tuple(worker_ranks), layout
        self._addresses, self._mailbox, self._slabs, self._progress = memory.addresses, mailbox, memory.slabs, progress
        self._make_buffers = SnapshotBuffers if readers else PrivateBuffers
        self._seqlock = SeqLockWriter(mailbox.words, [layout.announced(w) for w in readers], mailbox.sync, progress)
        self._ports: list[Port] = []
        self._port_of: dict[int, Port] = {}
        self._received = [0] * layout.workers
        self._handler: Handler | None = None
        self._on_leave: Callable[[int], object] | None = None
        self._retry: Callable[[], bool] | None = None
        self._left, self._readers = [0] * layout.workers, 0
        self._polls = 0
        self._missing: dict[int, int] = {}  # workers that left the program: the poll at which all they sent is taken
        self._gone: set[int] = set()  # those of them that had signed off, and workers that died
        self._target = 0
        self._pass_wait = PassWait(group)
        self._held: dict[int, _Held] = {}
        self._closed = False
        self._lock = threading.RLock()  # between the thread and the program
        self.stats = ServerStats(layout.workers)
        self._service = Service(self, back_off, threads, self.stats)

    def add_port(self, port: Port, workers: Sequence[int]) -> None:
        """Add a port for workers. `ParameterServers` calls it."""
        self._ports.append(port)
        self.patience = max(port.patience for port in self._ports)
        self._port_of.update(dict.fromkeys(workers, port))

    # variables

    def array(self, variable: int) -> np.ndarray:
        """Return a read-only view of a variable, for the handler; other callers may see partial writes."""
        return (self._held.get(variable) or self._hold(variable, "array")).array

    def read(self, variable: int, out: np.ndarray) -> int:
        """Copy a whole variable into an array of its shape, and return its version."""
        held = self._held.get(variable) or self._hold(variable, "read")
        with self._lock:
            np.copyto(out, held.array, casting="no")
            return held.words[held.word] >> 1

    def read_rows(self, variable: int, rows: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the version of a variable and a copy of rows of that version."""
        held = self._held.get(variable) or self._hold(variable, "read_rows")
        with self._lock:
            return held.words[held.word] >> 1, np.take(held.array, rows, axis=0)

    def lend(self, variable: int) -> tuple[int, np.ndarray]:
        """Return the version of a variable and its bytes, which do not change while referenced."""
        held = self._held.get(variable) or self._hold(variable, "lend")
        with self._lock:
            return held.lend()

    def version(self, variable: int) -> int:
        """Return the number of writes of a variable."""
        held = self._held.get(variable) or self._hold(variable, "version")
        return held.words[held.word] >> 1

    def writing(self, variable: int) -> AbstractContextManager[np.ndarray]:
        """Return a context with a writable view of a variable; no reader sees a partial write.

        An error inside leaves the variable closed to readers, because it may be partially written.
        """
        return self._held.get(variable) or self._hold(variable, "writing")

    def replacing(self, variable: int) -> AbstractContextManager[tuple[np.ndarray, np.ndarray]]:
        """Return a context with a variable and an array for a whole new value.

        Both may be the same array; if not, readers keep reading the old value meanwhile. While workers hold the variable, this
        is much faster than `writing`. If both are the same, an error inside leaves the variable closed to readers.
        """
        return (self._held.get(variable) or self._hold(variable, "replacing")).replacing

    # workers

    def clocks(self) -> np.ndarray:
        """Return the finished steps of every worker that publishes them; int64."""
        with self._lock:
            self._mailbox.sync()
        words, layout = self._mailbox.words, self._layout
        return np.array([words[layout.clock(w) // 8] for w in range(layout.workers)], np.int64)

    def left(self, worker: int) -> int:
        """Return the number of passes that a worker has left; FOR_GOOD if it will not return."""
        return FOR_GOOD if worker in self._gone else self._mailbox.words[self._layout.left(worker) // 8]

    def acknowledge(self, worker: int, number: int) -> None:
        """Acknowledge a worker's pushes up to a number, after a handler has deferred some. For handlers."""
        if not self.applied[worker] <= number <= self._received[worker]:
            expected = f"{self.applied[worker]} <= number <= {self._received[worker]}"
            raise ValueError(explain("Server.acknowledge", "number", expected=expected, got=number))
        self.applied[worker] = number
        self._port_of[worker].acknowledge(worker, number)

    # the service

    def start(
        self,
        handler: Handler,
        on_leave: Callable[[int], object] | None = None,
        retry: Callable[[], bool] | None = None,
    ) -> None:
        """Start to serve.

        Args:
            handler: handles pushes.
            on_leave: called with each worker that has signed off, from a pass or for good; see `left`.
            retry: called when idle; returns whether it handled any deferred pushes.
        """
        self._handler, self._on_leave, self._retry = handler, on_leave, retry
        self._service.start(f"mpistrat-server-{self.index}")

    def wait(self, passes: int | None = 1) -> None:
        """Wait until every worker has signed off from `passes` more passes, or for good.

        A worker that has left the program, after it signed off from a pass and pushed nothing more, has left for good.

        Args:
            passes: None: until every worker has left for good.

        Raises:
            PeerExitError: a worker has left the program without signing off.
        """
        if passes is not None:
            self.passes += passes
        self._target = FOR_GOOD if passes is None else self.passes
        self._pass_wait = PassWait(self._group)
        self._service.wait(self._all_left)

    def _all_left(self) -> bool:
        return all(self.left(worker) >= self._target for worker in range(self._layout.workers))

    def expects(self, worker: int) -> bool:
        """Return whether the program waits for a worker, and so has done everything before."""
        return self._service.waiting and self.left(worker) < self._target

    def stop(self) -> None:
        """End the service: nothing more is applied or answered."""
        self._service.stop()

    def abandon(self) -> None:
        """End the service, even with data in flight."""
        self._service.abandon()

    def close(self) -> None:
        """End the service, and free the memory."""
        self.stop()
        self._closed = True
        self._held.clear()

    def accepts(self, worker: int) -> bool:
        """Return whether another push of a worker may be taken. Ports call it."""
        return self._received[worker] - self.applied[worker] < _MOST_KEPT

    def deliver(self, worker: int, fragment: Fragment, payload: np.ndarray) -> None:
        """Apply a push, unless it is a duplicate. Ports call it."""
        expected = self._received[worker] + 1
        if fragment.number < expected:
            return
        if fragment.number > expected:
            raise RuntimeError(f"push {fragment.number} of worker {worker} is out of order: expected push {expected}")
        self._received[worker] = fragment.number
        applied = self._apply(worker, fragment, payload)
        if applied and self.applied[worker] == fragment.number - 1:  # no earlier push is deferred
            self.acknowledge(worker, fragment.number)

    def _apply(self, worker: int, fragment: Fragment, payload: np.ndarray) -> bool:
        """Call the handler; return whether it has applied the push."""
        handler, kind, stats, start = self._handler, fragment.kind, self.stats, perf_counter()
        if handler is None:
            raise RuntimeError("Server: received a push before start()")
        applied = True
        if kind != _COMMIT:
            count(stats.pushes[worker], fragment.variable, fragment.total)
            applied = handler(self._push(worker, fragment, payload)) is not False
        if kind >= _ENDS_STEP or kind == _COMMIT:
            stats.commits[worker] += 1
            commit = Push(worker, -1, fragment.number, fragment.what, fragment.version)
            applied = handler(commit) is not False and applied
        stats.busy += perf_counter() - start
        return applied

    def _push(self, worker: int, fragment: Fragment, payload: np.ndarray) -> Push:
        held = self._held.get(fragment.variable) or self._hold(fragment.variable, "push")
        payload.flags.writeable = False
        if fragment.kind & ~_ENDS_STEP == _PUSH:
            values = np.ndarray(held.shape, held.dtype, payload)
            return Push(worker, fragment.variable, fragment.number, fragment.what, fragment.version, None, values)
        encoding = (fragment.kind & ~_ENDS_STEP) - MessageKind.PUSH_ENCODED
        if encoding >= 0:
            values = read_only(_decoded(encoding, payload, held.shape))
            return Push(worker, fragment.variable, fragment.number, fragment.what, fragment.version, None, values)
        rows = payload[: 8 * fragment.rows].view(np.int64)
        values = payload[8 * fragment.rows :].view(held.dtype)
        whole = fragment.rows == 0 or values.size // fragment.rows == held.row_size
        values = values.reshape(fragment.rows, *held.shape[1:]) if whole else values.reshape(fragment.rows, -1)
        return Push(worker, fragment.variable, fragment.number, fragment.what, fragment.version, rows, values)

    def count_staleness(self, push: Push) -> None:
        """Record the age, in versions, of the version from which a push was computed, if any."""
        if push.version >= 0:
            self.stats.stale(push.worker, push.variable, self.version(push.variable) - push.version)

    def move(self) -> None:
        """Advance large messages between two parts of a long update: MPI moves them only in its calls."""
        try:
            for port in self._ports:
                port.move()
        except Exception as error:
            self._bear(error)  # `rest` drops the workers

    def renumber(self, worker_ranks: Sequence[int]) -> None:
        """Set the ranks of the workers, -1 for one that died."""
        self._worker_ranks = tuple(worker_ranks)

    def _drop_lost(self) -> None:
        """Expect nothing more from workers that died."""
        for worker, rank in enumerate(self._worker_ranks):
            if rank in self._group.lost and worker not in self._gone:
                self._gone.add(worker)
                self._port_of[worker].drop(worker)

    # the rounds of the service

    def give_way(self) -> None:
        if len(self._ports) == 1:
            self._ports[0].give_way()
        else:
            super().give_way()

    def poll(self) -> bool:
        self._polls += 1
        waiting = 0
        try:
            self._progress()
            for port in self._ports:
                waiting += port.poll()
        except Exception as error:
            self._bear(error)
            self._drop_lost()
        if waiting > self.stats.most_waiting:
            self.stats.most_waiting = waiting
        return waiting > 0

    def rest(self) -> bool:
        if self._group.lost:
            self._drop_lost()
        changed = self._retry is not None and self._retry()
        for worker, before in enumerate(self._left):
            if (left := self.left(worker)) != before:
                self._left[worker], changed = left, True
                if self._on_leave is not None:
                    self._on_leave(worker)
        readers = self._seqlock.readers()  # one-sided reads may need this rank's progress
        changed, self._readers = changed or readers != self._readers, readers
        return changed

    def busy(self) -> bool:
        return any(port.busy() for port in self._ports)

    def check(self) -> None:
        missing = [rank for worker, rank in enumerate(self._worker_ranks) if self.left(worker) < self._target]
        self._pass_wait.look(missing, sum(self._received))
        for worker, rank in enumerate(self._worker_ranks):
            if rank in self._group.lost or not self._group.has_left(rank) or self.left(worker) >= self._target:
                continue
            if self._polls < self._missing.setdefault(worker, self._polls + self._layout.slots + 2):
                continue
            signed = self._mailbox.words[self._layout.signed(worker) // 8]
            if not self.left(worker) or self._received[worker] > signed:
                what = "the last pass" if self._target == FOR_GOOD else f"pass {self._target}"
                raise PeerExitError(
                    f"worker {worker} (rank {rank}) left the program without signing off from {what} of server "
                    f"{self.index} (rank {self._group.topology.rank})"
                )
            self._gone.add(worker)

    def _hold(self, variable: int, function: str) -> _Held:
        if self._closed:
            raise ClosedError(f"Server.{function}: closed")
        address = self._addresses[variable]
        if address.spec.server != self.index:
            got = f"variable {address.spec.name!r} of server {address.spec.server}"
            expected = f"a variable of server {self.index}"
            raise ValueError(explain(f"Server.{function}", "variable", expected=expected, got=got))
        slab = self._slabs[address.slab]
        buffers = self._make_buffers(address, slab)
        held = self._held[variable] = _Held(address, slab, self._seqlock, self._lock, buffers)
        return held


def _raise(error: BaseException) -> None:
    raise error


def _decoded(encoding: int, payload: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float32 numbers of a payload."""
    wire, numbers = wire_named(WIRES[encoding]), np.empty(math.prod(shape), np.float32)
    assert wire is not None
    wire.decode(payload, numbers)
    return numbers.reshape(shape)
