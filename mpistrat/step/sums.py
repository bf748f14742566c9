"""Sums of gradients that stay in the program's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from ..arena.reduction import Consume, of_node
from ..optimizers.gradients import load_gradients
from ..variables.placement import Placement
from .interface import Sums, Work

__all__ = ["OfAll", "OfNode", "OfOne"]


class _InArenas(Sums):
    """Sums of gradients in arenas; gradients elsewhere are copied there."""

    def __init__(self, placement: Placement) -> None:
        self._ops, group = placement.ops, placement.group
        self.sends_ahead = self._ops.sends_ahead and group.num_nodes > 1

    def load(self, core: Any, replicas: Sequence[Any], key: tuple[int, ...]) -> None:
        load_gradients(replicas, key)

    def enter(self, call: Any) -> None:
        self._ops.call = call


@final
class OfOne(_InArenas):
    """No sum: all replicas have equal gradients, and each owner takes those of the first local one."""

    def hand_out(self, work: Work, consume: Consume) -> None:
        work.add_up(work.gradients.local[:1], consume)


@final
class OfNode(_InArenas):
    """The sums over the replicas of each node."""

    def hand_out(self, work: Work, consume: Consume) -> None:
        work.add_up(of_node(work.gradients), consume)


@final
class OfAll(_InArenas):
    """The sums over all replicas, by the strategy's CrossDeviceOps, or by the rank itself if it can read all gradients."""

    def hand_out(self, work: Work, consume: Consume) -> None:
        arrays = self._ops.node_gradients(work.gradients)
        if arrays is not None:
            work.add_up(arrays, consume)
        else:
            self._ops.reduce_arena(work.gradients, work.ranges, consume)
