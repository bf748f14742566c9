"""Ranks describe their settings when these change, not in every step: it takes longer than the update of a small model."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers.core import OptimizerCore

STEPS = 4
TORCH = ("SGD", "AdamW", "NAdam", "Adagrad", "Rprop", "Adafactor")
pytestmark = pytest.mark.ranks(1)


def by_torch(name, strategy):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    model, optimizer = ms.torch.distribute(model, optimizer)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    def change():
        optimizer.param_groups[0]["weight_decay"] = 0.5

    return step, change


def by_jax(_, strategy):
    jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
    import optax

    params, optimizer = ms.jax.distribute({"w": jax.numpy.ones(3)}, optax.adam(0.1))
    gradients = {"w": jax.numpy.ones(3)}

    def step():
        nonlocal params
        params = ms.jax.apply(optimizer, gradients, params)

    return step, None


def by_numpy(name, strategy):
    variable = ms.Variable(np.ones(3), name="w")
    optimizer = getattr(ms.optimizers, name)(0.1)

    def change():
        optimizer.clipvalue = 0.5

    pairs = [(np.ones(3), variable)]
    return lambda: strategy.run(optimizer.apply_gradients, args=(pairs,)), change


MAKERS = [(by_torch, name) for name in TORCH] + [(by_numpy, name) for name in ("SGD", "AdamW", "Lamb")] + [(by_jax, "")]


@pytest.mark.parametrize(("make", "name"), MAKERS)
def test_settings_are_described_once(make, name, monkeypatch):
    described = []
    original = OptimizerCore.describe_steps
    monkeypatch.setattr(OptimizerCore, "describe_steps", lambda core: (described.append(core), original(core)))
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        step, change = make(name, strategy)
        for _ in range(2):
            step()
        described.clear()
        for _ in range(STEPS):
            step()
        assert not described
        if change is not None:
            change()
            step()
            assert described
