"""Back-off and deadlines: waits by polling, with increasing sleeps, up to a time limit. Nothing here calls MPI.

A loop that polls and has more to do between two polls:

    backoff, deadline = Backoff(), Deadline(seconds)
    while not arrived():
        if deadline.passed:
            raise CollectiveTimeoutError(...)
        backoff.pause()

`wait_until(arrived, seconds)` is that loop for a function; `PeerWait` is it for what other ranks are to do, and raises where they
have left the program or take too long. Data that MPI receives in one call is reported by the next: poll twice before sleeping, as
`Backoff` does, which yields a hundred times first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Protocol, final

from . import log
from .environment import Environment
from .errors import CollectiveTimeoutError, PeerExitError

__all__ = ["CEILING", "Backoff", "Deadline", "PeerWait", "wait_until"]

CEILING = 1e-3  # seconds of the longest sleep: below 6 % of a core when idle, about 1 ms until something is seen
_CHECK = 0.05  # seconds between two checks for what may have gone wrong


@final
class Backoff:
    """Yields to other processes some times, then sleeps, each time longer by a factor, up to a ceiling in seconds.

    So the end of a wait is noticed at most one factor too late, until the ceiling is reached. A message crosses several such
    waits, of both ranks: with sleeps that double they add up to milliseconds, hence an eighth.

    Args:
        ceiling: seconds of the longest sleep.
        yields: how often it yields before it sleeps; about 0.5 µs each.
        start: seconds of the first sleep.
        growth: factor from one sleep to the next; closer to 1 where the end of a long wait must be noticed soon, too.
        give_way: what it calls to yield.
    """

    __slots__ = ("_ceiling", "_count", "_give_way", "_growth", "_seconds", "_start", "_yields")

    def __init__(
        self,
        ceiling: float = CEILING,
        *,
        yields: int = 100,
        start: float = 2e-5,
        growth: float = 1.125,
        give_way: Callable[[], object] = os.sched_yield,
    ) -> None:
        self._ceiling, self._yields, self._start, self._growth = ceiling, yields, start, growth
        self._give_way = give_way
        self.reset()

    def reset(self) -> None:
        """Begin anew, after something has happened."""
        self._count, self._seconds = 0, min(self._start, self._ceiling)

    def pause(self) -> bool:
        """Wait a little. Return whether it slept."""
        if self._count < self._yields:
            self._count += 1
            self._give_way()
            return False
        sleep(self._seconds)
        self._seconds = min(self._growth * self._seconds, self._ceiling)
        return True


@final
class Deadline:
    """The time in seconds that a wait may take, from now; None for no limit.

    Example:
        >>> Deadline(None).passed, Deadline(0.0).passed
        (False, True)
    """

    __slots__ = ("_end", "_start")

    def __init__(self, seconds: float | None) -> None:
        self._start = monotonic()
        self._end = float("inf") if seconds is None else self._start + seconds

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return monotonic() >= self._end

    @property
    def left(self) -> float:
        """Seconds until then, never below 0; infinite without a limit."""
        return max(0.0, self._end - monotonic())

    @property
    def waited(self) -> float:
        """Seconds since the beginning."""
        return monotonic() - self._start


def wait_until(done: Callable[[], Any], seconds: float | None = None, backoff: Backoff | None = None) -> bool:
    """Wait until `done()` is true. Return False where it is not after so many seconds.

    Example:
        >>> answers = iter([False, False, True])
        >>> wait_until(lambda: next(answers)), wait_until(lambda: False, seconds=0.01)
        (True, False)
    """
    deadline, backoff = Deadline(seconds), Backoff() if backoff is None else backoff
    while not done():
        if deadline.passed:
            return False
        backoff.pause()
    return True


class _Group(Protocol):
    """What a wait needs of a `ProcessGroup`."""

    environment: Environment

    @property
    def monitor(self) -> Any: ...
    def has_left(self, rank: int) -> bool: ...
    def look_for_losses(self) -> None: ...


@final
class PeerWait:
    """One wait for other ranks: a `Backoff` that raises when they have left or take too long.

    Args:
        group: a `ProcessGroup`; its `environment` says how long a wait may take.
        what: the wait in words.
        ranks: those it waits for.
        limited: whether there is a time limit; a server waits without one for workers that are there.
        remedy: what these ranks must do, for the warning and the error.
        backoff: how it polls. What may have gone wrong is looked for where it sleeps.
        seconds: the time limit; default `environment.abort_after`.
    """

    def __init__(
        self,
        group: _Group,
        what: str,
        ranks: Sequence[int],
        limited: bool = True,
        remedy: str = "",
        backoff: Backoff | None = None,
        seconds: float | None = None,
    ) -> None:
        self._seconds = group.environment.abort_after if seconds is None else seconds
        self._remedy = f"\n{remedy}" if remedy else ""
        self._group, self._what, self._ranks = group, what, ranks
        self._backoff, self._limited = backoff or Backoff(), limited
        self._warned = False
        self._start = monotonic()
        self._next = self._start + _CHECK

    def reset(self) -> None:
        """Begin anew, after something has happened."""
        self._backoff.reset()

    def pause(self) -> None:
        """Wait a little.

        Raises:
            PeerExitError: a rank that is waited for has left the program.
            mpi4py.MPI.Exception, RanksLostError: ranks were lost, where the program survives that.
            CollectiveTimeoutError: the wait takes longer than its time limit.
        """
        if self._backoff.pause() and monotonic() > self._next:
            self._check(monotonic())

    def _check(self, now: float) -> None:
        self._next = now + _CHECK
        monitor, environment = self._group.monitor, self._group.environment
        self._group.look_for_losses()
        gone = [rank for rank in self._ranks if self._group.has_left(rank)]
        if gone:
            raise PeerExitError(f"rank {gone[0]} left the program while rank {monitor.rank} was in {self._what}")
        if not self._limited:
            return
        waited = now - self._start
        if waited > self._seconds:
            where = monitor.where(self._ranks)
            waited_for = f"{self._what}: rank {monitor.rank} waited {self._seconds:g} s{where}"
            raise CollectiveTimeoutError(f"{waited_for}{self._remedy}")
        if waited > environment.warn_after and not self._warned:
            self._warned = True
            text = "%s takes longer than %g s:%s%s"
            log.logger.warning(text, self._what, environment.warn_after, monitor.where(self._ranks), self._remedy)
