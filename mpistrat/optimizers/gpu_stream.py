"""A step on the stream on which the program computes: what it reads and writes is then in order with the program's own work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ..comm.gpu import computing_streams
from .rule import Pairs, UpdateRun

__all__ = ["StepOnStream"]


@final
class StepOnStream(UpdateRun):
    """A step of variables on GPUs. Where PyTorch computes on a stream of its own, CuPy's work of the step goes there."""

    def __init__(self, step: UpdateRun) -> None:
        self._step, self.strategy = step, step.strategy

    def describe(self) -> None:
        self._step.describe()

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        with computing_streams()[-1]:
            self._step.load(replicas, key)

    def run(self, aggregate: bool) -> None:
        with computing_streams()[-1]:
            self._step.run(aggregate)
