"""One synchronous step, reduce and Adam: against MPI_Allreduce and Adam in NumPy on every rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..optimizers import Adam
from ..strategy import MultiWorkerMirroredStrategy
from ..variables import Variable
from .measure import Operation, pair
from .result import Result, Setting

__all__ = ["OURS", "RAW", "measure", "ours", "raw", "written_and_taken"]

OURS, RAW = "mpistrat, arenas", "raw MPI_Allreduce + NumPy Adam"
LAYERS = 16
SIZES = {"262 K": 1 << 18, "4.2 M": 1 << 22, "16.8 M": 1 << 24}
COPIES = 12  # of the parameters, in a rank's memory
_TIMES = 7  # least repetitions of each operation


def ours(strategy: Any, count: int) -> Operation:
    """Return a step of this package: gradients are in `v.grad` already, then `apply_gradients`. Collective."""
    return written_and_taken(strategy, count)[1]


def written_and_taken(strategy: Any, count: int) -> tuple[Operation, Operation]:
    """Return two operations: write this rank's gradients, and take a step with them. Collective."""
    with strategy.scope():
        variables = [Variable(np.zeros(count // LAYERS, np.float32), name=f"w{i}") for i in range(LAYERS)]
        optimizer = Adam(1e-3)
    replicas = range(strategy.extended.process_group.topology.num_local_replicas)
    gradients = [variable.gradient(replica) for variable in variables for replica in replicas]

    def write() -> None:
        for gradient in gradients:
            gradient[:] = 1e-3

    def step() -> None:
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    write()
    return write, lambda: strategy.run(step)


def raw(comm: Any, count: int) -> Operation:
    """Return a step by hand: the whole gradient through MPI, then Adam in blocks on every rank."""
    gradient, weights = np.full(count, 1e-3, np.float32), np.zeros(count, np.float32)
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    total = np.empty_like(gradient)
    block = 1 << 16
    work = np.empty(block, np.float32)
    steps = [0]

    def step() -> None:
        comm.Allreduce(gradient, total)
        steps[0] += 1
        alpha = 1e-3 * math.sqrt(1 - 0.999 ** steps[0]) / (1 - 0.9 ** steps[0])
        for low in range(0, count, block):
            part = slice(low, low + block)
            _adam(total[part], weights[part], first[part], second[part], work[: count - low], alpha)

    return step


def _adam(gradient: Any, weights: Any, momentum: Any, velocity: Any, work: Any, alpha: float) -> None:
    """Update by Adam in NumPy, in place: not by the package's own, whose loops are compiled."""
    np.subtract(gradient, momentum, out=work)
    np.multiply(work, 0.1, out=work)
    np.add(momentum, work, out=momentum)
    np.multiply(gradient, gradient, out=gradient)
    np.subtract(gradient, velocity, out=gradient)
    np.multiply(gradient, 0.001, out=gradient)
    np.add(velocity, gradient, out=velocity)
    np.sqrt(velocity, out=gradient)
    np.add(gradient, 1e-7, out=gradient)
    np.multiply(momentum, alpha, out=work)
    np.divide(work, gradient, out=work)
    np.subtract(weights, work, out=weights)


def measure(setting: Setting) -> Result:
    """Return the seconds of a step by number of parameters. Collective."""

    def one(count: int) -> dict[str, float]:
        strategy = MultiWorkerMirroredStrategy(comm=setting.comm)
        operations = {OURS: ours(strategy, count), RAW: raw(strategy.comm, count)}
        found = pair(strategy.comm, operations, repetitions=100, seconds=setting.budget(4.0))
        strategy.close()
        return found

    values, left_out = setting.by_size(SIZES, COPIES, _TIMES, one)
    return Result(
        title="A step: reduce and Adam",
        unit="seconds",
        first_column="parameters",
        values=values,
        against=(OURS, RAW),
        note=f"Ranks of a node share one copy of the weights, and each updates its part. {left_out}",
    )
