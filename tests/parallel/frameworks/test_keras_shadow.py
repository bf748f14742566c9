"""Keras models on several ranks beside one process: each planted fault is named, no correct program is, nothing is silent."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.shadow_programs import STEPS, expect_faults, first_difference, recorded  # noqa: E402

pytestmark = pytest.mark.timeout(240)  # JAX compiles each program on each rank, and eagerly each operation
BACKEND = keras.backend.backend()
layers = keras.layers

# fault: the step, the ranks ("all" or "last"), the operation, and words of the text
FAULTS = {
    "rate": (1, "all", "parameter dense/kernel after the update", "learning rate"),
    "rows": (2, "last", "input", "inputs is not in the batch and targets is that of row"),
    "order": (1, "all", "input", "read in another order"),
    "assigned": (3, "last", "parameter dense/kernel at the start of the step", "on these ranks only"),
    "scaled": (1, "last", "gradient of dense/kernel", "2 times what it should be"),
}
LEFT_OUT = {
    "dropout": ("all after dropout", "draws random numbers"),
    "batch norm": ("all after batch_normalization", "normalizes by the rows of each rank"),
}
CORRECT = ["", "accumulation", "", "eagerly", "" if BACKEND == "torch" else "steps"]


class Program:
    """A classifier of random layers and sizes, by `fit` or a loop over `train_on_batch`, with or without a fault."""

    def __init__(self, seed, fault="", special=""):
        rng = np.random.default_rng(seed)
        self.seed, self.fault, self.special = seed, fault, special
        self.rows, self.batch = int(rng.integers(60, 100)), int(rng.integers(8, 24))
        self.words = seed % 4 == 2
        self.x = (
            rng.integers(0, 20, (self.rows, 5)) if self.words else rng.normal(size=(self.rows, 6)).astype("float32")
        )
        self.y = rng.integers(0, 3, self.rows)
        self.loops = special == "loop"
        self.weighted = rng.random(self.rows).astype("float32") if seed % 3 == 1 else None
        self.shuffle = seed % 2 == 0
        width = int(rng.integers(4, 16))
        self.inner = [
            lambda: [layers.Dense(width, "relu")],
            lambda: [layers.Reshape((6, 1)), layers.Conv1D(4, 3, activation="gelu"), layers.Flatten()],
            lambda: [layers.Embedding(20, 6), layers.GRU(width)],
            lambda: [layers.Dense(width, "tanh", kernel_regularizer="l2"), layers.LayerNormalization()],
        ][seed % 4]

    def model(self):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(self.seed)
        more = {"dropout": [layers.Dropout(0.3)], "batch norm": [layers.BatchNormalization()]}.get(self.special, [])
        return keras.Sequential([keras.Input(self.x.shape[1:]), *self.inner(), *more, layers.Dense(3)])

    def optimizer(self, rate):
        more = {"gradient_accumulation_steps": 2} if self.special == "accumulation" else {}
        kinds = [keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.AdamW, keras.optimizers.Adadelta]
        return kinds[self.seed % 4](rate, **more)

    def __call__(self, comm):
        fault, x = self.fault if comm.size > 1 else "", self.x.copy()
        with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
            with strategy.scope():
                model = ms.keras.distribute(self.model())
            options = {"steps_per_execution": 2} if self.special == "steps" else {}
            options |= {"run_eagerly": True} if self.special == "eagerly" else {}
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            rate = 0.0101 if fault == "rate" else 0.01
            model.compile(optimizer=self.optimizer(rate), loss=loss, weighted_metrics=[], **options)
            last = strategy.rank == strategy.size - 1
            if fault == "scaled" and last:
                scaled(model.optimizer)
            if fault == "rows":
                x[2 * self.batch - 1] = 0  # the last row of step 2
            if self.loops:
                self.loop(strategy, model, x, fault, last)
                return
            keras.utils.set_random_seed(self.seed)
            fitting = {"batch_size": self.batch, "epochs": 3, "shuffle": self.shuffle, "verbose": 0}
            model.fit(x, self.y, sample_weight=self.weighted, steps_per_epoch=None, **fitting)

    def loop(self, strategy, model, x, fault, last):
        rows = ms.data.from_arrays((x, self.y))
        rows = rows.shuffle(seed=1) if fault == "order" else rows
        batches = iter(strategy.distribute_dataset(rows.repeat().batch(self.batch)))
        for number in range(STEPS + 1):
            model.train_on_batch(*next(batches))
            if fault == "assigned" and last and number == 1:
                kernel = model.trainable_variables[0]
                kernel.assign(kernel.value * 1.001)


def scaled(optimizer):
    """Make an optimizer of this rank get gradients times 2."""
    kind = type(optimizer)
    optimizer.apply = lambda gradients, *more: kind.apply(optimizer, [2 * each for each in gradients], *more)
    optimizer.stateless_apply = lambda slots, gradients, weights: kind.stateless_apply(
        optimizer, slots, [2 * each for each in gradients], weights
    )


@pytest.mark.ranks(2)
def test_each_fault_is_named_by_its_step_rank_and_tensor(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    recorded(mpi_tmp_path, Program(0, special="loop"), comm)
    expect_faults(mpi_tmp_path, FAULTS, lambda fault: Program(0, fault, "loop"), comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(len(CORRECT)))
def test_no_correct_program_differs(seed, mpi_tmp_path):
    from mpi4py import MPI

    comm, special = MPI.COMM_WORLD, CORRECT[seed]
    recorded(mpi_tmp_path, Program(seed, special=special), comm)
    assert first_difference(mpi_tmp_path, Program(seed, special=special), comm) is None


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("special", LEFT_OUT)
def test_what_cannot_be_equal_is_reported(special, mpi_tmp_path):
    """Rows are compared to the end; on one rank all is equal."""
    from mpi4py import MPI

    comm, (operation, reason) = MPI.COMM_WORLD, LEFT_OUT[special]
    recorded(mpi_tmp_path, Program(0, special=special), comm)
    with ms.shadow.compare(mpi_tmp_path, steps=STEPS) as report:
        Program(0, special=special)(comm)
    assert report.steps == STEPS and report.rows > 5 * STEPS
    if comm.size == 1:
        assert report.left_out == {} and report.points > 6 * STEPS
    else:
        assert reason in report.left_out[operation], report
