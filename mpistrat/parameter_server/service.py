"""Service thread: a server works in the background, independently of its program."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import final

from .stats import ServerStats
from .waiting import Backoff

__all__ = ["Rounds", "Service"]

_CHECK = 0.1  # seconds between two looks after workers that have gone
_LOOK = 0.01  # seconds with something to do, after which it looks at everything else nevertheless
_LAST_SENDS = 2.0  # seconds at the end for what is on its way to workers


class Rounds(ABC):
    """What a service does, again and again."""

    @abstractmethod
    def poll(self) -> bool:
        """Do what there is to do. Return whether there was anything."""

    @abstractmethod
    def rest(self) -> bool:
        """Look, when there was nothing, and now and then, after what else may have changed. Return whether it has."""

    @abstractmethod
    def busy(self) -> bool:
        """Return whether something is still on its way to a worker."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if what is waited for cannot come."""


@final
class Service:
    """Runs rounds in a thread of its own from `start` to `stop`; without threads inside `wait`.

    An error of a round ends the service. `wait` raises it; when nobody is in `wait`, it ends the job, as any exception does
    that nobody catches.

    Args:
        rounds: what to do.
        back_off: seconds of the longest sleep while there is nothing to do.
        threads: whether there may be a thread: MPI must allow MPI_THREAD_MULTIPLE.
        stats: where idle time is counted.

    Attributes:
        waiting: whether anybody is in `wait`.
    """

    def __init__(self, rounds: Rounds, back_off: float, threads: bool, stats: ServerStats) -> None:
        self.waiting = False
        self._stats = stats
        self._rounds, self._back_off, self._threads = rounds, back_off, threads
        self._thread: threading.Thread | None = None
        self._stop = False
        self._done: Callable[[], bool] = _never
        self._change = threading.Condition()
        self._error: BaseException | None = None

    def start(self, name: str) -> None:
        """Start the thread, with a name, where there may be one; later calls do nothing."""
        if self._threads and self._thread is None and not self._stop:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, once nothing is on its way any more, or two seconds later. It may be repeated."""
        self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LAST_SENDS)

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until something is done, which one of the rounds brings about.

        Raises:
            BaseException: what a round raised.
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
        rounds, backoff, next_check = self._rounds, Backoff(self._back_off), monotonic() + _CHECK
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
        backoff, end = Backoff(self._back_off), monotonic() + _LAST_SENDS
        while self._rounds.busy() and monotonic() < end:
            if not self._rounds.poll():
                backoff.pause()


def _never() -> bool:
    return False
