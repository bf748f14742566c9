"""Settings that a program changes between two steps: each counts from the next step on, under every strategy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.process_groups import set_layout
from tests.models import optimizer_reference as reference

SHAPES = ((6, 4), (5,), ())
BEFORE, AFTER = range(2), range(2, 5)


def nadam(beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """As `reference.nadam`, with Keras's product of the coefficients that the steps so far had."""

    def coefficient(t):
        return beta_1 * (1 - 0.5 * 0.96**t)

    def rule(w, g, s, t, lr):
        s["product"] = s.get("product", 1.0) * coefficient(t)
        s["momentum"] = beta_1 * s.get("momentum", 0 * w) + (1 - beta_1) * g
        s["velocity"] = beta_2 * s.get("velocity", 0 * w) + (1 - beta_2) * g**2
        ahead, product = coefficient(t + 1), s["product"]
        m_hat = ahead * s["momentum"] / (1 - product * ahead) + (1 - coefficient(t)) * g / (1 - product)
        return w - m_hat * lr / (np.sqrt(s["velocity"] / (1 - beta_2**t)) + epsilon)

    return rule


def ftrl(**settings):
    """As `reference.ftrl`; a step at rate 0 changes nothing."""
    names = {
        "learning_rate_power": "power",
        "l1_regularization_strength": "l1",
        "l2_regularization_strength": "l2",
        "l2_shrinkage_regularization_strength": "shrinkage",
    }
    rule = reference.ftrl(**{names.get(name, name): value for name, value in settings.items()})
    return lambda w, g, s, t, lr: rule(w, g, s, t, lr) if lr else w


def adafactor(beta_2_decay=-0.8, epsilon_1=1e-30, epsilon_2=1e-3, clip_threshold=1.0):
    return reference.adafactor(beta_2_decay, epsilon_1, epsilon_2, clip_threshold)


#: By class: the function that gives the formula, settings at first, and what each is changed to.
OWN = {
    "SGD": (
        reference.sgd,
        {"momentum": 0.9, "nesterov": False},
        {"momentum": 0.5, "nesterov": True, "momentum ": 0.0},
    ),
    "Adam": (reference.adam, {"amsgrad": True}, {"beta_1": 0.5, "beta_2": 0.7, "epsilon": 1e-2, "amsgrad": False}),
    "Adagrad": (reference.adagrad, {}, {"epsilon": 0.5}),
    "RMSProp": (
        reference.rmsprop,
        {"momentum": 0.8, "centered": True},
        {"rho": 0.5, "momentum": 0.3, "epsilon": 0.1, "centered": False, "momentum ": 0.0},
    ),
    "Adadelta": (reference.adadelta, {}, {"rho": 0.5, "epsilon": 0.1}),
    "Adamax": (reference.adamax, {}, {"beta_1": 0.5, "beta_2": 0.7, "epsilon": 0.1}),
    "Nadam": (nadam, {}, {"beta_1": 0.5, "beta_2": 0.7, "epsilon": 0.1}),
    "Ftrl": (
        ftrl,
        {"l1_regularization_strength": 0.01},
        {
            "learning_rate_power": -0.3,
            "l1_regularization_strength": 0.3,
            "l2_regularization_strength": 0.2,
            "l2_shrinkage_regularization_strength": 0.1,
            "beta": 0.4,
        },
    ),
    "Lion": (reference.lion, {}, {"beta_1": 0.5, "beta_2": 0.6}),
    "Lamb": (reference.lamb, {}, {"beta_1": 0.5, "beta_2": 0.7, "epsilon": 0.1}),
    "Adafactor": (
        adafactor,
        {},
        {"beta_2_decay": -0.5, "epsilon_1": 1e-2, "epsilon_2": 0.5, "clip_threshold": 0.3},
    ),
}

#: What all optimizers have in common: at first, and what it is changed to.
COMMON = {
    "decay": ({}, {"weight_decay": 0.3}),
    "other decay": ({"weight_decay": 0.3}, {"weight_decay": 0.1}),
    "no decay": ({"weight_decay": 0.3}, {"weight_decay": None}),
    "clipnorm": ({}, {"clipnorm": 0.5}),
    "no clipnorm": ({"clipnorm": 0.5}, {"clipnorm": None}),
    "clipvalue": ({}, {"clipvalue": 0.2}),
    "no clipvalue": ({"clipvalue": 0.2}, {"clipvalue": None}),
    "global_clipnorm": ({}, {"global_clipnorm": 1.0}),
    "no global_clipnorm": ({"global_clipnorm": 1.0}, {"global_clipnorm": None}),
    "another clip": ({"clipnorm": 0.5}, {"clipnorm": None, "global_clipnorm": 1.0}),
    "ema_momentum": ({"use_ema": True, "ema_momentum": 0.9}, {"ema_momentum": 0.2}),
    "ema_overwrite_frequency": ({"use_ema": True, "ema_momentum": 0.9}, {"ema_overwrite_frequency": 2}),
    "loss_scale_factor": ({}, {"loss_scale_factor": 8.0}),
    "other loss_scale_factor": ({"loss_scale_factor": 4.0}, {"loss_scale_factor": None}),
    "check_numerics": ({}, {"check_numerics": True}),
    "no check_numerics": ({"check_numerics": True}, {"check_numerics": False}),
    "rate": ({}, {"learning_rate": 0.01}),
    "rate of 0": ({}, {"learning_rate": 0.0}),
}
COMMON_RULES = ("Adam", "Lamb")

WORLDS = {
    "mirrored": lambda: ms.MirroredStrategy(["cpu:0", "cpu:1"]),
    "multi worker": lambda: ms.MultiWorkerMirroredStrategy(sharded_slots=True),
    "sharded gradients": lambda: ms.MultiWorkerMirroredStrategy(sharded_gradients=True),
    "central storage": lambda: ms.CentralStorageStrategy(["cpu:0"]),
    "mesh": lambda: ms.MeshStrategy({"data": -1}),
    "mesh of parts": lambda: ms.MeshStrategy({"data": 1, "model": -1}),
    "local steps": lambda: ms.MultiWorkerMirroredStrategy(
        local_steps=ms.LocalSteps(1, outer_learning_rate=1.0, outer_momentum=0.0)
    ),
    "servers": lambda: ms.ParameterServerStrategy(num_ps=ms_size() - 1),
}


def ms_size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def gradients_of(number):
    """The gradients of a step, summed over all replicas."""
    return [np.random.default_rng((number, i)).normal(size=shape) for i, shape in enumerate(SHAPES)]


def start():
    return [np.random.default_rng(99 + i).normal(size=shape) for i, shape in enumerate(SHAPES)]


def cases(world):
    """Yield name, class, arguments, and what changes."""
    apart = {"servers": {"Lamb", "Adafactor"}, "mesh of parts": {"Adafactor"}}.get(world, set())
    for kind, (_, first, changes) in OWN.items():
        for name, value in changes.items():
            if kind not in apart:
                yield f"{kind}: {name.strip()}={value}", kind, first, {name.strip(): value}
    for name, (first, changes) in COMMON.items():
        for kind in COMMON_RULES:
            if kind not in apart and not (world == "servers" and "use_ema" in first):
                yield f"{kind}: {name}", kind, first, changes


def take(strategy, trained, numbers):
    """Take steps with each optimizer on its variables."""
    servers = isinstance(strategy, ms.ParameterServerStrategy)
    if servers and strategy.is_server:
        strategy.serve()
        return
    share = 1 / (1 if servers else strategy.num_replicas_in_sync)

    def step(number):
        for optimizer, variables in trained:
            pairs = []
            for v, whole in zip(variables, gradients_of(number), strict=True):
                gradient = whole * share * (optimizer.loss_scale_factor or 1.0)
                v.grad[...] = gradient if v.part is None else v.part.cut(gradient)
                pairs.append((v.grad, v))
            optimizer.apply_gradients(pairs)

    for number in numbers:
        strategy.run(step, args=(number,))
    if servers:
        strategy.leave()


def expected(kind, first, changes):
    formula, _, _ = OWN[kind]
    training, now = reference.Training(start()), {"learning_rate": 0.1, **first}
    for numbers, changed in ((BEFORE, {}), (AFTER, changes)):
        now |= changed
        own = {name: value for name, value in now.items() if name not in _names_in_common()}
        common = {name: now[name] for name in now if name in _names_in_common()}
        rate = common.pop("learning_rate")
        common.pop("check_numerics", None)
        for number in numbers:
            gradients = [g * (common.get("loss_scale_factor") or 1.0) for g in gradients_of(number)]
            training.step(formula(**own), gradients, rate, **common)
    return training


def _names_in_common():
    return {"learning_rate", *ms.optimizers.hyperparameters.CommonSettings.__annotations__}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("world", WORLDS)
def test_every_setting_counts_from_the_next_step_on(world, monkeypatch):
    if world in ("multi worker", "local steps"):
        set_layout("private", monkeypatch)
    if world == "mesh of parts" and ms_size() == 3:
        pytest.skip("3 ranks do not divide the variable")
    chosen = list(cases(world))
    divided = {"layout": (None, "model")} if world == "mesh of parts" else {}
    with WORLDS[world]() as strategy:
        trained = []
        with strategy.scope():
            for _, kind, first, _ in chosen:
                variables = [ms.Variable(value, **(divided if value.ndim == 2 else {})) for value in start()]
                trained.append((getattr(ms.optimizers, kind)(0.1, **first), variables))
        take(strategy, trained, BEFORE)
        for (optimizer, _), (_, _, _, changes) in zip(trained, chosen, strict=True):
            for setting, value in changes.items():
                setattr(optimizer, setting, value)
        take(strategy, trained, AFTER)
        for (optimizer, variables), (name, kind, first, changes) in zip(trained, chosen, strict=True):
            right = expected(kind, first, changes)
            if not getattr(strategy, "is_server", False):
                for variable, value in zip(variables, right.weights, strict=True):
                    own = value if variable.part is None else value[variable.part.slices]
                    np.testing.assert_allclose(variable.numpy(), own, rtol=1e-9, atol=1e-12, err_msg=name)
            if optimizer.use_ema:
                for variable, average in zip(variables, right.averages, strict=True):
                    found = optimizer.slots(variable)["average"]
                    np.testing.assert_allclose(found, average, rtol=1e-9, atol=1e-12, err_msg=name)
        if strategy.size > 1:
            strategy.barrier()


@pytest.mark.ranks(1)
def test_settings_are_checked_when_they_are_changed():
    optimizer = ms.optimizers.SGD(0.1, momentum=0.5, clipnorm=1.0)
    for name, value in (
        ("weight_decay", -1.0),
        ("clipnorm", 0.0),
        ("clipnorm", math.nan),
        ("loss_scale_factor", -2.0),
        ("ema_momentum", 1.5),
        ("ema_overwrite_frequency", 0),
    ):
        with pytest.raises(ValueError, match=name):
            setattr(optimizer, name, value)
    with pytest.raises(ValueError, match="clipnorm and clipvalue. Set clipnorm to None before"):
        optimizer.clipvalue = 1.0
    assert (optimizer.clipnorm, optimizer.clipvalue, optimizer.weight_decay) == (1.0, None, None)


@pytest.mark.ranks(1)
def test_the_start_of_slots_may_be_changed_until_they_are_made():
    with ms.MirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.zeros(2))
        optimizer = ms.optimizers.Adagrad(1.0, initial_accumulator_value=5.0, epsilon=0.0)
        optimizer.initial_accumulator_value = 3.0
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))
        np.testing.assert_allclose(w.numpy(), -1 / math.sqrt(3 + 1))
        with pytest.raises(ValueError, match="took its first step with, got 7.0. Make another optimizer"):
            optimizer.initial_accumulator_value = 7.0
