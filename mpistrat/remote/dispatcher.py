"""The chief's side: sends closures to workers, receives their answers, and stores unanswered closures."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, final

from ..base import log
from ..base.errors import CollectiveTimeoutError, PeerExitError
from ..base.text import error_text
from ..base.waiting import Backoff
from ..comm.process_group import ProcessGroup
from .channel import Kind, Message, MpiChannel, pack_call
from .registry import loads_error
from .scheduler import ClosureCancelledError, RemoteValue, RemoteValueStatus

__all__ = ["FIRST", "Closure", "ClosureQueue", "Dispatcher"]

FIRST = float("inf")  # the priority of closures that come before all others and are never cancelled
_AHEAD = 4  # calls on a worker at a time while they are quick and many wait
_FUNCTIONS = 64  # that a worker stores; more than calls on it at a time
_MANY = 4  # calls that wait for each worker
_QUICK = 0.01  # seconds
_CHECK = 0.05  # seconds between two checks for ranks that left
_MUST_SERVE = "every rank but the chief must call coordinator.serve() or coordinator.close(), or end its `with` block"


@final
@dataclass
class Closure:
    """One scheduled function.

    Attributes:
        what: its name, for errors.
        data: its arguments as bytes; the function too if `function` is empty.
        value: the value that it will return.
        inputs: the RemoteValues that it refers to.
        worker: the only worker that may run it, or None.
        priority: larger ones are sent first.
        isolated: True if only its value raises its error, not the next join.
        kept: objects that must not be freed before it has run.
        start: called before it is first sent; returns False if it was cancelled.
        callback: called with the value once it is ready or aborted.
        number: counted from 1 over all submitted closures.
        missing: the number of its inputs that are not ready.
        function: the function as bytes, which each worker gets once.
    """

    what: str
    data: bytes
    value: RemoteValue
    inputs: Sequence[RemoteValue] = ()
    worker: int | None = None
    priority: float = 0
    isolated: bool = False
    kept: Sequence[Any] = ()
    start: Callable[[], bool] | None = None
    callback: Callable[[RemoteValue], None] | None = None
    number: int = 0
    missing: int = 0
    function: bytes = b""

    @property
    def rank(self) -> tuple[float, int]:
        """The order in the queue."""
        return -self.priority, self.number


Heap = list[tuple[tuple[float, int], Closure]]


@final
class ClosureQueue:
    """Closures for any worker, and closures for one.

    Example:
        >>> queue = ClosureQueue(2)
        >>> len(queue), queue.pop(0)
        (0, None)
    """

    def __init__(self, workers: int) -> None:
        self._any: Heap = []
        self._own: list[Heap] = [[] for _ in range(workers)]

    def __len__(self) -> int:
        return len(self._any) + sum(map(len, self._own))

    def push(self, closure: Closure) -> None:
        """Add a closure."""
        heap = self._any if closure.worker is None else self._own[closure.worker]
        heapq.heappush(heap, (closure.rank, closure))

    def pop(self, worker: int) -> Closure | None:
        """Take the next closure for a worker; None if there is none."""
        heaps = [heap for heap in (self._own[worker], self._any) if heap]
        return heapq.heappop(min(heaps, key=lambda heap: heap[0][0]))[1] if heaps else None

    def take(self, worker: int | None = None) -> list[Closure]:
        """Take all closures, or all that only one worker may run."""
        heaps = [self._any, *self._own] if worker is None else [self._own[worker]]
        taken = sorted(entry for heap in heaps for entry in heap)
        for heap in heaps:
            heap.clear()
        return [closure for _, closure in taken]


@final
class _ServingWorker:
    """The chief's record of a worker."""

    def __init__(self, index: int, rank: int) -> None:
        self.index, self.rank = index, rank
        self.calls: dict[int, Closure] = {}  # unanswered, by their number among this worker's
        self.sent = self.answered = 0
        self.seconds = FIRST  # duration of the last one
        self.serves = False
        self.returns = False  # it returns calls that wait for a long one
        self.since = 0.0  # when the first call was sent
        self.gone = ""  # the reason why it serves no longer
        self.warned = False  # the warning that it does not serve was printed
        self._functions: dict[
            bytes, int
        ] = {}  # functions that it has, by their digests: numbers; the last used one last
        self._numbers = itertools.count(1)

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"worker {self.index} (rank {self.rank})"

    def number_of(self, function: bytes) -> tuple[int, bool, int]:
        """Return the number of a function on this worker, whether it is new there, and the number that it replaces, or 0."""
        if not function:
            return 0, False, 0
        digest = hashlib.sha256(function).digest()
        number, new, dropped = self._functions.pop(digest, 0), False, 0
        if not number:
            number, new = next(self._numbers), True
            if len(self._functions) >= _FUNCTIONS:
                dropped = self._functions.pop(next(iter(self._functions)))
        self._functions[digest] = number
        return number, new, dropped

    def has_room(self, many: bool) -> bool:
        """Return True if it can get another call: one at a time, unless they are quick and many wait here."""
        ahead = many and self.returns and self.seconds < _QUICK
        return len(self.calls) < (_AHEAD if ahead else 1)


@final
class Dispatcher:
    """A carrier of closures to workers and of values back. For the chief.

    Any thread may drive it: threads that wait do, and if MPI allows it, a separate thread does while the program computes.

    Args:
        group: all ranks.
        channel: the chief's.
        workers: ranks.
        unpack: returns the value in a worker's bytes.

    Attributes:
        queue_size: the most closures that wait for a worker.
        listeners: the serving ranks, workers or not: they get commands, and a message at the end.
        threaded: True if it continues while the program computes.
        lock: held during changes.
    """

    def __init__(
        self,
        group: ProcessGroup,
        channel: MpiChannel,
        workers: Sequence[int],
        unpack: Callable[[bytes], Any],
    ) -> None:
        from mpi4py import MPI

        self.lock = threading.RLock()
        self._group, self._channel, self._unpack = group, channel, unpack
        self._workers = [_ServingWorker(index, rank) for index, rank in enumerate(workers)]
        self._alive = {worker.rank: worker for worker in self._workers}
        self.listeners: set[int] = set()
        self._serving: set[int] = set()
        self.queue_size, self._queue = 1, ClosureQueue(len(workers))
        self._waiting: dict[RemoteValue, list[Closure]] = {}  # closures by a missing input
        self._count = self._parked = self._pending = self._held = 0
        self._error: BaseException | None = None
        self._cancelled, self._cancel_everything = 0, False  # the number of the last closure at the last cancellation
        self._why_cancelled: BaseException = ClosureCancelledError("")
        self._finished: list[Closure] = []  # with callbacks to call
        self._messages = deque[Message]()  # of a client's program
        self._next_check = 0.0
        self.threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopping = False

    # calls of the coordinator

    def submit(self, closure: Closure) -> RemoteValue:
        """Put a function into the queue and return its value; wait while the queue is full.

        Raises:
            The exception of an earlier closure, unless this one is isolated.
        """
        isolated = closure.isolated
        if not isolated:
            self.raise_error()
        if closure.priority != FIRST:
            self.drive(lambda: self._size() < self.queue_size or (self._error is not None and not isolated))
            if not isolated:
                self.raise_error()
        with self.lock:
            if not self._alive:
                raise PeerExitError(f"{closure.what} cannot be run: all workers have left the program or died")
            self._count += 1
            closure.number = self._count
            self._pending += not isolated
            self._enter(closure)
            self._dispatch()
        self._start()
        return closure.value

    def alive(self) -> list[int]:
        """Return the indices of the workers that have not left."""
        return [worker.index for worker in self._alive.values()]

    def idle(self) -> list[int]:
        """Return the serving ranks that run no function, and no client's program."""
        self.progress()
        with self.lock:
            if self._held:
                return []
            return sorted(self._serving & self.listeners - {worker.rank for worker in self._workers if worker.calls})

    def join(self) -> None:
        """Wait until every closure has run.

        Raises:
            The exception of the first closure that failed, once.
        """
        self.drive(lambda: not self._pending or self._error is not None)
        self.raise_error()

    def done(self) -> bool:
        """Return True if every closure has run."""
        self.progress()
        return not self._pending

    def raise_error(self) -> None:
        """Raise a closure's exception, once, after the running ones have ended."""
        if self._error is None:
            return
        self.drive(lambda: not self._running())
        with self.lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_for(self, value: RemoteValue, timeout: float | None = None) -> Any:
        """Return a value: `RemoteValue.get`."""
        if not self.drive(lambda: value.status is not RemoteValueStatus.NOT_READY, timeout):
            raise TimeoutError(f"RemoteValue.get: not ready after {timeout:g} s")
        return value._result(self._unpack)

    def command(self, data: bytes) -> None:
        """Make the serving ranks join a collective call, which the chief then makes.

        It waits for running closures; queued ones run afterwards.
        """
        with self.held_back():
            self.send(self.listeners, Kind.COMMAND, data)

    def cancel(self, why: str) -> None:
        """Cancel waiting closures."""
        with self.lock:
            self._cancel(ClosureCancelledError(why), everything=True)
            self._error = None

    def end(self, ranks: Iterable[int]) -> None:
        """Release serving ranks, once nothing runs any more.

        Each confirms: then it has no pending message, and the communicator may be freed.

        Raises:
            CollectiveTimeoutError: a rank does not serve.
        """
        with self.held_back():
            leaving = self.listeners.intersection(ranks)
            self.send(leaving, Kind.END)
            self._wait_for("ClusterCoordinator.close", lambda: leaving & self.listeners)

    def leave(self) -> None:
        """Release the others at the end of the program, without waiting for them."""
        self.stop()
        self.send(self.listeners, Kind.END, extra=1)

    def renumber(self, channel: MpiChannel, numbers: Mapping[int, int]) -> None:
        """Continue over a new channel, with new numbers of the ranks by the old ones. Nothing runs, and all ranks serve."""
        with self.lock:
            self._channel = channel
            for worker in self._alive.values():
                worker.rank = numbers[worker.rank]
            self._alive = {worker.rank: worker for worker in self._alive.values()}
            self.listeners, self._serving = (
                {numbers[rank] for rank in ranks if rank in numbers} for ranks in (self.listeners, self._serving)
            )

    def wait_until_all_serve(self) -> None:
        """Wait until all listeners serve.

        Raises:
            CollectiveTimeoutError: a rank does not.
        """
        self._wait_for("ClusterCoordinator", lambda: self.listeners - self._serving)

    def _wait_for(self, function: str, late: Callable[[], set[int]]) -> None:
        """Wait until no rank is late."""
        if not self.drive(lambda: not late(), self._group.environment.abort_after):
            ranks = sorted(late())
            where = self._group.monitor.where(ranks)
            raise CollectiveTimeoutError(f"{function}: ranks {ranks} do not serve{where}\n{_MUST_SERVE}")

    @property
    def num_workers(self) -> int:
        """The number of workers at first: their indices are below."""
        return len(self._workers)

    def abandon(self) -> None:
        """Ask the thread to end."""
        self._stopping = True
        self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self.abandon()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Start no functions in this context, which waits for running ones; at its end its messages have left."""
        with self.lock:
            self._held += 1
        try:
            self.drive(lambda: not self._running())
            yield
            self.drive(lambda: not self.sending())
        finally:
            with self.lock:
                self._held -= 1

    def send(self, ranks: Iterable[int], kind: Kind, data: bytes = b"", extra: int = 0) -> None:
        """Send a message to ranks."""
        with self.lock:
            for rank in sorted(ranks):
                self._channel.send(rank, kind, 0, data, extra)

    def sending(self) -> bool:
        """Return True if a message has not left yet."""
        return self._channel.sending()

    def take_messages(self) -> list[Message]:
        """Return the messages about a client's program that have arrived since the last call."""
        with self.lock:
            taken, self._messages = list(self._messages), deque()
        return taken

    # driving

    def drive(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        """Make progress until a condition holds; return False on a timeout."""
        deadline = None if timeout is None else monotonic() + timeout
        backoff = Backoff()
        while not until():
            if self.progress():
                backoff.reset()
            elif deadline is not None and monotonic() > deadline:
                return until()
            else:
                backoff.pause()
        return True

    def progress(self) -> bool:
        """Receive and send available messages; return True if anything happened."""
        with self.lock:
            moved = self._receive()
            now = monotonic()
            if now > self._next_check:
                self._next_check = now + _CHECK
                self._check(now)
            self._dispatch()
            finished, self._finished = self._finished, []
        for closure in finished:
            if closure.callback is not None:
                closure.callback(closure.value)
        return moved

    def _start(self) -> None:
        if self.threaded and self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="mpistrat-coordinator", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        backoff = Backoff()
        while True:
            self._wake.clear()
            if self._stopping:  # checked after the clearing, else a `stop` between the two would be lost
                return
            if not self._size() and not self._running() and not self._channel.sending():
                self._wake.wait()
            elif self.progress():
                backoff.reset()
            else:
                backoff.pause()

    def _running(self) -> int:
        return sum(len(worker.calls) for worker in self._workers)

    def _size(self) -> int:
        return len(self._queue) + self._parked

    # inside the lock

    def _enter(self, closure: Closure) -> None:
        """Put a closure into the queue, or next to the inputs that it waits for."""
        if closure.worker is not None and closure.worker not in self.alive():
            worker = self._workers[closure.worker]
            error = PeerExitError(f"{closure.what} cannot be run: {worker.name} {worker.gone}")
            self._abort(closure, error)
            return
        for value in closure.inputs:
            if value.status is RemoteValueStatus.ABORTED:
                self._abort(closure, _no_argument(closure))
                return
        missing = [value for value in closure.inputs if value.status is RemoteValueStatus.NOT_READY]
        closure.missing = len(missing)
        if not missing:
            self._queue.push(closure)
            return
        self._parked += 1
        for value in missing:
            self._waiting.setdefault(value, []).append(closure)

    def _dispatch(self) -> None:
        while self._queue and not self._held:
            many = len(self._queue) > _MANY * len(self._alive)
            for worker in sorted(self._alive.values(), key=lambda worker: len(worker.calls)):
                closure = self._queue.pop(worker.index) if worker.has_room(many) else None
                if closure is not None:
                    self._start_on(worker, closure)
                    break
            else:
                return

    def _start_on(self, worker: _ServingWorker, closure: Closure) -> None:
        start, closure.start = closure.start, None
        if start is not None and not start():
            self._abort(closure, ClosureCancelledError(f"{closure.what} was cancelled"))
            return
        worker.sent += 1
        worker.since = worker.since or monotonic()
        worker.calls[worker.sent] = closure
        inputs = [(value._number, value._data or b"") for value in closure.inputs]
        number, new, dropped = worker.number_of(closure.function)
        if dropped:
            self._channel.send(worker.rank, Kind.FORGET, dropped)
        if new:
            self._channel.send(worker.rank, Kind.FUNCTION, number, closure.function)
        payload = pack_call(inputs, closure.data, number)
        self._channel.send(worker.rank, Kind.CALL, worker.sent, payload, worker.answered)

    def _receive(self) -> bool:
        messages = self._channel.poll()
        for message in messages:
            worker = self._alive.get(message.peer)
            if message.kind == Kind.HELLO:
                self._serving.add(message.peer)
            if message.kind in (Kind.OUTPUT, Kind.ENDED):
                self._messages.append(message)
            elif message.kind == Kind.BYE:
                self.listeners.discard(message.peer)
            elif worker is not None:
                worker.serves = True
                if message.kind == Kind.HELLO:
                    worker.returns = bool(message.extra)
                elif message.kind == Kind.RETURNED:
                    self._take_back(worker, message.number)
                else:
                    self._take(worker, message)
        return bool(messages)

    def _take(self, worker: _ServingWorker, message: Message) -> None:
        closure = worker.calls.pop(message.number, None)
        if closure is None:
            return
        worker.answered, worker.seconds = message.number, message.extra / 1e6
        if message.kind == Kind.RESULT:
            closure.value._finish(message.payload)
            self._settle(closure)
        else:
            self._abort(closure, loads_error(message.payload, self._unpack))

    def _take_back(self, worker: _ServingWorker, number: int) -> None:
        """Put a call that waits for a long one back into the queue, or cancel it with those that waited there."""
        closure = worker.calls.pop(number, None)
        worker.seconds = FIRST
        if closure is None:
            return
        if closure.number <= self._cancelled and _can_be_cancelled(closure, self._cancel_everything):
            self._abort(closure, self._why_cancelled, cancelled=True)
        else:
            self._queue.push(closure)

    def _abort(self, closure: Closure, error: BaseException, cancelled: bool = False) -> None:
        closure.value._abort(error)
        first = not (closure.isolated or cancelled) and self._error is None
        if first:
            self._error = error
        self._settle(closure)
        if first:
            self._cancel(ClosureCancelledError(f"cancelled, because {closure.what} failed: {error_text(error)}"))

    def _settle(self, closure: Closure) -> None:
        """Continue with closures that waited for a value, now that it is ready or aborted."""
        value = closure.value
        self._pending -= not closure.isolated
        self._finished.append(closure)
        for waiting in self._waiting.pop(value, ()):
            if waiting.value.status is not RemoteValueStatus.NOT_READY:
                continue
            waiting.missing -= 1
            if value.status is RemoteValueStatus.ABORTED:
                self._parked -= 1
                self._abort(waiting, _no_argument(waiting))
            elif not waiting.missing:
                self._parked -= 1
                self._queue.push(waiting)

    def _cancel(self, error: BaseException, everything: bool = False) -> None:
        """Cancel waiting closures; isolated ones and those of priority FIRST stay, unless `everything` is True."""
        self._cancelled, self._why_cancelled, self._cancel_everything = self._count, error, everything
        parked = {id(closure): closure for closures in self._waiting.values() for closure in closures}
        for closure in (*self._queue.take(), *parked.values()):
            if closure.value.status is not RemoteValueStatus.NOT_READY:
                continue
            if _can_be_cancelled(closure, everything):
                self._parked -= id(closure) in parked
                self._abort(closure, error, isinstance(error, ClosureCancelledError))
            elif id(closure) not in parked:
                self._queue.push(closure)

    def _check(self, now: float) -> None:
        """Check for workers that left the program, and for those that never started to serve."""
        gone = [worker for worker in self._alive.values() if self._group.has_left(worker.rank)]
        if gone:
            self._receive()  # their last messages
        for worker in gone:
            self._lose(worker, "died" if worker.rank in self._group.lost else "left the program", PeerExitError)
        for rank in [rank for rank in self.listeners if self._group.has_left(rank)]:
            self.listeners.remove(rank)
            self._channel.give_up(rank)
        environment = self._group.environment
        for worker in list(self._alive.values()):
            waited = now - worker.since if worker.calls and not worker.serves else 0.0
            if waited > environment.abort_after:
                why = f"does not serve after {environment.abort_after:g} s: {_MUST_SERVE}"
                self._lose(worker, why, CollectiveTimeoutError)
            elif waited > environment.warn_after and not worker.warned:
                worker.warned = True
                log.logger.warning("%s does not serve after %g s: %s", worker.name, environment.warn_after, _MUST_SERVE)

    def _lose(self, worker: _ServingWorker, why: str, error: type[Exception]) -> None:
        del self._alive[worker.rank]
        worker.gone = why
        self.listeners.discard(worker.rank)
        self._channel.give_up(worker.rank)
        name = worker.name
        calls, worker.calls = list(worker.calls.values()), {}
        log.logger.warning("%s %s: %d of its functions are run by others", name, why, len(calls))
        for closure in (*calls, *self._queue.take(worker.index)):
            if closure.worker is None and self._alive:
                self._queue.push(closure)
            else:
                self._abort(closure, error(f"{closure.what} cannot be run: {name} {why}"))
        if not self._alive:
            self._cancel(error(f"all workers are gone; {name} {why}"), everything=True)


def _can_be_cancelled(closure: Closure, everything: bool) -> bool:
    return everything or not (closure.isolated or closure.priority == FIRST)


def _no_argument(closure: Closure) -> ClosureCancelledError:
    return ClosureCancelledError(f"{closure.what} cannot be run: a RemoteValue among its arguments failed")
