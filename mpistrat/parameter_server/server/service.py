"""Service thread: a server works in the background, independently of its program, which may wait for workers."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import final

from ...base import log
from ...base.errors import CollectiveMismatchError
from ...base.waiting import Backoff, Deadline
from ...comm.monitor.rank_monitor import lines
from ...comm.process_group import ProcessGroup
from ..report import ServerStats

__all__ = ["PassWait", "Rounds", "Service"]

_CHECK = 0.1  # seconds between two looks after workers that have gone
_LOOK = 0.01  # seconds with something to do, after which it looks at everything else nevertheless
_LAST_SENDS = 2.0  # seconds at the end for what is on its way to workers
_QUIET = 5.0  # seconds without a push after which, and between which, workers are asked where they are
_ANSWER = 1.5  # seconds that they have to answer
_SILENCE = 10.0  # seconds without a push of which a server tells, once in a pass


class Rounds(ABC):
    """What a service does, again and again.

    Attributes:
        patience: how often it gives way, when there is nothing to do, before the service sleeps.
    """

    patience = 100

    def give_way(self) -> None:
        """Let other processes run, and where that is possible wait a little for something to do."""
        os.sched_yield()

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

    An error of a round ends the service. `wait` raises it; outside of `wait` it ends the job, as any uncaught exception does.

    Args:
        rounds: what to do.
        back_off: seconds of the longest sleep while there is nothing to do.
        threads: whether there may be a thread: MPI must allow MPI_THREAD_MULTIPLE.
        stats: where idle time is counted.

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
        """Start the thread, with a name, where there may be one; later calls do nothing."""
        if self._threads and self._thread is None and not self._stop:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, once nothing is on its way any more, or two seconds later. It may be repeated."""
        self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LAST_SENDS)

    def abandon(self) -> None:
        """End the thread, whatever is on its way."""
        self._stop = self._abandoned = True

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

    It may be long, for workers compute. But a worker that is in a collective of all ranks, which this one is to enter as well,
    will not leave the pass: that is raised. Where nothing comes for 10 s, or `environment.warn_after` if that is less, who is
    waited for is logged, once.

    Args:
        group: all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pushed, self._since, self._asked, self._warned = -1, 0.0, 0.0, False

    def look(self, ranks: Sequence[int], pushed: int) -> None:
        """Look after those that are waited for.

        Args:
            ranks: of these workers.
            pushed: how much they have sent so far.

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
            " dataset, and must do so before what all ranks call together: save, restore, stats, close, a new variable"
        )
        me = f"ParameterServerStrategy.serve: rank {monitor.rank}, a parameter server, waits for workers to leave the pass"
        for rank in places:
            if answers[rank].number > monitor.number:
                raise CollectiveMismatchError(f"{me}, and one of them waits for it:{lines(places)}\n{remedy}")
        if quiet > min(_SILENCE, warn_after) and not self._warned and now - self._asked > _ANSWER:
            self._warned = True
            unknown = dict.fromkeys(ranks, "does not answer")
            log.logger.warning("%s; none has sent anything for %g s:%s\n%s", me, quiet, lines(unknown | places), remedy)
