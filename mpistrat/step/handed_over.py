"""Gradients submitted before the step: they are summed bucket by bucket, and the step finds each owner's sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from ..arena.arena import by_arena, padded
from ..arena.buckets import BucketSums
from ..arena.pieces import summed_blocks
from ..arena.reduction import BLOCK, Consume, network_chunk
from ..base.errors import explain
from ..base.partition import blocks, merge
from ..base.types import Quality
from ..comm.arrays import accumulation_dtype, all_reduce
from ..optimizers.begun import changed, elsewhere, unfit
from ..optimizers.gradients import check_same, flat_gradient
from ..variables.own_gradients import own_gradients_of
from ..variables.placement import Placement
from ..variables.variable import Variable
from .interface import OptionCheck, Starter, Sums, Work

__all__ = ["HandOver", "HandedOverSums", "check", "lacking"]


def lacking(placement: Placement) -> dict[Quality, str]:
    """Return what gradients submitted early take away."""
    return {Quality.KEPT_GRADIENTS: "sharded_gradients=True"}


@final
class HandOver(Starter):
    """A starter that submits announced gradients."""

    able = early = True

    def __init__(self, placement: Placement) -> None:
        sums = placement.steps.parts.sums
        assert isinstance(sums, HandedOverSums)
        self._buckets = sums.buckets

    def start(self, variables: Sequence[Variable], due: bool) -> None:
        replicas = range(len(variables[0].placement.devices)) if variables else ()
        flat = [(v, [v.gradient(i).reshape(-1) for i in replicas]) for v in variables]
        hand_over(self._buckets, flat, noted=due)

    def kept(self, variables: Sequence[Variable]) -> Sequence[Variable]:
        return [variable for variable in variables if own_gradients_of(variable) is None]

    def require(self, variable: Variable, replica: int, gradient: Any) -> None:
        own = own_gradients_of(variable)
        if own is None:
            super().require(variable, replica, gradient)
        elif not own.stands_for(replica, gradient):
            raise elsewhere(variable.name)
        elif own.changed(replica, gradient):
            raise changed(variable.name)

    def check_unsummed(self) -> None:
        raise unfit("", "gradients that sharded_gradients sums", "experimental_aggregate_gradients=False")

    def forget(self, variables: Sequence[Variable]) -> None:
        """Give variables gradients again, and drop the sums of submitted ones."""
        for variable in variables:
            own = own_gradients_of(variable)
            if own is not None:
                own.renew()
        for arena, some in by_arena(variables).items():
            if arena.gradients is not None:
                self._buckets.forget(arena.gradients, merge(list(padded(arena, some).items())))


@final
class HandedOverSums(Sums):
    """The sums of a strategy with `sharded_gradients`.

    Attributes:
        buckets: the submitted gradients.
    """

    def __init__(self, placement: Placement) -> None:
        self.buckets, self._strategy = BucketSums(placement.group), placement.strategy

    def load(self, core: Any, replicas: Sequence[Any], key: tuple[int, ...]) -> None:
        """Submit the remaining gradients, and have all gradients of the step summed. Collective."""
        begun = core.begun
        check_same(replicas, key)
        begun.starter(self._strategy)  # it gives the variables gradients again after the step
        rows = [pairs for pairs in zip(*replicas, strict=True) if pairs[0][0] is not None]
        rest = [
            (pairs[0][1], [flat_gradient(gradient, variable) for gradient, variable in pairs])
            for pairs in rows
            if pairs[0][1] not in begun
        ]
        begun.note([variable for variable, _ in rest])  # after all gradients were checked
        hand_over(self.buckets, rest)
        self.buckets.send()

    def enter(self, call: Any) -> None:
        self.buckets.finish()

    def close(self) -> None:
        self.buckets.close()

    def hand_out(self, work: Work, consume: Consume) -> None:
        """Pass sums in the blocks of a reduction.

        The sums of an arena that every node sums whole are the node's; they are reduced over nodes here.
        """
        arena, memory = work.arena, self.buckets.memory(work.gradients)
        owned, dtype, inter = arena.owned(work.ranges), accumulation_dtype(arena.dtype), arena.group.inter
        work.keep_in(memory)
        if arena.sharded:
            for low, high in summed_blocks(owned, arena.group.num_nodes, dtype, BLOCK):
                consume(low, high, memory[low:high])
            return
        if inter is not None:
            for low, high in blocks(owned, network_chunk(dtype)):
                all_reduce(inter, memory[low:high])
        work.add_up([memory], consume)


def check(asked: OptionCheck) -> None:
    """Raise an error unless gradients can be submitted early.

    Raises:
        ValueError: an option excludes it.
        DeviceError: this rank has GPUs.
    """
    asked.require_cpus("sharded_gradients", "Leave sharded_gradients out: GPUs sum and update all weights")
    remedy, got, step = "Leave sharded_gradients out", "", asked.step
    if step.local_steps is not None:
        got, remedy = "local_steps, with which each node sums separately", "Leave local_steps or sharded_gradients out"
    elif step.sharded_slots is False and asked.nodes > 1:
        got, remedy = "sharded_slots=False", "Leave sharded_slots out: a sum is sent to the node with its slots"
    elif not asked.sums_pieces:
        got = f"{asked.algorithm}, which has its own order"
        remedy = "Leave cross_device_ops, replicas and implementation out, or use HierarchicalAllReduce"
    elif asked.nodes > 1 and step.wire is not None:
        from .fewer_bytes import needs_previous

        got, remedy = needs_previous(step), 'Use wire="bfloat16"'
    if got:
        expected = "gradients summed bucket by bucket"
        raise ValueError(explain(asked.function, "sharded_gradients", expected=expected, got=got, remedy=remedy))


def hand_over(buckets: BucketSums, gradients: Sequence[tuple[Variable, Sequence[Any]]], noted: bool = False) -> None:
    """Submit the flat gradients of variables, of each local replica. Collective."""
    for variable, flat in sorted(gradients, key=lambda pair: _place(pair[0]), reverse=True):
        arena, offset = variable.arena, variable.offset
        if arena is not None and arena.gradients is not None and variable.size:
            buckets.put(arena.gradients, offset, padded(arena, [variable])[offset], flat, variable.name)
        own = own_gradients_of(variable)
        if own is not None:
            own.hand_over(noted)


def _place(variable: Variable) -> tuple[str, int]:
    """Return a variable's arena and offset: each arena has its own buckets, so its variables are submitted together."""
    return "" if variable.arena is None else variable.arena.key, variable.offset
