"""Threads of local replicas, which run a step at the same time: replica 0 on the calling thread, the others on a thread pool."""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

from ..base import context, global_batch
from ..base.context import Frame
from ..base.devices import use_device
from ..base.errors import ContextError

__all__ = ["Rendezvous", "ReplicaThreads", "current_rendezvous"]

_rendezvous: contextvars.ContextVar[Rendezvous | None] = contextvars.ContextVar("mpistrat_rendezvous", default=None)


def current_rendezvous() -> Rendezvous | None:
    """Return the rendezvous of the current run; None with one local replica."""
    return _rendezvous.get()


class _Stopped(BaseException):
    """An exception that unwinds a replica because another one failed; never reaches the user."""


@final
class Rendezvous:
    """A rendezvous, at which the replicas of one run wait for each other.

    The calling thread runs all common calls of the replicas, so that MPI sees one thread and Ctrl-C arrives where it is
    expected. Each run has its own object: a replica that outlives a failed run does not disturb a later one.
    """

    def __init__(self, frames: Sequence[Frame], devices: Sequence[str]) -> None:
        self._frames, self._devices = frames, devices
        self._size = len(frames)
        self._changed = threading.Condition()
        self._posts: dict[int, tuple[str, Any]] = {}
        self._results: list[Any] = [None] * self._size
        self._answers: Sequence[Any] = ()
        self._done: set[int] = set()
        self._turn = 0
        self._error: BaseException | None = None

    def replica(self, index: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the step as local replica `index`; store its result or error."""
        error: BaseException | None = None
        token, outer = context.push(self._frames[index]), _rendezvous.set(self)
        ledger = self._frames[index].strategy.extended.batches
        given = global_batch.begin_step(args, kwargs, ledger)
        try:
            use_device(self._devices[index])
            self._results[index] = function(*args, **kwargs)
        except _Stopped:
            pass
        except BaseException as caught:
            error = caught
        finally:
            global_batch.end_step(given)
            _rendezvous.reset(outer)
            context.pop(token)
        with self._changed:
            self._error = self._error or error
            self._done.add(index)
            self._changed.notify_all()

    def results(self) -> list[Any]:
        """Wait for every replica; return their results, or raise the error of the first that failed."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: len(self._done) == self._size)
            except BaseException as interrupt:  # Ctrl-C: the others stop at their next rendezvous
                self._error = self._error or interrupt
                self._changed.notify_all()
                raise
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame
        return self._results

    def call_once(self, index: int, what: str, together: Callable[[list[Any]], Sequence[Any]], post: Any) -> Any:
        """Wait for all local replicas; the calling thread calls `together` once. Return this replica's result of it.

        Args:
            index: the calling local replica.
            what: the description of the call, the same on every replica.
            together: gets every local replica's post, in order; returns one result for each. Replica 0's is called.
            post: this replica's argument.

        Raises:
            ContextError: another replica makes another call, or has returned from its step.
        """
        with self._changed:
            self._posts[index], turn = (what, post), self._turn
            self._changed.notify_all()
            if index:
                self._wait(index, lambda: self._turn > turn)
                return self._answers[index]
            self._wait(index, lambda: len(self._posts) == self._size)
            calls, posts = zip(*(self._posts[replica] for replica in range(self._size)), strict=True)
        if len(set(calls)) > 1:
            got = ", ".join(f"{call} on replica {replica}" for replica, call in enumerate(calls))
            raise ContextError(f"{what}: expected every replica of this rank to make the same calls, got {got}")
        answers = together(list(posts))  # the others are waiting; an exception unwinds replica 0, which stops them
        with self._changed:
            self._answers, self._posts = answers, {}
            self._turn += 1
            self._changed.notify_all()
        return answers[0]

    def _wait(self, index: int, ready: Callable[[], bool]) -> None:
        """Wait under the lock until `ready`; unwind if it can no longer become true."""
        self._changed.wait_for(lambda: ready() or self._error is not None or bool(self._done))
        if ready():
            return
        if self._error is None:
            self._error = ContextError(
                f"merge_call: expected every replica to make the same calls, got replica {index} of this rank waiting "
                f"in one while replica {min(self._done)} has returned"
            )
            self._changed.notify_all()
        raise _Stopped


Inbox = queue.SimpleQueue[Any]


def _serve(inbox: Inbox) -> None:
    while (job := inbox.get()) is not None:
        own_context, call, args = job
        own_context.run(call, *args)
        del job, own_context, call, args  # do not keep user objects alive between steps


def _dismiss(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


@final
class ReplicaThreads:
    """The thread pool of a rank's replicas 1, 2, …; it starts with the first run and ends with `close`.

    In a step each thread has the GPU of its replica as the current one.
    """

    def __init__(self, frames: Sequence[Frame], devices: Sequence[str]) -> None:
        self._frames, self._devices = tuple(frames), tuple(devices)
        self._inboxes: list[Inbox] = []
        self._turn = threading.Lock()  # runs from several threads of the program take turns

    def run(self, function: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Call a step once for each local replica, with its arguments, concurrently; return their results.

        Raises:
            The error of the first replica that failed; ContextError if replicas made different numbers of common calls.
        """
        with self._turn:
            if not self._inboxes:
                self._start()
            rendezvous = Rendezvous(self._frames, self._devices)
            for index, inbox in enumerate(self._inboxes, 1):
                inbox.put((contextvars.copy_context(), rendezvous.replica, (index, function, *calls[index])))
            rendezvous.replica(0, function, *calls[0])
            return rendezvous.results()

    def _start(self) -> None:
        self._inboxes = [queue.SimpleQueue() for _ in self._frames[1:]]
        for index, inbox in enumerate(self._inboxes, 1):
            threading.Thread(target=_serve, args=(inbox,), daemon=True, name=f"mpistrat-replica-{index}").start()
        weakref.finalize(self, _dismiss, self._inboxes)

    def close(self) -> None:
        """End the threads."""
        _dismiss(self._inboxes)
        self._inboxes = []
