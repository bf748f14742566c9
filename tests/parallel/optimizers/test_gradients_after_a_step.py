"""Gradients after a step: each replica's are as it wrote them, so that a second step, or one that adds to them, is right."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.process_groups import set_layout
from tests.models import optimizer_reference as reference

SHAPES = ((70_001,), (9, 8), ())
RATE = 0.1
RULES = {
    "plain": (lambda o: o.SGD(RATE), reference.sgd(), {}),
    "clipnorm": (lambda o: o.SGD(RATE, clipnorm=2.0), reference.sgd(), {"clipnorm": 2.0}),
    "global_clipnorm": (lambda o: o.SGD(RATE, global_clipnorm=2.0), reference.sgd(), {"global_clipnorm": 2.0}),
    "loose": (lambda o: o.SGD(RATE, global_clipnorm=1e9), reference.sgd(), {"global_clipnorm": 1e9}),
    "check_numerics": (lambda o: o.Adam(RATE, check_numerics=True), reference.adam(), {}),
    "accumulates": (
        lambda o: o.SGD(RATE, gradient_accumulation_steps=2, clipnorm=2.0),
        reference.sgd(),
        {"gradient_accumulation_steps": 2, "clipnorm": 2.0},
    ),
    "scaled": (
        lambda o: o.SGD(RATE, loss_scale_factor=4.0, clipnorm=2.0),
        reference.sgd(),
        {"loss_scale_factor": 4.0, "clipnorm": 2.0},
    ),
    "lamb": (lambda o: o.Lamb(RATE), reference.lamb(), {}),
    "clipped lamb": (lambda o: o.Lamb(RATE, global_clipnorm=2.0), reference.lamb(), {"global_clipnorm": 2.0}),
    "adafactor": (lambda o: o.Adafactor(RATE), reference.adafactor(), {}),
}


def start():
    return [np.random.default_rng(99 + i).normal(size=shape) for i, shape in enumerate(SHAPES)]


def part_of(number, i, replica):
    """What one replica adds to its gradient of a variable."""
    return np.random.default_rng((number, i, replica)).normal(size=SHAPES[i])


def three_steps(strategy, build, begin=False):
    """Take steps of which the second has the first one's gradients, and the third adds to them; return the weights."""
    with strategy.scope():
        variables = [ms.Variable(value, name=f"v{i}") for i, value in enumerate(start())]
        optimizer = build(ms.optimizers)
    own = {}

    def step(number, added):
        replica = ms.get_replica_context().replica_id_in_sync_group
        for i, v in enumerate(variables):
            if added:
                v.grad[...] += part_of(number, i, replica)
                own[replica, i] = np.array(v.grad)
        if begin:
            optimizer.begin(variables)
        optimizer.apply_gradients([(v.grad, v) for v in variables])
        for i, v in enumerate(variables):
            np.testing.assert_array_equal(v.grad, own[replica, i])

    for number, added in enumerate((True, False, True)):
        strategy.run(step, args=(number, added))
    return variables


def expected(rule, settings, replicas):
    training = reference.Training(start())
    sums = [[sum(part_of(n, i, r) for r in range(replicas)) for i in range(len(SHAPES))] for n in (0, 2)]
    both = [a + b for a, b in zip(*sums, strict=True)]
    for gradients in (sums[0], sums[0], both):
        training.step(rule, gradients, RATE, **settings)
    return training.weights


def check(strategy, name, replicas=None, **more):
    build, rule, settings = RULES[name]
    variables = three_steps(strategy, build, **more)
    right = expected(rule, settings, replicas or strategy.num_replicas_in_sync)
    for variable, value in zip(variables, right, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-8, atol=1e-11, err_msg=name)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("devices", [1, 2])
def test_replicas_of_one_node(devices):
    for name in RULES:
        with ms.MirroredStrategy([f"cpu:{i}" for i in range(devices)]) as strategy:
            check(strategy, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["central storage", "mesh"])
def test_other_strategies(kind):
    for name in RULES:
        made = (
            ms.CentralStorageStrategy(["cpu:0", "cpu:1"])
            if kind == "central storage"
            else ms.MeshStrategy({"data": -1})
        )
        with made as strategy:
            check(strategy, name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("layout", ["private", "nodes"])
@pytest.mark.parametrize("sharded", [True, False])
def test_several_nodes(layout, sharded, monkeypatch):
    set_layout(layout, monkeypatch)
    for name in RULES:
        with ms.MultiWorkerMirroredStrategy(sharded_slots=sharded) as strategy:
            check(strategy, name, begin=name in ("plain", "clipnorm"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ops", ["MpiAllReduce", "ReductionToOneDevice"])
def test_other_algorithms(ops):
    for name in ("plain", "clipnorm", "lamb"):
        with ms.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=getattr(ms, ops)()) as strategy:
            check(strategy, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_one_worker_of_servers(devices):
    for name in ("plain", "clipnorm", "global_clipnorm", "loose", "check_numerics", "scaled"):
        with ms.ParameterServerStrategy(num_ps=1, devices=[f"cpu:{i}" for i in range(devices)]) as strategy:
            if strategy.is_server:
                with strategy.scope():
                    for i, value in enumerate(start()):
                        ms.Variable(value, name=f"v{i}")
                    RULES[name][0](ms.optimizers)
                strategy.serve()
            else:
                check(strategy, name, replicas=devices)
                strategy.leave()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_16_bits_and_scaled_losses(dtype):
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.zeros(70_001), dtype=dtype)
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.5), initial_scale=4.0)

        def step(gradient):
            if gradient is not None:
                w.grad[...] = gradient
            before = np.array(w.grad)
            optimizer.apply_gradients([(w.grad, w)])
            np.testing.assert_array_equal(w.grad, before)

        for gradient in (4.0, None, np.inf, None):  # 1.0 of each rank, and two steps that are left out
            strategy.run(step, args=(gradient,))
        assert (w.numpy() == -2.0).all()
        assert float(optimizer.dynamic_scale) == 1.0
