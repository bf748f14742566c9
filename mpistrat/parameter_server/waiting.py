"""Back-off: waits for another rank by polling, then with increasing sleeps, up to a timeout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic, sleep
from typing import final

from .._util import log
from ..comm.process_group import ProcessGroup
from ..comm.watch import lines
from ..errors import CollectiveMismatchError, CollectiveTimeoutError, PeerExitError

__all__ = ["CEILING", "Backoff", "PassWait", "Patience"]

CEILING = 1e-3  # seconds of the longest sleep: below 6 % of a core when idle, about 1 ms until something is seen
_YIELDS = 100
_FIRST = 2e-5
_GROWTH = 1.125
_CHECK = 0.05  # seconds between two looks after what may have gone wrong
_QUIET = 5.0  # seconds without a push after which, and between which, workers are asked where they are
_ANSWER = 1.5  # seconds that they have to answer
_SILENCE = 10.0  # seconds without a push of which a server tells, once in a pass


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
        """Begin anew, after something has happened."""
        self._count, self._nap = 0, min(_FIRST, self._ceiling)

    def pause(self) -> bool:
        """Wait a little. Return whether it slept."""
        if self._count < _YIELDS:
            self._count += 1
            os.sched_yield()
            return False
        sleep(self._nap)
        self._nap = min(_GROWTH * self._nap, self._ceiling)
        return True


@final
class Patience:
    """One wait for other ranks: a `Backoff` that raises when they have gone or take too long.

    Args:
        group: the ranks; its `environment` says how long a wait may take.
        what: what is waited for, in words.
        ranks: who is waited for.
        limited: whether the wait may take too long at all; a server waits for ever for workers that are there.
        remedy: what those that are waited for must do, told where it takes long.
    """

    def __init__(
        self,
        group: ProcessGroup,
        what: str,
        ranks: Sequence[int],
        limited: bool = True,
        remedy: str = "",
    ) -> None:
        self._remedy = f"\n{remedy}" if remedy else ""
        self._group, self._what, self._ranks = group, what, ranks
        self._backoff, self._limited = Backoff(), limited
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
            waited_for = f"{self._what}: rank {self._me} waited {environment.abort_after:g} s{where}"
            raise CollectiveTimeoutError(f"{waited_for}{self._remedy}")
        if waited > environment.warn_after and not self._warned:
            self._warned = True
            where = self._group.watch.where(self._ranks)
            log.logger.warning(
                "%s takes longer than %g s:%s%s", self._what, environment.warn_after, where, self._remedy
            )

    @property
    def _me(self) -> int:
        return self._group.topology.rank


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
        now, watch, warn_after = monotonic(), self._group.watch, self._group.environment.warn_after
        if pushed != self._pushed:
            self._pushed, self._since, self._asked = pushed, now, 0.0
        quiet = now - self._since
        if quiet < min(_QUIET, warn_after):
            return
        if now - self._asked > _QUIET:
            self._asked, watch.wanted = now, tuple(ranks)
        answers = {rank: watch.answers[rank] for rank in ranks if rank in watch.answers}
        places = {rank: answer.text for rank, answer in answers.items() if answer.time > self._asked}
        remedy = (
            "A worker leaves a pass by strategy.leave() after its last step, or by the end of a loop over a distributed"
            " dataset, and must do so before what all ranks call together: save, restore, stats, close, a new variable"
        )
        me = (
            f"ParameterServerStrategy.serve: rank {watch.rank}, a parameter server, waits for workers to leave the pass"
        )
        for rank in places:
            if answers[rank].number > watch.number:
                raise CollectiveMismatchError(f"{me}, and one of them waits for it:{lines(places)}\n{remedy}")
        if quiet > min(_SILENCE, warn_after) and not self._warned and now - self._asked > _ANSWER:
            self._warned = True
            unknown = dict.fromkeys(ranks, "does not answer")
            log.logger.warning("%s; none has sent anything for %g s:%s\n%s", me, quiet, lines(unknown | places), remedy)
