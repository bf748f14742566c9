"""Back-off and deadlines: waits by polling, with increasing sleeps, up to a time limit. No function here calls MPI.

A loop that polls and does other work between two polls:

    backoff, deadline = Backoff(), Deadline(seconds)
    while not arrived():
        if deadline.passed:
            raise CollectiveTimeoutError(...)
        backoff.pause()

`wait_until(arrived, seconds)` is that loop for a function. `PeerWait` is that loop for other ranks, and raises if they have left
the program or take too long. MPI reports data only in the call after it has received it, so poll twice before sleeping; `Backoff`
yields a hundred times first.
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

CEILING = 1e-3  # seconds of the longest sleep: below 6 % of a core when idle, a latency of about 1 ms
_CHECK = 0.05  # seconds between two checks for failures


@final
class Backoff:
    """A pause that first yields to other processes, then sleeps, each time longer by a factor, up to a ceiling in seconds.

    So the end of a wait is noticed at most one factor too late, until the ceiling is reached. A message passes several such
    waits; doubling sleeps would add up to milliseconds, hence the factor 1.125.

    Args:
        ceiling: seconds of the longest sleep.
        yields: number of yields before the first sleep; about 0.5 µs each.
        start: seconds of the first sleep.
        growth: factor from one sleep to the next; closer to 1 if the end of a long wait must be noticed soon.
        give_way: function that yields.
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
        """Start again, after an event."""
        self._count, self._seconds = 0, min(self._start, self._ceiling)

    def pause(self) -> bool:
        """Wait briefly. Return True if it slept."""
        if self._count < self._yields:
            self._count += 1
            self._give_way()
            return False
        sleep(self._seconds)
        self._seconds = min(self._growth * self._seconds, self._ceiling)
        return True


@final
class Deadline:
    """A time limit in seconds for a wait, from now; None for no limit.

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
        """True once the time is over."""
        return monotonic() >= self._end

    @property
    def left(self) -> float:
        """Remaining seconds, never below 0; infinite without a limit."""
        return max(0.0, self._end - monotonic())

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._start


def wait_until(done: Callable[[], Any], seconds: float | None = None, backoff: Backoff | None = None) -> bool:
    """Wait until `done()` is true. Return False if it is not after `seconds`.

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
    """The parts of a `ProcessGroup` that a wait needs."""

    environment: Environment

    @property
    def monitor(self) -> Any: ...
    def has_left(self, rank: int) -> bool: ...
    def look_for_losses(self) -> None: ...


@final
class PeerWait:
    """A wait for other ranks: a `Backoff` that raises when they have left or take too long.

    Args:
        group: a `ProcessGroup`; its `environment` has the time limits.
        what: description of the wait.
        ranks: the ranks that it waits for.
        limited: False for no time limit, as in a server's wait for connected workers.
        remedy: the action that these ranks must take, for the warning and the error.
        backoff: the polling. Failures are checked when it sleeps.
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
        """Start again, after an event."""
        self._backoff.reset()

    def pause(self) -> None:
        """Wait briefly.

        Raises:
            PeerExitError: a rank that this one waits for has left the program.
            mpi4py.MPI.Exception, RanksLostError: ranks were lost, in a program that survives it.
            CollectiveTimeoutError: the wait exceeds its time limit.
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
