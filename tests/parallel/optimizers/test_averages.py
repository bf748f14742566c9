"""Averages of weights, of variables that have no gradient in some steps, too: as Keras's, of all that the optimizer knows."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.process_groups import set_layout
from tests.models import optimizer_reference as reference

SIZES = (70_001, 15, 1)
SETTINGS = {
    "kept": {"ema_momentum": 0.5},
    "overwritten": {"ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulated": {"ema_momentum": 0.5, "ema_overwrite_frequency": 2, "gradient_accumulation_steps": 2},
    "two passes": {"ema_momentum": 0.5, "ema_overwrite_frequency": 3, "global_clipnorm": 10.0},
}
#: For each step, the variables that have a gradient. The last one has its first in the fourth step; one step leaves out the pair.
HAVING = ((0, 1), (0, 1), (0,), (2,), (1, 2), (0,))


def start():
    return [np.random.default_rng(99 + i).normal(size=size) for i, size in enumerate(SIZES)]


def gradients_of(number):
    every = [np.random.default_rng((number, i)).normal(size=size) for i, size in enumerate(SIZES)]
    return [gradient if i in HAVING[number] else None for i, gradient in enumerate(every)]


def opened(layout, monkeypatch, **settings):
    if layout != "one node":
        set_layout("private", monkeypatch)
    if layout == "local steps":
        how = ms.LocalSteps(1, outer_learning_rate=1.0, outer_momentum=0.0)
        return ms.MultiWorkerMirroredStrategy(local_steps=how)
    return ms.MultiWorkerMirroredStrategy(sharded_slots=layout == "pieces", **settings)


def make(strategy, settings):
    with strategy.scope():
        variables = [ms.Variable(value, name=f"v{i}") for i, value in enumerate(start())]
        return variables, ms.optimizers.SGD(0.1, momentum=0.9, use_ema=True, **settings)


def train(strategy, variables, optimizer, numbers):
    def step(number):
        pairs = []
        for gradient, v in zip(gradients_of(number), variables, strict=True):
            pairs.append((None if gradient is None else gradient / strategy.num_replicas_in_sync, v))
        optimizer.apply_gradients(pairs if number != 2 else pairs[:1])  # without a pair, and with None

    for number in numbers:
        strategy.run(step, args=(number,))


def check(variables, optimizer, settings, name):
    training = reference.Training(start())
    for number in range(len(HAVING)):
        training.step(reference.sgd(0.9), gradients_of(number), 0.1, use_ema=True, **settings)
    for variable, weights, average in zip(variables, training.weights, training.averages, strict=True):
        np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-9, atol=1e-12, err_msg=name)
        found = optimizer.slots(variable)["average"]
        np.testing.assert_allclose(found, average, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["one node", "nodes", "pieces", "local steps"])
def test_a_step_averages_all_that_the_optimizer_knows(layout, monkeypatch):
    for name, settings in SETTINGS.items():
        if layout == "local steps" and name == "two passes":
            continue
        with opened(layout, monkeypatch) as strategy:
            variables, optimizer = make(strategy, settings)
            train(strategy, variables, optimizer, range(len(HAVING)))
            check(variables, optimizer, settings, name)


@pytest.mark.ranks(2)
def test_a_restored_optimizer_averages_what_it_has_not_updated_yet():
    settings = SETTINGS["overwritten"]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = make(strategy, settings)
        train(strategy, variables, optimizer, range(2))
        state, weights = optimizer.get_state(), [v.numpy() for v in variables]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = make(strategy, settings)
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        optimizer.set_state(state)
        train(strategy, variables, optimizer, range(2, len(HAVING)))
        check(variables, optimizer, settings, "restored")
