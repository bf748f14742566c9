"""A step takes a bounded number of Python calls of this package: they are most of the time of a small model's step."""

import sys
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms

PACKAGE = str(Path(ms.__file__).parent)
pytestmark = pytest.mark.ranks(1)


def calls_of(function):
    """Return the number of calls of Python functions of this package in a call."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def by_torch(layers, strategy):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(layers)))
    model, optimizer = ms.torch.distribute(model, torch.optim.Adam(model.parameters(), 0.1))

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()

    return step


def by_jax(layers, strategy):
    jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
    import optax

    gradients = {f"w{number}": jax.numpy.ones((2, 2)) for number in range(layers)}
    params, optimizer = ms.jax.distribute(dict(gradients), optax.adam(0.1))

    def step():
        nonlocal params
        params = ms.jax.apply(optimizer, gradients, params)

    return step


def by_numpy(layers, strategy):
    variables = [ms.Variable(np.ones((2, 2)), name=f"w{number}") for number in range(layers)]
    optimizer = ms.optimizers.Adam(0.1)
    pairs = [(variable.gradient(0), variable) for variable in variables]
    return lambda: strategy.run(lambda: optimizer.apply_gradients(pairs))


@pytest.mark.parametrize(("make", "of_each", "of_all"), [(by_torch, 2, 130), (by_jax, 30, 175), (by_numpy, 1, 105)])
def test_calls_of_a_step(make, of_each, of_all):
    counts = {}
    for layers in (2, 12):
        with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
            step = make(layers, strategy)
            for _ in range(3):
                step()
            counts[layers] = min(calls_of(step) for _ in range(3))
    assert counts[12] - counts[2] <= 10 * of_each
    assert counts[2] <= of_all + 2 * of_each
