"""A client's program: one function that all ranks of a serving job call together, as if a launcher had started it there.

Each rank runs it in its main thread, with a new communicator as its world, while another thread takes messages. A program that
fails on one rank, or whose client interrupts it, is stopped on all ranks by an exception, KeyboardInterrupt. What it has created
is then abandoned, because ranks may have stopped inside a collective: its communicators are not used again.
"""

from __future__ import annotations

import contextvars
import gc
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, NoReturn, final

from ..base.context import set_global
from ..base.errors import ClosedError, ClusterError, ContextError, PeerExitError, explain
from ..base.text import named
from ..cluster.world import use
from ..comm.process_group import abandon, open_groups
from ..strategy.preemption import release_signals
from ..variables import ShardedVariable, Variable
from .channel import Kind
from .dispatcher import Dispatcher
from .output import STREAMS
from .registry import Reduced, dumps, dumps_error, dumps_result, loads, plain, text_of_failure
from .scheduler import ClosureCancelledError, RemoteValue

__all__ = ["RankProgram", "ProgramLeader", "pack_program", "plain_variable"]

LIMIT = 10.0  # seconds in which a stopped program must end on each rank; else the job ends
_AGAIN = 1.0  # seconds between two interruptions of a program that continues


def pack_program(
    program: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    strategy: Callable[[], Any] | None,
    shown: Sequence[bool],
) -> bytes:
    """Return the payload of a program.

    Args:
        program, args, kwargs, strategy: see `RemoteCluster.run`.
        shown: whether the client's stdout and stderr are terminals.

    Raises:
        TypeError: it refers to a RemoteValue, or to an object that cannot be pickled.
    """
    what = getattr(program, "__qualname__", "a program")
    call = (program, tuple(args), dict(kwargs or {}), strategy)
    return bytes(map(int, shown)) + dumps(call, _refuse_values, what)


def plain_variable(thing: Any) -> Reduced | None:
    """Return a variable's value to send in its place."""
    return plain(thing.numpy()) if isinstance(thing, (Variable, ShardedVariable)) else None


@final
class RankProgram:
    """A program on this rank.

    Args:
        payload: of `pack_program`.
        where: the rank, for errors.

    Attributes:
        output: what it has printed since this was emptied: the number of the stream, and the text.
    """

    def __init__(self, payload: bytes, where: str) -> None:
        self._shown, self._call = payload[:2], memoryview(payload)[2:]
        self._where, self._groups = where, open_groups()
        self._lock = threading.Lock()
        self._stopping = self._over = False
        self._interrupted = 0.0
        self.output: deque[tuple[int, str]] = deque()

    def run(self) -> tuple[Kind, bytes]:
        """Run it, and return RESULT, FAILED, or CANCEL if it was stopped; and the payload. In the main thread.

        Raises:
            KeyboardInterrupt: of this rank's terminal, not of the client.
        """
        before = signal.signal(signal.SIGINT, self._on_signal)
        for number, stream in STREAMS.items():
            stream.receiver, stream.shown = partial(self._record, number), bool(self._shown[number - 1])
        try:
            return contextvars.copy_context().run(self._attempt)  # scopes that it enters end with it
        except KeyboardInterrupt:
            if not self._stopping:
                raise
            return Kind.CANCEL, b""
        finally:
            self._end()
            for stream in STREAMS.values():
                stream.receiver, stream.shown = None, False
            signal.signal(signal.SIGINT, before)

    def stop(self) -> None:
        """Interrupt it, again if it continues. From another thread."""
        with self._lock:
            if not self._over and monotonic() - self._interrupted > _AGAIN:
                self._stopping, self._interrupted = True, monotonic()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def take_output(self) -> list[tuple[int, str]]:
        """Return what it has printed since the last call, joined."""
        taken: list[tuple[int, str]] = []
        for _ in range(len(self.output)):
            number, text = self.output.popleft()
            if taken and taken[-1][0] == number:
                text = taken.pop()[1] + text
            taken.append((number, text))
        return taken

    def finish(self, clean: bool) -> None:
        """Forget it, once it has ended on all ranks; abandon what it has created unless all have returned. In the main thread."""
        set_global(None)
        if clean:
            return
        abandon(self._groups, ClosedError("the program that created it has failed, or was stopped"))
        release_signals()
        gc.collect()

    def _attempt(self) -> tuple[Kind, bytes]:
        try:
            answer = self._run()
            self._end()
            return Kind.RESULT, answer
        except BaseException as error:
            self._end()
            if self._stopping:
                return Kind.CANCEL, b""
            text = text_of_failure(error, self._where, loss_ends=False)  # this rank's service ends if it needs those
            return Kind.FAILED, dumps_error(error, text, plain_variable, _no_token)

    def _run(self) -> bytes:
        program, args, kwargs, strategy = loads(self._call, _no_token)
        if strategy is None:
            return dumps_result(program(*args, **kwargs), plain_variable)
        with strategy() as made, made.scope():
            return dumps_result(program(*args, **kwargs), plain_variable)

    def _end(self) -> None:
        with self._lock:
            self._over = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the program; a signal that comes after its end has no effect."""
        if not self._over or not self._stopping:
            raise KeyboardInterrupt

    def _record(self, number: int, text: str) -> None:
        self.output.append((number, text))


@final
class ProgramWorld:
    """The communicator of all ranks for programs. After one that failed, the next gets a new one, without old messages.

    Args:
        comm: of all ranks.
    """

    def __init__(self, comm: Any) -> None:
        self._parent = comm
        self._comm: Any = None
        self._before: Any = None  # the job's own

    def enter(self) -> None:
        """Make it the default communicator of strategies. Collective; all ranks are here."""
        self._comm = self._comm or self._parent.Dup()
        self._before = use(self._comm)

    def leave(self, clean: bool) -> None:
        """Restore the job's own; after a failed program, do not use this one again. Local."""
        use(self._before)
        if not clean:
            self._comm = None

    def free(self) -> None:
        """Free it. Collective."""
        if self._comm is not None:
            self._comm.Free()


@final
class ProgramLeader:
    """A program on all ranks, for the chief: it runs its own part in the main thread, and another thread calls `step`.

    Args:
        dispatcher: the chief's.
        world: of programs.
        chief: its rank.
        payload: of `pack_program`.

    Raises:
        ContextError: MPI was started without THREAD_MULTIPLE.
    """

    def __init__(self, dispatcher: Dispatcher, world: ProgramWorld, chief: int, payload: bytes) -> None:
        if not dispatcher.threaded:
            remedy = "Let mpi4py start MPI"
            raise ContextError(
                explain("run", "", expected="MPI.THREAD_MULTIPLE in the job", got="a lower level", remedy=remedy)
            )
        self._dispatcher, self._world, self._chief = dispatcher, world, chief
        self._others = set(dispatcher.listeners)
        self._answers: dict[int, tuple[int, bytes]] = {}
        self._failed: list[int] = []  # ranks, in the order of their answers
        self._stopped: float | None = None  # since when
        self._lock = threading.RLock()  # of the answers
        self.size = len(self._others) + 1
        self.program = RankProgram(payload, self._name(chief))
        self._payload = payload

    def run(self, attend: Callable[[], None]) -> None:
        """Run the program on all ranks, once running functions have ended; return when it has ended on all. In the main thread.

        Args:
            attend: runs in another thread meanwhile; it calls `step` until all ranks have answered.
        """
        with self._dispatcher.held_back():
            self._dispatcher.send(self._others, Kind.PROGRAM, self._payload)
            self._payload = b""
            self._dispatcher.drive(lambda: not self._dispatcher.sending())
            self._world.enter()
            helper = threading.Thread(target=attend, name="mpistrat-program", daemon=True)
            helper.start()
            own = self.program.run()
            with self._lock:
                self._take(self._chief, *own)
            helper.join()
            clean = all(kind == Kind.RESULT for kind, _ in self._answers.values())
            self._dispatcher.send(self._others & self._dispatcher.listeners, Kind.OVER, extra=int(clean))
            self.program.finish(clean)
            self._world.leave(clean)

    def step(self) -> list[tuple[int, str | bytes]]:
        """Handle what has arrived, and return new output: the number of the stream, and the text."""
        with self._lock:
            return self._step()

    def _step(self) -> list[tuple[int, str | bytes]]:
        own = self._chief in self._answers
        output: list[tuple[int, str | bytes]] = list(self.program.take_output())
        self._dispatcher.progress()
        for message in self._dispatcher.take_messages():
            if message.kind == Kind.OUTPUT:
                output.append((message.number, message.payload))
            else:
                self._take(message.peer, message.extra, message.payload)
        for rank in self._others - self._dispatcher.listeners - set(self._answers):
            error = PeerExitError(f"{self._name(rank)} died or left the program")
            self._take(rank, Kind.FAILED, dumps_error(error, str(error), plain_variable, _no_token))
            self._failed.insert(0, self._failed.pop())  # the cause of the others
        if self._stopped is not None and not own:
            self.program.stop()
        return output

    def stop(self) -> None:
        """Stop it on all ranks; repeated calls have no effect."""
        with self._lock:
            if self._stopped is None:
                self._stopped = monotonic()
                self._dispatcher.send(self._others - set(self._answers), Kind.STOP)

    @property
    def over(self) -> bool:
        """True once all ranks have answered."""
        return len(self._answers) == self.size

    @property
    def late(self) -> str:
        """The ranks on which it continues long after it was stopped, in words; "" without any."""
        if self._stopped is None or monotonic() - self._stopped < LIMIT:
            return ""
        return named("rank", sorted({self._chief, *self._others} - set(self._answers)))

    def answer(self, note: str = "") -> tuple[Kind, bytes]:
        """Return RESULT and the values of all ranks by rank, or FAILED and an error, for the client.

        Args:
            note: why the job ends, added to the error; "" if it continues.
        """
        if self._failed:
            error, text = loads(self._answers[self._failed[0]][1], _no_token)
            others = f"\n(It also failed on {named('rank', sorted(self._failed[1:]))})" if self._failed[1:] else ""
            return Kind.FAILED, dumps((error, text + others + note), plain_variable)
        if note:
            job_ends = ClusterError(note)
            return Kind.FAILED, dumps_error(job_ends, note, plain_variable, _no_token)
        if any(kind == Kind.CANCEL for kind, _ in self._answers.values()):
            stopped = ClosureCancelledError("the program was stopped")
            return Kind.FAILED, dumps_error(stopped, str(stopped), plain_variable, _no_token)
        return Kind.RESULT, dumps([data for _, (_, data) in sorted(self._answers.items())], plain_variable)

    def _take(self, rank: int, kind: int, data: bytes) -> None:
        self._answers[rank] = kind, data
        if kind == Kind.FAILED:
            self._failed.append(rank)
            self.stop()

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.size}"


def _refuse_values(thing: Any) -> None:
    if isinstance(thing, RemoteValue):
        raise TypeError("a RemoteValue, which only scheduled functions take: pass its value, value.get()")


def _no_token(kind: str, key: int) -> NoReturn:
    raise TypeError(f"a {kind} of the job's own strategy in a program, which creates its own")
