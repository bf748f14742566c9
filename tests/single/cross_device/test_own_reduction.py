"""A program's own CrossDeviceOps, with one replica."""

import numpy as np
import pytest

import mpistrat as ms


class Halving(ms.CrossDeviceOps):
    """A reduction that is none: with one replica, too, it is the program's."""

    calls = 0

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        self.calls += 1
        return [value.values[0] * 0.5 for value, _ in pairs]


@pytest.mark.parametrize("clipped", [False, True])
def test_it_sums_the_gradients_of_one_replica(clipped):
    halving = Halving()
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0"], cross_device_ops=halving) as strategy:
        with strategy.scope():
            v = ms.Variable(np.ones(4, np.float32))
            optimizer = ms.optimizers.SGD(0.1, global_clipnorm=10.0 if clipped else None)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(4, np.float32), v)]))
        np.testing.assert_allclose(v.numpy(), 0.95, rtol=1e-6)
    assert halving.calls == 1
