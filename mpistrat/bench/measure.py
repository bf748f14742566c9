"""Timing of operations: in turns or alone, after a barrier; medians of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Operation", "Spread", "largest", "median_rate", "medians", "meet", "pair", "spread", "total"]

Operation = Callable[[], object]
Spread = tuple[float, float, float]  # the median, and quartiles
_PAUSE, _LONG_PAUSE = 5e-4, 2e-2  # seconds


def pair(
    comm: Any,
    operations: Mapping[str, Operation],
    *,
    repetitions: int,
    seconds: float,
    of: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the seconds of each operation: `of` its repetitions, the median, on the slowest rank. Collective.

    Operations take turns (A B A B …), so that a drift affects all. Each runs once untimed before it is timed, so that its own
    data are in the caches and not its predecessor's; a barrier precedes both. `seconds` bounds the whole measurement; rank 0
    decides for all, and there are at least three rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in operations}
    for operation in operations.values():
        operation()
    start, go_on = time.perf_counter(), np.ones(1, np.int32)
    for done in range(repetitions):
        for name, operation in operations.items():
            comm.Barrier()
            operation()
            comm.Barrier()
            before = time.perf_counter()
            operation()
            times[name].append(time.perf_counter() - before)
        go_on[0] = done < 2 or time.perf_counter() - start < seconds
        comm.Bcast(go_on, root=0)
        if not go_on[0]:
            break
    return {name: largest(comm, of(values)) for name, values in times.items()}


def spread(
    comm: Any, operation: Operation | None, seconds: float, *, before: Operation | None = None, everyone: bool = True
) -> Spread:
    """Return the median, and the quartiles, of the seconds of an operation on the slowest rank. Collective.

    Args:
        comm: all ranks.
        operation: of this rank; None if it only waits.
        seconds: for all repetitions; there are at least five, after one that does not count.
        before: precedes each, untimed; a barrier of all follows it, if they all have an operation.
        everyone: True if all ranks have an operation; else waiting ranks yield their cores.
    """
    if not everyone:
        return _spread_of_some(comm, operation, seconds, before)
    from mpi4py import MPI

    times: list[float] = []
    start, go_on, worst = time.perf_counter(), np.ones(1, np.int32), np.empty(1)
    while go_on[0]:
        if before is not None:
            before()
        comm.Barrier()
        began = time.perf_counter()
        if operation is not None:
            operation()
        comm.Allreduce(np.array([time.perf_counter() - began]), worst, op=MPI.MAX)
        times.append(float(worst[0]))
        go_on[0] = _goes_on(times, start, seconds)
        comm.Bcast(go_on, root=0)
    return _quartiles(times)


def _spread_of_some(comm: Any, operation: Operation | None, seconds: float, before: Operation | None) -> Spread:
    """Return `spread` of ranks with an operation, each by itself, while the others rarely poll for their end."""
    meet(comm)
    times: list[float] = []
    start = time.perf_counter()
    while operation is not None and _goes_on(times, start, seconds):
        if before is not None:
            before()
        began = time.perf_counter()
        operation()
        times.append(time.perf_counter() - began)
    meet(comm, _LONG_PAUSE)
    median, least, most = (largest(comm, value) for value in (_quartiles(times) if times else (0.0, 0.0, 0.0)))
    return median, least, most


def _goes_on(times: Sequence[float], start: float, seconds: float) -> bool:
    return len(times) < 6 or (time.perf_counter() - start < seconds and len(times) < 1000)


def _quartiles(times: Sequence[float]) -> Spread:
    least, median, most = statistics.quantiles(times[1:], n=4)
    return median, least, most


def median_rate(
    comm: Any, operation: Operation | None, finish: Operation | None = None, *, rounds: int, seconds: float
) -> float:
    """Return the operations per second of all ranks together: the median of the rounds. Collective.

    Args:
        operation: repeated on this rank; None to wait and yield the core.
        finish: waits for the effects of `operation`.
        rounds: their number; a barrier precedes each, and the slowest rank ends it.
        seconds: of one round.
    """
    rates = []
    for _ in range(rounds):
        meet(comm)
        start, count, spent = time.perf_counter(), 0, 0.0
        while operation is not None and spent < seconds:
            operation()
            count, spent = count + 1, time.perf_counter() - start
        if finish is not None:
            finish()
            spent = time.perf_counter() - start
        meet(comm)
        rates.append(total(comm, count) / largest(comm, spent))
    return statistics.median(rates)


def meet(comm: Any, pause: float = _PAUSE) -> None:
    """Wait for all ranks without keeping a core busy, polling every `pause` seconds. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(pause)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over several runs.

    Example:
        >>> medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}])
        {'a': 2.0}
    """
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def largest(comm: Any, value: float) -> float:
    """Return the largest value over the ranks. Collective."""
    from mpi4py import MPI

    out = np.empty(1)
    comm.Allreduce(np.array([value], np.float64), out, op=MPI.MAX)
    return float(out[0])


def total(comm: Any, value: float) -> float:
    """Return the sum over the ranks. Collective."""
    out = np.empty(1)
    comm.Allreduce(np.array([value], np.float64), out)
    return float(out[0])
