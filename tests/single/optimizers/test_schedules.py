"""The schedules give the numbers that Keras's formulae give by hand."""

import math

import pytest

from mpistrat.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)


def test_exponential_decay():
    smooth = ExponentialDecay(0.1, decay_steps=100000, decay_rate=0.96)
    stairs = ExponentialDecay(0.1, decay_steps=100000, decay_rate=0.96, staircase=True)
    assert smooth(0) == 0.1
    assert smooth(50000) == pytest.approx(0.1 * math.sqrt(0.96), rel=1e-15)
    assert stairs(99999) == 0.1
    assert stairs(200001) == pytest.approx(0.1 * 0.9216, rel=1e-15)


def test_piecewise_constant_decay():
    # Keras: 1.0 for the first 100001 steps, 0.5 for the next 10000, then 0.1
    rate = PiecewiseConstantDecay([100000, 110000], [1.0, 0.5, 0.1])
    assert [rate(step) for step in (0, 100000, 100001, 110000, 110001)] == [1.0, 1.0, 0.5, 0.5, 0.1]


def test_polynomial_decay():
    # Keras: from 0.1 to 0.01 in 10000 steps by a square root
    rate = PolynomialDecay(0.1, 10000, 0.01, power=0.5)
    assert rate(0) == pytest.approx(0.1)
    assert rate(7500) == pytest.approx(0.09 * 0.5 + 0.01)
    assert rate(10000) == rate(99999) == 0.01


def test_polynomial_decay_in_cycles():
    rate = PolynomialDecay(1.0, 10, 0.0, cycle=True)
    assert [rate(step) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]
    assert rate(15) == pytest.approx(1 - 15 / 20)  # the second cycle is as long as two
    assert rate(21) == pytest.approx(1 - 21 / 30)


def test_inverse_time_decay():
    assert InverseTimeDecay(0.1, 1.0, 0.5)(4) == pytest.approx(0.1 / 3)
    assert InverseTimeDecay(0.1, 10, 0.5, staircase=True)(19) == pytest.approx(0.1 / 1.5)


def test_cosine_decay():
    rate = CosineDecay(0.1, 1000, alpha=0.1)
    assert rate(0) == pytest.approx(0.1)
    assert rate(500) == pytest.approx(0.1 * (0.9 * 0.5 + 0.1))
    assert rate(250) == pytest.approx(0.1 * (0.9 * 0.5 * (1 + math.sqrt(0.5)) + 0.1))
    assert rate(1000) == rate(5000) == pytest.approx(0.01)


def test_cosine_decay_after_a_warm_up():
    rate = CosineDecay(0.0, 1000, warmup_target=0.1, warmup_steps=1000)
    assert [rate(step) for step in (0, 500)] == [0.0, 0.05]
    assert rate(1000) == pytest.approx(0.1)
    assert rate(1500) == pytest.approx(0.05)
    assert rate(2000) == rate(9999) == pytest.approx(0.0, abs=1e-17)


def test_cosine_decay_restarts():
    rate = CosineDecayRestarts(1.0, 10, t_mul=3.0, m_mul=0.5, alpha=0.2)  # restarts at 10, 40, 130
    for start, length, height in ((0, 10, 1.0), (10, 30, 0.5), (40, 90, 0.25)):
        assert rate(start) == pytest.approx(0.8 * height + 0.2)
        assert rate(start + length / 2) == pytest.approx(0.8 * height / 2 + 0.2)
        assert rate(start + length - 1) == pytest.approx(
            0.8 * height * (1 + math.cos(math.pi * (length - 1) / length)) / 2 + 0.2
        )
    even = CosineDecayRestarts(1.0, 10, t_mul=1.0)
    assert [even(step) for step in (0, 10, 1000)] == [1.0, 1.0, 1.0]
    assert even(10**9 + 5) == pytest.approx(0.5)


@pytest.mark.parametrize("make", [ExponentialDecay, PolynomialDecay, InverseTimeDecay, CosineDecay])
def test_decay_steps_are_positive(make):
    with pytest.raises(ValueError, match="decay_steps: expected a finite number > 0, got 0"):
        make(0.1, 0, 0.5)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (ExponentialDecay, {"decay_rate": -0.5}),
        (ExponentialDecay, {"decay_rate": 0.5, "staircase": "False"}),
        (ExponentialDecay, {"decay_rate": None}),
        (InverseTimeDecay, {"decay_rate": math.nan}),
        (PolynomialDecay, {"power": -1}),
        (PolynomialDecay, {"end_learning_rate": math.inf}),
        (PolynomialDecay, {"cycle": 2}),
        (PolynomialDecay, {"decay_steps": math.inf}),
        (CosineDecay, {"initial_learning_rate": -0.1}),
        (CosineDecay, {"initial_learning_rate": True}),
        (CosineDecay, {"alpha": "0.1"}),
        (CosineDecay, {"warmup_target": math.nan}),
        (CosineDecay, {"warmup_steps": -1}),
    ],
)
def test_settings_are_checked_when_a_schedule_is_made(make, settings):
    (*_, name), value = settings, [*settings.values()][-1]
    with pytest.raises((TypeError, ValueError), match=f"{make.__name__}: {name}: expected .*, got .*{value}"):
        make(**{"initial_learning_rate": 0.1, "decay_steps": 10, **settings})


@pytest.mark.parametrize(
    ("name", "value"), [("first_decay_steps", 0), ("t_mul", 0.5), ("m_mul", -1), ("alpha", math.inf)]
)
def test_settings_of_restarts_are_checked(name, value):
    with pytest.raises(ValueError, match=f"CosineDecayRestarts: {name}: expected a finite number .*, got {value}"):
        CosineDecayRestarts(**{"initial_learning_rate": 0.1, "first_decay_steps": 10, name: value})


def test_steps_and_values_of_a_piecewise_schedule_are_numbers():
    for boundaries, values in (([math.nan], [0.1, 0.2]), ([1], [0.1, -0.2]), ([1], [0.1, None]), (["1"], [0.1, 0.2])):
        with pytest.raises(
            (TypeError, ValueError), match=r"PiecewiseConstantDecay: \w+\[\d\]: expected a finite number"
        ):
            PiecewiseConstantDecay(boundaries, values)


def test_piecewise_boundaries_fit_the_values():
    with pytest.raises(ValueError, match=r"values: expected 3 for 2 boundaries, got 2"):
        PiecewiseConstantDecay([1, 2], [0.1, 0.2])
    with pytest.raises(ValueError, match="increasing"):
        PiecewiseConstantDecay([2, 2], [0.1, 0.2, 0.3])


def test_an_optimizer_asks_its_schedule_once_a_step():
    import numpy as np

    import mpistrat as ms

    asked = []

    class Halving(LearningRateSchedule):
        def __call__(self, step):
            asked.append(step)
            return 0.5**step

    w = ms.Variable(np.zeros(3))
    optimizer = ms.optimizers.SGD(Halving())
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(3), w)])
    assert asked == [0, 1, 2]
    assert w.numpy().tolist() == [-1.75] * 3
    assert optimizer.learning_rate == 0.125
