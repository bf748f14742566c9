"""All-reduce of float32: on users' own arrays and in place on arenas, against MPI_Allreduce."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.types import ReduceOp
from ..strategy import MultiWorkerMirroredStrategy
from ..variables import Variable
from .measure import Operation, medians, pair
from .result import Result, Setting

__all__ = ["ARENA", "OWN", "RAW", "measure", "operations"]

RAW, OWN, ARENA = "raw MPI_Allreduce", "mpistrat, own arrays", "mpistrat, arenas"
SIZES = {"4 KB": 1 << 10, "64 KB": 1 << 14, "1 MB": 1 << 18, "16.8 MB": 1 << 22, "67 MB": 1 << 24}
COPIES = 6  # of the buffer, in a rank's memory
_ALLOCATIONS = 2  # the pages of a buffer change times by a factor of up to 2
_TIMES = 7 * _ALLOCATIONS  # least repetitions of each operation


def operations(strategy: Any, count: int) -> dict[str, Operation]:
    """Return the all-reduces of `count` elements, by name, after checking their sums. Collective.

    Raises:
        RuntimeError: a sum is wrong.
    """
    comm, ops = strategy.comm, strategy.extended.cross_device_ops
    mine = np.full(count, comm.rank + 1, np.float32)
    out = np.empty_like(mine)
    with strategy.scope():
        variable = Variable(np.zeros(count, np.float32), name=f"v{count}")
    gradient = variable.gradient(0)
    gradient[:] = mine
    expected = comm.size * (comm.size + 1) / 2
    found = ops.reduce(ReduceOp.SUM, gradient, variable)
    if not (found[0] == found[-1] == expected and (ops.reduce(ReduceOp.SUM, mine) == expected).all()):
        raise RuntimeError(f"all-reduce of {count}: expected {expected}, got {found[0]}")
    return {
        OWN: lambda: ops.reduce(ReduceOp.SUM, mine),
        ARENA: lambda: ops.reduce(ReduceOp.SUM, gradient, variable),
        RAW: lambda: comm.Allreduce(mine, out),
    }


def measure(setting: Setting) -> Result:
    """Return the seconds of an all-reduce by size. Collective."""

    def one(count: int) -> dict[str, float]:
        runs = []
        for _ in range(_ALLOCATIONS):
            strategy = MultiWorkerMirroredStrategy(comm=setting.comm)
            found = operations(strategy, count)
            runs.append(pair(strategy.comm, found, repetitions=200, seconds=setting.budget(1.2)))
            strategy.close()
        return medians(runs)

    values, left_out = setting.by_size(SIZES, COPIES, _TIMES, one)
    return Result(
        title="All-reduce of float32",
        unit="seconds",
        first_column="size",
        values=values,
        against=(ARENA, RAW),
        note=f"Gradients lie in arenas, where variables share memory; own arrays are what ctx.all_reduce takes. {left_out}",
    )
