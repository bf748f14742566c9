"""Snapshots under parameter servers: what it costs a Trainer's workers to meet for them, against the same steps without.

    mpistrat run -n 3 --restarts 1 benchmarks/snapshots_served.py --output benchmarks/results/today

Workers compute for some milliseconds each step, of which every tenth takes three times as long on one of them, pull the
weights and push a gradient. Rounds with snapshots and without take turns; the time is that of the slowest worker.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import harness
import numpy as np

import mpistrat as ms
from mpistrat.comm import job_files

STEPS, BUSY = 8000, 4e-3  # of each worker in a round: half a minute; seconds


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=1_000_000, rounds=5)
    strategy = ms.ParameterServerStrategy(num_ps=1)
    comm = strategy.comm
    with strategy.scope():
        w = ms.Variable(np.zeros(options.parameters, np.float32), name="w")
        optimizer = ms.optimizers.Adam(1e-3)
    gradient = np.ones(options.parameters, np.float32)
    rows = ms.data.from_arrays(np.arange(STEPS * strategy.num_workers)).batch(1)
    data = strategy.distribute_dataset(rows)

    def step(x: np.ndarray) -> None:
        slow = strategy.worker_index == 0 and int(x[0]) // strategy.num_workers % 10 == 0
        time.sleep(3 * BUSY if slow else BUSY)
        np.asarray(w)
        optimizer.apply_gradients([(gradient, w)])

    found: dict[str, list[float]] = {"with snapshots": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):  # the first one warms up
            for name, seconds in (("with snapshots", 1.0), ("without", None)):
                place = strategy.broadcast_object(f"{folder}/{name}-{number}")
                checkpoints = ms.train.Checkpoints(strategy, place, every_steps=10**9, snapshot_seconds=seconds)
                trainer = ms.train.Trainer(strategy, step, checkpoints=checkpoints)
                if comm.rank == 0:  # else the next round would go on from there
                    for path in job_files.paths(strategy.extended.process_group.environment.job):
                        path.unlink()
                comm.Barrier()
                start = time.perf_counter()
                trainer.fit(data, 1)
                taken = harness.largest(comm, time.perf_counter() - start)
                if number:
                    found[name].append(taken)
    medians = {name: statistics.median(times) for name, times in found.items()}
    machine = harness.machine(comm, ())
    if comm.rank == 0:
        cost = medians["with snapshots"] / medians["without"] - 1
        table = [[name, f"{seconds:.3f} s"] for name, seconds in medians.items()] + [["cost", f"{100 * cost:.1f} %"]]
        print(harness.table(f"{STEPS} steps, {strategy.num_workers} workers, 1 server", ["", ""], table))
        result = {"benchmark": "snapshots_served", "machine": machine, "seconds": medians, "cost": cost}
        harness.save(options.output, result | {"parameters": options.parameters, "steps": STEPS})
    strategy.close()


if __name__ == "__main__":
    main()
