"""The other ranks' end: runs what the chief sends, one after the other, until it says that it is done."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, final

from .._util import log
from ..comm.process_group import ProcessGroup
from ..errors import ContextError, PeerExitError, explain
from ..parameter_server.waiting import Backoff, Patience
from .channel import Channel, Message
from .home import Home
from .pickling import dumps, loads
from .protocol import Kind, unpack_call

__all__ = ["Follower", "get_current_worker_index"]

_GRACE = 1.0  # seconds in which the last word of a chief that left may still come
_LONG = 0.02  # seconds that a function may run before those that came behind it are given back
_running: Follower | None = None


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
class Follower:
    """A worker or a server that serves the chief.

    While a function runs long, a thread gives the calls that came behind it back to the chief, which may have another
    worker run them. Whoever takes a call out of the inbox, under the lock, has it: it is run or given back, never both.

    Args:
        group: all ranks.
        channel: this rank's.
        chief: its rank.
        index: of this worker; -1 for a server.
        home: what tokens stand for here.
        scope: makes the context in which functions run.
        obey: carries out an order: something that all ranks do together.
        flush: waits until what this rank wrote to variables is applied.
    """

    def __init__(
        self,
        group: ProcessGroup,
        channel: Channel,
        chief: int,
        index: int,
        home: Home,
        scope: Callable[[], Any],
        obey: Callable[[str, tuple[Any, ...]], None],
        flush: Callable[[], None],
    ) -> None:
        self.index = index
        self._group, self._channel, self._chief = group, channel, chief
        self._home, self._scope, self._obey, self._flush = home, scope, obey, flush
        self._answers: dict[int, tuple[Kind, int, bytes]] = {}
        self._forgotten = 0
        self._inbox: list[Message] = []
        self._lock = threading.Lock()  # of the channel and the inbox
        self._begun = 0  # how many functions have begun
        self._busy = False  # one runs

    def serve(self, meanwhile: Callable[[], bool] | None = None) -> bool:
        """Do what the chief says until it closes.

        Args:
            meanwhile: called again and again while there is nothing to do; returns whether it did anything.

        Returns:
            Whether the chief goes on; False if it left the program.

        Raises:
            PeerExitError: the chief left without a word.
        """
        with self._giving_back() as able:
            with self._lock:
                self._channel.send(self._chief, Kind.HELLO, extra=able)
            return self._serve(meanwhile)

    def _serve(self, meanwhile: Callable[[], bool] | None) -> bool:
        waiting = self._patience()
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
                waiting = self._patience()
            elif meanwhile is not None and meanwhile():
                waiting.reset()
            else:
                try:
                    waiting.pause()
                except PeerExitError:
                    return self._last_word()

    @contextlib.contextmanager
    def _giving_back(self) -> Iterator[bool]:
        """While the context lasts calls are given back, where MPI lets a thread do it; yields whether."""
        from mpi4py import MPI

        over = threading.Event()
        if self.index < 0 or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            yield False
            return
        thread = threading.Thread(target=self._give_back, args=(over,), name="mpistrat-follower", daemon=True)
        thread.start()
        try:
            yield True
        finally:
            over.set()
            thread.join()

    def _give_back(self, over: threading.Event) -> None:
        """Look now and then whether the same function still runs; if so, give back what came behind it."""
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

    def _patience(self) -> Patience:
        return Patience(self._group, "the coordinator's service", [self._chief], limited=False)

    def _last_word(self) -> bool:
        until, backoff = monotonic() + _GRACE, Backoff()
        while monotonic() < until:
            with self._lock:
                messages = self._channel.poll()
            for message in messages:
                if message.kind == Kind.END:
                    return self._end(message)
            backoff.pause()
        raise PeerExitError(f"the chief (rank {self._chief}) left the program and closed no coordinator")

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.ORDER:
            self._obey(*loads(message.payload, self._home.resolve))
        elif message.kind == Kind.CALL:
            self._forget(message.extra)
            if message.number <= self._forgotten:
                return  # the chief has had the answer
            if message.number not in self._answers:
                self._answers[message.number] = self._call(message.payload)
            kind, microseconds, data = self._answers[message.number]
            with self._lock:
                self._busy = False
                self._channel.send(self._chief, kind, message.number, microseconds, data)
            self._finish_sending()

    def _forget(self, number: int) -> None:
        if number > self._forgotten:
            self._forgotten = number
            self._answers = {n: answer for n, answer in self._answers.items() if n > number}

    def _finish_sending(self) -> None:
        """Send the answer before anything else is run: MPI sends large ones only while it is called."""
        waiting = None
        while self._channel.sending():
            with self._lock:
                self._inbox += self._channel.poll()
            waiting = waiting or self._patience()
            waiting.pause()

    def _call(self, payload: bytes) -> tuple[Kind, int, bytes]:
        global _running
        start = monotonic()
        _running = self
        try:
            inputs, data = unpack_call(payload)
            with self._scope(), self._home.with_inputs(inputs):
                fn, args, kwargs = loads(data, self._home.resolve)
                result = fn(*args, **kwargs)
                self._flush()  # who hears that it has run shall find what it wrote
                kind, answer = Kind.RESULT, dumps(result, self._home.reduce_result)
        except Exception as error:
            kind, answer = Kind.FAILED, self._failure(error)
        finally:
            _running = None
        return kind, int((monotonic() - start) * 1e6), answer

    def _failure(self, error: Exception) -> bytes:
        where = f"worker {self.index} (rank {self._group.topology.rank})"
        trace = error.__traceback__
        own = trace.tb_next if trace is not None and trace.tb_next is not None else trace  # without the line above
        text = f"{where}:\n{''.join(traceback.format_exception(type(error), error, own))}"
        log.logger.info("a scheduled function failed: %s", text)
        data: bytes | None
        try:
            data = dumps(error, self._home.reduce_result)
            loads(data, self._home.resolve)
        except Exception:  # one with a lock in it, or one that asks for other arguments when it is made
            data = None
        return dumps((data, text), self._home.reduce_result)
