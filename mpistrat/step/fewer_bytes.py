"""Weights that nodes exchange in fewer bytes: the rule updates the weights plus their error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..arena.arena import Arena
from ..arena.encoded import Encoded, EncodedShare
from ..arena.reduction import BLOCK
from ..arena.wire import wire_named
from ..base.buffers import BufferPool
from ..base.errors import explain
from ..base.options import StepOptions
from ..optimizers.slots import ArenaSlots
from .interface import OptionCheck, Range
from .publish import ToNodes

__all__ = ["ToNodesInFewerBytes", "check", "needs_previous"]


def check(asked: OptionCheck) -> None:
    """Raise ValueError if a wire is given and steps between nodes cannot use it."""
    if asked.all_nodes == 1:
        return
    remedy, got, step = "Leave wire out", "", asked.step
    if step.local_steps is not None:
        got = "local_steps, whose outer steps send exact numbers"
    elif step.sharded_slots is False:
        got, remedy = "sharded_slots=False", "Leave sharded_slots out: sums are sent to the node with their slots"
    elif not asked.sums_pieces:
        got = f"{asked.algorithm}, which sends whole sums"
        remedy = "Leave cross_device_ops, replicas and implementation out, or use HierarchicalAllReduce"
    if got:
        expected = f"sums divided among nodes, for wire={step.wire!r}"
        raise ValueError(explain(asked.function, "communication_options", expected=expected, got=got, remedy=remedy))


def needs_previous(step: StepOptions) -> str:
    """Return what sums need of the previous step, as text; "" if nothing."""
    wire = wire_named(step.wire)
    needs = wire is not None and wire.feeds_back
    return f"wire={step.wire!r}, which needs the error feedback of the previous step" if needs else ""


@final
class ToNodesInFewerBytes(ToNodes):
    """An exchange in the arena's `wire`: each node sends the changes of its piece, with error feedback.

    An exact weight is the weight in memory, equal on all nodes, plus its owner's error feedback.
    """

    block = BLOCK
    exact = False

    def __init__(self, arena: Arena, ranges: Sequence[Range], slots: ArenaSlots) -> None:
        """Serve an arena with a wire, using the scratch memory of an optimizer's slots."""
        super().__init__(arena, ranges, slots)
        assert isinstance(arena.form, Encoded)
        self._slots, self._unsent, self._wire = slots, arena.form.unsent, arena.form.wire
        self._messages = BufferPool(kept=16)

    def _begin(self, inter: Any, pieces: list[list[Range]]) -> Any:
        work = self._slots.scratch[0]
        return EncodedShare(inter, self.arena.values, pieces, self._unsent, self._wire, work, self._messages)

    def target(self, low: int, high: int) -> Any:
        meant = self._slots.scratch[2][: high - low]  # free, as these weights are not 16-bit
        np.add(self.arena.values[low:high], self._unsent.of(low, high), out=meant)
        return meant

    def commit(self, low: int, high: int, target: Any) -> None:
        with np.errstate(invalid="ignore"):
            np.subtract(target, self.arena.values[low:high], out=self._unsent.of(low, high))
        super().commit(low, high, target)

    def meant(self, low: int, high: int) -> Any:
        return self.arena.values[low:high] + self._unsent.of(low, high)
