"""Local steps: each node trains separately, and after `every` updates all nodes take an outer step together.

Within a round, from one outer step to the next, a step sums gradients over the node only, and the weights of nodes differ. The
outer step sums the weights of all nodes piece by piece, on the node with the piece's anchor and momentum. Anchor minus mean is
the outer gradient; SGD with Nesterov's momentum gives the new weights of all.

Source: Douillard et al., DiLoCo (arXiv 2311.08105). As there, each node has its own slots of the inner optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import numpy as np

from ..arena.arena import Arena
from ..arena.arithmetic import arithmetic
from ..arena.pieces import PieceShare, PieceSum, Range
from ..arena.reduction import BLOCK
from ..base.errors import ContextError, explain
from ..base.options import LocalSteps
from ..base.partition import aligned_bounds, merge
from ..base.types import Quality, ReduceOp
from ..base.underflow import may_underflow
from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..optimizers.node_slots import OUTER_MOMENTUM, node_slots_here
from ..variables.kinds import apply_constraint
from ..variables.placement import Placement
from ..variables.variable import Variable
from .interface import NodeRounds, OptionCheck
from .norms import OverAll

__all__ = ["OuterSteps", "OverOwnNode", "check", "lacking"]


def check(asked: OptionCheck) -> None:
    """Raise an error unless a strategy can have these local steps.

    Raises:
        TypeError: neither a number of steps nor LocalSteps.
        ValueError: a number out of range; with `replicas`, or with slots divided over nodes.
        DeviceError: this rank has GPUs.
    """
    given, function = asked.step.local_steps, asked.function
    if given is not None and not isinstance(given, LocalSteps):
        try:
            LocalSteps(given)
        except (TypeError, ValueError) as error:
            expected = "ms.LocalSteps, or a number of updates of at least 1"
            raise type(error)(explain(function, "local_steps", expected=expected, got=repr(given))) from None
    if asked.ordered or asked.step.sharded_slots:
        other = "replicas" if asked.ordered else "sharded_slots=True"
        expected = f"local_steps without {other}"
        got = "both, while each node sums and stores slots separately"
        raise ValueError(explain(function, "local_steps", expected=expected, got=got))
    asked.require_cpus("local_steps")


def lacking(placement: Placement) -> dict[Quality, str]:
    """Return what local steps take away."""
    return {Quality.EQUAL_NODES: f"local_steps={placement.local_steps}"}


@final
class OuterSteps(NodeRounds):
    """The rounds of one optimizer, and the state of its outer steps.

    `Placement.apart` has the variables of the round, for code that must not see variables that differ between nodes.

    Attributes:
        factor: scales the sum of a node's gradients to stand for the sum over all.
    """

    alike = False
    slot_names = (OUTER_MOMENTUM,)

    def __init__(self, placement: Placement) -> None:
        assert placement.local_steps is not None
        self._group = group = placement.group
        self._placement, self._how = placement, placement.local_steps
        self._updates = 0  # in this round
        self._parity = 0
        self._arenas: dict[Arena, _OuterArena] = {}
        self._sums: dict[np.dtype, PieceSum] = {}
        counts = replicas_by_node(group)
        mine, common = counts[group.node_index], math.gcd(*counts)
        # A loss is scaled for the sum over all replicas. Times this factor, the sum over a node is the gradient of the mean
        # over its part of the batch. The mean of these over nodes, weighted by replicas, is the gradient of all nodes.
        self.factor = sum(counts) / mine
        self._weight, self._divisor = mine // common, sum(counts) // common

    # steps within a round

    @property
    def begun(self) -> bool:
        """True if nodes have taken local steps since the last outer step."""
        return self in self._placement.apart.values()

    def compares(self, due: bool) -> bool:
        return not self.begun

    def check(self, variables: Sequence[Variable]) -> None:
        """Raise ContextError, on every rank, if another optimizer has updated a variable in its own round."""
        apart = self._placement.apart
        for variable in variables:
            if apart.get(variable, self) is not self:
                expected = "one optimizer for each variable between two outer steps"
                remedy = "Call strategy.outer_step() before another one updates it"
                got = "a second one"
                raise ContextError(explain("apply_gradients", variable.name, expected=expected, got=got, remedy=remedy))

    def enter(self, variables: Sequence[Variable]) -> None:
        """Copy the anchors of variables before their first update in a round; nodes then have equal weights."""
        apart = self._placement.apart
        if not self.begun:
            self._updates = 0
        new = [variable for variable in variables if variable not in apart]
        apart.update(dict.fromkeys(new, self))
        for arena, ranges in _ranges_of(new).items():
            self._of(arena).take_anchor(ranges)

    def end_update(self) -> None:
        """Count an update of this round, and take the outer step if the round is over. Collective."""
        self._updates += 1
        if self._updates >= self._how.every:
            self.take()

    def end(self) -> None:
        if self.begun:
            self.take()

    # the outer step

    def take(self) -> None:
        """Take the outer step of all variables in the round, and end the round. Collective."""
        group, apart = self._group, self._placement.apart
        variables = [variable for variable, owner in apart.items() if owner is self]
        # The call differs from the last one of its name, so nodes compare it: none waits for a node without an outer step.
        self._parity = 1 - self._parity
        names = ", ".join(variable.name for variable in variables)
        detail = f"of {names} by {self._how}, {'an odd' if self._parity else 'an even'} one"
        with group.collective("outer_step", detail=detail).stamp(f", after {self._updates} updates") as call:
            shares: list[PieceShare] = []
            try:
                for arena, ranges in _ranges_of(variables).items():
                    self._step(arena, ranges, shares)
                for share in shares:
                    share.finish()
            except BaseException as error:
                for share in shares:
                    share.leave()
                group.refuse_after(error, "left messages between nodes")
                raise
            group.node.barrier(call)
        for variable in variables:
            del apart[variable]
        for variable in variables:
            apply_constraint(variable, compare=True)

    def _step(self, arena: Arena, ranges: Sequence[Range], shares: list[PieceShare]) -> None:
        """Compute the new weights of element ranges, and start to share them. Collective over `group.inter`."""
        inter, kept = self._group.inter, self._of(arena)
        pieces, values = kept.pieces(ranges), arena.values
        if inter is None:
            return
        how = arithmetic(ReduceOp.SUM, arena.dtype, 1)
        sums = self._sums.get(how.accumulate)
        if sums is None:
            sums = self._sums[how.accumulate] = PieceSum(inter, how.accumulate, BLOCK)
        rate, momentum, divisor = self._how.outer_learning_rate, self._how.outer_momentum, self._divisor

        @may_underflow
        def update(low: int, high: int, total: np.ndarray) -> None:
            np.divide(total, divisor, out=total)
            anchor, velocity = kept.part(kept.anchor, low, high), kept.part(kept.momentum, low, high)
            gradient = anchor - total
            velocity *= momentum
            velocity += gradient
            # anchor - rate (gradient + momentum velocity), starting from the mean: exact for rate 1 and momentum 0
            anchor[...] = total
            anchor += (1 - rate) * gradient
            anchor -= (rate * momentum) * velocity

        # Nodes are weighted by their replicas: their weights are added that many times.
        sums.hand_out([values] * self._weight, pieces, how, update)
        for low, high in pieces[inter.rank]:  # only now: other nodes' sums read from here
            values[low:high] = kept.part(kept.anchor, low, high)
        share = PieceShare(inter, values, pieces)
        shares.append(share)
        share.ready(arena.size)

    # files

    def reset(self) -> None:
        """Reset the momentum."""
        for kept in self._arenas.values():
            kept.momentum[...] = 0

    def load(self, variable: Variable, arena: Arena, slots: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take this rank's piece of a variable's outer momentum, if it is among slots; return the others."""
        momentum = slots.get(OUTER_MOMENTUM)
        if momentum is None:
            return slots
        kept, first = self._of(arena), variable.offset
        flat = np.asarray(momentum).reshape(-1)
        for low, high in kept.own([(first, first + variable.size)]):
            kept.part(kept.momentum, low, high)[...] = flat[low - first : high - first]
        return {name: array for name, array in slots.items() if name != OUTER_MOMENTUM}

    def slots_here(
        self,
        variable: Variable,
        arena: Arena,
        names: Sequence[str],
        of_range: Callable[[int, int], Mapping[str, Any]],
        writers: Collection[int] | None,
        each_node: bool,
    ) -> dict[str, list[tuple[int, Any]]]:
        """Return this rank's part of the slots of all nodes, and of the momentum. Collective. See `node_slots_here`."""
        first = variable.offset

        def momentum_of_slice() -> list[tuple[int, Any]]:
            found = self._of(arena).gathered(first, first + variable.size)
            return [(low - first, array) for low, array in found]

        return node_slots_here(variable, arena, names, of_range, momentum_of_slice, writers, each_node)

    def _of(self, arena: Arena) -> _OuterArena:
        kept = self._arenas.get(arena)
        if kept is None:
            kept = self._arenas[arena] = _OuterArena(arena)
        return kept


@final
class OverOwnNode(OverAll):
    """Norms over the owners of slices on this rank's node: each node steps with its own sums."""

    def _table(self, column: np.ndarray) -> np.ndarray:
        return self._group.of_own_node(column)

    def all_finite(self, finite: bool) -> bool:
        return bool(self._group.agree(int(finite)))

    def counted(self, arena: Arena) -> list[int]:
        return list(range(self._group.topology.size)) if super().counted(arena) else []


@final
class _OuterArena:
    """This rank's piece of an arena: the anchor and the momentum of outer steps. Each element is on one rank of all.

    Attributes:
        anchor, momentum: flat arrays of the piece, in the dtype of sums.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        low, high = (arena.sliced([(0, arena.size)]) or [(0, 0)])[0]
        self._bounds = [(low + a, low + b) for a, b in aligned_bounds(high - low, arena.group.num_nodes)]
        self._low, end = self._bounds[arena.group.node_index]
        self.anchor = np.zeros(end - self._low, accumulation_dtype(arena.dtype))
        self.momentum = np.zeros_like(self.anchor)

    def pieces(self, ranges: Sequence[Range]) -> list[list[Range]]:
        """Return the parts of element ranges in each node's piece of this rank's slice."""
        inside = [[(max(a, low), min(b, high)) for a, b in ranges] for low, high in self._bounds]
        return [[(a, b) for a, b in piece if a < b] for piece in inside]

    def own(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the parts of element ranges in this rank's piece."""
        return self.pieces(ranges)[self._arena.group.node_index]

    def part(self, array: np.ndarray, low: int, high: int) -> np.ndarray:
        """Return elements [low, high) of the arena, which lie in this rank's piece, of one of the arrays."""
        return array[low - self._low : high - self._low]

    def take_anchor(self, ranges: Sequence[Range]) -> None:
        """Copy the weights to the anchors."""
        for low, high in self.own(ranges):
            self.part(self.anchor, low, high)[...] = self._arena.values[low:high]

    def gathered(self, low: int, high: int) -> list[tuple[int, np.ndarray]]:
        """Return the momentum of elements [low, high) in this rank's slice. Collective over peers."""
        inter, found = self._arena.group.inter, []
        if inter is None:
            return []
        for first, end in self._arena.sliced([(low, high)]):
            whole, pieces = np.empty(end - first, self.momentum.dtype), self.pieces([(first, end)])
            for begin, after in pieces[inter.rank]:
                whole[begin - first : after - first] = self.part(self.momentum, begin, after)
            share = PieceShare(inter, whole, pieces, first)
            share.ready(end)
            share.finish()
            found.append((first, whole))
        return found


def replicas_by_node(group: ProcessGroup) -> list[int]:
    """Return the number of replicas on each node."""
    return [sum(group.topology.replicas_per_rank[rank] for rank in group.ranks_of(n)) for n in range(group.num_nodes)]


def _ranges_of(variables: Sequence[Variable]) -> dict[Arena, list[Range]]:
    found: dict[Arena, list[Range]] = {}
    for variable in variables:
        if variable.arena is not None and variable.size:
            found.setdefault(variable.arena, []).append((variable.offset, variable.offset + variable.size))
    return {arena: merge(ranges) for arena, ranges in found.items()}
