"""A snapshot in memory, as jobs take that are started again: how long training stands still, against a memcpy of the same part.

    mpistrat run -n 2 --restarts 1 benchmarks/snapshots.py --output benchmarks/results/today

The state is weights and Adam's two slots, float32. Each node keeps all of it, so a rank copies its share of the node's. The
time is that of the slowest rank; at one snapshot a second it is the share of time that protection costs.
"""

from __future__ import annotations

import statistics
import time

import harness
import numpy as np

import mpistrat as ms

LAYERS = 16


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=16_800_000, rounds=15)
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    rows = options.parameters // LAYERS // 1000
    with strategy.scope():
        variables = [ms.Variable(np.ones((rows, 1000), np.float32), name=f"layer_{i}") for i in range(LAYERS)]
        optimizer = ms.optimizers.Adam(1e-3)
    strategy.run(lambda: optimizer.apply_gradients([(v.grad, v) for v in variables]))
    nbytes = 3 * 4 * rows * 1000 * LAYERS
    source = np.ones(nbytes // strategy.extended.process_group.node.size, np.uint8)
    target = np.ones_like(source)
    found: dict[str, list[float]] = {"snapshot": [], "memcpy of the share": []}
    for number in range(options.rounds + 2):  # the first two take their memory
        for name in found:
            comm.Barrier()
            start = time.perf_counter()
            if name == "snapshot":
                strategy.take_snapshot(number + 1, {"step": number + 1})
            else:
                np.copyto(target, source)
            taken = harness.largest(comm, time.perf_counter() - start)
            if number > 1:
                found[name].append(taken)
    seconds = {name: statistics.median(times) for name, times in found.items()}
    if comm.rank == 0:
        table = [
            [name, f"{1e3 * each:.1f} ms", f"{100 * each:.1f} % at one a second"] for name, each in seconds.items()
        ]
        print(harness.table(f"a snapshot of {nbytes / 1e6:.0f} MB, {comm.size} ranks", ["", "stall", ""], table))
        machine = harness.machine(comm, ())
        harness.save(
            options.output, {"benchmark": "snapshots", "machine": machine, "bytes": nbytes, "stall_seconds": seconds}
        )
    else:
        harness.machine(comm, ())
    strategy.close()


if __name__ == "__main__":
    main()
