"""A step on the stream on which the program computes: what it reads and writes is then in order with the program's own work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

from ..comm.gpu import computing_streams
from ..optimizers.rule import Pairs, UpdateRun

__all__ = ["StepOnStream"]


@final
class StepOnStream(UpdateRun):
    """A step of variables on GPUs. Where PyTorch computes on a stream of its own, CuPy's work of the step goes there.

    The step then comes after what CuPy's own stream has begun (values that were assigned, new slots), and what CuPy begins later
    comes after the step.
    """

    def __init__(self, step: UpdateRun) -> None:
        self._step, self.strategy = step, step.strategy

    def describe(self) -> None:
        self._step.describe()

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        with _in_order():
            self._step.load(replicas, key)

    def run(self, aggregate: bool) -> None:
        with _in_order():
            self._step.run(aggregate)


@contextlib.contextmanager
def _in_order() -> Iterator[None]:
    """Enter the stream on which the program computes, for a block that is in order with CuPy's own stream."""
    *others, stream = computing_streams()
    for other in others:
        stream.wait_event(other.record())
    try:
        with stream:
            yield
    finally:
        for other in others:
            other.wait_event(stream.record())
