"""Passes over the sums of a step before the update: clipping by norms, directions, factors, rules on whole variables.

A rule without passes sums and updates each block while it is in cache. With passes the sums are kept first.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from ..base.errors import by_rank, explain
from ..comm.arrays import to_host
from ..comm.call import Call
from ..comm.process_group import ProcessGroup
from ..optimizers.core import OptimizerCore
from ..variables.variable import Variable
from .arena_step import ArenaStep, not_finite_of
from .interface import Replica, StepParts

__all__ = ["KeptSums"]

_STEP = "apply_gradients"
K = TypeVar("K", bound=Hashable)
Scales = Mapping[str, Any]  # the factor of each variable's sum, on a GPU a DeviceScale; 1 for missing names


@final
class KeptSums:
    """The kept sums of a step, and the sums over ranks of numbers of them.

    Attributes:
        core: of the optimizer.
        group: the ranks.
        variables: those that the step updates.
        works: the arenas.
        norms, replica: see `interface`.
    """

    def __init__(
        self,
        core: OptimizerCore,
        group: ProcessGroup,
        variables: Sequence[Variable],
        works: Sequence[ArenaStep],
        parts: StepParts,
        replica: Replica,
    ) -> None:
        self.core, self.group, self.variables, self.works = core, group, variables, works
        self.norms, self.replica = parts.new_norms(), replica
        self._arenas = [work.arena for work in works]

    def totals(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sums over all ranks of float64 numbers of each work. Collective, inside one."""
        return self.norms.totals(numbers, self._arenas)

    def by_name(self, numbers: Sequence[Mapping[K, float]]) -> dict[K, float]:
        """Return the sums over all ranks of named numbers of each work. Collective, inside one."""
        totals = self.totals([np.array([*each.values()], np.float64) for each in numbers])
        return {
            name: total
            for each, column in zip(numbers, totals, strict=True)
            for name, total in zip(each, column.tolist(), strict=True)
        }

    @property
    def on_device(self) -> bool:
        """True if scales can stay on the GPU of the sums."""
        return self.replica.whole and bool(self.works) and all(work.on_device for work in self.works)

    def squares(self) -> list[dict[str, float]]:
        """Return the sums of squares of this rank's kept sums of each work, by name."""
        if not any(work.on_device for work in self.works):
            return [work.squares for work in self.works]
        from .on_device import totals_of

        totals = iter(to_host(totals_of([work.device_squares() for work in self.works])).tolist())
        return [{name: next(totals) for name in work.squares} for work in self.works]

    def take(self, passes: Sequence[str], number: int, rate: float, call: Call) -> Scales:
        """Run passes in their order, and return the scales of the kept sums. Collective, inside `call`."""
        scales: Scales = {}
        updates = self.core.updates_at(number)
        for each in [_PASSES[name] for name in passes]:
            if each.always or updates:
                scales = each.take(self, scales, number, rate, call)
        return scales


class Pass(ABC):
    """One pass over kept sums."""

    #: Whether calls that only accumulate gradients run it, too.
    always: bool = False

    @abstractmethod
    def take(self, kept: KeptSums, scales: Scales, number: int, rate: float, call: Call) -> Scales:
        """Run the pass, and return the scales of the kept sums. Collective, inside `call`.

        Args:
            kept: the sums.
            scales: of them, the same bits on every rank.
            number: of the step.
            rate: the learning rate.
        """


@final
class Unscale(Pass):
    """Division of sums by the factor of a LossScaleOptimizer on the GPU, which decides whether it skips the step."""

    always = True

    def take(self, kept: KeptSums, scales: Scales, number: int, rate: float, call: Call) -> Scales:
        if kept.core.overflow is not None:
            kept.core.overflow.decide([part for work in kept.works for part in work.kept_parts()], number)
        return scales


@final
class Clip(Pass):
    """Clipping of sums to a norm, and with `check_numerics` the check that they are finite."""

    always = True

    def take(self, kept: KeptSums, scales: Scales, number: int, rate: float, call: Call) -> Scales:
        """Return the factors of the gradients of each variable; NaN for sums that are not finite.

        Raises:
            FloatingPointError: on every rank, with `check_numerics`: a sum is not finite.
        """
        optimizer = kept.core.optimizer
        if kept.on_device and not kept.core.check_numerics:
            return self._on_device(kept)
        sums = kept.replica.total(kept.by_name(kept.squares()))
        if kept.core.check_numerics and not kept.norms.all_finite(all(map(math.isfinite, sums.values()))):
            try:
                _refuse_numbers(kept, number)
            except FloatingPointError:
                for work in kept.works:
                    work.leave()
                raise
        if optimizer.clipnorm is not None:
            return {name: _scale(total, optimizer.clipnorm) for name, total in sums.items()}
        limit = optimizer.global_clipnorm
        scale = 1.0 if limit is None else _scale(sum(sums.values()), limit)
        return dict.fromkeys(sums, scale)

    def _on_device(self, kept: KeptSums) -> Scales:
        """Return the factors on the GPU of the sums. Each rank has all sums, so ranks exchange nothing."""
        from .on_device import scales, totals_of

        optimizer = kept.core.optimizer
        limit, together = optimizer.clipnorm, optimizer.clipnorm is None
        if limit is None:
            limit = optimizer.global_clipnorm or math.inf
        found = scales(totals_of([work.device_squares() for work in kept.works]), limit, together)
        return dict(zip([name for work in kept.works for name in work.squares], found, strict=True))


@final
class Factor(Pass):
    """Factored moments: forms the rule's moments, and factors them by the sums of rows and columns over all ranks."""

    def take(self, kept: KeptSums, scales: Scales, number: int, rate: float, call: Call) -> Scales:
        works = kept.works
        for work in works:
            work.form_moments(scales)
        columns = [np.concatenate([[], *(matrix.sums for matrix in work.matrices.values())]) for work in works]
        for work, total in zip(works, kept.totals(columns), strict=True):
            first = 0
            for matrix in work.matrices.values():
                matrix.sums, first = total[first : first + matrix.sums.size], first + matrix.sums.size
            work.factor()
        return {}


@final
class Direct(Pass):
    """Update directions, scaled per variable by the norms of its weights and its direction."""

    def take(self, kept: KeptSums, scales: Scales, number: int, rate: float, call: Call) -> Scales:
        core, works = kept.core, kept.works
        for work in works:
            work.direct(scales)
        squares = kept.by_name([work.norms for work in works])
        norms = {}
        for what in ("weights", "direction"):
            norms[what] = kept.replica.total({name: total for (name, of), total in squares.items() if of == what})
        ratios = {}
        for work in works:
            for variable in work.variables:
                weights, direction = (math.sqrt(norms[what][variable.name]) for what in ("weights", "direction"))
                weights *= abs(1 - core.decay_of(variable) * rate)  # weights decay before the update
                size = variable.size if variable.part is None else variable.part.whole_size
                ratios[variable.name] = core.ratio(weights, direction, size, rate)
        return ratios


@final
class Whole(Pass):
    """Rules on whole variables: replaces scaled sums by the new weights that the rule computes."""

    def take(self, kept: KeptSums, scales: Scales, number: int, rate: float, call: Call) -> Scales:
        gradients: dict[str, np.ndarray] = {}
        weights: dict[str, np.ndarray] = {}
        for work in kept.works:
            gradients |= work.whole_gradients(scales)
            weights |= work.whole_weights()
        new = kept.core.update_whole(gradients, weights)
        kept.group.node.barrier(call)  # all have read the weights and the rule's state
        for work in kept.works:
            work.keep_weights(new)
        kept.core.store_whole()
        return {}


def _refuse_numbers(kept: KeptSums, number: int) -> None:
    """Raise with the ranks whose gradients are not finite, if any: finite gradients may have infinite squares. Collective.

    Raises:
        FloatingPointError: on every rank.
    """
    for work in kept.works:
        work.refuse()
    own = {
        variable.name: not_finite_of(*(variable.gradient(i).reshape(-1) for i in range(len(work.gradients.local))))
        for work in kept.works
        for variable in work.variables
    }  # none if they were submitted early
    summed = {name: count for work in kept.works for name, count in work.not_finite().items()}
    counted = [json.loads(text) for text in kept.group.all_gather_text(json.dumps([own, summed]))]
    for variable in kept.variables:
        counts = {rank: mine[variable.name] for rank, (mine, _) in enumerate(counted) if mine.get(variable.name)}
        ranks = [] if variable.arena is None else kept.norms.counted(variable.arena)
        overflown = sum(counted[rank][1].get(variable.name, 0) for rank in ranks)
        if not counts and not overflown:
            continue
        got = by_rank({rank: f"{count} that are not" for rank, count in counts.items()})
        got = got or f"{overflown} that are not in the sum over all replicas"
        got += ", of finite ones on each" * (not counts and variable.placement.arenas.keeps_gradients)
        remedy = "Look at the loss and the learning rate; no variable was changed by this step"
        expected, got = "finite numbers", f"{got}, of {variable.size}, in step {number}"
        raise FloatingPointError(explain(_STEP, variable.name, expected=expected, got=got, remedy=remedy))
    kept.replica.refuse(number)


def _scale(total: float, limit: float) -> float:
    if not math.isfinite(total):
        return math.nan
    return limit * min(1 / math.sqrt(total), 1 / limit) if total else 1.0


# By their names in `OptimizerCore.passes`.
_PASSES: Mapping[str, Pass] = {
    "unscale": Unscale(),
    "clip": Clip(),
    "factor": Factor(),
    "direct": Direct(),
    "whole": Whole(),
}
