"""A synchronous step of each kind: dtypes, settings of the optimizer, threads of a rank, beside plain Adam and one loop in C.

    mpiexec -n 2 python benchmarks/step_options.py --output benchmarks/results/today
    mpiexec -n 1 python benchmarks/step_options.py --only float32          # 1 rank, all its cores, beside one thread of it
    mpiexec -n 2 python benchmarks/step_options.py --only sharded_gradients

Each kind is timed with one thread a rank, and, where a rank has more cores, with all of them. Steps with and without
sharded_gradients also fill the gradients, layer by layer; beside them is the memory that all ranks have for variables, gradients
and slots after a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from compiled_loop import LIMIT, compiled_loop

import mpistrat as ms
from mpistrat.base import loops
from mpistrat.base.text import counted
from mpistrat.bench.training_step import LAYERS

PLAIN = "float32"
SHARDED = "sharded_gradients"
CALLS = 4  # whose gradients are accumulated


def kinds() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Return the dtype of the variables and the optimizer of each kind of step."""
    adam = ms.optimizers.Adam
    single = np.float32
    found: dict[str, tuple[Any, Callable[[], Any]]] = {
        PLAIN: (single, adam),
        "float16": (np.float16, adam),
        "float64": (np.float64, adam),
        "AdamW": (single, ms.optimizers.AdamW),
        "AMSGrad": (single, lambda: adam(amsgrad=True)),
        "clipvalue": (single, lambda: adam(clipvalue=1.0)),
        "clipnorm": (single, lambda: adam(clipnorm=1.0)),
        "global_clipnorm": (single, lambda: adam(global_clipnorm=1.0)),
        "use_ema": (single, lambda: adam(use_ema=True)),
        f"accumulation, {CALLS} calls": (single, lambda: adam(gradient_accumulation_steps=CALLS)),
    }
    try:
        import ml_dtypes
    except ImportError:
        return found
    return found | {"bfloat16": (ml_dtypes.bfloat16, adam)}


def step_of(strategy: Any, count: int, dtype: Any, make: Callable[[], Any], threads: int) -> harness.Operation:
    """Return a step on gradients that lie in `v.grad` already, by so many threads; calls that accumulate are one step."""
    with strategy.scope():
        variables = [ms.Variable(np.zeros(count // LAYERS, dtype), name=f"w{i}") for i in range(LAYERS)]
        optimizer = make()
    for variable in variables:
        variable.gradient(0)[:] = 1e-3
    calls = optimizer.gradient_accumulation_steps or 1

    def step() -> None:
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    def whole() -> None:
        loops.set_threads(threads)
        for _ in range(calls):
            strategy.run(step)

    return whole


def filling_step_of(strategy: Any, count: int, begins: bool) -> harness.Operation:
    """Return a step of Adam that fills the gradients of layer after layer, from the last, and gives them to `begin` if wanted."""
    with strategy.scope():
        variables = [ms.Variable(np.zeros(count // LAYERS, np.float32), name=f"w{i}") for i in range(LAYERS)]
        optimizer = ms.optimizers.Adam()

    def step() -> None:
        for variable in reversed(variables):
            variable.grad[...] = 1e-3
            if begins:
                optimizer.begin([variable])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    return lambda: strategy.run(step)


def sharded_gradients(comm: Any, options: Any) -> dict[str, tuple[float, float]]:
    """Return seconds of a step and bytes of all ranks, of steps with and without `sharded_gradients`. Collective."""
    ways = {
        "gradients filled, float32": ({}, False),
        f"the same, {SHARDED}": ({SHARDED: True}, True),
        f"the same, {SHARDED}, all of them by apply_gradients": ({SHARDED: True}, False),
    }
    operations, memory, strategies = {}, {}, []
    for name, (setting, begins) in ways.items():
        before = harness.proportional_memory(comm)
        strategies.append(ms.MultiWorkerMirroredStrategy(**setting))
        operations[name] = filling_step_of(strategies[-1], options.parameters, begins)
        operations[name]()
        memory[name] = harness.proportional_memory(comm) - before
    times = harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds)
    for strategy in strategies:
        strategy.close()
    return {name: (times[name], memory[name]) for name in ways}


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=1 << 24, repetitions=20, seconds=12.0, only="")
    strategy = ms.MultiWorkerMirroredStrategy()
    comm, most, chosen = strategy.comm, loops.threads(), kinds()
    names = [PLAIN, *(name for name in chosen if name != PLAIN and (not options.only or name in options.only))]
    if options.only in (PLAIN, SHARDED):
        names = [PLAIN] if options.only == PLAIN else []
    result: dict[str, Any] = {"benchmark": "step_options", "machine": harness.machine(comm)}
    result |= {"parameters": options.parameters, "threads": most, "seconds": {}}
    rows = []
    limit = compiled_loop(comm, options.parameters)
    for name in names:  # one after the other, each beside plain Adam: the memory of two at a time
        operations = {}
        for threads in dict.fromkeys((1, most)):
            operations[f"{name}, {counted(threads, 'thread')} a rank"] = step_of(
                strategy, options.parameters, *chosen[name], threads
            )
        if name != PLAIN:
            operations[PLAIN] = step_of(strategy, options.parameters, *chosen[PLAIN], most)
        elif limit is not None:
            operations[LIMIT] = limit
        times = harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds)
        plain = times.get(PLAIN) or times[f"{PLAIN}, {counted(most, 'thread')} a rank"]
        rows += [[each, harness.duration(t), f"{t / plain:.2f} ×"] for each, t in times.items() if each != PLAIN]
        result["seconds"][name] = times
    about_gradients = []
    if options.only in ("", SHARDED):
        result[SHARDED] = found = sharded_gradients(comm, options)
        plain = next(iter(found.values()))[0]
        for name, (seconds, nbytes) in found.items():
            about_gradients.append(
                [name, harness.duration(seconds), f"{seconds / plain:.2f} ×", f"{nbytes / 1e6:,.0f} MB"]
            )
    if comm.rank == 0:
        about = result["machine"]
        layout = f"{counted(about['ranks'], 'rank')} of {counted(most, 'thread')}"
        title = f"{options.parameters / 1e6:.1f} M parameters, {layout}, {about['mpi']}"
        if rows:
            print(harness.table(title, ["step", "time", "× Adam of float32 in the same turns"], rows), flush=True)
        if about_gradients:
            header = ["step", "time", "× the first in the same turns", "memory of all ranks"]
            print(harness.table(title, header, about_gradients), flush=True)
        harness.save(options.output, result)
    strategy.close()


if __name__ == "__main__":
    main()
