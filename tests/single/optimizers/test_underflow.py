"""Under `np.seterr(all="raise")` rules, metrics and losses let small numbers become 0, in NumPy as in the compiled loops."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base import loops
from tests.harness.strategies import without_mpi

RULES = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "Lamb",
    "Adafactor",
]
TINY = 1e-36  # whose square float32 has no number for
COMMON = {
    "plain": {},
    "weight decay": {"weight_decay": 1e-4},
    "clipvalue": {"clipvalue": 1e-37},
    "clipnorm": {"clipnorm": 1e-37},
    "global_clipnorm": {"global_clipnorm": 1e-37},
    "averages": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulated": {"gradient_accumulation_steps": 2},
    "scaled": {"loss_scale_factor": 3e7},
    "checked": {"check_numerics": True},
}
MADE_WITH = {
    "SGD": {"momentum": 0.5, "nesterov": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adam": {"amsgrad": True},
}


@pytest.fixture(params=["compiled", "numpy"])
def arithmetic(request, monkeypatch):
    if request.param == "numpy":
        for name in ("add", "update", "narrow", "_squares"):
            monkeypatch.setattr(loops, name, loops.leave_to_numpy)


@pytest.fixture(autouse=True)
def raises():
    with np.errstate(all="raise"):
        yield


def train(optimizer, dtype, gradient, steps=4):
    with without_mpi() as strategy:
        with strategy.scope():
            v, made = ms.Variable(np.full((30, 70), 1e-30, np.float32), dtype=dtype), optimizer()
        with np.errstate(under="ignore"):
            given = np.full((30, 70), gradient, dtype)
        for _ in range(steps):
            strategy.run(lambda: made.apply_gradients([(given, v)]))
        return v.numpy().astype(np.float64)


@pytest.mark.parametrize("settings", COMMON)
@pytest.mark.parametrize("rule", RULES)
def test_rules_let_numbers_underflow(arithmetic, rule, settings):
    def optimizer():
        return getattr(ms.optimizers, rule)(1e-3, **MADE_WITH.get(rule, {}), **COMMON[settings])

    found = train(optimizer, np.float32, TINY)
    with np.errstate(all="ignore"):
        assert np.array_equal(found, train(optimizer, np.float32, TINY))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_16_bit_weights(arithmetic, rule):
    assert np.isfinite(train(lambda: getattr(ms.optimizers, rule)(1e-3), np.float16, 6e-8)).all()


@pytest.mark.parametrize("rule", RULES)
def test_an_overflow_is_reported(arithmetic, rule):
    if rule in ("SGD", "Adamax", "Lion"):
        pytest.skip("it squares no gradient")
    with pytest.raises(FloatingPointError, match="overflow"):
        train(lambda: getattr(ms.optimizers, rule)(1e-3), np.float32, 1e30)


class Mine(ms.optimizers.Optimizer):
    """A rule of a user's, whose numbers underflow."""

    def __init__(self):
        super().__init__(1e-3)

    def update(self, gradient, weights, slots, step, rate, scratch):
        weights -= gradient * gradient


def test_an_underflow_in_a_rule_of_the_users_is_reported():
    with pytest.raises(FloatingPointError, match="underflow"):
        train(Mine, np.float32, TINY)


class MyMetric(ms.train.MeanOf):
    def values(self, y_true, y_pred):
        return np.square(y_pred)


LABELS, SCORES = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1e-300, 1.0], [1e-310, 1 - 1e-16]])
METRICS = {
    "Mean": lambda m: m.update_state(SCORES, sample_weight=np.full(2, 1e-300)),
    "Sum": lambda m: m.update_state(SCORES, sample_weight=np.full(2, 1e-300)),
    **dict.fromkeys(
        [
            "Accuracy", "MeanSquaredError", "MeanAbsoluteError", "RootMeanSquaredError", "BinaryAccuracy", "BinaryCrossentropy",
            "CategoricalAccuracy", "CategoricalCrossentropy", "TopKCategoricalAccuracy", "Precision", "Recall", "AUC",
        ],
        lambda m: m.update_state(LABELS, SCORES),
    ),
    **dict.fromkeys(
        ["SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy", "SparseCategoricalCrossentropy"],
        lambda m: m.update_state(np.array([0, 1]), SCORES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
def test_metrics_let_numbers_underflow(name):
    metric = getattr(ms.train, name)()
    METRICS[name](metric)
    assert np.isfinite(metric.result())


@pytest.mark.parametrize("name", ["BinaryCrossentropy", "CategoricalCrossentropy"])
def test_cross_entropies_of_large_logits(name):
    metric = getattr(ms.train, name)(from_logits=True)
    metric.update_state(LABELS, np.array([[1000.0, -1000.0], [-800.0, 800.0]]))
    assert metric.result() == 0


@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_areas_of_one_kind_of_label(curve):
    metric = ms.train.AUC(curve=curve)
    metric.update_state(np.ones(3), np.array([0.0, 0.5, 1.0]), sample_weight=np.array([1e-300, 1e-300, 1.0]))
    assert np.isfinite(metric.result())


def test_an_underflow_in_a_metric_of_the_users_is_reported():
    with pytest.raises(FloatingPointError, match="underflow"):
        MyMetric("mine").update_state(LABELS, np.full((2, 2), 1e-200))


def test_losses_let_numbers_underflow():
    least = np.finfo(np.float32).smallest_subnormal
    losses = np.full(4, least)
    assert ms.nn.compute_average_loss(losses, sample_weight=np.full(4, 1e-3), global_batch_size=8) == 0
    with without_mpi(replicas=2) as strategy:
        assert strategy.run(lambda: ms.nn.scale_regularization_loss(least)).values == (0, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("axis", [None, 0])
def test_means_let_numbers_underflow(arithmetic, dtype, axis):
    least = np.full(3, np.finfo(dtype).smallest_subnormal)
    with without_mpi(replicas=2) as strategy:
        assert not np.any(strategy.reduce("MEAN", ms.PerReplica((least, 0 * least)), axis=axis))
