"""A step of Adam with a backward pass, in which gradients become final in buckets: with Optimizer.begin and without it.

    mpiexec -hosts a,b -n 2 python benchmarks/early_gradients.py --output benchmarks/results/today
    mpiexec -hosts a,b -n 2 python benchmarks/early_gradients.py --backward 500 --count 16777216

The backward pass is simulated in two ways: it leaves the core free, as a GPU's does, or computes on it. "automatic" is what
`begin` chooses by itself in the first steps. The limit is the longer one of backward pass and communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

import mpistrat as ms
from mpistrat.optimizers.begun import Choice

BUCKETS = 16
TRIALS = 20  # steps after which the automatic choice is made
WITH, WITHOUT, AUTOMATIC = "begin", "no begin", "automatic"
BACKWARD, STEP = "backward alone", "apply_gradients alone"


def sleep(seconds: float) -> None:
    """Leave the core free, as long as a GPU works."""
    time.sleep(seconds)


def compute(seconds: float) -> None:
    """Use this rank's core for so many seconds of it."""
    matrix, end = np.ones((128, 128), np.float32), time.thread_time() + seconds
    while time.thread_time() < end:
        np.matmul(matrix, matrix)


def steps(strategy: Any, options: Any, backward: Callable[[float], None]) -> dict[str, harness.Operation]:
    """Return the contenders; each optimizer has variables of its own. Collective."""
    seconds = options.backward / 1e3 / BUCKETS
    operations: dict[str, harness.Operation] = {}
    for name in (AUTOMATIC, WITH, WITHOUT):
        with strategy.scope():
            variables = [ms.Variable(np.zeros(options.count // BUCKETS, np.float32)) for _ in range(BUCKETS)]
            optimizer = ms.optimizers.Adam(1e-3)

        def step(
            variables: Any = variables,
            optimizer: Any = optimizer,
            early: bool = name != WITHOUT,
            pause: float = seconds,
        ) -> None:
            for variable in reversed(variables):
                if pause:
                    backward(pause)
                if early:
                    optimizer.begin([variable])
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        operations[name] = lambda step=step: strategy.run(step)  # type: ignore[misc]
        for _ in range(TRIALS if name == AUTOMATIC else 1):  # after its first step an arena gets no more variables
            operations[name]()
        Choice.note_step = lambda self, group: None  # type: ignore[method-assign]  # the others do what they are told
    operations[BACKWARD] = lambda: [backward(seconds) for _ in range(BUCKETS)]
    operations[STEP] = lambda step=step: strategy.run(step, kwargs={"pause": 0.0})  # type: ignore[misc]
    return operations


def main() -> None:
    """Measure both kinds of backward pass. Collective."""
    options = harness.arguments(__doc__, count=1 << 24, backward=300.0, repetitions=10, seconds=60.0)
    choose, figures = Choice.note_step, {}
    with ms.MultiWorkerMirroredStrategy() as strategy:
        about = harness.machine(strategy.comm)
        for kind, backward in {"core free": sleep, "core used": compute}.items():
            Choice.note_step = choose  # type: ignore[method-assign]
            operations = steps(strategy, options, backward)
            figures[kind] = harness.pair(
                strategy.comm, operations, repetitions=options.repetitions, seconds=options.seconds
            )
        if strategy.rank == 0:
            limits = {kind: max(times[BACKWARD], times[STEP]) for kind, times in figures.items()}
            names = [WITHOUT, WITH, AUTOMATIC, BACKWARD, STEP]
            rows = [
                [kind, *(harness.duration(times[name]) for name in names), harness.duration(limits[kind])]
                for kind, times in figures.items()
            ]
            title = f"{options.count:,} parameters, backward pass of {options.backward:g} ms"
            print(harness.table(title, ["backward", *names, "limit"], rows), flush=True)
            result = {
                "benchmark": "early_gradients",
                "machine": about,
                "parameters": options.count,
                "backward_ms": options.backward,
                "seconds": figures,
                "limit_seconds": limits,
            }
            harness.save(options.output, result)


if __name__ == "__main__":
    main()
