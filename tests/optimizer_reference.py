"""Keras's update rules on whole arrays, written from its formulae: what the optimizers are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Slots = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray, Slots, int, float], np.ndarray]


def sgd(momentum: float = 0.0, nesterov: bool = False) -> Rule:
    def rule(w, g, s, t, lr):
        if momentum == 0:
            return w - lr * g
        s["momentum"] = s.get("momentum", 0 * w) * momentum - g * lr
        return w + (s["momentum"] * momentum - g * lr if nesterov else s["momentum"])

    return rule


def adagrad(start: float = 0.1, epsilon: float = 1e-7) -> Rule:
    def rule(w, g, s, t, lr):
        s["accumulator"] = s.get("accumulator", 0 * w + start) + g**2
        return w - lr * g / np.sqrt(s["accumulator"] + epsilon)

    return rule


def rmsprop(rho: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-7, centered: bool = False) -> Rule:
    def rule(w, g, s, t, lr):
        s["velocity"] = rho * s.get("velocity", 0 * w) + (1 - rho) * g**2
        under = s["velocity"] + epsilon
        if centered:
            s["average_gradient"] = rho * s.get("average_gradient", 0 * w) + (1 - rho) * g
            under = s["velocity"] - s["average_gradient"] ** 2 + epsilon
        increment = lr * g / np.sqrt(under)
        if momentum == 0:
            return w - increment
        s["momentum"] = momentum * s.get("momentum", 0 * w) + increment
        return w - s["momentum"]

    return rule


def adam(beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7, weight_decay: float = 0.0) -> Rule:
    def rule(w, g, s, t, lr):
        w = w - w * weight_decay * lr
        s["momentum"] = beta_1 * s.get("momentum", 0 * w) + (1 - beta_1) * g
        s["velocity"] = beta_2 * s.get("velocity", 0 * w) + (1 - beta_2) * g**2
        alpha = lr * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return w - alpha * s["momentum"] / (np.sqrt(s["velocity"]) + epsilon)

    return rule


def cases() -> dict[str, tuple[Callable[[Any], Any], Rule, float]]:
    """For each case a function from `ms.optimizers` to a new optimizer, the rule it follows, and its learning rate."""
    return {
        "sgd": (lambda o: o.SGD(0.1), sgd(), 0.1),
        "momentum": (lambda o: o.Momentum(0.05, momentum=0.8), sgd(0.8), 0.05),
        "nesterov": (lambda o: o.SGD(0.05, momentum=0.9, nesterov=True), sgd(0.9, True), 0.05),
        "adagrad": (lambda o: o.Adagrad(0.2, initial_accumulator_value=0.3), adagrad(0.3), 0.2),
        "rmsprop": (lambda o: o.RMSProp(0.01), rmsprop(), 0.01),
        "rmsprop centered": (
            lambda o: o.RMSProp(0.01, rho=0.8, momentum=0.7, epsilon=1e-3, centered=True),
            rmsprop(0.8, 0.7, 1e-3, True),
            0.01,
        ),
        "adam": (lambda o: o.Adam(0.03, beta_1=0.8, beta_2=0.95), adam(0.8, 0.95), 0.03),
        "adamw": (lambda o: o.AdamW(0.03, weight_decay=0.1), adam(weight_decay=0.1), 0.03),
    }


def clip(gradients: list[np.ndarray], limit: float) -> list[np.ndarray]:
    """Scale gradients down together so that their norm does not exceed a limit."""
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))
    return [g * min(1.0, limit / norm) for g in gradients]


def run(
    rule: Rule,
    weights: list[np.ndarray],
    gradients: Callable[[int], list[np.ndarray]],
    steps: range,
    rate: float,
    slots: list[Slots] | None = None,
) -> tuple[list[np.ndarray], list[Slots]]:
    """Apply a rule to some variables, for steps counted from 0; return the weights and slots at the end."""
    weights = [w.copy() for w in weights]
    slots = [{} for _ in weights] if slots is None else [dict(s) for s in slots]
    for step in steps:
        for index, gradient in enumerate(gradients(step)):
            weights[index] = rule(weights[index], gradient, slots[index], step + 1, rate)
    return weights, slots
