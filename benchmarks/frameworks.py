"""A training step of a framework's model by `ms.torch`, `ms.jax` or `ms.keras`, against its own ways and `MPI_Allreduce`.

    mpiexec -n 2 python benchmarks/frameworks.py --output benchmarks/results/today
    mpiexec -n 2 python benchmarks/frameworks.py --framework jax
    KERAS_BACKEND=jax mpiexec -n 2 python benchmarks/frameworks.py --framework keras

Each contender computes the same forward and backward pass; its figure is also given less that pass alone. CPU seconds are
those of all threads of the slowest rank, since MPI spins while it waits, and gloo does not. Memory is what the ranks of a
node use together, pages that they share counted once. Contenders are in `frameworks_torch.py`, `_jax` and `_keras`: each
framework in processes of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import harness

import mpistrat as ms

FRAMEWORKS = ("torch", "jax", "keras")


def made(comm: Any, makers: Mapping[str, Callable[[], Any]], calls: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what each maker makes, and the bytes a node that it has added after so many calls of it. Collective."""
    things, added = {}, {}
    nodes = harness.comm_nodes(comm)
    for name, make in makers.items():
        before = used(comm)
        things[name] = make()
        for _ in range(calls):
            things[name]()
        added[name] = (used(comm) - before) / nodes
    return things, added


def used(comm: Any) -> float:
    """Return the bytes that the ranks use together, without what their allocators keep of what was freed. Collective."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    return harness.proportional_memory(comm)


def cpu_seconds(
    comm: Any, operations: Mapping[str, harness.Operation], rounds: int, seconds: float
) -> dict[str, float]:
    """Return the CPU seconds of each operation on the slowest rank: the smallest of some rounds, taken in turns. Collective.

    Three rounds at least; no more begin after so many seconds.
    """
    best, start = dict.fromkeys(operations, float("inf")), time.perf_counter()
    for done in range(rounds):
        if comm.bcast(done >= 3 and time.perf_counter() - start > seconds):
            break
        for name, operation in operations.items():
            comm.Barrier()
            before = time.process_time()
            operation()
            best[name] = min(best[name], time.process_time() - before)
    return {name: harness.largest(comm, value) for name, value in best.items()}


def show(model: str, result: Mapping[str, Any]) -> None:
    """Print the figures of a model."""
    wall, cpu, memory = (result[what][model] for what in ("seconds", "cpu_seconds", "memory_bytes"))
    rest, rest_cpu = ({name: t - times[harness.ALONE] for name, t in times.items()} for times in (wall, cpu))
    rows = [
        [name, harness.duration(wall[name]), harness.duration(max(rest[name], 0)),
         against(rest[name], rest[harness.OURS]), harness.duration(max(rest_cpu[name], 0)),
         against(rest_cpu[name], rest_cpu[harness.OURS]), f"{memory['step'][name] / 1e6:.0f} MB"]
        for name in wall if name != harness.ALONE
    ]  # fmt: skip
    about = result["machine"]
    title = f"{result['benchmark']}: {model}, {about['ranks']} ranks on {about['nodes']} node(s)"
    header = ["step", "wall", "less compute", "against ours", "CPU less compute", "against ours", "memory a node"]
    print(harness.table(title, header, rows), flush=True)
    for name, size in memory["parameters"].items():
        print(f"parameters alone, a node: {name} {size / 1e6:.0f} MB", flush=True)


def against(rest: float, ours: float) -> str:
    """Return a time as a multiple of ours, where there is something to compare.

    Example:
        >>> against(3.0, 2.0), against(3.0, -0.1)
        ('1.50 ×', '–')
    """
    return f"{rest / ours:.2f} ×" if rest > 0 and ours > 0 else "–"


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, framework="torch", repetitions=40, seconds=20.0, rounds=15)
    if options.framework not in FRAMEWORKS:
        raise SystemExit(f"--framework: expected one of {', '.join(FRAMEWORKS)}, got {options.framework}")
    framework: Any = importlib.import_module(f"frameworks_{options.framework}")
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    end = framework.start(comm)
    backend = getattr(framework, "BACKEND", "")
    result: dict[str, Any] = {
        "benchmark": "_".join(["frameworks", options.framework, *filter(None, [backend])]),
        "machine": harness.machine(comm, framework.PACKAGES),
        "seconds": {},
        "cpu_seconds": {},
        "memory_bytes": {},
    }
    for model in framework.MODELS:
        _, alone = made(comm, framework.parameters(strategy, model), calls=0)
        operations, added = made(comm, framework.contenders(strategy, model), calls=2)
        result["memory_bytes"][model] = {"parameters": alone, "step": added}
        wall = harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds)
        cpu = cpu_seconds(comm, operations, options.rounds, options.seconds)
        for what, times in (("seconds", wall), ("cpu_seconds", cpu)):
            result[what][model] = {name: t / framework.STEPS for name, t in times.items()}
        if comm.rank == 0:
            show(model, result)
    if comm.rank == 0:
        harness.save(options.output, result)
    end()
    strategy.close()


if __name__ == "__main__":
    main()
