"""The chief's side of clients: it holds the values that a client creates, and runs its functions and programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, final

from ..base import log
from ..base.errors import ClosedError, explain
from ..base.text import encoded, error_text
from ..comm.monitor.abort import end_job
from .channel import Channel, Kind, Message
from .coordinator import ClusterCoordinator
from .program import LIMIT, ProgramLeader, plain_variable
from .registry import dumps_error, dumps_result, loads, text_of_failure
from .scheduler import ClosureCancelledError, RemoteValue, RemoteValueStatus

__all__ = ["COORDINATOR", "serve"]

COORDINATOR = 0  # the number of the coordinator among a session's objects
_IDLE, _BUSY = 0.2, 0.002  # seconds to wait for a message while idle, and while functions run
_ERROR = 1 << 24  # bytes of an error that is sent whole; of a larger one only the end of its text
_LOOK = 2.0  # seconds between two checks of the client


def serve(coordinator: ClusterCoordinator, channel: Channel) -> None:
    """Serve one client after the other until one ends the job. For the chief.

    When a client leaves or disappears, its waiting functions are cancelled and its program is stopped; variables and optimizers
    stay.

    Raises:
        PeerExitError: all workers have left the program.
    """
    _Service(coordinator, channel).run()


@final
class _Service:
    """The chief's loop. While a program runs, it is in another thread."""

    def __init__(self, coordinator: ClusterCoordinator, channel: Channel) -> None:
        self._coordinator, self._channel = coordinator, channel
        self._session: _Session | None = None
        self._late: deque[Message] = deque()  # of new clients; earlier messages may end the current session
        self._leader: ProgramLeader | None = None
        self._look = 0.0
        self._ended = False

    def run(self) -> None:
        while not self._ended:
            self._step()
            session = self._session
            if session is not None and session.program is not None:
                self._run_program(session, session.program)
                session.resume()

    def _step(self) -> None:
        """Handle messages, and report what has ended."""
        session, waits = self._session, self._session is not None and self._session.waits
        messages = self._channel.poll(0 if self._late else _BUSY if waits else _IDLE)
        if self._late and not messages:
            self._begin(self._late.popleft())
        for message in messages:
            if session is None or message.peer != session.client:
                self._late.append(message)
            elif message.kind in (Kind.END, Kind.LEAVE):
                self._ended = message.kind == Kind.END
                self._leave()
                return
            elif message.kind == Kind.STOP:
                if self._leader is not None:
                    self._leader.stop()
            else:
                session.take(message)
        if session is not None and session is self._session:
            session.tell()
            if monotonic() > self._look:
                self._look = monotonic() + _LOOK
                if not self._channel.send(session.client, Kind.ALIVE):
                    log.logger.warning(
                        "mpistrat serve: the client %s is gone; its waiting functions are cancelled", session.who
                    )
                    self._leave()
        self._coordinator.done()  # drives running functions, if MPI allows no thread for that
        self._coordinator.require_workers()

    def _begin(self, message: Message) -> None:
        """Accept a new client, unless there is one."""
        channel, session = self._channel, self._session
        if message.kind != Kind.HELLO:
            channel.send(message.peer, Kind.REFUSED, 0, b"this client's session has ended")
        elif self._leader is not None and session is None:
            channel.send(message.peer, Kind.REFUSED, 0, b"the job stops the program of a client that has left")
        elif session is not None and channel.send(session.client, Kind.ALIVE):
            channel.send(message.peer, Kind.REFUSED, 0, encoded(f"the job serves another client, {session.who}"))
        else:
            self._leave()
            who = message.payload.decode(errors="replace")
            log.logger.info("mpistrat serve: %s", who)
            self._session = _Session(self._coordinator, channel, message.peer, who)
            channel.send(message.peer, Kind.WELCOME, self._coordinator.num_workers)

    def _leave(self) -> None:
        """End the session, if there is one, and stop its program."""
        session, self._session = self._session, None
        if session is not None:
            session.leave()
        if self._leader is not None:
            self._leader.stop()

    def _run_program(self, session: _Session, message: Message) -> None:
        """Run a client's program on all ranks. In the main thread."""
        try:
            self._leader = self._coordinator.lead(message.payload)
        except Exception as error:
            session.fail(message.number, error, str(error))
            return
        leader = self._leader
        leader.run(lambda: self._attend(session, leader))
        self._leader = None
        if session is self._session:
            session.answer(message.number, *leader.answer())

    def _attend(self, session: _Session, leader: ProgramLeader) -> None:
        """Serve the client while its program runs. In another thread; errors there end the job."""
        try:
            over = False
            while not over:
                over = leader.over  # its last output has arrived then
                for number, text in leader.step():
                    session.send(Kind.OUTPUT, number, text if isinstance(text, bytes) else encoded(text))
                self._step()
                if leader.late:
                    self._end_job(
                        f"the program continues on {leader.late}, {LIMIT:g} s after it was stopped: in a call that Python cannot "
                        "interrupt, as of MPI, or in an `except` that catches KeyboardInterrupt. So the job ends",
                        session,
                        leader,
                    )
        except BaseException as error:
            self._end_job(error_text(error), session, leader)

    def _end_job(self, why: str, session: _Session, leader: ProgramLeader) -> None:
        """Report to the client that the job ends, and end it."""
        if session.program is not None:
            session.answer(session.program.number, *leader.answer(f"\n{why}"))
        self._channel.close()
        end_job(f"mpistrat serve: {why}")


@final
class _Session:
    """A client's objects in the job.

    Attributes:
        client: the peer.
        who: its description for people.
        program: a program that waits, or runs; then other messages wait.
    """

    def __init__(self, coordinator: ClusterCoordinator, channel: Channel, client: bytes, who: str) -> None:
        self.client, self.who = client, who
        self._coordinator, self._channel = coordinator, channel
        self._things: dict[int, Any] = {COORDINATOR: coordinator}  # by the client's numbers; RemoteValues of functions
        self._waiting: dict[RemoteValue, int] = {}
        self.program: Message | None = None
        self._later: list[Message] = []  # messages that wait for the program
        self._failures = 0  # of scheduled functions; the client knows those before it scheduled another one
        self._ended: deque[RemoteValue] = deque()  # filled by the coordinator's thread
        self._does: dict[int, Callable[[Message], None]] = {
            Kind.SCHEDULE: self._schedule,
            Kind.CALL: self._call,
            Kind.FETCH: self._fetch,
            Kind.FORGET: self._forget,
            Kind.CANCEL: lambda _: coordinator.cancel(),
            Kind.PROGRAM: self._run,
        }

    @property
    def waits(self) -> bool:
        """True while functions or a program run or wait."""
        return bool(self._waiting) or self.program is not None

    def take(self, message: Message) -> None:
        """Handle a client's message; after its program, if one runs."""
        if self.program is not None:
            self._later.append(message)
            return
        act = self._does.get(message.kind)
        try:
            if act is None:
                got = f"a message of kind {message.kind}"
                raise ValueError(explain("mpistrat serve", "", expected="a known kind of message", got=got))
            act(message)
        except BaseException as error:  # also SystemExit: a client ends the job only by shutdown()
            text = text_of_failure(error, f"the chief (rank {self._coordinator.strategy.rank})")
            if message.kind == Kind.SCHEDULE:
                self._cancel_after(error)
            self.fail(message.number, error, text)

    def tell(self) -> None:
        """Report the functions that have ended to the client."""
        while self._ended:
            value = self._ended.popleft()
            number = self._waiting.pop(value, None)
            if number is None:
                continue
            if value.status is RemoteValueStatus.READY:
                self.send(Kind.DONE, number)
                continue
            try:
                value.get()
            except BaseException as error:
                self._cancel_after(error)
                self.fail(number, error, str(error if error.__cause__ is None else error.__cause__))

    def leave(self) -> None:
        """Cancel waiting functions, and release all objects."""
        self._later.clear()
        self._coordinator.cancel()
        self._waiting.clear()
        self._things.clear()

    def resume(self) -> None:
        """Handle the messages that have waited for a program."""
        self.program = None
        later, self._later = self._later, []
        for message in later:
            self.take(message)

    def answer(self, number: int, kind: Kind, payload: bytes) -> None:
        """Send the answer to a program, or the error that it is too large."""
        try:
            self.send(kind, number, payload)
        except ValueError as error:
            self.fail(number, error, str(error))

    def _run(self, message: Message) -> None:
        self.program = message

    def _cancel_after(self, error: BaseException) -> None:
        """Cancel what waits after the failure of a function, like the coordinator for functions of its own program."""
        if not isinstance(error, ClosureCancelledError):
            self._failures += 1
            self._coordinator.cancel()

    def _schedule(self, message: Message) -> None:
        fn, args, kwargs, worker, priority, failures = loads(message.payload, self._resolve)
        if failures < self._failures:
            raise ClosureCancelledError("cancelled, because an earlier function failed")
        value = self._coordinator.submit(
            fn, args, kwargs, worker=worker, priority=priority, callback=self._ended.append
        )
        self._things[message.number] = value
        self._waiting[value] = message.number

    def _call(self, message: Message) -> None:
        fn, args, kwargs = loads(message.payload, self._resolve)
        with self._coordinator.strategy.scope():
            self._things[message.number] = fn(*args, **kwargs)
        self.send(Kind.DONE, message.number)

    def _fetch(self, message: Message) -> None:
        thing = self._things[loads(message.payload, self._resolve)]
        value = self._coordinator.fetch(thing)
        self.send(Kind.RESULT, message.number, dumps_result(value, plain_variable))

    def _forget(self, message: Message) -> None:
        for number in loads(message.payload, self._resolve):
            self._things.pop(number, None)

    def _resolve(self, kind: str, key: int) -> Any:
        if key not in self._things:
            raise ClosedError("a value of an earlier session, or of a function that was not called")
        return self._things[key]

    def fail(self, number: int, error: BaseException, text: str) -> None:
        """Send an error."""
        self.send(Kind.FAILED, number, dumps_error(error, text[-_ERROR:], plain_variable, self._resolve, _ERROR))

    def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        """Send a message to the client."""
        self._channel.send(self.client, kind, number, payload)
