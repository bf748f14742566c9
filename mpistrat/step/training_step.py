"""One training step: the ranks arrive, each sums and updates its elements, and the ranks leave together.

This module has the order of a step. Sums, publishing and meetings of ranks are its parts, see `interface`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from ..arena.arena import by_arena
from ..arena.values import checksum
from ..comm.call import Call, payload_bytes
from ..optimizers.core import OptimizerCore
from ..optimizers.gradients import Pairs
from ..optimizers.rule import UpdateRun
from ..variables.equal import different_nodes
from ..variables.kinds import apply_constraint
from ..variables.variable import Variable
from .arena_step import ArenaStep
from .interface import StepParts, Sums

if TYPE_CHECKING:
    from .passes import KeptSums

__all__ = ["TrainingStep"]

_STEP = "apply_gradients"


@final
class TrainingStep(UpdateRun):
    """The step of one optimizer on one set of variables in arenas."""

    def __init__(
        self, core: OptimizerCore, parts: StepParts, variables: Sequence[Variable], left_out: Sequence[str]
    ) -> None:
        """Plan the step, on all ranks, with the variables in equal order.

        `left_out` are names of variables without a gradient.
        """
        placement = variables[0].placement
        self.strategy = placement.strategy
        self._core, self._optimizer, self._group = core, core.optimizer, placement.group
        self._averaged: list[Variable] = []  # variables without a gradient in this step, whose averages it updates
        self._averages: list[ArenaStep] = []
        self._known_count = -1  # the number of known variables at the last search
        self._variables, self._left_out = tuple(variables), tuple(left_out)
        self._names = f"{[variable.name for variable in variables]}, not {self._left_out}"
        self._constrained = [variable for variable in variables if variable.constraint is not None]
        self._number = core.number_in(placement)  # None if it was not made in the strategy's scope
        self._parts, self._rounds = parts, core.slots.rounds
        self._replica = parts.replica_of(variables)
        self._works = self._works_of(variables)
        self._kept: KeptSums | None = None  # if the rule has passes
        self._nbytes = sum(payload_bytes(variable.dtype, variable.shape) for variable in variables)
        self.describe()

    def _works_of(self, variables: Sequence[Variable]) -> list[ArenaStep]:
        return [ArenaStep(self._core, arena, some, self._parts) for arena, some in by_arena(variables).items()]

    def _find_averaged(self) -> None:
        """Find known variables without a gradient in this step: their averages are updated too, as in Keras."""
        known = self._core.variables
        if len(known) != self._known_count:
            self._known_count, own = len(known), set(map(id, self._variables))
            self._averaged = [variable for variable in known if id(variable) not in own]
            self._averages = self._works_of(self._averaged)

    def describe(self) -> None:
        """Update the description that ranks compare, after the optimizer's numbers have changed."""
        names = ", ".join(variable.name for variable in self._variables)
        absent = f", not {', '.join(self._left_out)}" if self._left_out else ""
        decays = [self._core.decay_of(variable) for variable in self._variables]
        decaying = f", decays {decays}" if any(decays) else ""
        self._passes = self._core.passes
        for work in self._works:
            work.read_settings()
        self._every, self._rate_words = self._group.environment.check_every, (0.0, "0.0")
        which = "" if self._number is None else f", the scope's optimizer {self._number}"
        self._detail = f"of {names}{absent} by {self._core.describe()}{decaying}{which}"

    @property
    def may_skip(self) -> bool:
        works = self._replica.whole and bool(self._works) and all(work.may_skip for work in self._works)
        return works and not self._constrained and self._core.may_skip

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Take the gradients of each local replica."""
        self._parts.sums.load(self._core, replicas, key)

    def run(self, aggregate: bool) -> None:
        """Take the step. Collective; in cross-replica context."""
        core, group, rounds, optimizer = self._core, self._group, self._rounds, self._optimizer
        if optimizer.use_ema:
            self._find_averaged()
        overwrites = self._averaged and optimizer.ema_overwrite_frequency is not None
        changed = [*self._variables, *self._averaged] if overwrites else self._variables
        rounds.check(changed)
        number = core.started + 1
        rate = core.rate_at(number)
        detail = (self._detail if aggregate else self._detail + ", without aggregation") + core.begun.words
        if self._rate_words[0] != rate:  # comparing a number is faster than formatting it
            self._rate_words = rate, repr(rate)
        words = f", step {number} at rate {self._rate_words[1]}"
        due = core.taken[self._names] % self._every == 0
        self._replica.compare(detail, words, due)
        if due and not aggregate:
            words += f", gradients #{self._checksum_of_gradients():08x}"
        factor = (rounds.factor if aggregate else 1.0) / ((optimizer.loss_scale_factor or 1.0) * core.divisor)
        sums = self._parts.sums if aggregate else self._parts.no_sums
        with group.collective(_STEP, detail=detail).stamp(words) as call:
            call.nbytes = self._nbytes if aggregate else 0
            core.taken[self._names] += 1
            if group.num_nodes > 1 and rounds.compares(due):
                self._compare_nodes()
            self._parts.sums.enter(call)
            for work in (*self._works, *self._averages):
                work.begin(core.update_of(number), rate, number, bool(self._passes), factor)
            scales = self._keep(sums, number, rate, call) if self._passes else {}
            changes = core.changes_weights(number)
            if changes:
                rounds.enter(changed)
            self._update(sums, scales, changes)
            group.node.barrier(call)
        for variable in self._constrained:
            apply_constraint(variable, compare=due and rounds.alike)
        if core.updates_at(number):
            rounds.end_update()

    def _keep(self, sums: Sums, number: int, rate: float, call: Call) -> Mapping[str, float]:
        """Keep all sums, and run the passes over them. Collective, inside `call`."""
        try:
            with np.errstate(over="ignore"):  # of squares; sums are checked in the passes
                for work in self._works:
                    sums.hand_out(work, work.keep)
        except BaseException as error:
            self._leave(error)
            raise
        if self._kept is None:
            from .passes import KeptSums

            self._kept = KeptSums(self._core, self._group, self._variables, self._works, self._parts, self._replica)
        return self._kept.take(self._passes, number, rate, call)

    def _update(self, sums: Sums, scales: Mapping[str, float], changes: bool) -> None:
        """Update this rank's elements, and publish those weights that the step `changes`. Collective, inside one."""
        try:
            for work in self._works:
                if changes:
                    work.begin_publish()
                if self._passes:
                    work.take_kept(scales)
                else:
                    sums.hand_out(work, work.take)
            for work in self._averages:
                if self._optimizer.ema_overwrite_frequency is not None:
                    work.begin_publish()
                work.average()
            for work in (*self._works, *self._averages):
                work.publish()
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Cancel exchanges, and refuse later collectives after an error: a later step would receive this one's messages."""
        works = (*self._works, *self._averages)
        for work in works:
            work.leave()
        if self._parts.sums.sends_ahead or any(work.arena.sharded for work in works):
            self._group.refuse_after(error, "in a step left messages between nodes")

    def _checksum_of_gradients(self) -> int:
        """Return a checksum of the first local replica's gradients, which should be equal on all replicas."""
        return checksum(*(variable.gradient(0).reshape(-1) for variable in self._variables if variable.size))

    def _compare_nodes(self) -> None:
        """Raise unless all nodes have equal weights. Collective, inside one; all ranks have arrived.

        Raises:
            CollectiveMismatchError: on every rank, with each rank's values of the variables that differ.
        """
        digests = [work.digest() for work in self._works]
        error = different_nodes(_STEP, self._group, self._variables, digests)
        if error is not None:
            raise error
