"""Programs of NumPy for `ms.shadow`, on the ranks of a communicator, with or without a planted fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat as ms

STEPS = 6
ONE_GRADIENT = {"one skipped": 0.0, "one thrice": 3.0, "one NaN": np.nan}  # a factor of the last rank's


def recorded(folder: Any, train: Callable[[Any], None], comm: Any, **options: Any) -> None:
    """Record a program on rank 0 alone, and how far rounding carries. Collective."""
    from mpi4py import MPI

    error = None
    try:
        if comm.rank == 0:
            with ms.shadow.record(folder, steps=STEPS, **options):
                train(MPI.COMM_SELF)
            for _ in range(2):
                with ms.shadow.round_off(folder, steps=STEPS):
                    train(MPI.COMM_SELF)
    except Exception as caught:
        error = caught
    assert not any(comm.allgather(None if error is None else repr(error))), error


def first_difference(folder: Any, train: Callable[[Any], None], comm: Any) -> ms.errors.DifferenceError | None:
    """Return the first difference, which all ranks must find, None for none. Collective."""
    found = None
    with contextlib.suppress(ms.errors.DifferenceError), ms.shadow.compare(folder, steps=STEPS) as report:
        try:
            train(comm)
        except ms.errors.DifferenceError as error:
            found = error
            raise
    assert len(set(comm.allgather(str(found)))) == 1
    if found is None:
        assert report.steps == STEPS
        assert report.points > 3 * STEPS + 2 * len(report.left_out)
    return found


def expect_faults(
    folder: Any,
    faults: dict[str, tuple[int, str, str, str]],
    program: Callable[[str], Callable[[Any], None]],
    comm: Any,
) -> None:
    """Run a program with each fault. Collective.

    Args:
        folder: of the recorded run.
        faults: of each the step, the ranks ("all", "last", or another word for any), the operation, and words of the text.
        program: returns the program with a fault.
        comm: of the ranks.
    """
    for fault, (step, ranks, operation, words) in faults.items():
        found = first_difference(folder, program(fault), comm)
        assert found is not None, fault
        assert (found.step, found.operation) == (step, operation), (fault, str(found))
        assert words in str(found), (fault, str(found))
        expected = {"all": tuple(range(comm.size)), "last": (comm.size - 1,)}.get(ranks, found.ranks)
        assert found.ranks == expected, (fault, str(found))


class Net:
    """A regression by two layers: random sizes, batches, dtype, activation and rule.

    Args:
        seed: of all that is random.
        fault: of the program; "" for none.
    """

    def __init__(self, seed: int, fault: str = "") -> None:
        rng = np.random.default_rng(seed)
        self.fault, self.dtype = fault, rng.choice([np.float32, np.float64])
        rows, width, self.hidden = int(rng.integers(20, 90)), int(rng.integers(1, 12)), int(rng.integers(1, 20))
        self.x = (rng.normal(size=(rows, width)) * 10 ** rng.uniform(-1.5, 0.5)).astype(self.dtype)
        self.y = rng.normal(size=rows).astype(self.dtype)
        self.batch = int(rng.integers(4, 24))
        self.relu = bool(rng.integers(2))
        self.rule, self.seed = int(rng.integers(4)), seed
        self.sums = not rng.integers(3)  # True if the program itself sums gradients

    def optimizer(self) -> ms.optimizers.Optimizer:
        make: list[Callable[[], ms.optimizers.Optimizer]] = [
            lambda: ms.optimizers.SGD(0.01, momentum=0.9),
            lambda: ms.optimizers.Adam(0.01),
            lambda: ms.optimizers.RMSProp(0.01, global_clipnorm=1.0),
            lambda: ms.optimizers.Lion(0.001),
        ]
        return make[self.rule]()

    def __call__(self, comm: Any) -> None:
        """Train. Collective."""
        fault, rng = self.fault if comm.size > 1 else "", np.random.default_rng(self.seed)
        last = comm.size - 1
        with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
            with strategy.scope():
                inner = ms.Variable(
                    (rng.normal(size=(self.x.shape[1], self.hidden)) / 3).astype(self.dtype), name="inner"
                )
                bias = ms.Variable(np.zeros(self.hidden, self.dtype), name="bias")
                outer = ms.Variable((rng.normal(size=self.hidden) / 3).astype(self.dtype), name="outer")
                optimizer = self.optimizer()
            optimizer.learning_rate *= 1.01 if fault == "rate" else 1.0
            known: list[np.ndarray] = []

            def step(x: np.ndarray, y: np.ndarray, size: int) -> None:
                weights = inner.numpy()
                known.append(weights)
                if fault == "stale" and strategy.rank == last and len(known) > 2:
                    weights = known[-2]
                before = x @ weights + bias.array
                hidden = np.maximum(before, 0) if self.relu else np.tanh(before)
                ms.shadow.tensor("hidden", hidden)
                miss = hidden @ outer.array - y
                error = 2 * miss / (max(len(x), 1) if fault == "divisor" else size)
                slope = np.multiply.outer(error, outer.array) * ((before > 0) if self.relu else 1 - hidden**2)
                gradients = [x.T @ slope, slope.sum(0), hidden.T @ error]
                if fault == "skipped" and strategy.rank == last:
                    gradients = [0 * each for each in gradients]
                if fault == "twice" and strategy.rank == last:
                    gradients = [2 * each for each in gradients]
                if fault in ONE_GRADIENT and strategy.rank == last:
                    gradients[2] = ONE_GRADIENT[fault] * gradients[2]
                gradients = [each.astype(self.dtype) for each in gradients]
                if self.sums:
                    gradients = ms.get_replica_context().all_reduce("SUM", gradients)
                pairs = zip(gradients, (inner, bias, outer), strict=True)
                optimizer.apply_gradients(pairs, experimental_aggregate_gradients=not self.sums)

            rows = ms.data.from_arrays((self.x, self.y)).shuffle(seed=self.seed + (fault == "order")).repeat()
            data = iter(strategy.distribute_dataset(rows.batch(self.batch)))
            for number in range(STEPS + 1):
                x, y = batch = next(data)
                size = ms.context.global_batch_size(batch)
                if fault == "all rows" and number == 1:  # each rank reads those of rank 0
                    x, y = strategy.broadcast_object((x, y))
                if fault == "labels" and strategy.rank == last and number == 1:
                    y = np.roll(y, 1)
                strategy.run(step, args=(x, y, size))
                if fault == "written" and number == 1:
                    outer.assign(outer.numpy() * 1.001)
