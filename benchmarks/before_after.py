"""Steps, sums, batches and pushes with this tree's package and with that of another tree, in turns.

    git worktree add ../before COMMIT && cp mpistrat/base/loops/*.so ../before/mpistrat/base/loops/
    .venv-frameworks/bin/python benchmarks/before_after.py ../before --output benchmarks/results/today

The ranks start anew for each measurement: a pair is one start with each package, in random order. "core" is this package
alone: steps of its Adam, `Strategy.reduce`, batches of a shuffled dataset, and pushes of one worker to one server. The
others are steps of PyTorch and JAX and fits of Keras; their batches come from a distributed dataset, in equal parts. A
ratio is the median over the pairs; its limits are those of 95 % by order statistics, which assume nothing about the times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("core", "torch", "jax", "keras-torch", "keras-jax")
ROWS, STEPS = 16, 4  # of a global batch; of a dataset
WIDTHS = {"MLP, 4.2 M": (1024,) * 5, "MLP, 24 K": (64, 128, 96, 32, 10)}
ROUNDS, FIT = 7, 50  # timed ones; steps of a fit of Keras
Step = Callable[[Any], object]


def main() -> None:
    """Measure the pairs, or be one rank of a measurement."""
    if sys.argv[1:2] == ["--steps"]:
        measure(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path, help="the other tree, with its compiled loops")
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="default: all")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder for the JSON file; nothing is written without it")
    options = parser.parse_args()
    if options.pairs < 6:
        parser.error(f"--pairs: expected at least 6, of which limits of 95 % can be told, got {options.pairs}")
    trees = {"before": commit(options.before), "after": commit(ROOT)}
    result: dict[str, Any] = {"benchmark": "before_after", "trees": trees, "seconds": {}}
    for framework in options.framework or FRAMEWORKS:
        for _ in range(options.pairs):
            for tree in random.sample((options.before, ROOT), 2):
                told = start(framework, tree.resolve(), options.ranks)
                result.setdefault("machine", told["machine"])["versions"] |= told["machine"]["versions"]
                for model, seconds in told["seconds"].items():
                    times = result["seconds"].setdefault(f"{framework}: {model}", {"before": [], "after": []})
                    times["after" if tree == ROOT else "before"].append(seconds)
        show(result, framework)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import harness

    harness.save(options.output, result)


def commit(tree: Path) -> str:
    """Return the commit that is checked out in a tree, "" where it is none of git."""
    return subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def start(framework: str, tree: Path, ranks: int) -> dict[str, Any]:
    """Return what the ranks of one start measured, with the package of a tree."""
    sys.path.insert(0, str(ROOT))
    from tests.launch.launcher import launch, mpi_env

    env = {
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'benchmarks'}",
        "OMP_NUM_THREADS": "1",
        "KERAS_BACKEND": framework.partition("-")[2] or "jax",
        "JAX_COMPILATION_CACHE_DIR": "/tmp/mpistrat-before-after-jax",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    ran = launch([__file__, "--steps", framework], ranks, mpi_env(sys.executable), 300, env=env, cwd=ROOT)
    if ran.returncode:
        raise SystemExit(f"{framework} with {tree}: {ran}")
    told: dict[str, Any] = json.loads(next(line for line in ran.out[0].splitlines() if line.startswith("{")))
    if Path(told["package"]).parent != tree:
        raise SystemExit(f"{framework}: expected the package of {tree}, got that of {told['package']}")
    return told


def show(result: dict[str, Any], framework: str) -> None:
    """Print the medians of a framework, and the ratio with its limits."""
    for name, times in result["seconds"].items():
        if name.startswith(f"{framework}:"):
            old, new = (statistics.median(times[when]) * 1e6 for when in ("before", "after"))
            low, middle, high = ratio(times["before"], times["after"])
            print(
                f"{name}: before {old:.0f} µs, after {new:.0f} µs, ratio {middle:.3f} [{low:.3f}, {high:.3f}]",
                flush=True,
            )


def ratio(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """Return the lower limit, the median and the upper limit of after / before, over pairs.

    The limits are the k-th smallest and largest ratio with the largest k such that 95 % of samples hold the median
    between them (the sign test's interval; Conover, Practical Nonparametric Statistics, section 3.2).

    Example:
        >>> ratio([1.0] * 6, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
        (1.0, 1.25, 1.5)
    """
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    n, k, tail = len(ratios), 0, 0.0
    while (tail := tail + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    return ratios[k - 1], statistics.median(ratios), ratios[-k]


def measure(framework: str) -> None:
    """Print the seconds of a framework's steps, on the slowest rank, as JSON. Collective."""
    sys.path.pop(0)  # this file's folder: PYTHONPATH names the package's tree, whose harness fits it

    import mpistrat as ms

    strategy = ms.MultiWorkerMirroredStrategy()
    if framework == "core":
        seconds = {name: each(strategy.comm, step, [None], calls) for name, step, calls in core(ms, strategy)}
        seconds |= pushes(ms, strategy.comm)
        report(ms, strategy, seconds, [])
        return
    make = {"torch": torch_step, "jax": jax_step}.get(framework, keras_fit)
    seconds = {}
    for name, optimizer, calls in (("MLP, 4.2 M", "adam", 20), ("MLP, 24 K", "adam", 150), ("MLP, 24 K", "sgd", 150)):
        step, batches = make(ms, strategy, WIDTHS[name], optimizer)
        steps = FIT if make is keras_fit else 1  # of a call
        seconds[f"{name}, {optimizer}"] = each(strategy.comm, step, batches, max(1, calls // steps)) / steps
    report(
        ms, strategy, seconds, {"torch": ["torch"], "jax": ["jax", "optax"]}.get(framework, ["keras", "torch", "jax"])
    )


def report(ms: Any, strategy: Any, seconds: dict[str, float], libraries: list[str]) -> None:
    """Print the seconds of each operation, the machine and the package as JSON on rank 0, and close the strategy. Collective."""
    import harness

    machine = harness.machine(strategy.comm, libraries)
    if strategy.comm.rank == 0:
        print(json.dumps({"machine": machine, "seconds": seconds, "package": str(Path(ms.__file__).resolve().parent)}))
    strategy.close()


def each(comm: Any, step: Step, batches: list[Any], calls: int) -> float:
    """Return the seconds of a call: the median of some rounds of so many calls, on the slowest rank. Collective."""
    import harness

    times = []
    turns = itertools.cycle(batches)
    for number in range(ROUNDS + 1):  # the first is not timed
        comm.Barrier()
        begun = time.perf_counter()
        for _ in range(calls):
            step(next(turns))
        if number:
            times.append((time.perf_counter() - begun) / calls)
    return harness.largest(comm, statistics.median(times))


def core(ms: Any, strategy: Any) -> Iterator[tuple[str, Step, int]]:
    """Yield name, function and calls a round of the operations of all ranks. Collective."""
    import numpy as np

    for name, shapes, calls in (
        ("step, 4.2 M, Adam", [(1 << 20,)] * 4, 20),
        ("step, 24 K, Adam", [(64, 128), (128,), (128, 96), (96,), (96, 32), (32,)], 200),
    ):
        with strategy.scope():
            variables = [ms.Variable(np.zeros(shape, np.float32)) for shape in shapes]
            adam = ms.optimizers.Adam(1e-3)
        gradients = [np.full(shape, 1e-3, np.float32) for shape in shapes]

        def update(adam: Any = adam, variables: Any = variables, gradients: Any = gradients) -> None:
            adam.apply_gradients(list(zip(gradients, variables, strict=True)))

        yield name, lambda _, update=update: strategy.run(update), calls
    for name, count, calls in (("8 B", 1, 1000), ("64 KB", 1 << 13, 300), ("4 MB", 1 << 19, 20)):
        value = np.ones(count)
        yield f"reduce, {name}", lambda _, value=value: strategy.reduce("SUM", value, axis=None), calls
    for rows, calls in ((2, 1000), (128, 400)):
        chain = ms.data.Dataset.range(1_000_000).shuffle(seed=1).batch(rows).repeat()
        batches = iter(strategy.distribute_dataset(chain))
        yield f"batch of {rows} rows", lambda _, batches=batches: next(batches), calls


def pushes(ms: Any, world: Any) -> dict[str, float]:
    """Return the seconds of a push to the server on the last rank, waited for at the end of a round. Collective."""
    import numpy as np
    from mpi4py import MPI

    found = {}
    for name, count, calls in (("4 KB", 1 << 10, 300), ("4 MB", 1 << 20, 20)):
        sgd = ms.optimizers.SGD(1.0)
        strategy = ms.ParameterServerStrategy(num_ps=1, comm=world)
        with strategy.scope():
            variable = ms.Variable(np.zeros(count, np.float32), name="v")
        seconds = 0.0
        if strategy.is_server:
            strategy.serve()
        else:
            variable.grad[...] = 1

            def push(
                _: object, sgd: Any = sgd, v: Any = variable, strategy: Any = strategy, calls: int = calls
            ) -> None:
                for _ in range(calls):
                    strategy.run(lambda: sgd.apply_gradients([(v.grad, v)]))
                strategy.flush()

            seconds = each(MPI.COMM_SELF, push, [None], 1) / calls
        strategy.close()
        found[f"push, {name}"] = world.allreduce(seconds, MPI.MAX)
    return found


def drawn(ms: Any, strategy: Any, width: int) -> list[Any]:
    """Return this rank's parts of the batches, kept by the loop. Collective."""
    import numpy as np

    rows = np.random.default_rng(0).normal(size=(STEPS * ROWS, width)).astype(np.float32)
    return list(strategy.distribute_dataset(ms.data.from_arrays(rows).batch(ROWS)))


def torch_step(ms: Any, strategy: Any, widths: tuple[int, ...], optimizer: str) -> tuple[Step, list[Any]]:
    """Return the step of a module, and its batches. Collective."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (torch.nn.Linear(*pair), torch.nn.Tanh())]
    module = torch.nn.Sequential(*layers)
    rule: Any = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](module.parameters(), lr=1e-3)
    with strategy.scope():
        module, rule = ms.torch.distribute(module, rule)

    def step(batch: Any) -> None:
        rule.zero_grad()
        module(torch.from_numpy(batch)).square().mean().backward()
        rule.step()

    return step, drawn(ms, strategy, widths[0])


def jax_step(ms: Any, strategy: Any, widths: tuple[int, ...], optimizer: str) -> tuple[Step, list[Any]]:
    """Return the step of a tree, and its batches. Collective."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    numbers = np.random.default_rng(0)
    params: Any = [
        {"w": (numbers.normal(size=(a, b)) / a**0.5).astype(np.float32), "b": np.zeros(b, np.float32)}
        for a, b in itertools.pairwise(widths)
    ]
    with strategy.scope():
        params, rule = ms.jax.distribute(params, {"adam": optax.adam, "sgd": optax.sgd}[optimizer](1e-3))

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    gradients = jax.jit(jax.value_and_grad(loss))
    kept = [params]

    def step(batch: Any) -> None:
        kept[0] = ms.jax.apply(rule, gradients(kept[0], batch)[1], kept[0])

    return step, drawn(ms, strategy, widths[0])


def keras_fit(ms: Any, strategy: Any, widths: tuple[int, ...], optimizer: str) -> tuple[Step, list[Any]]:
    """Return a fit of FIT steps, for no batches of its own. Collective."""
    import keras
    import numpy as np

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(widths[:1]), *(keras.layers.Dense(width, "tanh") for width in widths[1:])])
    model.compile({"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}[optimizer](1e-3), "mse")
    with strategy.scope():
        ms.keras.distribute(model)
    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=(FIT * ROWS, width)).astype(np.float32) for width in (widths[0], widths[-1]))
    return lambda _: model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0), [None]


if __name__ == "__main__":
    main()
