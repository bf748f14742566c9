"""Waiting for another rank: eagerly, then with longer and longer sleeps, and never for ever."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic, sleep
from typing import final

from .. import log
from ..comm.process_group import ProcessGroup
from ..errors import CollectiveTimeoutError, PeerExitError

__all__ = ["CEILING", "Backoff", "Patience"]

CEILING = 1e-3  # seconds of the longest sleep: below 6 % of a core when idle, about 1 ms until something is seen
_YIELDS = 100
_FIRST = 2e-5
_GROWTH = 1.125
_CHECK = 0.05  # seconds between two looks after what may have gone wrong


@final
class Backoff:
    """Gives way to other processes a hundred times, then sleeps, each time an eighth longer up to a ceiling in seconds.

    So a wait is noticed to be over at most an eighth too late, until the ceiling is reached. A message crosses several
    such waits, of both ranks: with sleeps that double they add up to milliseconds.
    """

    __slots__ = ("_ceiling", "_count", "_nap")

    def __init__(self, ceiling: float = CEILING) -> None:
        self._ceiling = ceiling
        self.reset()

    def reset(self) -> None:
        """Begin anew, after something has happened. Not collective."""
        self._count, self._nap = 0, min(_FIRST, self._ceiling)

    def pause(self) -> bool:
        """Wait a little. Return whether it slept. Not collective."""
        if self._count < _YIELDS:
            self._count += 1
            os.sched_yield()
            return False
        sleep(self._nap)
        self._nap = min(_GROWTH * self._nap, self._ceiling)
        return True


@final
class Patience:
    """One wait for other ranks: a `Backoff` that raises when they have gone or take too long. Not collective.

    Args:
        group: the ranks; its `environment` says how long a wait may take.
        what: what is waited for, in words.
        ranks: who is waited for.
        ceiling: seconds of the longest sleep.
        limited: whether the wait may take too long at all; a server waits for ever for workers that are there.
    """

    def __init__(
        self, group: ProcessGroup, what: str, ranks: Sequence[int], ceiling: float = CEILING, limited: bool = True
    ) -> None:
        self._group, self._what, self._ranks = group, what, ranks
        self._backoff, self._limited = Backoff(ceiling), limited
        self._warned = False
        self._start = monotonic()
        self._next = self._start + _CHECK

    def reset(self) -> None:
        """Begin anew, after something has happened. Not collective."""
        self._backoff.reset()

    def pause(self) -> None:
        """Wait a little.

        Raises:
            PeerExitError: a rank that is waited for has left the program.
            CollectiveTimeoutError: the wait takes longer than `environment.abort_after`.
        """
        if self._backoff.pause() and monotonic() > self._next:
            self._check(monotonic())

    def _check(self, now: float) -> None:
        self._next = now + _CHECK
        gone = [rank for rank in self._ranks if self._group.has_left(rank)]
        if gone:
            raise PeerExitError(f"rank {gone[0]} left the program while rank {self._me} was in {self._what}")
        if not self._limited:
            return
        waited, environment = now - self._start, self._group.environment
        if waited > environment.abort_after:
            where = self._group.watch.where(self._ranks)
            raise CollectiveTimeoutError(f"{self._what}: rank {self._me} waited {environment.abort_after:g} s{where}")
        if waited > environment.warn_after and not self._warned:
            self._warned = True
            where = self._group.watch.where(self._ranks)
            log.logger.warning("%s takes longer than %g s:%s", self._what, environment.warn_after, where)

    @property
    def _me(self) -> int:
        return self._group.topology.rank
