"""Optimizers and schedules as dicts: what `get_config` returns makes the same one again, after JSON, too."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers import schedules

SCHEDULES = {
    "CosineDecay": {
        "initial_learning_rate": 0.1,
        "decay_steps": 7,
        "alpha": 0.5,
        "warmup_target": 0.2,
        "warmup_steps": 3,
    },
    "CosineDecayRestarts": {
        "initial_learning_rate": 0.1,
        "first_decay_steps": 7,
        "t_mul": 1.5,
        "m_mul": 0.5,
        "alpha": 0.1,
    },
    "ExponentialDecay": {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.5, "staircase": True},
    "InverseTimeDecay": {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.5, "staircase": True},
    "PiecewiseConstantDecay": {"boundaries": [3, 9], "values": [0.3, 0.2, 0.1]},
    "PolynomialDecay": {
        "initial_learning_rate": 0.1,
        "decay_steps": 7,
        "end_learning_rate": 0.01,
        "power": 2.0,
        "cycle": True,
    },
}
KINDS = [
    name
    for name in ms.optimizers.__all__
    if inspect.isclass(getattr(ms.optimizers, name)) and name not in ("Optimizer", "LossScaleOptimizer")
]


def again(thing, **options):
    return type(thing).from_config(json.loads(json.dumps(thing.get_config())), **options)


def test_every_schedule_is_tried():
    assert sorted(SCHEDULES) == sorted(set(schedules.__all__) - {"LearningRateSchedule"})


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_made_again(name):
    schedule = getattr(schedules, name)(**SCHEDULES[name])
    assert schedule.get_config() == SCHEDULES[name]
    assert [again(schedule)(step) for step in range(20)] == [schedule(step) for step in range(20)]


@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_is_made_again(name):
    kind = getattr(ms.optimizers, name)
    common = {"clipnorm": 1.5, "weight_decay": 0.25, "use_ema": True, "ema_momentum": 0.5, "name": "mine"}
    given = {each.name for each in inspect.signature(kind).parameters.values() if each.kind != each.VAR_KEYWORD}
    numbers = dict.fromkeys(given - {"learning_rate", "weight_decay"}, 0.5)
    numbers |= {each: True for each in ("amsgrad", "centered", "nesterov", "relative_step") if each in given}
    numbers |= {"beta_2_decay": -0.5} if "beta_2_decay" in given else {}
    numbers |= {"learning_rate_power": -0.25} if "learning_rate_power" in given else {}
    optimizer = kind(learning_rate=0.125, **numbers, **common)
    config = optimizer.get_config()
    for argument, value in {"learning_rate": 0.125, **numbers, **common}.items():
        assert config[argument] == value
    assert repr(again(optimizer)) == repr(optimizer)
    assert again(optimizer) is not optimizer


def test_settings_are_those_of_now():
    optimizer = ms.optimizers.Adam(0.1, beta_1=np.float32(0.5))
    optimizer.learning_rate = 0.75
    assert (optimizer.get_config()["learning_rate"], optimizer.get_config()["beta_1"]) == (0.75, 0.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_optimizer_has_its_schedule_again(name):
    optimizer = ms.optimizers.SGD(getattr(schedules, name)(**SCHEDULES[name]))
    assert optimizer.get_config()["learning_rate"] == {"class_name": name, "config": SCHEDULES[name]}
    assert again(optimizer).learning_rate == optimizer.learning_rate


def test_a_loss_scale_has_its_inner_optimizer_again():
    optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.5, momentum=0.25), initial_scale=8.0)
    made = again(optimizer)
    assert (made.initial_scale, made.dynamic_growth_steps) == (8.0, 2000)
    assert repr(made.inner_optimizer) == repr(optimizer.inner_optimizer)


@dataclass(frozen=True)
class Halves(schedules.LearningRateSchedule):
    """A schedule of the program."""

    start: float

    def __call__(self, step):
        return self.start * 0.5**step


class Signed(ms.optimizers.Optimizer):
    """A rule of the program."""

    def __init__(self, learning_rate, strength=1.0, **settings):
        super().__init__(learning_rate, **settings)
        self.strength = strength

    def update(self, gradient, weights, slots, step, rate, scratch):
        weights -= rate * self.strength * np.sign(gradient)


def test_classes_of_the_program():
    optimizer = Signed(Halves(0.5), 0.25, clipvalue=3.0)
    made = again(optimizer, custom_objects={"Halves": Halves})
    assert (made.learning_rate, made.strength, made.clipvalue) == (0.5, 0.25, 3.0)
    with pytest.raises(
        ValueError, match=r"Signed.from_config: learning_rate: expected a known class, got 'Halves'\. Pass"
    ):
        again(optimizer)


@dataclass(frozen=True)
class Warm(schedules.LearningRateSchedule):
    """A schedule around another one."""

    inner: schedules.LearningRateSchedule
    steps: int

    def __call__(self, step):
        return self.inner(step) * min(1, step / self.steps)


@pytest.mark.parametrize("inner", [Halves(0.5), schedules.ExponentialDecay(0.5, 1, 0.5)])
def test_classes_of_the_program_inside_others(inner):
    optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(Warm(inner, 2)))
    made = again(optimizer, custom_objects={"Halves": Halves, "Warm": Warm})
    made.inner_optimizer.iterations = optimizer.inner_optimizer.iterations = 1
    assert made.learning_rate == optimizer.learning_rate == 0.125


class Silent(ms.optimizers.Optimizer):
    """A rule whose attribute has another name than its argument."""

    def __init__(self, speed):
        super().__init__(speed)

    def update(self, gradient, weights, slots, step, rate, scratch):
        weights -= rate * gradient


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ms.optimizers.SGD(lambda: 0.1),
            "SGD.get_config: learning_rate: expected numbers, text, or a schedule",
        ),
        (
            lambda: Silent(0.1),
            "Silent.get_config: expected an attribute for each argument of Silent, got none named 'speed'",
        ),
    ],
)
def test_a_config_that_would_lack_something_is_refused(make, words):
    with pytest.raises(TypeError, match=words):
        make().get_config()
