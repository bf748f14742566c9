"""What each rank calls of MPI in each phase of a program: function, size of the communicator, calls, bytes, in a JSON file.

Started by test_calls.py with count_mpi.c preloaded, and a folder for its files.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat.base.waiting import wait_until
from mpistrat.comm import process_group
from mpistrat.comm.monitor import group_monitor
from mpistrat.comm.monitor.group_monitor import Watchdog

VARIABLES, STEPS = 8, 32
counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
text = ctypes.create_string_buffer(1 << 18)
phases: dict[str, list[tuple[str, int, int, int]]] = {}


def phase(name: str, act: Callable[[], Any]) -> Any:
    counter.count_mpi_begin()
    result = act()
    counter.count_mpi_write(text, ctypes.c_long(len(text)))
    rows = (line.split() for line in text.value.decode().splitlines())
    phases[name] = [(function, int(size), int(calls), int(count)) for function, size, calls, count in rows]
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = phase("strategy", ms.MultiWorkerMirroredStrategy)
    with strategy.scope():
        makes = [lambda i=i: ms.Variable(np.zeros(4096, np.float32), name=f"w{i}") for i in range(VARIABLES)]
        weights = phase("variables", lambda: [make() for make in makes])
        plain, clipped = ms.optimizers.Adam(1e-3), ms.optimizers.Adam(1e-3, global_clipnorm=1.0)

    def steps(optimizer: Any, count: int) -> None:
        for _ in range(count):
            strategy.run(lambda: optimizer.apply_gradients([(v.grad, v) for v in weights]))
            strategy.reduce("SUM", strategy.run(lambda: np.float64(1)), axis=None)

    phase("first step", lambda: steps(plain, 1))
    phase("steps", lambda: steps(plain, STEPS))
    steps(clipped, 1)
    phase("clipped steps", lambda: steps(clipped, STEPS))
    with strategy.scope():
        wide, whole = ms.optimizers.Adam(1e-3), ms.Variable(np.zeros(1 << 20, np.float32), name="wide")

    def wide_steps(count: int) -> None:
        for _ in range(count):
            strategy.run(lambda: wide.apply_gradients([(whole.grad, whole)]))

    wide_steps(1)
    assert whole.arena.sharded == (strategy.extended.process_group.num_nodes > 1)
    phase("wide steps", lambda: wide_steps(STEPS))
    rows = ms.data.from_arrays(np.zeros((4096, 4), np.float32)).shuffle(seed=1).batch(64)
    data = phase("dataset", lambda: strategy.distribute_dataset(rows))
    phase("epoch", lambda: [steps(plain, 1) for _ in data])
    phase("save", lambda: strategy.save(folder / "saved.h5"))
    phase("restore", lambda: strategy.restore(folder / "saved.h5"))
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    os.chdir(elsewhere if strategy.rank else folder)  # only rank 0 finds the file
    phase("restore, sent", lambda: strategy.restore("saved.h5"))
    topology, group = strategy.extended.topology, strategy.extended.process_group

    def wait_long() -> None:
        """The last rank comes late, and a rank that waits has all asked where they are."""
        group.monitor.warn_after = 1.0
        time.sleep(4.0 * (topology.rank == topology.size - 1))
        group.barrier("late")
        group.monitor.warn_after = 100.0

    group_monitor._NEIGHBOUR = 100.0  # seconds: what a rank asks the next one all the time, however many there are
    phase("long wait", wait_long)

    def end() -> None:
        """What ranks say before the last one ends the job by an error; it does not."""
        if topology.rank == topology.size - 1:
            assert Watchdog.report_end("ValueError: mine", "ValueError: mine") == ""
        else:
            time.sleep(4.0)

    def stop() -> None:
        """The last rank is requested to stop, as by a signal."""
        if topology.rank == topology.size - 1:
            group.monitor.stop = True
        wait_until(lambda: group.monitor.stop, 20.0)
        time.sleep(2.0)
        assert group.monitor.stop

    phase("request to stop", stop)
    phase("end by an error", end)
    kept = ms.data.from_arrays(np.zeros((256, 4), np.float32)).cache("job", transport="messages").batch(64)
    for _ in strategy.distribute_dataset(kept):
        pass
    group.barrier("rows given to all")

    def leave() -> None:
        """What ranks do at the end of the program, with a thread that gives rows to others until all have left."""
        group.leave()
        for wait in process_group._waits:
            wait()

    phase("leave", leave)
    (folder / f"rank-{topology.rank}.json").write_text(json.dumps({"nodes": topology.num_nodes, "phases": phases}))
    strategy.comm.Barrier()


if __name__ == "__main__":
    main()
