"""How many threads decode chunks, and how many batches ahead they hear of: what these constants of mpistrat.data rest on.

    mpiexec -n 1 python benchmarks/tune_input.py --output benchmarks/results/today

Our own reader only, over compressed cases of hdf5_input.py, the settings in turns. The thread that reads decodes, too, so one
decoding thread keeps two cores busy. On nodes full of ranks more threads take other ranks' cores: measure with as many ranks.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import harness
from hdf5_input import Case, Reader, Share, ours, rate, written

from mpistrat.data import look_ahead
from mpistrat.data.readers import chunk_cache

CASES = [Case(layout, 8, order, 3072) for layout in ("gzip", "lzf") for order in ("in order", "shuffled")]
THREADS, LOOK_AHEAD = (1, 2, 3, 4), (1, 2, 4)


def reader(threads: int, ahead: int) -> Reader:
    """Return our reader with other constants."""

    def batches(share: Share) -> Iterator[Any]:
        chunk_cache.THREADS, look_ahead.LOOK_AHEAD = threads, ahead
        chunk_cache._threads.forget()  # those of the setting before
        return ours(share)

    return batches


def measure(comm: Any, case: Case, megabytes: int, seconds: float, rounds: int) -> dict[tuple[int, int], float]:
    """Return the median rate of each setting, in bytes a second. Collective."""
    rates: dict[tuple[int, int], list[float]] = {}
    with written(comm, case, megabytes) as share:
        for _ in range(rounds):
            for setting in itertools.product(THREADS, LOOK_AHEAD):
                rates.setdefault(setting, []).append(rate(comm, share, reader(*setting), seconds))
    return {setting: statistics.median(values) for setting, values in rates.items()}


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, megabytes=96, seconds=0.5, rounds=3)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    result: dict[str, Any] = {"benchmark": "tune_input", "machine": harness.machine(comm), "cases": []}
    for case in CASES:
        medians = measure(comm, case, options.megabytes, options.seconds, options.rounds)
        for (threads, ahead), value in medians.items():
            result["cases"].append({"case": str(case), "threads": threads, "ahead": ahead, "bytes_per_second": value})
        if comm.rank == 0:
            table = [[str(t), *(f"{medians[t, a] / 1e6:,.0f}" for a in LOOK_AHEAD)] for t in THREADS]
            print(harness.table(f"{case}, MB/s", ["threads", *(f"{a} ahead" for a in LOOK_AHEAD)], table), flush=True)
    if comm.rank == 0:
        harness.save(options.output, "tune_input", result)


if __name__ == "__main__":
    main()
