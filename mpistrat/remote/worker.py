"""The worker loop: a rank runs the chief's functions, one after the other, and takes part in its collective calls."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ..arena.values import initial_array, parse_dtype
from ..base import log
from ..base.errors import ContextError, PeerExitError, explain
from ..base.text import encoded, error_text
from ..base.waiting import Backoff, Deadline, PeerWait
from ..cluster.world import is_loss
from ..comm.process_group import ProcessGroup
from ..optimizers import Optimizer
from ..optimizers.definition import Definition, definition_of, make_defined
from ..strategy.show_config import show_config
from ..variables import create_variable
from ..variables.variable import value_for_file
from .channel import Kind, Message, MpiChannel, unpack_call
from .program import ProgramWorld, RankProgram
from .registry import ObjectRegistry, dumps_error, dumps_result, loads, text_of_failure

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["WorkerLoop", "Commands", "get_current_worker_index", "command_of"]

_GRACE = 1.0  # seconds in which the final message of a chief that left may still arrive
_LONG = 0.02  # seconds that a function may run before waiting calls are returned
_ATTENTION = 0.02  # seconds between two looks for messages while a client's program runs
_running: WorkerLoop | None = None


def get_current_worker_index() -> int:
    """Return the index of the worker that runs this scheduled function.

    Raises:
        ContextError: outside a scheduled function.
    """
    if _running is None:
        expected, got = "a call in a scheduled function", "one outside"
        raise ContextError(explain("get_current_worker_index", "", expected=expected, got=got))
    return _running.index


@final
class WorkerLoop:
    """A worker or a server that serves the chief.

    While a function runs long, a thread returns waiting calls to the chief, which may send them to another worker. A call is
    taken out of the inbox under the lock: it is either run or returned.

    Args:
        group: all ranks.
        channel: this rank's.
        chief: its rank.
        index: of this worker; -1 for a server.
        registry: resolves tokens on this rank.
        scope: creates the context in which functions run.
        execute: executes a command, a collective call of all ranks.
        flush: waits until this rank's writes to variables are applied.
        reform: continues with the other ranks, without workers that died.
        world: of clients' programs.
    """

    def __init__(
        self,
        group: ProcessGroup,
        channel: MpiChannel,
        chief: int,
        index: int,
        registry: ObjectRegistry,
        scope: Callable[[], Any],
        execute: Callable[[str, tuple[Any, ...]], None],
        flush: Callable[[], None],
        reform: Callable[[], None],
        world: ProgramWorld,
    ) -> None:
        self.index = index
        self._group, self._channel, self._chief = group, channel, chief
        self._registry, self._scope, self._execute, self._flush = registry, scope, execute, flush
        self._reform, self._world = reform, world
        self._answers: dict[int, tuple[Kind, int, bytes]] = {}
        self._forgotten = 0
        self._functions: dict[int, bytes] = {}  # of the chief, by their numbers, and
        self._loaded: dict[int, Any] = {}  # those that were called
        self._inbox: list[Message] = []
        self._lock = threading.Lock()  # of the channel and the inbox
        self._begun = 0  # number of started functions
        self._busy = False  # a function runs

    def serve(self, meanwhile: Callable[[], bool] | None = None) -> bool:
        """Run the chief's functions until it closes.

        Args:
            meanwhile: called repeatedly while idle; returns True if it did anything.

        Returns:
            True if the chief continues, False if it left the program.

        Raises:
            PeerExitError: the chief left without a message.
        """
        with self._giving_back() as able:
            with self._lock:
                self._channel.send(self._chief, Kind.HELLO, extra=able)
            return self._serve(meanwhile)

    def _serve(self, meanwhile: Callable[[], bool] | None) -> bool:
        waiting = self._wait_for_chief()
        while True:
            with self._lock:
                self._inbox = self._inbox or self._channel.poll()
                message = self._inbox.pop(0) if self._inbox else None
                self._busy = message is not None and message.kind == Kind.CALL
                self._begun += self._busy
            if message is not None:
                if message.kind == Kind.END:
                    return self._end(message)
                self._handle(message)
                waiting = self._wait_for_chief()
            elif meanwhile is not None and meanwhile():
                waiting.reset()
            else:
                try:
                    waiting.pause()
                except PeerExitError:
                    return self._final_message()

    @contextlib.contextmanager
    def _giving_back(self) -> Iterator[bool]:
        """Return waiting calls in this context, if MPI allows threads to; yields True if so."""
        from mpi4py import MPI

        over = threading.Event()
        if self.index < 0 or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            yield False
            return
        thread = threading.Thread(target=self._give_back, args=(over,), name="mpistrat-worker-loop", daemon=True)
        thread.start()
        try:
            yield True
        finally:
            over.set()
            thread.join()

    def _give_back(self, over: threading.Event) -> None:
        """Check periodically if the same function still runs; if so, return waiting calls."""
        seen = 0
        while not over.wait(_LONG):
            with self._lock:
                if self._busy and self._begun == seen:
                    self._inbox += self._channel.poll()
                    for message in [message for message in self._inbox if message.kind == Kind.CALL]:
                        self._inbox.remove(message)
                        self._channel.send(self._chief, Kind.RETURNED, message.number)
                seen = self._begun

    def _end(self, message: Message) -> bool:
        if message.extra:
            return False
        with self._lock:
            self._channel.send(self._chief, Kind.BYE)
        self._finish_sending()
        return True

    def _wait_for_chief(self) -> PeerWait:
        return PeerWait(self._group, "the coordinator's service", [self._chief], limited=False)

    def _final_message(self) -> bool:
        deadline, backoff = Deadline(_GRACE), Backoff()
        while not deadline.passed:
            with self._lock:
                messages = self._channel.poll()
            for message in messages:
                if message.kind == Kind.END:
                    return self._end(message)
            backoff.pause()
        raise PeerExitError(f"the chief (rank {self._chief}) left the program and closed no coordinator")

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.REFORM:
            self._reform()
        elif message.kind == Kind.COMMAND:
            self._execute(*loads(message.payload, self._registry.resolve))
        elif message.kind == Kind.FUNCTION:
            self._functions[message.number] = message.payload
        elif message.kind == Kind.FORGET:
            self._loaded.pop(message.number, None)
            del self._functions[message.number]
        elif message.kind == Kind.PROGRAM:
            self._run_program(message.payload)
        elif message.kind == Kind.CALL:
            self._forget(message.extra)
            if message.number <= self._forgotten:
                return  # the chief has the answer
            if message.number not in self._answers:
                self._answers[message.number] = self._call(message.payload)
            kind, microseconds, data = self._answers[message.number]
            with self._lock:
                self._busy = False
                self._channel.send(self._chief, kind, message.number, data, microseconds)
            self._finish_sending()

    def renumber(self, channel: MpiChannel, chief: int, world: ProgramWorld) -> None:
        """Continue over a new channel, with new numbers of the ranks."""
        with self._lock:
            self._channel, self._chief, self._world = channel, chief, world

    def _run_program(self, payload: bytes) -> None:
        """Run a client's program with the other ranks; return once it has ended on all of them."""
        topology = self._group.topology
        program, ended = RankProgram(payload, f"rank {topology.rank} of {topology.size}"), threading.Event()
        self._world.enter()
        helper = threading.Thread(target=self._attend, args=(program, ended), name="mpistrat-program", daemon=True)
        helper.start()
        try:
            kind, data = program.run()
        finally:
            ended.set()
            helper.join()
        with self._lock:
            self._send_output(program)
            self._channel.send(self._chief, Kind.ENDED, 0, data, kind)
        self._finish_sending()
        clean = bool(self._wait_for(Kind.OVER).extra)
        program.finish(clean)
        self._world.leave(clean)

    def _function(self, number: int) -> tuple[Any, ...]:
        """Return a function in a tuple; an empty one for number 0: then it is among the arguments."""
        if not number:
            return ()
        if number not in self._loaded:
            self._loaded[number] = loads(self._functions[number], self._registry.resolve)
        return (self._loaded[number],)

    def _attend(self, program: RankProgram, ended: threading.Event) -> None:
        """Send a running program's output, and stop it if the chief says so."""
        while not ended.wait(_ATTENTION):
            with self._lock:
                self._inbox += self._channel.poll()
                stop = any(message.kind == Kind.STOP for message in self._inbox)
                self._send_output(program)
            if stop:
                program.stop()

    def _send_output(self, program: RankProgram) -> None:
        for number, text in program.take_output():
            self._channel.send(self._chief, Kind.OUTPUT, number, encoded(text))

    def _wait_for(self, kind: Kind) -> Message:
        """Return the next message of a kind; drop others, which were for the program."""
        waiting = self._wait_for_chief()
        while True:
            with self._lock:
                messages, self._inbox = self._inbox + self._channel.poll(), []
            for at, message in enumerate(messages):
                if message.kind == kind:
                    self._inbox = messages[at + 1 :]
                    return message
            waiting.pause()

    def _forget(self, number: int) -> None:
        if number > self._forgotten:
            self._forgotten = number
            self._answers = {n: answer for n, answer in self._answers.items() if n > number}

    def _finish_sending(self) -> None:
        """Send the answer before running anything else, because MPI sends large ones only during calls."""
        waiting = None
        while self._channel.sending():
            with self._lock:
                self._inbox += self._channel.poll()
            waiting = waiting or self._wait_for_chief()
            waiting.pause()

    def _call(self, payload: bytes) -> tuple[Kind, int, bytes]:
        global _running
        start = monotonic()
        _running = self
        try:
            number, inputs, data = unpack_call(payload)
            with self._scope(), self._registry.with_inputs(inputs):
                fn, args, kwargs = self._function(number) + loads(data, self._registry.resolve)
                result = fn(*args, **kwargs)
                self._flush()  # all writes are applied before the result is sent
                kind, answer = Kind.RESULT, dumps_result(result, self._registry.reduce_result)
        except BaseException as error:  # also SystemExit: this rank's program continues
            text = text_of_failure(error, f"worker {self.index} (rank {self._group.topology.rank})")
            log.logger.info("a scheduled function failed: %s", text)
            registry = self._registry
            kind, answer = Kind.FAILED, dumps_error(error, text, registry.reduce_result, registry.resolve)
        finally:
            _running = None
        return kind, int((monotonic() - start) * 1e6), answer


def command_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the command for others to take part in an announced call of a strategy.

    Raises:
        The exception of the call itself, if it would raise before it communicates.
    """
    if name == "variable":
        return name, (_variable(args, kwargs),)
    if name == "optimizer":
        return name, (definition_of(*args),)
    return name, tuple(args)


def _variable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = dict(inspect.signature(create_variable).bind(None, *args, **kwargs).arguments)
    del bound["placement"]
    value = bound.pop("initial_value", None)
    if value is not None and (not callable(value) or hasattr(value, "__array__")):
        dtype = bound.get("dtype")
        array = initial_array(value, None if dtype is None else parse_dtype(dtype))
        bound["form"] = array.shape, array.dtype
    return bound


@final
class Commands:
    """The execution of the chief's commands. Collective over all ranks: the chief makes the same calls.

    Args:
        strategy: this rank's.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._optimizers: dict[int, Optimizer] = {}  # keeps them alive

    def execute(self, name: str, args: tuple[Any, ...]) -> None:
        """Execute a command. An error here also occurs on the chief, which raises it. Collective."""
        own: dict[str, Callable[..., object]] = {
            "variable": self._make_variable,
            "optimizer": self._make_optimizer,
            "show_config": lambda: show_config(self._strategy),
            "read_all": lambda variable: variable.read_all(),
            "gathered": lambda *variables: [value_for_file(variable) for variable in variables],
            "write_copies": _write_copies,
        }
        try:
            (own.get(name) or getattr(self._strategy, name))(*args)
        except Exception as error:
            if is_loss(error):
                raise
            log.logger.log(logging.WARNING, "%s, which the chief called: %s", name, error_text(error))

    def _make_variable(self, what: dict[str, Any]) -> None:
        form = what.pop("form", None)
        value = _rank_0_has_it if form is None else np.zeros(*form)
        with self._strategy.scope():
            self._strategy.extended.create_variable(value, **what)

    def _make_optimizer(self, definition: Definition) -> None:
        self._optimizers[definition.ordinal] = make_defined(definition)


def _write_copies(variable: Any, op: str, value: np.ndarray) -> None:
    """Write the chief's value to its copies; a sum is whole on the chief, so others write nothing."""
    if op == "assign":
        variable.load(value)
    else:
        variable.write_copies(op, value)


def _rank_0_has_it() -> NoReturn:
    raise RuntimeError("only rank 0 makes initial values")
