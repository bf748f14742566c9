"""Sums on GPUs that start when the program announces gradients: NCCL sums a block once it has all gradients of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ..arena.arena import by_arena, padded
from ..variables.placement import Placement
from ..variables.variable import Variable
from .interface import Starter
from .on_stream import in_order

__all__ = ["EarlyOnGpu"]


@final
class EarlyOnGpu(Starter):
    """The early sums of one optimizer's variables on GPUs. Ranks do not meet: the step compares what all have announced."""

    able = early = True

    def __init__(self, placement: Placement) -> None:
        self._ops = placement.ops

    def start(self, variables: Sequence[Variable], due: bool) -> None:
        with in_order():
            for arena, some in by_arena(variables).items():
                sums = self._ops.early_sums(arena.gradients) if arena.gradients else None
                if sums is not None and arena.gradients:
                    sums.begin(arena.gradients, list(padded(arena, some).items()))

    def forget(self, variables: Sequence[Variable]) -> None:
        for arena, some in by_arena(variables).items():
            sums = self._ops.early_sums(arena.gradients) if arena.gradients else None
            if sums is not None:
                sums.forget(arena.key, list(padded(arena, some).items()))
