"""Gradients that are handed over, on two hosts: the bits of an ordinary step, and half of the sums on each host."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena import buckets
from tests.harness.gradient_memory import memory_of

SIZES = (300_007, 15, 266_177)
pytestmark = pytest.mark.hosts(2, ranks_per_host=2)


def test_memory():
    shared, private, whole = memory_of(True)
    expected = 2 * whole + whole + 2 * buckets.BUCKET_BYTES * 4  # weights and sums of both hosts, and buckets
    assert abs(shared - expected) < 600_000
    assert private < whole // 16 + 300_000


def weights_of(sharded):
    with ms.MultiWorkerMirroredStrategy(sharded_gradients=sharded) as strategy:
        with strategy.scope():
            variables = [ms.Variable(np.full(size, 0.5, np.float32), name=f"v{i}") for i, size in enumerate(SIZES)]
            optimizer = ms.optimizers.Adam(0.01, global_clipnorm=3.0)

        def step(number):
            for i, variable in enumerate(variables):
                variable.grad[...] = np.random.default_rng((number, i, strategy.rank)).normal(size=variable.shape)
            if sharded:
                optimizer.begin([variables[2]])
                optimizer.begin([variables[1], variables[0]])
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        for number in range(3):
            strategy.run(step, args=(number,))
        return [variable.numpy() for variable in variables]


def test_bits():
    for ours, expected in zip(weights_of(True), weights_of(False), strict=True):
        np.testing.assert_array_equal(ours, expected)
