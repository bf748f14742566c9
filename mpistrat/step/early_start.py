"""Sums that start when the program announces gradients, and the choice whether that is faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter_ns
from typing import final

import numpy as np

from ..arena.arena import Arena, by_arena, padded
from ..arena.early import threads_agree
from ..arena.reduction import StartedSums
from ..base import log
from ..base.partition import merge
from ..comm.process_group import ProcessGroup
from ..variables.placement import Placement
from ..variables.variable import Variable
from .interface import Starter

__all__ = ["EarlyChoice", "EarlyStart"]

LEAST_BYTES = 4 << 20  # of gradients started together: with fewer, agreement costs too much
_TRIES = 7  # steps of each way
_WARM = 2  # steps before that
_GAIN = 0.98  # of the time without; all but one of the tries must be faster, to exclude chance
_KEPT = 1000  # steps until the next trial: if one way is 50 % slower, trials cost 0.4 %
_FUNCTION = "Optimizer.begin"


@final
class EarlyChoice:
    """The choice whether sums start in `begin`: both ways are tried in turns, then the faster one is used for many steps.

    The choice does not change results. All ranks choose the same.

    Attributes:
        early: whether sums start in `begin` now.
        words: the last choice, with the measured times.
    """

    def __init__(self) -> None:
        self.early, self.words = True, "not decided"
        self._kept: bool | None = None  # the last choice
        self._left = 0  # steps until the next trial
        self._number, self._ended = 0, 0
        self._times: dict[bool, list[int]] = {True: [], False: []}

    @property
    def open(self) -> bool:
        """True if sums start early, or on trial."""
        return self.early or not self._left

    def note_step(self, group: ProcessGroup, begun: bool) -> None:
        """Record the end of a step, and whether it started sums early. Collective: some calls compare times."""
        now, ended = perf_counter_ns(), self._ended
        self._ended = now
        if self._left:
            self._left -= 1
            self.early = bool(self._kept) or not self._left
        elif begun:
            if self._number >= _WARM:
                self._times[self.early].append(now - ended)
            self._number += 1
            self.early = self._number % 2 == 0
            if self._number == _WARM + 2 * _TRIES:
                self._decide(group)

    def _decide(self, group: ProcessGroup) -> None:
        with group.collective("begin: choice"):
            sums = group.sum_int(self._times[True] + self._times[False]).reshape(2, _TRIES) / group.topology.size / 1e6
        ratios = np.sort(sums[0] / sums[1])  # of neighbours, so that drift of the machine cancels
        self.early = bool(np.median(ratios) < _GAIN and ratios[-2] < 1)
        early, late = np.median(sums, axis=1)
        what, ours, other = ("start there", early, late) if self.early else ("wait for apply_gradients", late, early)
        self.words = f"sums of gradients {what}: a step took {ours:.1f} ms so, {other:.1f} ms otherwise"
        if self.early is not self._kept:
            log.once(logging.INFO, f"{_FUNCTION}: {self.words}")
        self._kept, self._left, self._number = self.early, _KEPT, 0
        for times in self._times.values():
            times.clear()


@final
class EarlyStart(Starter):
    """The early sums of one optimizer: a thread of each rank exchanges them between nodes until the step takes them.

    Attributes:
        choice: whether sums start early in this step.
    """

    def __init__(self, placement: Placement) -> None:
        self._group, self._ops, self.choice = placement.group, placement.ops, EarlyChoice()
        self._able: bool | None = None  # whether sums can start early; None until known
        self._waiting: list[Variable] = []  # variables collected until they are large enough to send
        self._sent: list[tuple[StartedSums, str, list[tuple[int, int]]]] = []
        self._begun = False  # whether gradients were announced for the next step

    @property
    def able(self) -> bool:  # type: ignore[override]
        return self._able is not False

    @property
    def early(self) -> bool:  # type: ignore[override]
        return self.able and self.choice.open

    @property
    def least_bytes(self) -> int:  # type: ignore[override]
        return LEAST_BYTES

    def start(self, variables: Sequence[Variable], due: bool) -> None:
        self._begun |= bool(variables)
        if self.able and self.choice.early:
            self._waiting += variables
            if sum(v.size * v.dtype.itemsize for v in self._waiting) >= self.least_bytes:
                self._send()

    def _send(self) -> None:
        names = ", ".join(variable.name for variable in self._waiting)
        with self._group.collective("begin", detail=f"of {names}"):
            members = by_arena(self._waiting)
            if self._able is None:
                self._able = self._is_able(list(members))
            for arena, some in members.items():
                sums = self._ops.early_sums(arena.gradients) if self._able and arena.gradients else None
                if sums is not None and arena.gradients:
                    ranges = merge(list(padded(arena, some).items()))
                    sums.begin(arena.gradients, ranges)
                    self._sent.append((sums, arena.key, ranges))
        self._waiting = []

    def _is_able(self, arenas: Sequence[Arena]) -> bool:
        """Return whether sums can start before the step, and log the reason if not. Collective, inside one."""
        why = ""
        if not any(arena.gradients and self._ops.early_sums(arena.gradients) for arena in arenas):
            why = "each node, or a GPU, sums and updates all weights"
        elif not threads_agree(self._group):
            why = "MPI was started without THREAD_MULTIPLE"
        if why:
            log.once(logging.INFO, f"{_FUNCTION}: sums of gradients wait for apply_gradients: {why}")
        return not why

    def note_step(self) -> None:
        if self._able:
            self.choice.note_step(self._group, self._begun)

    def forget(self, variables: Sequence[Variable]) -> None:
        for sums, key, ranges in self._sent:
            sums.forget(key, ranges)
        self._waiting, self._sent, self._begun = [], [], False
