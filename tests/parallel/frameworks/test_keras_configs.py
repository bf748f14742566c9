"""Dicts of Keras's optimizers and schedules make ours, with the same settings and rates; and ours make Keras's."""

import json

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402

OPTIMIZERS = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
]
SCHEDULES = {
    "CosineDecay": (0.5, 7, 0.25),
    "CosineDecayRestarts": (0.5, 7, 1.5, 0.5, 0.125),
    "ExponentialDecay": (0.5, 7, 0.5),
    "InverseTimeDecay": (0.5, 7, 0.5),
    "PiecewiseConstantDecay": ([3, 9], [0.5, 0.25, 0.125]),
    "PolynomialDecay": (0.5, 7, 0.125, 2.0),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_keras(name):
    theirs = getattr(keras.optimizers, name)(0.125, weight_decay=0.25, clipnorm=2.0, use_ema=True)
    config = json.loads(json.dumps(theirs.get_config()))
    ours = getattr(ms.optimizers, name).from_config(config)
    found = ours.get_config()
    assert {argument: found[argument] for argument in config} == config
    back = {argument: value for argument, value in found.items() if argument != "check_numerics"}
    assert getattr(keras.optimizers, name).from_config(back).get_config() == config


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_keras(name):
    theirs = getattr(keras.optimizers.schedules, name)(*SCHEDULES[name])
    ours = ms.optimizers.SGD.from_config(keras.optimizers.SGD(theirs).get_config())
    schedule = ours.get_config()["learning_rate"]
    assert schedule["class_name"] == name
    mine = getattr(ms.optimizers.schedules, name).from_config(schedule["config"])
    for step in range(40):
        assert mine(step) == pytest.approx(float(theirs(step)), rel=1e-4, abs=1e-6)
