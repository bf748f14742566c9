"""Optimizer.begin on GPUs, on the stand-in for CuPy: NCCL starts to sum a block when its last gradient is announced."""

import shutil

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.arena import arena
from mpistrat.cross_device import nccl
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy
from tests.single.base.test_loops import assert_same_bits

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for the stand-in"),
]
SIZES = (64, 16, 128, 48)  # 256 elements in all: four blocks
BLOCK = 64


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, on which no work was found without an order when the test ends."""
    monkeypatch.setattr(arena, "FIRST_SLAB", 1 << 16)
    monkeypatch.setattr(nccl, "GPU_BLOCK", BLOCK)
    yield from stand_in(monkeypatch)
    assert not honest_cupy.report()[0]


class Program:
    """Training of four variables on this rank's GPU."""

    def __init__(self, strategy, make=lambda: ms.optimizers.AdamW(0.01), dtype: str = "float32") -> None:
        self.strategy = strategy
        with strategy.scope():
            self.variables = [ms.Variable(np.ones(size, dtype), name=f"v{i}") for i, size in enumerate(SIZES)]
            self.optimizer = make()
        self.inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        self.sums: list[int] = []

    def step(self, number: int, order=(3, 2, 1, 0), without=()):
        """Announce each gradient once it is there, and note the sums that NCCL has."""
        import cupy

        for i in order:
            variable = self.variables[i]
            random = np.random.default_rng([number, i, self.strategy.rank])
            variable.grad[...] = cupy.asarray(random.normal(size=variable.shape).astype(variable.dtype))
            if i not in without:
                self.inner.begin([variable])
            self.sums.append(honest_cupy.M.counts["nccl"])
        return self.optimizer.apply_gradients([(v.grad, v) for v in self.variables])

    def run(self, steps: int = 3, **how) -> None:
        for number in range(steps):
            honest_cupy.M.counts.clear()
            self.sums = []
            self.strategy.run(self.step, args=(number,), kwargs=how)

    def state(self) -> list:
        slots = [slot for v in self.variables for slot in self.inner.slots(v).values()]
        return [v.numpy() for v in self.variables] + slots


def opened():
    return ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{MPI.COMM_WORLD.rank}"])


def test_a_block_starts_with_its_last_gradient(cupy):
    several = MPI.COMM_WORLD.size > 1
    with opened() as strategy:
        program = Program(strategy)
        program.run(1)
        assert program.sums == [0] * 4  # the first step connects the ranks
        program.run()
        # From the end: 48 elements, then 176, so that two blocks of 64 are complete, then 192, 256.
        assert program.sums == [several * sums for sums in (0, 2, 3, 4)]
        assert honest_cupy.M.counts["nccl"] == 4 * several
        assert honest_cupy.M.counts["wait"] <= several
        program.run(order=(0, 1, 2, 3))  # blocks start in one order only
        assert program.sums == [0, 0, 0, several * 4]
        program.run(without=(2,))
        assert program.sums == [0] * 4
        assert honest_cupy.M.counts["nccl"] == 4 * several


MAKES = {
    "adamw": lambda: ms.optimizers.AdamW(0.01),
    "loss scale": lambda: ms.optimizers.LossScaleOptimizer(ms.optimizers.AdamW(0.01)),
    "clipped": lambda: ms.optimizers.AdamW(0.01, global_clipnorm=1.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", MAKES)
def test_the_bits_are_those_of_steps_without(cupy, name, dtype):
    found = []
    for without in ((), (2,), (0, 1, 2, 3)):
        with opened() as strategy:
            program = Program(strategy, MAKES[name], dtype)
            program.run(without=without)
            found.append(program.state())
    for states in zip(*found, strict=True):
        for state in states[1:]:
            assert_same_bits(state, states[0])


def test_gradients_stay_and_can_be_written_after_the_step(cupy):
    with opened() as strategy:
        program = Program(strategy)
        program.run()
        for i, variable in enumerate(program.variables):
            random = np.random.default_rng([2, i, strategy.rank])
            np.testing.assert_array_equal(variable.gradient(0).get(), random.normal(size=variable.shape).astype("f4"))


def test_an_error_after_begin_leaves_nothing_behind(cupy):
    """Sums that no step takes are dropped, and the next step sums anew."""
    found = []
    for fails in (False, True):
        with opened() as strategy:
            program = Program(strategy)
            program.run(2)
            if fails:

                def fail(program=program):
                    for variable in program.variables[::-1]:
                        variable.grad[...] = 7.0
                        program.optimizer.begin([variable])
                    program.optimizer.apply_gradients([(v.grad, v) for v in program.variables[1:]])

                with pytest.raises(ValueError, match="a gradient for each variable passed to begin"):
                    strategy.run(fail)
            program.run(2)
            found.append(program.state())
    for mine, expected in zip(*reversed(found), strict=True):
        assert_same_bits(mine, expected)


def test_two_optimizers_of_one_arena(cupy):
    """Those of the one that took the last step start early, and nothing is mixed."""
    found = []
    for early in (False, True):
        with opened() as strategy:
            program = Program(strategy)
            with strategy.scope():
                other = ms.optimizers.SGD(0.5)

            def step(number, program=program, other=other, early=early):
                for i, variable in enumerate(program.variables):
                    variable.grad[...] = float(number + i + strategy.rank)
                for optimizer, some in ((program.optimizer, program.variables[:2]), (other, program.variables[2:])):
                    if early:
                        optimizer.begin(some)
                for optimizer, some in ((program.optimizer, program.variables[:2]), (other, program.variables[2:])):
                    optimizer.apply_gradients([(v.grad, v) for v in some])

            for number in range(4):
                honest_cupy.M.counts.clear()
                strategy.run(step, args=(number,))
            assert honest_cupy.M.counts["nccl"] == (5 if MPI.COMM_WORLD.size > 1 else 0)  # of 80 and 176 elements
            found.append([variable.numpy() for variable in program.variables])
    for mine, expected in zip(*found, strict=True):
        assert_same_bits(mine, expected)


def test_mpi_gets_memory_of_gpus_after_started_sums(cupy):
    """A call of MPI with memory of GPUs and sums by NCCL could wait for each other."""
    with opened() as strategy:
        program = Program(strategy)
        program.run(2)

        def step():
            program.optimizer.begin(program.variables)
            started = honest_cupy.M.counts["nccl"]
            least = ms.get_replica_context().all_reduce("MIN", cupy.asarray(np.full(3, 1.0 + strategy.rank)))
            found = [stream.finished for stream in honest_cupy.M.streams if not stream.blocking]
            program.optimizer.apply_gradients([(v.grad, v) for v in program.variables])
            return started, all(found), float(least[0])

        honest_cupy.M.counts.clear()
        assert strategy.run(step) == (4 if MPI.COMM_WORLD.size > 1 else 0, True, 1.0)
