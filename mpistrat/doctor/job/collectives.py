"""Collectives over all ranks: their values, and their times next to MPI's own in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...base.environment import Environment
from ...bench.measure import largest, pair
from ...comm.process_group import ProcessGroup
from ...cross_device.collectives import Collectives
from .trial import Trial

__all__ = ["MPI", "OURS", "SIZES", "CallPair", "compare", "pattern", "raw_calls", "run", "sum_of_patterns"]

SIZES = {"8 B": 2, "4 KB": 1 << 10, "64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22}  # float32 of a rank
OURS, MPI = "mpistrat", "MPI"
_SECONDS = 0.4  # per operation and size
_CALLS = 16  # of each operation, at least
_MOST = 1 << 26  # bytes that a rank gathers


class CallPair(NamedTuple):
    """A collective of MPI, and the correct result of both it and the package's.

    Attributes:
        raw: calls MPI.
        out: MPI's output array.
        expected: the correct values.
        mine: this rank's array.
    """

    raw: Callable[[], object]
    out: np.ndarray
    expected: np.ndarray
    mine: np.ndarray


def pattern(rank: int, count: int) -> np.ndarray:
    """Return a rank's values: small integers, whose sums over thousands of ranks are exact in float32.

    Example:
        >>> pattern(1, 4)
        array([2., 4., 6., 8.], dtype=float32)
    """
    return ((rank % 16 + 1) * (np.arange(count) % 7 + 1)).astype(np.float32)


def sum_of_patterns(size: int, count: int) -> np.ndarray:
    """Return the sum of the patterns of `size` ranks.

    Example:
        >>> sum_of_patterns(2, 3)
        array([3., 6., 9.], dtype=float32)
    """
    return (sum(rank % 16 + 1 for rank in range(size)) * (np.arange(count) % 7 + 1)).astype(np.float32)


def raw_calls(comm: Any, count: int) -> dict[str, CallPair]:
    """Return MPI's calls on `count` elements of each rank, by name, without those that would gather too much."""
    rank, size = comm.rank, comm.size
    part = max(count // size, 1)
    mine, divided = pattern(rank, count), pattern(rank, part * size)
    total = sum_of_patterns(size, part * size)
    wrong = np.full(max(count, part * size), np.nan, np.float32)  # each call must overwrite it
    calls = {
        "all_reduce": (lambda out: comm.Allreduce(mine, out), sum_of_patterns(size, count), mine),
        "reduce_scatter": (
            lambda out: comm.Reduce_scatter_block(divided, out), total[rank * part : (rank + 1) * part], divided,
        ),
        "all_to_all": (
            lambda out: comm.Alltoall(divided, out),
            np.concatenate([pattern(other, part * size)[rank * part : (rank + 1) * part] for other in range(size)]),
            divided,
        ),
    }  # fmt: skip
    if 4 * count * size <= _MOST:
        every = np.concatenate([pattern(other, count) for other in range(size)])
        calls["all_gather"] = lambda out: comm.Allgather(mine, out), every, mine
    made = {
        name: _pair(call, np.resize(wrong, expected.size), expected, own)
        for name, (call, expected, own) in calls.items()
    }
    sent = mine.copy() if rank == size - 1 else np.full(count, np.nan, np.float32)
    made["broadcast"] = CallPair(lambda: comm.Bcast(sent, size - 1), sent, pattern(size - 1, count), mine)
    return made


def _pair(call: Callable[[np.ndarray], object], out: np.ndarray, expected: np.ndarray, mine: np.ndarray) -> CallPair:
    return CallPair(partial(call, out), out, expected, mine)


def compare(trial: Trial, row: str, ours: Callable[[], Any], who: str, call: CallPair) -> None:
    """Check a collective of the package and MPI's, then time both in turns, if there is time. Collective."""
    trial.part(row)
    start = time.perf_counter()
    trial.same(f"{row}, {who}", ours(), call.expected)
    call.raw()
    longest = largest(trial.comm, time.perf_counter() - start)
    trial.same(f"{row}, {MPI}", call.out, call.expected)
    if trial.has_time(_CALLS * longest):
        for name, seconds in pair(trial.comm, {who: ours, MPI: call.raw}, repetitions=200, seconds=_SECONDS).items():
            trial.number(row, name, seconds, "seconds")


def run(trial: Trial) -> None:
    """Check and measure each operation at each size. Collective."""
    trial.part("the group of ranks")
    group = ProcessGroup.create(trial.topology, Environment.read())
    ours = Collectives(group, "doctor")
    operations: dict[str, Callable[[np.ndarray], Any]] = {
        "all_reduce": partial(ours.all_reduce, "SUM"),
        "reduce_scatter": partial(ours.reduce_scatter, "SUM"),
        "all_to_all": lambda mine: ours.all_to_all(mine)[0],
        "all_gather": ours.all_gather,
        "broadcast": partial(ours.broadcast, root=trial.comm.size - 1),
    }
    for label, count in SIZES.items():
        for name, call in raw_calls(trial.comm, count).items():
            compare(trial, f"{name} {label}", partial(operations[name], call.mine), OURS, call)
    trial.part("barrier")
    barriers = {OURS: ours.barrier, MPI: trial.comm.Barrier}
    for who, seconds in pair(trial.comm, barriers, repetitions=200, seconds=_SECONDS).items():
        trial.number("barrier", who, seconds, "seconds")
    ours.close()
    group.close()
