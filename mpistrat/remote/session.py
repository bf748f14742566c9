"""The chief's part of a client: it keeps what the client makes, has workers call functions, and tells how they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, final

from ..base import log
from ..base.errors import ClosedError, explain
from ..base.text import encoded, traceback_text
from ..cluster.world import is_loss
from ..variables import ShardedVariable, Variable
from .channel import Channel, Kind, Message
from .coordinator import ClusterCoordinator
from .registry import Reduced, dumps_error, dumps_result, loads, plain
from .values import ClosureCancelledError, RemoteValue, RemoteValueStatus

__all__ = ["COORDINATOR", "serve"]

COORDINATOR = 0  # the number of the coordinator among the things of a session
_IDLE, _BUSY = 0.2, 0.002  # seconds to wait for a message while nothing runs, and while something does
_ERROR = 1 << 24  # bytes of an error that is sent as it is; of a larger one the end of its text
_LOOK = 2.0  # seconds between two looks after the client


def serve(coordinator: ClusterCoordinator, channel: Channel) -> None:
    """Serve one client after the other until one ends the job. For the chief.

    A client that leaves, or is not there any more, takes along what it has waiting; variables and optimizers stay.

    Raises:
        PeerExitError: all workers have left the program.
    """
    session: _Session | None = None
    late: deque[Message] = deque()  # of clients that want to begin; what another has sent before may end its session
    look = 0.0
    while True:
        messages = channel.poll(0 if late else _BUSY if session is not None and session.waits else _IDLE)
        if late and not messages:
            session = _begin(coordinator, channel, session, late.popleft())
        for message in messages:
            if session is None or message.peer != session.client:
                late.append(message)
            elif message.kind == Kind.END:
                session.leave()
                return
            elif message.kind == Kind.LEAVE:
                session.leave()
                session = None
            else:
                session.take(message)
        if session is not None:
            session.tell()
            if monotonic() > look:
                look = monotonic() + _LOOK
                if not channel.send(session.client, Kind.ALIVE):
                    log.logger.warning(
                        "mpistrat serve: the client %s is gone; what it had waiting is cancelled", session.who
                    )
                    session.leave()
                    session = None
        coordinator.done()  # which carries on what runs, where MPI allows no thread for that
        coordinator.require_workers()


def _begin(
    coordinator: ClusterCoordinator, channel: Channel, session: _Session | None, message: Message
) -> _Session | None:
    """Take a new client, unless there is one."""
    if message.kind != Kind.HELLO:
        channel.send(message.peer, Kind.REFUSED, 0, b"this client's session has ended")
    elif session is not None and channel.send(session.client, Kind.ALIVE):
        channel.send(message.peer, Kind.REFUSED, 0, encoded(f"the job serves another client, {session.who}"))
    else:
        if session is not None:
            session.leave()
        who = message.payload.decode(errors="replace")
        log.logger.info("mpistrat serve: %s", who)
        session = _Session(coordinator, channel, message.peer, who)
        channel.send(message.peer, Kind.WELCOME, coordinator.num_workers)
    return session


@final
class _Session:
    """What a client has in the job.

    Attributes:
        client: the peer.
        who: the same, for people.
    """

    def __init__(self, coordinator: ClusterCoordinator, channel: Channel, client: bytes, who: str) -> None:
        self.client, self.who = client, who
        self._coordinator, self._channel = coordinator, channel
        self._things: dict[int, Any] = {COORDINATOR: coordinator}  # by the client's numbers; RemoteValues of functions
        self._waiting: dict[RemoteValue, int] = {}
        self._ended: deque[RemoteValue] = deque()  # that the coordinator's thread adds to
        self._does: dict[int, Callable[[Message], None]] = {
            Kind.SCHEDULE: self._schedule,
            Kind.CALL: self._call,
            Kind.FETCH: self._fetch,
            Kind.FORGET: self._forget,
            Kind.CANCEL: lambda _: coordinator.cancel(),
        }

    @property
    def waits(self) -> bool:
        """Whether functions run or wait."""
        return bool(self._waiting)

    def take(self, message: Message) -> None:
        """Do what the client asks."""
        act = self._does.get(message.kind)
        try:
            if act is None:
                got = f"a message of kind {message.kind}"
                raise ValueError(explain("mpistrat serve", "", expected="a message that it knows", got=got))
            act(message)
        except BaseException as error:  # SystemExit, too: a client ends the job by shutdown() only
            if isinstance(error, KeyboardInterrupt) or is_loss(error):
                raise
            self._fail(message.number, error, f"the chief (rank {self._coordinator.strategy.rank})")

    def tell(self) -> None:
        """Tell the client of the functions that have ended."""
        while self._ended:
            value = self._ended.popleft()
            number = self._waiting.pop(value, None)
            if number is None:
                continue
            if value.status is RemoteValueStatus.READY:
                self._send(Kind.DONE, number)
                continue
            try:
                value.get()
            except BaseException as error:
                if not isinstance(error, ClosureCancelledError):
                    self._coordinator.cancel()  # as the coordinator does where functions are its program's own
                self._fail(number, error, "")

    def leave(self) -> None:
        """Cancel what waits, and forget everything."""
        self._coordinator.cancel()
        self._waiting.clear()
        self._things.clear()

    def _schedule(self, message: Message) -> None:
        fn, args, kwargs, worker, priority = loads(message.payload, self._resolve)
        value = self._coordinator.submit(
            fn, args, kwargs, worker=worker, priority=priority, callback=self._ended.append
        )
        self._things[message.number] = value
        self._waiting[value] = message.number

    def _call(self, message: Message) -> None:
        fn, args, kwargs = loads(message.payload, self._resolve)
        with self._coordinator.strategy.scope():
            self._things[message.number] = fn(*args, **kwargs)
        self._send(Kind.DONE, message.number)

    def _fetch(self, message: Message) -> None:
        thing = self._things[loads(message.payload, self._resolve)]
        value = self._coordinator.fetch(thing)
        self._send(Kind.RESULT, message.number, dumps_result(value, _reduce))

    def _forget(self, message: Message) -> None:
        for number in loads(message.payload, self._resolve):
            self._things.pop(number, None)

    def _resolve(self, kind: str, key: int) -> Any:
        if key not in self._things:
            raise ClosedError("a value of an earlier session, or of a function that was not called")
        return self._things[key]

    def _fail(self, number: int, error: BaseException, where: str) -> None:
        """Tell the client of an error; `where` is empty where the error has its remote traceback already."""
        if where:
            text = f"{where}:\n{traceback_text(error, error.__traceback__)}"
        else:
            text = str(error if error.__cause__ is None else error.__cause__)
        self._send(Kind.FAILED, number, dumps_error(error, text[-_ERROR:], _reduce, self._resolve, _ERROR))

    def _send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        self._channel.send(self.client, kind, number, payload)


def _reduce(thing: Any) -> Reduced | None:
    """Send a variable's value in its place."""
    return plain(thing.numpy()) if isinstance(thing, (Variable, ShardedVariable)) else None
