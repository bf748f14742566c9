"""Collectives, each against MPI's own by mpi4py: whole values and parts, nests, what is started and waited for later.

A figure is the least of all repetitions, of the slowest rank, or with --median the median. --small leaves out what is larger than
64 KB; "alternating" are two shapes that take turns.

mpiexec -n 2 python benchmarks/collectives.py --output benchmarks/results/today
"""

from __future__ import annotations

import statistics
from typing import Any

import harness
import numpy as np

import mpistrat as ms

SIZES = {
    "8 B": 2,
    "512 B": 1 << 7,
    "4 KB": 1 << 10,
    "64 KB": 1 << 14,
    "1 MB": 1 << 18,
    "16.8 MB": 1 << 22,
}  # float32 of a rank
LEAVES = 8  # of a nest
OURS, RAW = "mpistrat", "MPI"


def timed(comm: Any, operations: dict[str, harness.Operation], options: Any) -> dict[str, float]:
    """Return the seconds of each operation; they take turns. Collective."""
    one = statistics.median if options.median else min
    return harness.pair(comm, operations, repetitions=1_000_000, seconds=options.seconds, of=one)


def parts(some: ms.ProcessSet, comm: Any, count: int, options: Any) -> dict[str, dict[str, harness.Operation]]:
    """Return what moves parts of `count` elements: ours and MPI's, by the name of the call."""
    size = comm.size
    count = max(size, count - count % size)
    mine, out = np.full(count, comm.rank + 1.0, np.float32), np.empty(count, np.float32)
    splits = np.full(size, count // size)
    splits[0] += splits[-1] // 2
    splits[-1] -= splits[-1] // 2
    come = np.array(comm.alltoall(splits.tolist()))
    room = np.empty(come.sum(), np.float32)
    return {
        "reduce_scatter": {
            OURS: lambda: some.reduce_scatter("SUM", mine),
            RAW: lambda: comm.Reduce_scatter_block(mine, out[: count // size]),
        },
        "all_to_all": {OURS: lambda: some.all_to_all(mine), RAW: lambda: comm.Alltoall(mine, out)},
        "all_to_all with splits": {
            OURS: lambda: some.all_to_all(mine, splits=splits),
            RAW: lambda: comm.Alltoallv([mine, splits], [room, come]),
        },
    }


def whole(some: ms.ProcessSet, comm: Any, count: int, options: Any) -> dict[str, dict[str, harness.Operation]]:
    """Return what moves whole arrays of `count` elements, or none."""
    mine, out = np.full(count, comm.rank + 1.0, np.float32), np.empty(count, np.float32)
    every, longer = np.empty((comm.size, count), np.float32), np.full(count + 1, comm.rank + 1.0, np.float32)
    longer_out = np.empty(count + 1, np.float32)

    def both() -> None:
        some.all_reduce("SUM", mine)
        some.all_reduce("SUM", longer)

    def raw_both() -> None:
        comm.Allreduce(mine, out)
        comm.Allreduce(longer, longer_out)

    return {
        "all_reduce": {OURS: lambda: some.all_reduce("SUM", mine), RAW: lambda: comm.Allreduce(mine, out)},
        "all_reduce, alternating": {OURS: both, RAW: raw_both},
        "all_gather": {OURS: lambda: some.all_gather(mine), RAW: lambda: comm.Allgather(mine, every)},
        "broadcast": {OURS: lambda: some.broadcast(mine), RAW: lambda: comm.Bcast(out)},
        "barrier": {OURS: some.barrier, RAW: comm.Barrier},
    }


def nests(some: ms.ProcessSet, comm: Any, count: int, options: Any) -> dict[str, dict[str, harness.Operation]]:
    """Return what moves a nest of `count` elements in all: MPI's once for each leaf, and once for as many bytes."""
    leaf = [np.full(max(1, count // LEAVES), comm.rank + 1.0, np.float32) for _ in range(LEAVES)]
    whole = np.concatenate(leaf)
    outs, out = (
        [np.empty((comm.size, each.size), np.float32) for each in leaf],
        np.empty((comm.size, whole.size), np.float32),
    )

    def gather_each() -> None:
        for each, there in zip(leaf, outs, strict=True):
            comm.Allgather(each, there)

    def broadcast_each() -> None:
        for each in leaf:
            comm.Bcast(each)

    name = f"each of {LEAVES}"
    return {
        f"all_gather of {LEAVES}": {
            OURS: lambda: some.all_gather(leaf),
            f"{RAW}, {name}": gather_each,
            RAW: lambda: comm.Allgather(whole, out),
        },
        f"broadcast of {LEAVES}": {
            OURS: lambda: some.broadcast(leaf),
            f"{RAW}, {name}": broadcast_each,
            RAW: lambda: comm.Bcast(whole),
        },
    }


def started(some: ms.ProcessSet, comm: Any, count: int, options: Any) -> dict[str, dict[str, harness.Operation]]:
    """Return sums of `count` elements that are started and waited for at once, or after products of NumPy."""
    mine, out = np.full(count, comm.rank + 1.0, np.float32), np.empty(count, np.float32)
    left, product = np.ones((128, 128), np.float32), np.empty((128, 128), np.float32)

    def at_once() -> None:
        some.all_reduce_async("SUM", mine).wait()

    def compute(request: ms.CollectiveRequest | None = None) -> None:
        for _ in range(products):
            np.matmul(left, left, out=product)
            if request is not None:
                request.done()

    def behind(looks: bool) -> None:
        request = some.all_reduce_async("SUM", mine)
        compute(request if looks else None)
        request.wait()

    def raw_behind() -> None:
        request = comm.Iallreduce(mine, out)
        compute()
        request.Wait()

    products = 1
    seconds = timed(comm, {"sum": at_once, "product": compute}, options)
    products = max(1, int(comm.bcast(1.5 * seconds["sum"] / seconds["product"])))  # which hide it, if anything does
    return {
        "all_reduce_async": {
            OURS: at_once,
            RAW: lambda: comm.Iallreduce(mine, out).Wait(),
            "reduce": lambda: some.all_reduce("SUM", mine),
            "MPI_Allreduce": lambda: comm.Allreduce(mine, out),
        },
        "behind products": {
            OURS: lambda: behind(False),
            RAW: raw_behind,
            "with done()": lambda: behind(True),
            "products alone": compute,
        },
    }


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, seconds=0.6, median=False, small=False)
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    some = strategy.process_set(range(strategy.size))  # a value of each rank, outside of steps
    result: dict[str, Any] = {"benchmark": "collectives", "machine": harness.machine(comm), "seconds": {}}
    for label, count in SIZES.items():
        if options.small and count > 1 << 14:
            break
        for make in (whole, parts, nests, started):
            for call, operations in make(some, comm, count, options).items():
                times = timed(comm, operations, options)
                result["seconds"].setdefault(call, {})[label] = times
    if comm.rank == 0:
        harness.show_ratios(result, result["seconds"], RAW)
        harness.save(options.output, result)
    strategy.close()


if __name__ == "__main__":
    main()
