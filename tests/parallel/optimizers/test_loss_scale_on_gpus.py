"""LossScaleOptimizer on GPUs, on the stand-in for CuPy: the GPU decides which steps are skipped, with the numbers of CPUs."""

import shutil

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.arena import arena
from mpistrat.optimizers import device_scale
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy
from tests.single.base.test_loops import assert_same_bits

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for the stand-in"),
]
SHAPES = ((5, 301), (7,), (64,))
STEPS = 20


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setattr(arena, "FIRST_SLAB", 1 << 16)  # the stand-in fills memory that nothing uses, too
    yield from stand_in(monkeypatch)
    assert not honest_cupy.report()[0]


RULES = {
    "adamw": lambda: ms.optimizers.AdamW(0.01),
    "nadam": lambda: ms.optimizers.Nadam(0.01),
    "a schedule": lambda: ms.optimizers.Adam(ms.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), weight_decay=0.1),
    "momentum": lambda: ms.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.5),
    "clipped": lambda: ms.optimizers.AdamW(0.01, global_clipnorm=1.0),
    "each clipped": lambda: ms.optimizers.Adamax(0.01, clipnorm=1.0),
    "a callable": lambda: ms.optimizers.Adam(lambda step: 0.1 / (1 + step)),
    "accumulated": lambda: ms.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averages": lambda: ms.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "lamb": lambda: ms.optimizers.Lamb(0.01),
}
ON_DEVICE = ("adamw", "nadam", "a schedule", "momentum", "clipped", "each clipped")


class Program:
    """Training on one device with gradients that overflow at random, on one replica of all or none."""

    def __init__(self, strategy, make, dtype: str, to_array, growth: int = 3, seed: int = 0) -> None:
        self.strategy, self.to_array, self.seed = strategy, to_array, seed
        with strategy.scope():
            starts = [np.random.default_rng(i).normal(size=shape).astype(dtype) for i, shape in enumerate(SHAPES)]
            self.variables = [ms.Variable(start, name=f"v{i}") for i, start in enumerate(starts)]
            self.optimizer = ms.optimizers.LossScaleOptimizer(
                make(), initial_scale=2.0**10, dynamic_growth_steps=growth
            )

    def step(self, number: int):
        replica, random = ms.get_replica_context().replica_id_in_sync_group, np.random.default_rng([self.seed, number])
        bad = random.random() < 0.4 and int(random.integers(self.strategy.num_replicas_in_sync))
        value = random.choice([np.inf, -np.inf, np.nan])
        random, pairs = np.random.default_rng([self.seed, number, replica]), []
        scale = self.to_array(np.ones((), np.float32))
        scale = self.optimizer.scale_loss(scale)
        for variable in self.variables:
            gradient = np.round(random.normal(size=variable.shape), 1).astype(variable.dtype)
            if bad is not False and bad == replica and variable is self.variables[-1]:
                gradient.reshape(-1)[number % 5] = value
            variable.grad[...] = self.to_array(gradient) * scale.astype(variable.dtype)
            pairs.append((variable.grad, variable))
        return self.optimizer.apply_gradients(pairs)

    def run(self, first: int = 0, last: int = STEPS, ask: bool = False) -> list:
        found = []
        for number in range(first, last):
            with np.errstate(invalid="ignore", over="ignore"):
                count = self.strategy.run(self.step, args=(number,))
            if ask:
                found.append((int(count), *self.counts()))
        return found

    def counts(self) -> tuple:
        optimizer = self.optimizer
        return optimizer.iterations, optimizer.step_counter, float(optimizer.dynamic_scale), optimizer.learning_rate

    def state(self) -> list:
        slots = [slot for v in self.variables for slot in self.optimizer.inner_optimizer.slots(v).values()]
        return [v.numpy() for v in self.variables] + slots


def on(device: str, make, dtype: str = "float32", **more) -> tuple:
    """Counts after each step if they are asked for, at the end, and weights and slots."""
    to_array = (lambda array: array) if device.startswith("cpu") else __import__("cupy").asarray
    with ms.MultiWorkerMirroredStrategy(devices=[device]) as strategy:
        program = Program(strategy, make, dtype, to_array)
        found = program.run(**more)
        return found, program.counts(), program.state()


def gpu() -> str:
    return f"gpu:{MPI.COMM_WORLD.rank}"


def alike(found, expected, dtype: str) -> None:
    for mine, of_cpu in zip(found, expected, strict=True):
        if MPI.COMM_WORLD.size == 1:
            assert_same_bits(mine, of_cpu)
        else:  # norms of two ranks are added in another order
            np.testing.assert_allclose(mine, of_cpu, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-6)


CASES = [*((name, "float32", False) for name in RULES), ("adamw", "float32", True), ("adamw", "float64", False),
         ("clipped", "float16", False)]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "ask"), CASES)
def test_counts_and_weights_are_those_of_cpus(cupy, name, dtype, ask):
    expected, found = on("cpu:0", RULES[name], dtype, ask=ask), on(gpu(), RULES[name], dtype, ask=ask)
    assert found[:2] == expected[:2]
    assert 0 < found[1][0] < STEPS  # some were skipped
    alike(found[2], expected[2], dtype)


def test_the_host_is_not_asked_where_the_gpu_decides(cupy):
    """Steps are taken in advance: the host learns of the skipped ones when the program asks."""
    for name in RULES:
        with ms.MultiWorkerMirroredStrategy(devices=[gpu()]) as strategy:
            program = Program(strategy, RULES[name], "float32", cupy.asarray)
            program.run(0, 2)
            honest_cupy.M.counts.clear()
            program.run(2, 5)
            asked = honest_cupy.M.counts["copy to host"]
            assert asked == 0 if name in ON_DEVICE else asked > 0


@pytest.mark.parametrize("rows", [1, 4])
def test_more_steps_than_the_gpu_has_rows_for(cupy, rows, monkeypatch):
    expected = on("cpu:0", RULES["a schedule"])
    monkeypatch.setattr(device_scale, "ROWS", rows)
    found = on(gpu(), RULES["a schedule"])
    assert found[1] == expected[1]
    alike(found[2], expected[2], "float32")


def changing(device: str, change) -> tuple:
    to_array = (lambda array: array) if device.startswith("cpu") else __import__("cupy").asarray
    with ms.MultiWorkerMirroredStrategy(devices=[device]) as strategy:
        program, counts = Program(strategy, RULES["a schedule"], "float32", to_array), []
        for part in range(5):
            program.run(4 * part, 4 * part + 4)
            change(program, part)
            counts.append(program.counts() if part % 2 else None)
        return counts, program.counts(), program.state()


def set_rate(program, part: int) -> None:
    program.optimizer.learning_rate = 0.1 / (1 + part)


def set_iterations(program, part: int) -> None:
    program.optimizer.inner_optimizer.iterations = 30 * part


def set_factor(program, part: int) -> None:
    program.optimizer.dynamic_scale.assign(8.0)


def other_variables(program, part: int) -> None:
    program.variables = program.variables[::-1][:2] if part else program.variables[::-1]


def to_averages_and_back(program, part: int) -> None:
    """A callable's rate may depend on anything, so the host counts."""
    program.optimizer.learning_rate = (lambda: 0.01) if part % 2 else 0.1


CHANGES = (set_rate, set_iterations, set_factor, other_variables, to_averages_and_back)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_by_the_program_count_from_the_next_step(cupy, change):
    expected, found = changing("cpu:0", change), changing(gpu(), change)
    assert found[:2] == expected[:2]
    alike(found[2], expected[2], "float32")


@pytest.mark.parametrize("first", ["cpu", "gpu"])
@pytest.mark.parametrize("sharded", [False, True])
def test_files_of_either_restore_on_the_other(cupy, tmp_path, first, sharded):
    """As if all steps were taken on one device. Only rank 0 asks for its count before."""
    path = MPI.COMM_WORLD.bcast(str(tmp_path / "state.h5"))
    devices = {"cpu": ("cpu:0", lambda array: array), "gpu": (gpu(), cupy.asarray)}
    expected = on("cpu:0", RULES["adamw"])
    for kind, (begin, end) in zip((first, *({"cpu", "gpu"} - {first})), ((0, 9), (9, STEPS)), strict=True):
        device, to_array = devices[kind]
        with ms.MultiWorkerMirroredStrategy(devices=[device], sharded_slots=sharded) as strategy:
            program = Program(strategy, RULES["adamw"], "float32", to_array)
            if begin:
                strategy.restore(path)
            program.run(begin, end)
            if strategy.rank == 0:
                assert program.optimizer.iterations > 0
            program.run(end, end)
            strategy.save(path)
            found = program.counts(), program.state()
    assert found[0] == expected[1]
    alike(found[1], expected[2], "float32")


def test_steps_that_are_all_skipped_are_reported(cupy, caplog):
    with ms.MultiWorkerMirroredStrategy(devices=[gpu()]) as strategy:
        program = Program(strategy, RULES["adamw"], "float32", cupy.asarray)

        def step():
            for variable in program.variables:
                variable.grad[...] = np.nan
            return program.optimizer.apply_gradients([(v.grad, v) for v in program.variables])

        before = program.state()
        for count, lines in ((49, 0), (11, 1), (10, 1)):
            for _ in range(count):
                found = strategy.run(step)
            assert program.optimizer.iterations == int(found) == 0
            texts = [record.getMessage() for record in caplog.records if "LossScaleOptimizer" in record.getMessage()]
            assert len(texts) == (lines if strategy.rank == 0 else 0)
            assert all(f"60 steps in a row were left out, for sums that are not finite: the factor is {2.0**-50:g}" in t
                       for t in texts)  # fmt: skip
        assert float(program.optimizer.dynamic_scale) == 2.0**-60
        for mine, of_start in zip(program.state(), before, strict=False):
            assert_same_bits(mine, of_start)


@pytest.mark.parametrize(("factor", "value"), [(2.0**127, 0.0), (2.0**-126, np.inf)])
def test_a_factor_stays_one_from_which_training_can_continue(cupy, factor, value):
    """It is neither doubled to infinity nor, in many steps, halved to 0."""
    with ms.MultiWorkerMirroredStrategy(devices=[gpu()]) as strategy:
        program = Program(strategy, RULES["momentum"], "float64", cupy.asarray, growth=1)
        program.optimizer.dynamic_scale.assign(factor)

        def step():
            for variable in program.variables:
                variable.grad[...] = value
            return program.optimizer.apply_gradients([(v.grad, v) for v in program.variables])

        assert int(strategy.run(step)) == (value == 0)
        assert program.counts()[:3] == (int(value == 0), 0, factor)
