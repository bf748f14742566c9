"""A step of Adam with a backward pass, in which gradients become final in buckets: with Optimizer.begin and without it.

    MPISTRAT_SHARED_MEMORY=0 mpiexec -n 2 python benchmarks/early_gradients.py --output benchmarks/results/today
    mpiexec -hosts a,b -n 2 python benchmarks/early_gradients.py --backward 500 --count 16777216

Over two isolated hosts of a rank and a core each:

    python benchmarks/run.py benchmarks/results/today --only early_gradients --mpi-env mpich=.venv/bin/python

The backward pass leaves the core free, as a GPU's does ("core free"); or computes gradients of dense layers by NumPy, or by a
module of PyTorch, where that is installed. "automatic" is what `begin` chooses by itself, as it goes on; what it chose, and by
which times, is printed, too. The limit is the longer one of backward pass and communication.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

import mpistrat as ms

LAYERS = 16
TRIALS = 20  # steps after which the automatic choice is made
STEPS = 3  # in a turn
WITH, WITHOUT, AUTOMATIC = "begin", "no begin", "automatic"
BACKWARD, STEP = "backward alone", "apply_gradients alone"
KINDS = ("core free", "NumPy", "PyTorch")


class Forced:
    """In place of a choice: always early."""

    early = open = True
    words = ""

    def note_step(self, group: Any, begun: bool) -> None:
        """Measure nothing."""


class Layers:
    """Dense layers in NumPy, and a backward pass of so many rows; or one that only takes as long."""

    def __init__(self, strategy: Any, options: Any, rows: int, sleeps: bool) -> None:
        self._pause = options.backward / 1e3 / LAYERS if sleeps else 0.0
        width = math.isqrt(options.count // LAYERS)
        rng = np.random.default_rng(7)
        with strategy.scope():
            self.variables = [
                ms.Variable(rng.normal(size=(width, width)).astype(np.float32) / width, name=f"layer_{i}")
                for i in range(LAYERS)
            ]
            self.optimizer = ms.optimizers.Adam(1e-6)
        self._input, self._delta = (rng.normal(size=(rows, width)).astype(np.float32) for _ in range(2))
        self._next = np.empty_like(self._delta)

    def backward(self, done: Callable[[Any], None]) -> None:
        """Make the gradients, the last layer's first."""
        for variable in reversed(self.variables):
            if self._pause:
                time.sleep(self._pause)
            else:
                np.matmul(self._input.T, self._delta, out=variable.grad)
                np.matmul(self._delta, variable.array.T, out=self._next)
            done(variable)

    def step(self, early: bool) -> None:
        """Take a step; in replica context."""
        self.backward(lambda variable: self.optimizer.begin([variable]) if early else None)
        self.update()

    def update(self) -> None:
        """Update the layers; in replica context."""
        self.optimizer.apply_gradients([(v.grad, v) for v in self.variables])

    @property
    def begun(self) -> Any:
        """What chooses."""
        return self.optimizer._core.begun


class TorchLayers:
    """The same layers as a module of PyTorch."""

    def __init__(self, strategy: Any, options: Any, rows: int, early: bool) -> None:
        import torch

        torch.set_num_threads(1)
        width = math.isqrt(options.count // LAYERS)
        torch.manual_seed(7)
        self._module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self._adam: Any = torch.optim.Adam(self._module.parameters(), 1e-6)
        with strategy.scope():
            ms.torch.distribute(self._module, self._adam, overlap=early)
        self._rows = torch.randn(rows, width)

    def backward(self, done: Callable[[Any], None]) -> None:
        """Go forwards and backwards."""
        self._adam.zero_grad(set_to_none=False)
        self._module(self._rows).square().mean().backward()

    def step(self, early: bool) -> None:
        """Take a step; in replica context."""
        self.backward(lambda variable: None)
        self.update()

    def update(self) -> None:
        """Update the layers; in replica context."""
        self._adam.step()

    @property
    def begun(self) -> Any:
        """What chooses."""
        return self._adam.mpistrat_rule._core.begun


def made(strategy: Any, options: Any, kind: str, rows: int, early: bool) -> Any:
    """Return layers in an arena of their own, which gets no more variables after a step. Collective."""
    layers: Any
    if kind == "PyTorch":
        layers = TorchLayers(strategy, options, rows, early)
    else:
        layers = Layers(strategy, options, rows, kind == "core free")
    strategy.run(layers.step, (early,))
    return layers


def rows_of(strategy: Any, options: Any, kind: str) -> int:
    """Return the rows of a batch with which a backward pass takes about as long as it shall. Collective."""
    if kind == "core free":
        return 1
    rows = 32
    for _ in range(3):
        alone = functools.partial(strategy.run, backward, (made(strategy, options, kind, rows, early=False),))
        seconds = harness.largest(strategy.comm, min(timed(alone) for _ in range(3)))
        rows = max(8, int(rows * options.backward / 1e3 / seconds))
    return rows


def backward(layers: Any) -> None:
    """Make gradients only; in replica context."""
    layers.backward(lambda variable: None)


def timed(operation: harness.Operation) -> float:
    """Return the seconds of an operation."""
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def in_turns(comm: Any, operations: dict[str, harness.Operation], options: Any) -> dict[str, tuple[float, float]]:
    """Return the seconds of a step of each, by the slowest rank: median and least of turns of STEPS steps. Collective."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    start = time.perf_counter()
    for number in range(options.repetitions + 1):
        for name, operation in operations.items():
            operation()
            comm.Barrier()
            taken = timed(lambda: [operation() for _ in range(STEPS)]) / STEPS  # noqa: B023
            if number:
                times[name].append(harness.largest(comm, taken))
        if harness.largest(comm, time.perf_counter() - start) > options.seconds and number > 2:
            break
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def measured(strategy: Any, options: Any, kind: str) -> tuple[dict[str, tuple[float, float]], str, int]:
    """Return the times of a kind of backward pass, what was chosen, and the rows of its batch. Collective."""
    rows = rows_of(strategy, options, kind)
    layers = {name: made(strategy, options, kind, rows, name != WITHOUT) for name in (WITHOUT, AUTOMATIC, WITH)}
    layers[WITH].begun.starter(strategy).choice = Forced()
    operations: dict[str, harness.Operation] = {
        name: lambda one=one, early=name != WITHOUT: strategy.run(one.step, (early,))  # type: ignore[misc]
        for name, one in layers.items()
    }
    for _ in range(TRIALS):
        operations[AUTOMATIC]()
    without = layers[WITHOUT]
    operations[BACKWARD] = lambda: strategy.run(backward, (without,))
    operations[STEP] = lambda: strategy.run(without.update)
    times = in_turns(strategy.comm, operations, options)
    return times, layers[AUTOMATIC].begun.starter(strategy).choice.words, rows


def main() -> None:
    """Measure all kinds of backward pass. Collective."""
    options = harness.arguments(
        __doc__, count=1 << 22, backward=100.0, repetitions=20, seconds=20.0, kinds=",".join(KINDS), pin=False
    )
    if options.pin:  # before libraries count the cores
        pin_to_a_core()
    figures, chosen, batches = {}, {}, {}
    with ms.MultiWorkerMirroredStrategy() as strategy:
        about = harness.machine(strategy.comm, ())
        for kind in options.kinds.split(","):
            if kind == "PyTorch" and importlib.util.find_spec("torch") is None:
                continue
            figures[kind], chosen[kind], batches[kind] = measured(strategy, options, kind)
        if strategy.rank == 0:
            report(options, about, figures, chosen, batches)


def pin_to_a_core() -> None:
    """Have this rank use one core, another one than its neighbour, also where hosts are isolated ones of one machine."""
    from mpi4py import MPI

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[MPI.COMM_WORLD.rank % len(cores)]})


def report(options: Any, about: Any, figures: Any, chosen: Any, batches: Any) -> None:
    """Print a table, and save the figures."""
    limits = {kind: max(times[BACKWARD][0], times[STEP][0]) for kind, times in figures.items()}
    names = [WITHOUT, AUTOMATIC, WITH, BACKWARD, STEP]
    rows = []
    for kind, times in figures.items():
        shown = [" / ".join(f"{1e3 * each:.1f}" for each in times[name]) for name in names]
        ratios = [f"{times[AUTOMATIC][i] / times[WITHOUT][i]:.3f}" for i in (0, 1)]
        rows.append([f"{kind}, {batches[kind]} rows", *shown, f"{1e3 * limits[kind]:.1f}", " / ".join(ratios)])
    title = f"{options.count:,} parameters, {about['ranks']} ranks on {about['nodes']} nodes; ms, median / least"
    header = ["backward", *names, "limit", f"{AUTOMATIC} : {WITHOUT}"]
    print(
        harness.table(title, header, rows),
        *(f"{kind}: {words}" for kind, words in chosen.items()),
        sep="\n",
        flush=True,
    )
    result = {"benchmark": "early_gradients", "machine": about, "parameters": options.count, "seconds": figures}
    harness.save(options.output, {**result, "rows": batches, "chosen": chosen, "limit_seconds": limits})


if __name__ == "__main__":
    main()
