"""The fused step over two hosts of two ranks: slices summed on each host, then between them."""

import numpy as np
import pytest

from tests.models import optimizer_reference as reference


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("name", ["adamw", "rmsprop centered"])
def test_two_hosts_equal_the_formula(name):
    import mpistrat as ms

    build, rule, rate = reference.cases()[name]
    shapes = [(600_001,), (7, 3)]  # slices of more than one chunk of the network
    start = [np.full(shape, 0.5) for shape in shapes]
    gradients = [[np.random.default_rng((step, i)).normal(size=s) for i, s in enumerate(shapes)] for step in range(3)]
    clipped = [reference.clip(some, 100.0) for some in gradients]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variables = [ms.Variable(value, name=f"v{i}") for i, value in enumerate(start)]
            optimizer = build(ms.optimizers)
            optimizer.global_clipnorm = 100.0
        assert strategy.num_replicas_in_sync == 4

        def step(number):
            share = (strategy.rank + 1) / 10  # 1 + 2 + 3 + 4 tenths
            optimizer.apply_gradients([(g * share, v) for g, v in zip(gradients[number], variables, strict=True)])

        for number in range(3):
            strategy.run(step, args=(number,))
        weights, slots = reference.run(rule, start, clipped.__getitem__, range(3), rate)
        state = optimizer.get_state()
        for variable, expected, kept in zip(variables, weights, slots, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-13)
            for slot, array in kept.items():
                np.testing.assert_allclose(state["slots"][variable.name][slot], array, rtol=1e-12, atol=1e-13)
