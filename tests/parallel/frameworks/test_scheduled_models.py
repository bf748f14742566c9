"""Models of frameworks in a coordinator's functions: one worker's steps equal the framework alone."""

import functools
import importlib.util

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.coordinators import coordinated

pytestmark = pytest.mark.ranks(3)  # a chief, a worker, a server
rng = np.random.default_rng(0)
X = rng.normal(size=(40, 4)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5, 3.0], np.float32))[:, None]
A, B = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
FIRST = [*range(0, 40, 8)] * 4  # rows of the steps


def torch_steps(model, distribute):
    """Return a step, with its model and optimizer as arguments or not."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if distribute:
        model, optimizer = ms.torch.distribute(model, optimizer)

    def step(first):
        x, y = (torch.as_tensor(rows[first : first + 8]) for rows in (X, Y))
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def torch_model(distribute):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch_steps(torch.nn.Sequential(*layers), distribute)


def jax_steps(params, loss_of, distribute):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    optimizer = optax.adam(0.01)
    if distribute:
        params, optimizer = ms.jax.distribute(params, optimizer)

        def step(params, first):
            loss, grads = ms.jax.value_and_grad(loss_of)(params, X[first : first + 8], Y[first : first + 8])
            ms.jax.apply(optimizer, grads, params)
            return float(loss)

        return functools.partial(step, params)
    state = optimizer.init(params)

    def plain(first):
        nonlocal params, state
        loss, grads = jax.value_and_grad(loss_of)(params, X[first : first + 8], Y[first : first + 8])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return float(loss)

    return plain


def jax_model(distribute):
    jnp = pytest.importorskip("jax.numpy")
    return jax_steps({"a": A, "b": B}, lambda p, x, y: ((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2).mean(), distribute)


def keras_model(distribute):
    """Keras's layers, with the steps of its backend."""
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    if keras.backend.backend() == "torch":
        return torch_steps(model, distribute)
    if keras.backend.backend() != "jax":
        pytest.skip("a backend without scheduled steps")
    weights = [variable.value for variable in model.trainable_variables]
    return jax_steps(weights, lambda p, x, y: ((model.stateless_call(p, [], x)[0] - y) ** 2).mean(), distribute)


MODELS = {"torch": torch_model, "jax": jax_model, "keras": keras_model}


@pytest.mark.parametrize("name", MODELS)
def test_scheduled_steps_equal_the_framework_alone(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-frameworks")
    alone = MODELS[name](False)
    expected = [alone(first) for first in FIRST]
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        step = MODELS[name](True)
    with coordinated(strategy) as c:
        if c.is_chief:
            values = [c.schedule(lambda first: strategy.run(step, args=(first,)), (first,)) for first in FIRST]
            np.testing.assert_allclose(c.fetch(values), expected, rtol=2e-5)


def test_a_jitted_function_is_traced_once():
    jax = pytest.importorskip("jax")
    traced = []

    @jax.jit
    def double(x):
        traced.append(1)
        return 2 * x

    def call(x):
        return float(double(x)), len(traced)

    with coordinated(ms.ParameterServerStrategy()) as c:
        if c.is_chief:
            assert c.fetch([c.schedule(call, (float(i),)) for i in range(6)]) == [(2.0 * i, 1) for i in range(6)]
