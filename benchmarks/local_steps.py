"""Local steps (DiLoCo) against synchronous training: time of a step, and the loss and accuracy that training ends with.

    mpiexec -n 4 python benchmarks/local_steps.py --output benchmarks/results/today

Over two isolated hosts, and as ranks see them on one machine (each rank a node there: MPISTRAT_SHARED_MEMORY=0):

    python benchmarks/run.py benchmarks/results/today --only local_steps --mpi-env mpich=.venv/bin/python

Time: Adam on `--parameters` float32, synchronous and with each number of local steps, in turns of `--rounds` rounds of so many
steps, an outer step among them; the limit is a step of one node alone, which no network can slow down. Loss: the digits of the
examples, same batches, same epochs, over `--seeds` seeds: mean and least and largest over seeds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import numpy as np

import mpistrat as ms
from mpistrat.examples import digits_data
from mpistrat.examples.digits_model import Digits

LAYERS = 16
EVERY = (10, 50)
STEPS = 50  # in a turn: each has as many outer steps as belong to it


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=4_200_000, rounds=3, seeds=3, epochs=12)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    seconds = times(comm, options.parameters, options.rounds)
    losses = {name: quality(how, options.seeds, options.epochs) for name, how in contenders().items()}
    machine = harness.machine(comm, ())
    if comm.rank == 0:
        first = seconds["synchronous"]
        rows = [[name, f"{1e3 * each:.2f} ms", f"{first / each:.2f} ×"] for name, each in seconds.items()]
        title = f"a step of Adam on {options.parameters / 1e6:.1f} M parameters, {comm.size} ranks, {machine['nodes']} nodes"
        print(harness.table(title, ["", "least of a turn, each step", "speed"], rows))
        rows = [
            [name, *(f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" for values in found)]
            for name, found in losses.items()
        ]
        print(harness.table(f"digits after {options.epochs} epochs", ["", "test loss", "test accuracy"], rows))
        result = {"benchmark": "local_steps", "machine": machine, "parameters": options.parameters}
        harness.save(options.output, {**result, "step_seconds": seconds, "digits": losses})


def contenders() -> dict[str, ms.LocalSteps | None]:
    """Return what is compared: synchronous training; local steps with the outer step of DiLoCo, and with plain means."""
    found: dict[str, ms.LocalSteps | None] = {"synchronous": None}
    for every in EVERY:
        found[f"{every} local steps, means"] = ms.LocalSteps(every, outer_learning_rate=1.0, outer_momentum=0.0)
        found[f"{every} local steps, DiLoCo's"] = ms.LocalSteps(every)
    return found


def times(comm: Any, parameters: int, rounds: int) -> dict[str, float]:
    """Return the least time of a step by contender, turns of STEPS steps each. Collective."""
    made: dict[str, tuple[Any, Any, list[Any]]] = {}
    for name, how in contenders().items():
        if how is not None and not how.outer_momentum:  # it takes as long as DiLoCo's
            continue
        made[name] = _made(ms.MultiWorkerMirroredStrategy(local_steps=how), parameters)
    alone = _node_of(made["synchronous"][0])
    made["one node alone"] = _made(ms.MultiWorkerMirroredStrategy(comm=alone), parameters)
    least = dict.fromkeys(made, float("inf"))
    for number in range(rounds + 1):  # the first warms up
        for name, (strategy, optimizer, variables) in made.items():
            pairs = [(variable.grad, variable) for variable in variables]
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                strategy.run(lambda: optimizer.apply_gradients(pairs))  # noqa: B023
            taken = harness.largest(comm, time.perf_counter() - start) / STEPS
            if number:
                least[name] = min(least[name], taken)
    for strategy, _, _ in made.values():
        strategy.close()
    return least


def _node_of(strategy: Any) -> Any:
    """Return a communicator of this rank's node as the strategy sees it. Collective."""
    group = strategy.extended.process_group
    return strategy.comm.Split(group.node_index, strategy.rank)


def _made(strategy: Any, parameters: int) -> tuple[Any, Any, list[Any]]:
    rows = max(1, parameters // LAYERS // 1000)
    with strategy.scope():
        variables = [ms.Variable(np.ones((rows, 1000), np.float32), name=f"layer_{i}") for i in range(LAYERS)]
        optimizer = ms.optimizers.Adam(1e-3)
    for variable in variables:
        variable.grad[...] = 1e-3
    return strategy, optimizer, variables


def quality(how: ms.LocalSteps | None, seeds: int, epochs: int) -> tuple[list[float], list[float]]:
    """Return the test losses and accuracies that training on digits ends with, of each seed. Collective."""
    pixels, labels = digits_data.load()
    order = np.random.default_rng(2024).permutation(len(labels))
    images, labels = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    test = slice(0, digits_data.TEST_ROWS)
    losses, accuracies = [], []
    for seed in range(seeds):
        with ms.MultiWorkerMirroredStrategy(local_steps=how) as strategy:
            rows = ms.data.from_arrays((images[test.stop :], labels[test.stop :])).shuffle(seed=seed).batch(96)
            with strategy.scope():
                model, optimizer = Digits(seed, "float32"), ms.optimizers.Adam(1e-3)

            def step(x: np.ndarray, y: np.ndarray) -> None:
                model.scores_and_gradients(x, y)  # noqa: B023
                optimizer.apply_gradients([(v.grad, v) for v in model.variables])  # noqa: B023

            data = strategy.distribute_dataset(rows)
            for _ in range(epochs):
                for batch in data:
                    strategy.run(step, args=batch)
            strategy.outer_step()
            scores = model.forward(images[test])[-1]
            wrong = np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)) + scores.max(axis=1)
            losses.append(float((wrong - scores[np.arange(test.stop), labels[test]]).mean()))
            accuracies.append(float((scores.argmax(axis=1) == labels[test]).mean()))
    return losses, accuracies


if __name__ == "__main__":
    main()
