"""Steps on one rank with two GPUs, of which either may be the current one (tests/models/honest_cupy.py)."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in."""
    yield from stand_in(monkeypatch)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_kernels_run_on_the_gpu_of_their_arrays(cupy, clip):
    """Also where another one is current, as after a second strategy."""
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            v, optimizer = ms.Variable(np.ones(4, np.float32)), ms.optimizers.SGD(0.5, global_clipnorm=clip)
        v.gradient(0)[...] = 1
        with cupy.cuda.Device(1):
            strategy.run(lambda: optimizer.apply_gradients([(v.gradient(0), v)]))
        np.testing.assert_allclose(v.numpy(), 0.75 if clip else 0.5, rtol=1e-6)
    assert not honest_cupy.report()[0]


@pytest.mark.ranks(1)
def test_copies_on_other_gpus_come_after_the_kernel_on_a_stream_of_the_program(cupy):
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        with strategy.scope():
            v, optimizer = ms.Variable(np.ones(4, np.float32)), ms.optimizers.SGD(0.5)

        def step():
            v.grad[...] = 1
            optimizer.apply_gradients([(v.grad, v)])

        with cupy.cuda.Stream():
            for _ in range(2):
                strategy.run(step)
        assert [copy.get()[:4].tolist() for copy in v.arena.copies] == [[-1] * 4] * 2
    assert not honest_cupy.report()[0]
