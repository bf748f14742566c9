"""Rendezvous of a communicator's ranks before their first blocking call, with a time limit; compares what each creates.

No watchdog runs yet, and a wait inside MPI cannot be interrupted. So the ranks use MPI's nonblocking collectives and test them
periodically.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np

from ..base import log
from ..base.environment import Environment
from ..base.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerExitError, by_rank
from ..base.text import named
from ..base.waiting import Backoff
from .start import ranks_of_launcher

__all__ = ["add_check", "remove_check", "wait_for_ranks"]

_NAME_BYTES, _VERDICT_BYTES = 64, 1024
_GRACE = 5.0  # seconds after the time limit in which rank 0, which has more information, may raise first
_LOOK = 1.0  # seconds between two checks for finished ranks of this node
_abandoned: list[Any] = []  # requests that never ended, and the memory that MPI may still write to
_checks: list[Callable[[Any, str], None]] = []


def add_check(check: Callable[[Any, str], None]) -> None:
    """Call a function with the communicator and the caller's name in each rendezvous: it raises if a rank cannot arrive."""
    _checks.append(check)


def remove_check(check: Callable[[Any, str], None]) -> None:
    """Remove a function that was passed to `add_check`, if present."""
    if check in _checks:
        _checks.remove(check)


def wait_for_ranks(comm: Any, function: str, seconds: float | None = None) -> None:
    """Wait until all ranks are here, and raise unless they all call `function`. Collective over `comm`.

    Args:
        comm: the communicator.
        function: the public caller.
        seconds: the time limit; default MPISTRAT_ABORT_AFTER.

    Raises:
        CollectiveMismatchError: on every rank, if they create different things.
        CollectiveTimeoutError: a rank did not arrive within the time limit.
        ContextError: a rank serves a coordinator, and cannot arrive.
        PeerExitError: a rank of this node has finished its program.
    """
    if comm.size == 1:
        return
    for check in _checks:
        check(comm, function)
    environment = Environment.read()
    limit = environment.abort_after if seconds is None else seconds
    rendezvous = _Rendezvous(comm, function)
    start, backoff, warned = monotonic(), Backoff(5e-3), False
    look, finished = _LOOK, set[int]()
    while not rendezvous.over():
        if not backoff.pause():
            continue
        try:
            for check in _checks:
                check(comm, function)
        except BaseException:
            _abandoned.append(rendezvous)
            raise
        waited = monotonic() - start
        if waited > look:
            before, finished, look = finished, _finished(comm), waited + _LOOK
            if before & finished and not rendezvous.over():
                _abandoned.append(rendezvous)
                raise PeerExitError(
                    f"{function}: rank {comm.rank} of {comm.size} waits for rank {min(before & finished)}, which has finished"
                    " its program. All ranks of a communicator make this call: look on that rank for an exit or an `if`"
                )
        if not warned and waited > environment.warn_after:
            warned = True
            if rendezvous.informed:
                log.setup(environment.log)
                log.logger.warning(
                    "%s: rank %d waits for %s since %.0f s", function, comm.rank, rendezvous.missing(), waited
                )
        if waited > limit + (0.0 if rendezvous.informed else _GRACE):
            _abandoned.append(rendezvous)
            raise CollectiveTimeoutError(
                f"{function}: rank {comm.rank} of {comm.size} waited {limit:g} s for {rendezvous.missing()}."
                " All ranks of a communicator make this call: look on that rank for an exit, an `if` or long work"
                " before it, for another comm=, or for a program that ended"
            )
    if rendezvous.verdict:
        raise CollectiveMismatchError(rendezvous.verdict)


def _finished(comm: Any) -> set[int]:
    """Return the ranks of a communicator on this node that have finished their program."""
    from mpi4py import MPI

    finished = sorted(ranks_of_launcher()[0])
    if not finished or finished[-1] >= MPI.COMM_WORLD.size:
        return set()
    world, group = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(world, finished, group)
    world.Free()
    group.Free()
    return {rank for rank in ranks if rank != MPI.UNDEFINED}


class _Rendezvous:
    """A scatter from rank 0, a gather of what each rank creates, and a broadcast of the verdict once rank 0 has received all.

    Both MPIs implement these collectives without intermediate ranks, so rank 0 sees which ranks have arrived, and the others see
    whether rank 0 has.
    """

    def __init__(self, comm: Any, function: str) -> None:
        from mpi4py import MPI

        self._comm, self.verdict = comm, ""
        size, root = comm.size, comm.rank == 0
        self._greeting, self._answer = np.zeros(1, np.uint8), np.zeros(_VERDICT_BYTES, np.uint8)
        self._greetings = np.ones(size, np.uint8)
        self._name = np.zeros(_NAME_BYTES, np.uint8)
        name = function.encode()[:_NAME_BYTES]
        self._name[: len(name)] = np.frombuffer(name, np.uint8)
        self._names = np.zeros((size if root else 0, _NAME_BYTES), np.uint8)
        places = np.arange(size)
        ones, widths = np.ones(size, np.int64), np.full(size, _NAME_BYTES)
        out = [self._greetings, (ones, places), MPI.BYTE] if root else None
        names = [self._names, (widths, places * _NAME_BYTES), MPI.BYTE] if root else None
        self._greeted = comm.Iscatterv(out, self._greeting, 0)
        self._heard = comm.Igatherv(self._name, names, 0)
        self._answered: Any = None if root else comm.Ibcast(self._answer, 0)

    @property
    def informed(self) -> bool:
        """True if this rank knows at least as well as rank 0 which ranks are missing."""
        return self._comm.rank == 0 or not self._greeting[0]

    def over(self) -> bool:
        """Return True if all ranks have arrived, as far as this one knows."""
        greeted, heard = self._greeted.Test(), self._heard.Test()
        if self._answered is None and heard:
            self._judge()
        return bool(greeted and heard and self._answered is not None and self._finish())

    def _finish(self) -> bool:
        if not self._answered.Test():
            return False
        self.verdict = self._answer.tobytes().rstrip(b"\0").decode(errors="replace")
        return True

    def _judge(self) -> None:
        """Broadcast the verdict, as rank 0."""
        made = {rank: row.tobytes().rstrip(b"\0").decode(errors="replace") for rank, row in enumerate(self._names)}
        if len(set(made.values())) > 1:
            text = (
                f"the ranks make different things: {by_rank(made)}. All ranks of a communicator make the same, in the same"
                " order; give ranks that do something else a separate communicator: comm="
            ).encode()[:_VERDICT_BYTES]
            self._answer[: len(text)] = np.frombuffer(text, np.uint8)
        self._answered = self._comm.Ibcast(self._answer, 0)

    def missing(self) -> str:
        """Return the missing ranks, in words.

        On rank 0 the partial gather shows them: a name is present once its rank has arrived.
        """
        if self._comm.rank:
            return "ranks that rank 0 waits for" if self._greeting[0] else "rank 0"
        absent = [rank for rank, row in enumerate(self._names) if rank and not row[0]]
        return named("rank", absent, 20)
