"""One training step on arenas: sum the replicas' gradients and update the weights block by block, while both are in cache.

The ranks of a node arrive; each sums its slice of the gradients, all-reduces it with its peers on other nodes, and updates
its slice of the weights; the ranks leave together. Or, where the arena is sharded, peers sum and update a piece of the slice
each, and exchange the new weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from ..arena.arena import by_arena
from ..arena.reduction import Consume, of_node
from ..arena.values import checksum
from ..base.errors import by_rank, explain
from ..comm.arrays import all_reduce
from ..comm.call import Call
from ..variables.equal import different_nodes
from ..variables.kinds import apply_constraint
from ..variables.variable import Variable
from .arena_step import ArenaStep, not_finite_of
from .core import OptimizerCore
from .gradients import Pairs, check_same, load_gradients
from .rule import UpdateRun
from .slots import owners

__all__ = ["FusedStep"]

K = TypeVar("K", bound=Hashable)


@final
class FusedStep(UpdateRun):
    """The step of one optimizer on one set of variables whose arenas all ranks of a node share."""

    def __init__(
        self, core: OptimizerCore, strategy: Any, variables: Sequence[Variable], left_out: Sequence[str]
    ) -> None:
        """Plan the step, of variables in the same order on every rank. All ranks make it.

        `left_out` are names of variables without a gradient.
        """
        self.strategy = strategy
        self._core, self._optimizer = core, core.optimizer
        self._averaged: list[Variable] = []  # those without a gradient in this step whose averages it updates
        self._averages: list[ArenaStep] = []
        self._known_count = -1  # when they were looked for
        self._variables, self._left_out = tuple(variables), tuple(left_out)
        self._names = f"{[variable.name for variable in variables]}, not {self._left_out}"
        self._constrained = [variable for variable in variables if variable.constraint is not None]
        placement = variables[0].placement
        self._group, self._ops, self._outer = placement.group, placement.ops, core.slots.outer
        self._number = core.number_in(placement)  # None if it was not made in the strategy's scope
        self._buckets = placement.buckets
        self._parts: ReplicaParts | None = None
        if placement.grid is not None:
            from .replica_parts import ReplicaParts

            self._parts = ReplicaParts(placement.grid, variables)
        self._arena_steps = self._steps_of(variables)
        self.describe()

    def _steps_of(self, variables: Sequence[Variable]) -> list[ArenaStep]:
        return [ArenaStep(self._core, arena, some) for arena, some in by_arena(variables).items()]

    def _find_averaged(self) -> None:
        """Find the known variables that have no gradient in this step: their averages are updated as well, as Keras does."""
        known = self._core.variables
        if self._optimizer.use_ema and len(known) != self._known_count:
            self._known_count, own = len(known), set(map(id, self._variables))
            self._averaged = [variable for variable in known if id(variable) not in own]
            self._averages = self._steps_of(self._averaged)

    def describe(self) -> None:
        """Describe anew what the ranks compare, after the optimizer's numbers have changed."""
        names = ", ".join(variable.name for variable in self._variables)
        absent = f", not {', '.join(self._left_out)}" if self._left_out else ""
        decays = [self._core.decay_of(variable) for variable in self._variables]
        decaying = f", decays {decays}" if any(decays) else ""
        optimizer = self._optimizer
        clips = optimizer.clipnorm is not None or optimizer.global_clipnorm is not None
        self._scaled = clips or optimizer.check_numerics
        self._two_passes = self._scaled or optimizer._scales_by_norms or optimizer._on_wholes
        for step in self._arena_steps:
            step.read_settings()
        self._every, self._rate_words = self._group.environment.check_every, (0.0, "0.0")
        which = "" if self._number is None else f", the scope's optimizer {self._number}"
        self._detail = f"of {names}{absent} by {self._core.describe()}{decaying}{which}"

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Copy the local replicas' gradients into the arenas, or hand over those that were not begun."""
        if self._buckets is None:
            load_gradients(replicas, key)
        else:
            check_same(replicas, key)
            self._core.begun.add_rest(self._buckets, replicas)

    def run(self, aggregate: bool) -> None:
        """Take the step. Collective; in cross-replica context."""
        core, optimizer, group = self._core, self._optimizer, self._group
        self._find_averaged()
        if self._outer is not None:
            self._outer.check(self._changed())
        number = core.calls + 1
        rate = core.rate_at(number)
        detail = (self._detail if aggregate else self._detail + ", without aggregation") + core.begun.words
        if self._rate_words[0] != rate:  # a number takes longer to write than to compare
            self._rate_words = rate, repr(rate)
        words = f", step {number} at rate {self._rate_words[1]}"
        due = core.taken[self._names] % self._every == 0
        if self._parts is not None:
            self._parts.compare(detail, words, due)
        if due and not aggregate:
            words += f", gradients #{self._checksum_of_gradients():08x}"
        factor = self._outer.factor if self._outer is not None and aggregate else 1.0
        factor /= (optimizer.loss_scale_factor or 1.0) * core.divisor
        with group.collective("apply_gradients", detail=detail).stamp(words) as call:
            core.taken[self._names] += 1
            self._ops.call = call
            if self._group.num_nodes > 1 and (due if self._outer is None else not self._outer.begun):
                self._compare_nodes()
            if self._buckets is not None:
                self._buckets.finish()
            for step in (*self._arena_steps, *self._averages):
                step.begin(core.updates + 1, rate, number, self._two_passes, factor)
            scales: dict[str, float] = {}
            if self._two_passes:
                with np.errstate(over="ignore"), self._exchanges():  # of squares; sums are checked below
                    for step in self._arena_steps:
                        self._sum(step, aggregate, step.keep)
                if self._scaled:
                    scales = self._scales(number)
                if optimizer._scales_by_norms and core.updates_at(number):
                    scales = self._ratios(scales, rate)
                if optimizer._on_wholes and core.updates_at(number):
                    self._update_whole(scales, call)
                    scales = {}
            if self._outer is not None and core.changes_weights(number):
                self._outer.enter(self._changed())
            with self._exchanges():
                for step in self._arena_steps:
                    step.begin_share()
                    if self._two_passes:
                        step.take_kept(scales)
                    else:
                        self._sum(step, aggregate, step.take)
                for step in self._averages:
                    if optimizer.ema_overwrite_frequency is not None:
                        step.begin_share()
                    step.average()
                for step in (*self._arena_steps, *self._averages):
                    step.finish_share()
            group.node.barrier(call)
        for variable in self._constrained:
            apply_constraint(variable, compare=due and self._outer is None)
        if self._outer is not None and core.updates_at(number):
            self._outer.count_update()
            if self._outer.due:
                self._outer.take()

    def _changed(self) -> Sequence[Variable]:
        """Return the variables whose weights this step may change."""
        overwrites = self._averaged and self._optimizer.ema_overwrite_frequency is not None
        return [*self._variables, *self._averaged] if overwrites else self._variables

    @contextlib.contextmanager
    def _exchanges(self) -> Iterator[None]:
        """Refuse the next collectives after an error in it: a later step would take messages that are under way for its own."""
        try:
            yield
        except BaseException as error:
            for step in (*self._arena_steps, *self._averages):
                step.leave_share()
            ahead = self._ops.sends_ahead and self._group.num_nodes > 1
            ahead = ahead or any(step.arena.sharded for step in (*self._arena_steps, *self._averages))
            if ahead:
                self._group.refuse_after(error, "in a step left messages between nodes")
            raise

    def _checksum_of_gradients(self) -> int:
        """A checksum of gradients that should be equal on all replicas: those of the first local one."""
        return checksum(*(variable.gradient(0).reshape(-1) for variable in self._variables if variable.size))

    def _compare_nodes(self) -> None:
        """Check that all nodes hold the same weights. Collective, inside one; all ranks have arrived.

        Raises:
            CollectiveMismatchError: they do not; on every rank, with what each has of the variables that differ.
        """
        digests = [step.digest() for step in self._arena_steps]
        error = different_nodes("apply_gradients", self._group, self._variables, digests)
        if error is not None:
            raise error

    def _sum(self, step: ArenaStep, aggregate: bool, consume: Consume) -> None:
        gradients = step.gradients
        if self._buckets is not None:
            step.take_sums(self._buckets.memory(gradients), consume)
            return
        if not aggregate:
            arrays = gradients.local[:1]
        elif self._outer is not None:
            arrays = of_node(gradients)
        else:
            arrays = self._ops.node_gradients(gradients)
        if arrays is not None:
            step.sum(arrays, consume)
        elif step.unsent is None:
            self._ops.reduce_arena(gradients, step.ranges, consume)
        else:
            self._ops.reduce_arena(gradients, step.ranges, consume, step.unsent)

    def _scales(self, number: int) -> dict[str, float]:
        """Return the factors of the gradients of each variable, the same bits on every rank; NaN for what is not finite.

        Raises:
            FloatingPointError: on every rank, for what is not finite, with `check_numerics`.
        """
        optimizer = self._optimizer
        sums, own = self._over_slices([step.squares for step in self._arena_steps]), self._outer is not None
        if self._parts is not None:
            sums = self._parts.total(sums)
        if optimizer.check_numerics:
            finite = all(map(math.isfinite, sums.values()))
            if not (self._group.agree(int(finite)) if own else finite):  # nodes with sums of their own
                try:
                    self._refuse_numbers(number)
                except FloatingPointError:
                    for step in self._arena_steps:
                        step.leave_share()
                    raise
        if optimizer.clipnorm is not None:
            return {name: _scale(total, optimizer.clipnorm) for name, total in sums.items()}
        limit = optimizer.global_clipnorm
        scale = 1.0 if limit is None else _scale(sum(sums.values()), limit)
        return dict.fromkeys(sums, scale)

    def _ratios(self, scales: Mapping[str, float], rate: float) -> dict[str, float]:
        """Return what each variable's direction is multiplied by, by the norms of its weights and of the direction."""
        optimizer = self._optimizer
        if optimizer._factored:
            self._factor(scales)
        for step in self._arena_steps:
            step.direct({} if optimizer._factored else scales)
        squares = self._over_slices([step.norms for step in self._arena_steps])
        norms = {}
        for what in ("weights", "direction"):
            sums = {name: total for (name, of), total in squares.items() if of == what}
            norms[what] = sums if self._parts is None else self._parts.total(sums)
        ratios = {}
        for step in self._arena_steps:
            for variable in step.variables:
                weights, direction = (math.sqrt(norms[what][variable.name]) for what in ("weights", "direction"))
                weights *= abs(1 - self._core.decay_of(variable) * rate)  # they decay before they are updated
                size = variable.size if variable.part is None else variable.part.whole_size
                ratios[variable.name] = optimizer._ratio(weights, direction, size, self._core.updates + 1, rate)
        return ratios

    def _update_whole(self, scales: Mapping[str, float], call: Call) -> None:
        """Keep, in place of gradients times their scales, the new weights that the rule computes of whole variables."""
        gradients: dict[str, np.ndarray] = {}
        weights: dict[str, np.ndarray] = {}
        for step in self._arena_steps:
            gradients |= step.whole_gradients(scales)
            weights |= step.whole_weights()
        new = self._optimizer._update_whole(gradients, weights)
        self._group.node.barrier(call)  # all have read the weights and the rule's state
        for step in self._arena_steps:
            step.keep_weights(new)
        self._optimizer._store_whole()

    def _factor(self, scales: Mapping[str, float]) -> None:
        """Form the moments of the rule, and factor them by the sums of rows and columns over all ranks."""
        steps = self._arena_steps
        for step in steps:
            step.form_moments(scales)
        columns = [np.concatenate([[], *(matrix.sums for matrix in step.matrices.values())]) for step in steps]
        for step, total in zip(steps, self._totals(columns), strict=True):
            first = 0
            for matrix in step.matrices.values():
                matrix.sums, first = total[first : first + matrix.sums.size], first + matrix.sums.size
            step.factor()

    def _over_slices(self, numbers: Sequence[Mapping[K, float]]) -> dict[K, float]:
        """Return the sums over all ranks of numbers of what each updates of each arena, the same bits on every rank."""
        totals = self._totals([np.array([*each.values()], np.float64) for each in numbers])
        return {
            name: total
            for each, column in zip(numbers, totals, strict=True)
            for name, total in zip(each, column.tolist(), strict=True)
        }

    def _totals(self, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sums over all ranks of float64 numbers of what each updates of each arena, the same bits on every rank."""
        column = np.concatenate([[], *columns])
        in_pieces = np.repeat(
            np.array([step.arena.sharded for step in self._arena_steps], bool), [each.size for each in columns]
        )
        if in_pieces.any() and self._group.inter is not None:
            column[in_pieces] = _over_nodes(self._group.inter, column[in_pieces])
        table = (self._group.of_first_node if self._outer is None else self._group.of_own_node)(column)
        totals, first = [], 0
        for step, each in zip(self._arena_steps, columns, strict=True):
            rows = table[: len(step.arena.bounds()), first : first + each.size]
            totals.append(functools.reduce(np.add, rows, np.zeros(each.size)))
            first += each.size
        return totals

    def _refuse_numbers(self, number: int) -> None:
        """Raise with the ranks whose gradients are not finite, if any: squares may be infinite where no gradient is. Collective.

        Raises:
            FloatingPointError: on every rank.
        """
        for step in self._arena_steps:
            step.forget_unsent()
        own = {
            variable.name: not_finite_of(*(variable.gradient(i).reshape(-1) for i in range(len(step.gradients.local))))
            for step in self._arena_steps
            for variable in step.variables
        }  # none where they were handed over
        summed = {name: count for step in self._arena_steps for name, count in step.not_finite().items()}
        counted = [json.loads(text) for text in self._group.all_gather_text(json.dumps([own, summed]))]
        for variable in self._variables:
            counts = {rank: mine[variable.name] for rank, (mine, _) in enumerate(counted) if mine.get(variable.name)}
            ranks = [] if variable.arena is None else owners(variable.arena)
            if ranks and self._outer is not None:
                ranks = list(range(len(counted)))
            overflown = sum(counted[rank][1].get(variable.name, 0) for rank in ranks)
            if not counts and not overflown:
                continue
            got = by_rank({rank: f"{count} that are not" for rank, count in counts.items()})
            got = got or f"{overflown} that are not in the sum over all replicas"
            got += ", of finite ones on each" * (not counts and self._buckets is None)
            remedy = "Look at the loss and the learning rate; no variable was changed by this step"
            expected, got = "finite numbers", f"{got}, of {variable.size}, in step {number}"
            raise FloatingPointError(
                explain("apply_gradients", variable.name, expected=expected, got=got, remedy=remedy)
            )
        if self._parts is not None:
            got = f"others in a part of a variable that lies on other ranks, in step {number}"
            raise FloatingPointError(explain("apply_gradients", "", expected="finite numbers", got=got))


def _over_nodes(inter: Any, numbers: np.ndarray) -> np.ndarray:
    """Return the sums of float64 numbers over the peers of other nodes. Collective over `inter`."""
    total = np.array(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        all_reduce(inter, total)
    return total


def _scale(total: float, limit: float) -> float:
    if not math.isfinite(total):
        return math.nan
    return limit * min(1 / math.sqrt(total), 1 / limit) if total else 1.0
