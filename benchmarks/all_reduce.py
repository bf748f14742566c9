"""All-reduce of float32: ours on the user's arrays and on arenas, against raw MPI_Allreduce and torch on gloo.

mpiexec -n 2 python benchmarks/all_reduce.py --output benchmarks/results/today
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np

import mpistrat as ms
from mpistrat.bench import all_reduce

SIZES = {"4 KB": 1 << 10, "64 KB": 1 << 14, "1 MB": 1 << 18, "16.8 MB": 1 << 22, "67 MB": 1 << 24, "134 MB": 1 << 25}
GLOO = "torch gloo"
TENSORFLOW = "TensorFlow MultiWorkerMirroredStrategy"


def tensorflow_all_reduce(workers: Any, mine: np.ndarray) -> harness.Operation:
    """Return an all-reduce of TensorFlow's strategy, traced once."""
    import tensorflow as tf

    value = tf.constant(mine)

    @tf.function
    def reduce() -> Any:
        return workers.run(lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value))

    return lambda: reduce().numpy()


def contenders(strategy: Any, dist: Any, workers: Any, count: int) -> dict[str, harness.Operation]:
    """Return what is measured for `count` elements, by name."""
    mine = np.full(count, strategy.comm.rank + 1, np.float32)
    operations = all_reduce.operations(strategy, count)
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
            [label, *(f"{harness.duration(times[n])} ({times[all_reduce.RAW] / times[n]:.2f} ×)" for n in names)]
            for label, times in result["seconds"].items()
        ]
        about = result["machine"]
        title = (
            f"all-reduce, {about['ranks']} ranks on {about['nodes']} node(s), {about['mpi']}; (×) raw MPI's time / this"
        )
        print(harness.table(title, ["size", *names], rows), flush=True)
        harness.save(options.output, result)
    if dist is not None:
        dist.destroy_process_group()
    strategy.close()


if __name__ == "__main__":
    main()
