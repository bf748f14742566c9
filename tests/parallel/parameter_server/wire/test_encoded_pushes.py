"""Pushes in fewer bytes: `CommunicationOptions(wire=...)` under parameter servers."""

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.ranks(2, 3)
SIZE = 600_000  # more than a fragment, also encoded
BYTES = {"bfloat16": 2 * SIZE, "int8": SIZE + 4 * -(-SIZE // 4096), None: 4 * SIZE}


def trained(transport, wire, gradient, steps, **settings):
    """Return the sum of the gradients that arrived, and the bytes of one push."""
    options = ms.CommunicationOptions(wire=wire)
    with ms.ParameterServerStrategy(communication_options=options, transport=transport, **settings) as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(SIZE, np.float32), name="w")
            wide = ms.Variable(np.zeros(3), name="wide")  # float64 is never encoded
            sgd = ms.optimizers.SGD(1.0)
        pushes = [(gradient, w), (np.full(3, 0.1), wide)]
        if strategy.is_server:
            strategy.serve()
        else:
            for _ in range(steps):
                strategy.run(lambda: sgd.apply_gradients(pushes))
            strategy.leave()
        strategy.barrier()
        stats = strategy.stats()
        pushed = sum(e.pushed_bytes for e in stats.exchanges if e.variable == "w")
        per_step = steps * strategy.num_workers
        results = strategy.all_gather_object((w.numpy(), wide.numpy()) if strategy.is_server else None)
        (found,) = [each for each in results if each is not None]
        np.testing.assert_allclose(found[1], -0.1 * per_step)
        return -found[0] / per_step, pushed // per_step


@pytest.mark.parametrize("transport", ["messages", "one_sided"])
def test_bfloat16_rounds_to_nearest_even_and_halves_the_bytes(transport):
    # 8 bits of precision: 1 + 2^-8 is a tie, whose even neighbour is 1; 1 + 3 x 2^-8 one whose is 1 + 2^-6
    given = np.array([1.0, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -3.0, 0.0], np.float32)
    rounded = np.array([1.0, 1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.0, 0.0])
    for settings in ({}, {"max_staleness": 0}):
        got, nbytes = trained(transport, "bfloat16", np.resize(given, SIZE), 2, **settings)
        assert np.array_equal(got, np.resize(rounded, SIZE))
        assert nbytes == BYTES["bfloat16"]


def test_int8_feeds_its_errors_back():
    gradient = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    steps = 8
    got, nbytes = trained("messages", "int8", gradient, steps)
    assert nbytes == BYTES["int8"]
    step = 2 * np.abs(gradient).max() / 127  # of the largest message: a gradient and at most half a step
    error = np.abs(got - gradient)
    assert 0 < error.max() <= step / steps  # a sum lacks at most one rounding


@pytest.mark.parametrize("transport", ["shared_window"])
def test_shared_memory_keeps_numbers_exact(transport):
    got, nbytes = trained(transport, "bfloat16", np.full(SIZE, 1 + 2**-9, np.float32), 2)
    assert np.array_equal(got, np.full(SIZE, 1 + 2**-9)) and nbytes == BYTES[None]
