"""All-reduce of float32: ours on the user's arrays and on arenas, against raw MPI_Allreduce and torch on gloo.

mpiexec -n 2 python benchmarks/all_reduce.py --output benchmarks/results/today
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np

import mpistrat as ms

SIZES = {"4 KB": 1 << 10, "64 KB": 1 << 14, "1 MB": 1 << 18, "16.8 MB": 1 << 22, "67 MB": 1 << 24, "134 MB": 1 << 25}
RAW, GLOO, OWN, ARENA = "raw MPI_Allreduce", "torch gloo", "mpistrat, own arrays", "mpistrat, arenas"
TENSORFLOW = "TensorFlow MultiWorkerMirroredStrategy"


def tensorflow_all_reduce(workers: Any, mine: np.ndarray) -> harness.Operation:
    """Return an all-reduce of TensorFlow's strategy, traced once."""
    import tensorflow as tf

    value = tf.constant(mine)

    @tf.function
    def all_reduce() -> Any:
        return workers.run(lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value))

    return lambda: all_reduce().numpy()


def contenders(strategy: Any, dist: Any, workers: Any, count: int) -> dict[str, harness.Operation]:
    """Return what is measured for `count` elements, by name."""
    comm, ops = strategy.comm, strategy.extended.cross_device_ops
    mine = np.full(count, comm.rank + 1, np.float32)
    out = np.empty_like(mine)
    with strategy.scope():
        variable = ms.Variable(np.zeros(count, np.float32), name=f"v{count}")
    gradient = variable.gradient(0)
    gradient[:] = mine
    expected = comm.size * (comm.size + 1) / 2
    found = ops.reduce(ms.ReduceOp.SUM, gradient, variable)
    if not (found[0] == found[-1] == expected and (ops.reduce(ms.ReduceOp.SUM, mine) == expected).all()):
        raise RuntimeError(f"all_reduce of {count}: expected {expected}, got {found[0]}")
    operations: dict[str, harness.Operation] = {
        RAW: lambda: comm.Allreduce(mine, out),
        OWN: lambda: ops.reduce(ms.ReduceOp.SUM, mine),
        ARENA: lambda: ops.reduce(ms.ReduceOp.SUM, gradient, variable),
    }
    if dist is not None:
        import torch

        tensor = torch.from_numpy(mine.copy())
        operations[GLOO] = lambda: dist.all_reduce(tensor)
    if workers is not None:
        operations[TENSORFLOW] = tensorflow_all_reduce(workers, mine)
    return operations


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, repetitions=200, seconds=2.0, allocations=3, tensorflow=False)
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    workers = harness.tensorflow_strategy(comm) if options.tensorflow else None
    dist = harness.gloo(comm)
    result: dict[str, Any] = {"benchmark": "all_reduce", "machine": harness.machine(comm), "seconds": {}}
    for label, count in SIZES.items():
        runs = []
        for _ in range(options.allocations):  # where the pages of a buffer lie makes up to a factor of 2
            operations = contenders(strategy, dist, workers, count)
            runs.append(harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds))
        result["seconds"][label] = harness.medians(runs)
    if comm.rank == 0:
        names = list(next(iter(result["seconds"].values())))
        rows = [
            [label, *(f"{harness.describe(times[n])} ({times[RAW] / times[n]:.2f} ×)" for n in names)]
            for label, times in result["seconds"].items()
        ]
        about = result["machine"]
        title = (
            f"all-reduce, {about['ranks']} ranks on {about['nodes']} node(s), {about['mpi']}; (×) raw MPI's time / this"
        )
        print(harness.table(title, ["size", *names], rows), flush=True)
        harness.save(options.output, "all_reduce", result)
    if dist is not None:
        dist.destroy_process_group()
    strategy.close()


if __name__ == "__main__":
    main()
