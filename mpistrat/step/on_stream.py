"""A step on the stream on which the program computes, ordered with the program's own work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

from ..comm.gpu import computing_streams
from ..optimizers.rule import Pairs, UpdateRun

__all__ = ["StepOnStream", "in_order"]


@final
class StepOnStream(UpdateRun):
    """A step of variables on GPUs. If PyTorch computes on its own stream, CuPy's work of the step runs there.

    The step runs after earlier work on CuPy's own stream, such as assignments, and before later work there.
    """

    def __init__(self, step: UpdateRun) -> None:
        self._step, self.strategy = step, step.strategy

    @property
    def may_skip(self) -> bool:
        return self._step.may_skip

    def describe(self) -> None:
        self._step.describe()

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        with in_order():
            self._step.load(replicas, key)

    def run(self, aggregate: bool) -> None:
        with in_order():
            self._step.run(aggregate)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Enter the program's stream for a block that is ordered with CuPy's own stream."""
    *others, stream = computing_streams()
    for other in others:
        stream.wait_event(other.record())
    try:
        with stream:
            yield
    finally:
        for other in others:
            other.wait_event(stream.record())
