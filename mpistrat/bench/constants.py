"""What a step is made of, one by one: the constants from which `mpistrat plan` predicts steps on other layouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._util.partition import blocks
from ..comm.arrays import all_reduce
from ..cross_device.arena import BLOCK, NETWORK_CHUNK
from ..cross_device.arithmetic import combine
from ..optimizers import Adam
from ..optimizers.rule import BlockUpdate
from ..strategy import MultiWorkerMirroredStrategy
from .measure import Operation, median_rate, pair
from .result import Result, Setting
from .training_step import ours

__all__ = [
    "CHUNK",
    "CHUNK_BYTES",
    "FIXED",
    "GRADIENT",
    "GRADIENT_ALL",
    "LATENCY",
    "MILLION",
    "UPDATE",
    "UPDATE_ALL",
    "measure",
]

UPDATE = "sum and update of 1 M parameters, 1 gradient, alone on its node"
GRADIENT = "each gradient more, alone"
UPDATE_ALL = "the same update, all ranks at once"
GRADIENT_ALL = "each gradient more, all at once"
FIXED = "a step on 1,024 parameters"
LATENCY = "all-reduce of 8 bytes between nodes"
CHUNK = "all-reduce of 1 MiB between nodes, all ranks at once"
CHUNK_BYTES = NETWORK_CHUNK
MILLION = 1_000_000
_SIZES = (1 << 20, 1 << 22, 1 << 24)  # of a rank's part: the largest that there is room for
_COPIES = 8  # of that, that a rank holds
_SMALL = 1024


def measure(setting: Setting) -> Result:
    """Return the seconds of each constant. Collective."""
    strategy = MultiWorkerMirroredStrategy(comm=setting.comm)
    group = strategy.extended.process_group
    sizes = _SIZES[:1] if setting.quick else _SIZES
    size = max((size for size in sizes if 4 * _COPIES * size <= setting.memory), default=_SIZES[0])
    seconds, leads = setting.budget(1.0), group.node.rank == 0
    passes = {count: _sum_and_update(size, count) for count in (1, 2)}
    found: dict[str, float] = {}
    for together, first, more in ((False, UPDATE, GRADIENT), (True, UPDATE_ALL, GRADIENT_ALL)):
        each = group.topology.size if together else group.num_nodes
        times = {}
        for count, operation in passes.items():
            mine = operation if together or leads else None
            times[count] = each / median_rate(strategy.comm, mine, rounds=3, seconds=seconds) / size * MILLION
        found[first], found[more] = times[1], max(times[2] - times[1], 0.0)
    found[FIXED] = pair(strategy.comm, {FIXED: ours(strategy, _SMALL)}, repetitions=300, seconds=seconds)[FIXED]
    inter = group.inter  # None on ranks that own nothing, where nodes have unequal numbers
    if group.num_nodes > 1:
        small, chunk = np.zeros(2, np.float32), np.zeros(CHUNK_BYTES // 4, np.float32)
        operations: dict[str, Operation] = {
            LATENCY: lambda: None if inter is None else all_reduce(inter, small),
            CHUNK: lambda: None if inter is None else all_reduce(inter, chunk),
        }
        found |= pair(strategy.comm, operations, repetitions=100, seconds=2 * seconds)
    strategy.close()
    return Result(
        title="What a step is made of",
        unit="seconds",
        first_column="what",
        values={name: {"a rank": value} for name, value in found.items()},
        note="mpistrat plan takes these, from the file of --json, and predicts steps on other layouts.",
    )


def _sum_and_update(size: int, count: int) -> Operation:
    """Return a pass over a rank's part as a step takes it: so many gradients summed, and Adam, block by block."""
    gradients = [np.full(size, 1e-3, np.float32) for _ in range(count)]
    weights, scratch = np.zeros(size, np.float32), [np.empty(BLOCK, np.float32) for _ in range(4)]
    adam = Adam(1e-3)
    slots = {name: np.zeros(size, np.float32) for name in adam.slot_names}
    rule = BlockUpdate(adam, weights.dtype, scratch)
    rule.begin(1, 1e-3)

    def step() -> None:
        for low, high in blocks([(0, size)], BLOCK):
            total = rule.block[: high - low]
            combine(np.add, [gradient[low:high] for gradient in gradients], total)
            rule.update(weights[low:high], total, _of(slots, low, high), ())

    return step


def _of(slots: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    return {name: array[low:high] for name, array in slots.items()}
