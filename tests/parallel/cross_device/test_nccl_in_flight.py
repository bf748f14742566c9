"""The host does not wait for a step's sums by NCCL: what follows is ordered behind them, on the stand-in for CuPy."""

import shutil

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++, which compiles the kernels for the stand-in"
)
pytestmark = [pytest.mark.ranks(2), needs_compiler]


@pytest.fixture
def cupy(monkeypatch):
    yield from stand_in(monkeypatch)


@pytest.fixture
def training(cupy):
    """A strategy and a function that takes a step, whose sums are in flight when it returns."""
    with ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{MPI.COMM_WORLD.rank}"]) as strategy:
        with strategy.scope():
            variable, optimizer = ms.Variable(np.zeros(300, np.float32), name="v"), ms.optimizers.Adam(0.1)

        def step():
            variable.grad[...] = 1.0
            optimizer.apply_gradients([(variable.grad, variable)])

        def train():
            strategy.run(step)
            assert honest_cupy.sums_in_flight()

        train()
        yield strategy, train, variable
    assert not honest_cupy.sums_in_flight()
    assert not honest_cupy.report()[0]


def bits(cupy):
    return cupy.asarray(np.arange(4, dtype=np.uint16))  # a dtype that NCCL does not sum


FOLLOWING = {
    "a step": lambda strategy, train, cupy: train(),
    "a sum by MPI": lambda strategy, train, cupy: strategy.reduce("SUM", bits(cupy), axis=None),
    "a largest number": lambda strategy, train, cupy: strategy.extended.reduce_to("MAX", bits(cupy), bits(cupy)),
    "a sum by NCCL": lambda strategy, train, cupy: strategy.reduce("SUM", cupy.ones(3, np.float32), axis=None),
    "a collective on the host": lambda strategy, train, cupy: strategy.gather(np.ones((1, 2)), axis=0),
    "nothing": lambda strategy, train, cupy: None,
}


@pytest.mark.parametrize("what", FOLLOWING)
def test_what_follows_is_ordered_behind_the_sums(training, cupy, what):
    strategy, train, variable = training
    before = honest_cupy.M.counts["nccl"]
    FOLLOWING[what](strategy, train, cupy)
    if what not in ("a step", "nothing"):
        assert honest_cupy.M.counts["nccl"] > before or not honest_cupy.sums_in_flight()
    np.testing.assert_allclose(variable.numpy(), -0.2 if what == "a step" else -0.1, rtol=1e-4)


def test_the_host_is_one_step_ahead_at_most(training):
    _, train, _ = training
    train()
    of_a_step = honest_cupy.sums_in_flight()
    for _ in range(3):
        train()
    assert honest_cupy.sums_in_flight() == of_a_step
