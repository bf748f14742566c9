"""A synchronous step of each kind: dtypes, settings of the optimizer, threads of a rank, beside plain Adam and one loop in C.

    mpiexec -n 2 python benchmarks/step_options.py --output benchmarks/results/today
    mpiexec -n 1 python benchmarks/step_options.py --only float32          # 1 rank, all its cores, beside one thread of it

Each kind is timed with one thread a rank, and, where a rank has more cores, with all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from compiled_loop import LIMIT, compiled_loop

import mpistrat as ms
from mpistrat._util import loops
from mpistrat._util.text import counted
from mpistrat.bench.training_step import LAYERS

PLAIN = "float32"
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


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=1 << 24, repetitions=20, seconds=12.0, only="")
    strategy = ms.MultiWorkerMirroredStrategy()
    comm, most, chosen = strategy.comm, loops.threads(), kinds()
    names = [PLAIN, *(name for name in chosen if name != PLAIN and (not options.only or name in options.only))]
    if options.only == PLAIN:
        names = [PLAIN]
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
    if comm.rank == 0:
        about = result["machine"]
        layout = f"{counted(about['ranks'], 'rank')} of {counted(most, 'thread')}"
        title = f"{options.parameters / 1e6:.1f} M parameters, {layout}, {about['mpi']}"
        print(harness.table(title, ["step", "time", "× Adam of float32 in the same turns"], rows), flush=True)
        harness.save(options.output, result)
    strategy.close()


if __name__ == "__main__":
    main()
