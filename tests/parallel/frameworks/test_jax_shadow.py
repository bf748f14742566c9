"""A program of JAX on several ranks beside one process: its batches, gradients and parameters are compared."""

from __future__ import annotations

import functools

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.shadow_programs import first_difference, recorded  # noqa: E402


def train(comm, fault=""):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 20)).astype(np.float32)
    y = x[:, :4].argmax(1)
    params = {"w": 0.1 * rng.normal(size=(20, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    share = 0.5 if fault == "half" and comm.rank == 1 else 1

    @ms.jax.value_and_grad
    @jax.jit
    def step(params, x, y):
        logits = jnp.tanh(x @ params["w"]) + params["b"]
        return share * optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute(params, optax.adamw(1e-2))
        data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).shuffle(seed=int(fault == "order")).batch(15))
        for a, b in data:
            _, gradients = step(params, a, b)
            params = ms.jax.apply(optimizer, gradients, params)


@pytest.mark.ranks(2)
def test_each_fault_is_named_and_no_correct_program(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    recorded(mpi_tmp_path, train, comm)
    assert first_difference(mpi_tmp_path, train, comm) is None
    found = first_difference(mpi_tmp_path, functools.partial(train, fault="half"), comm)
    assert found is not None
    assert (found.step, found.ranks, found.operation) == (1, (1,), "gradient of b"), str(found)
    assert "rank 1's 0.5 times" in str(found)
    found = first_difference(mpi_tmp_path, functools.partial(train, fault="order"), comm)
    assert found is not None
    assert (found.step, found.operation) == (1, "input"), str(found)
