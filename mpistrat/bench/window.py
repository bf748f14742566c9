"""Parameter servers' transports: reads and pushes per second of all workers together."""

from __future__ import annotations

import numpy as np

from ..base.errors import LayoutError, SharedMemoryError
from ..base.text import counted
from ..optimizers import SGD
from ..parameter_server.strategy import ParameterServerStrategy
from ..parameter_server.wire.choice import TRANSPORTS
from ..variables import Variable
from .measure import Operation, median_rate
from .result import Result, Setting

__all__ = ["measure"]

SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18}


def measure(setting: Setting) -> Result | str:
    """Return reads and pushes per second by transport; a reason, with less than two ranks. Collective."""
    if setting.comm.size < 2:
        return "parameter servers need two ranks: mpistrat run -n 2 -m mpistrat bench"
    values: dict[str, dict[str, float]] = {f"{what} {size}": {} for what in ("read", "push") for size in SIZES}
    for transport in TRANSPORTS:
        for size, count in SIZES.items():
            try:
                read, push = _rates(setting, transport, count)
            except (LayoutError, SharedMemoryError):  # on every rank: workers on other nodes share no memory
                continue
            values[f"read {size}"][transport] = read
            values[f"push {size}"][transport] = push
    workers = setting.comm.size - 1
    return Result(
        title=f"Parameter servers: one server, {counted(workers, 'worker')}",
        unit="per second",
        first_column="all workers",
        values=values,
        note="A push is an SGD step on the server. The package chooses shared_window on a node, else one_sided or messages.",
    )


def _rates(setting: Setting, transport: str, count: int) -> tuple[float, float]:
    """Return reads and pushes per second of one transport. Collective."""
    strategy = ParameterServerStrategy(comm=setting.comm, num_ps=1, transport=transport)
    with strategy.scope():
        variable = Variable(np.zeros(count, np.float32), name="v")
        optimizer = SGD(1e-3)
    read: Operation | None = None
    push: Operation | None = None
    if not strategy.is_server:
        variable.grad[...] = 1

        def step() -> None:
            optimizer.apply_gradients([(variable.grad, variable)])

        def read() -> object:
            return variable.array

        def push() -> object:
            return strategy.run(step)

        read()
        push()
    comm, seconds = strategy.comm, setting.budget(0.3)
    reads = median_rate(comm, read, rounds=3, seconds=seconds)
    pushes = median_rate(comm, push, read, rounds=3, seconds=seconds)  # a read follows this worker's pushes
    strategy.close()
    return reads, pushes
