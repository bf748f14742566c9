"""The contenders of `frameworks.py` for JAX: ours, one flat gradient through MPI with optax, and no communication."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrat as ms

FLAT = "one flat MPI_Allreduce, optax.adam"
PACKAGES = ("jax", "optax")
STEPS = 1  # of one call of an operation
ROWS = 8
MODELS: dict[str, tuple[int, ...]] = {"MLP, 16.8 M": (2048,) * 5, "MLP, 24 K": (64, 128, 96, 32, 10)}

Tree = list[dict[str, Any]]


def start(comm: Any) -> Callable[[], None]:
    """Begin; return what is called at the end."""
    return lambda: None


def contenders(strategy: Any, model: str) -> dict[str, Callable[[], harness.Operation]]:
    """Return what makes each contender's step, by name: ours first, the pass alone last. Making one is collective."""
    widths = MODELS[model]
    return {
        harness.OURS: lambda: ours(strategy, widths),
        FLAT: lambda: flat(strategy.comm, widths),
        harness.ALONE: lambda: alone(widths),
    }


def parameters(strategy: Any, model: str) -> dict[str, Callable[[], Any]]:
    """Return what makes the parameters alone; none: a distributed tree has gradients."""
    return {}


def make(widths: tuple[int, ...]) -> tuple[Tree, jax.Array]:
    """Return the parameters of a perceptron, and a batch."""
    numbers = np.random.default_rng(0)
    layers = [
        {"w": jnp.asarray(numbers.normal(size=(a, b)) / a**0.5, jnp.float32), "b": jnp.zeros(b, jnp.float32)}
        for a, b in itertools.pairwise(widths)
    ]
    return layers, jnp.asarray(numbers.normal(size=(ROWS, widths[0])), jnp.float32)


def loss(params: Tree, x: jax.Array) -> jax.Array:
    """Return a number that depends on all parameters."""
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def ours(strategy: Any, widths: tuple[int, ...]) -> harness.Operation:
    """Return the step of a distributed tree. Collective."""
    params, x = make(widths)
    with strategy.scope():
        params, optimizer = ms.jax.distribute(params), ms.optimizers.Adam(1e-3)
    passes = ms.jax.value_and_grad(jax.jit(loss))

    def step() -> None:
        nonlocal params
        _, grads = passes(params, x)
        params = ms.jax.apply(optimizer, grads, params)

    return lambda: strategy.run(step)


def flat(comm: Any, widths: tuple[int, ...]) -> harness.Operation:
    """Return a step with one MPI_Allreduce of all gradients, copied into one array; jitted functions read views of it.

    NumPy copies them faster than a jitted `ravel_pytree`.
    """
    from mpi4py import MPI

    params, x = make(widths)
    adam = optax.adam(1e-3)
    state, (leaves, structure) = adam.init(params), jax.tree.flatten(params)
    total = np.empty(sum(leaf.size for leaf in leaves), np.float32)
    parts = np.split(total, np.cumsum([leaf.size for leaf in leaves])[:-1])
    parts = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    passes = jax.jit(jax.value_and_grad(loss))

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Any, Any]:
        mean = jax.tree.map(lambda total: total / comm.size, grads)
        changes, state = adam.update(mean, state, params)
        return optax.apply_updates(params, changes), state

    update = jax.jit(update, donate_argnums=(1, 2))

    def step() -> None:
        nonlocal params, state
        for part, leaf in zip(parts, jax.tree.leaves(passes(params, x)[1]), strict=True):
            np.copyto(part, np.asarray(leaf))
        comm.Allreduce(MPI.IN_PLACE, total)
        params, state = update(structure.unflatten(parts), state, params)
        jax.block_until_ready(params)

    return step


def alone(widths: tuple[int, ...]) -> harness.Operation:
    """Return the forward and backward pass."""
    params, x = make(widths)
    passes = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(passes(params, x))
