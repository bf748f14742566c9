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


def adam(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7, weight_decay: float = 0.0, amsgrad: bool = False
) -> Rule:
    def rule(w, g, s, t, lr):
        w = w - w * weight_decay * lr
        s["momentum"] = beta_1 * s.get("momentum", 0 * w) + (1 - beta_1) * g
        s["velocity"] = beta_2 * s.get("velocity", 0 * w) + (1 - beta_2) * g**2
        alpha = lr * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        if amsgrad:
            s["velocity_hat"] = np.maximum(s.get("velocity_hat", 0 * w), s["velocity"])
            return w - alpha * s["momentum"] / (np.sqrt(s["velocity_hat"]) + epsilon)
        return w - alpha * s["momentum"] / (np.sqrt(s["velocity"]) + epsilon)

    return rule


def adadelta(rho: float = 0.95, epsilon: float = 1e-7) -> Rule:
    def rule(w, g, s, t, lr):
        before = s.get("accumulated_delta_var", 0 * w)
        s["accumulated_grad"] = rho * s.get("accumulated_grad", 0 * w) + (1 - rho) * g**2
        delta = -np.sqrt(before + epsilon) * g / np.sqrt(s["accumulated_grad"] + epsilon)
        s["accumulated_delta_var"] = rho * before + (1 - rho) * delta**2
        return w + lr * delta

    return rule


def adamax(beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> Rule:
    def rule(w, g, s, t, lr):
        s["momentum"] = beta_1 * s.get("momentum", 0 * w) + (1 - beta_1) * g
        s["norm"] = np.maximum(beta_2 * s.get("norm", 0 * w), abs(g))
        return w - lr * s["momentum"] / ((1 - beta_1**t) * (s["norm"] + epsilon))

    return rule


def nadam(beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> Rule:
    def coefficient(t):
        return beta_1 * (1 - 0.5 * 0.96**t)

    def rule(w, g, s, t, lr):
        product = math.prod(coefficient(step) for step in range(1, t + 1))
        s["momentum"] = beta_1 * s.get("momentum", 0 * w) + (1 - beta_1) * g
        s["velocity"] = beta_2 * s.get("velocity", 0 * w) + (1 - beta_2) * g**2
        ahead = coefficient(t + 1)
        m_hat = ahead * s["momentum"] / (1 - product * ahead) + (1 - coefficient(t)) * g / (1 - product)
        v_hat = s["velocity"] / (1 - beta_2**t)
        return w - m_hat * lr / (np.sqrt(v_hat) + epsilon)

    return rule


def ftrl(
    power: float = -0.5,
    start: float = 0.1,
    l1: float = 0.0,
    l2: float = 0.0,
    shrinkage: float = 0.0,
    beta: float = 0.0,
) -> Rule:
    def rule(w, g, s, t, lr):
        before = s.get("accumulator", 0 * w + start)
        s["accumulator"] = before + g**2
        sigma = (s["accumulator"] ** -power - before**-power) / lr
        s["linear"] = s.get("linear", 0 * w) + g + 2 * shrinkage * w - sigma * w
        quadratic = s["accumulator"] ** -power / lr + 2 * (l2 + beta / (2 * lr))
        return (np.clip(s["linear"], -l1, l1) - s["linear"]) / quadratic

    return rule


def lion(beta_1: float = 0.9, beta_2: float = 0.99) -> Rule:
    def rule(w, g, s, t, lr):
        momentum = s.get("momentum", 0 * w)
        s["momentum"] = beta_2 * momentum + (1 - beta_2) * g
        return w - lr * np.sign(beta_1 * momentum + (1 - beta_1) * g)

    return rule


def lamb(beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> Rule:
    def rule(w, g, s, t, lr):
        s["momentum"] = beta_1 * s.get("momentum", 0 * w) + (1 - beta_1) * g
        s["velocity"] = beta_2 * s.get("velocity", 0 * w) + (1 - beta_2) * g**2
        u = s["momentum"] / (1 - beta_1**t) / (np.sqrt(s["velocity"] / (1 - beta_2**t)) + epsilon)
        w_norm, u_norm = math.sqrt((w**2).sum()), math.sqrt((u**2).sum())
        return w - lr * (w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0) * u

    return rule


def adafactor(decay: float = -0.8, small: float = 1e-30, least: float = 1e-3, threshold: float = 1.0) -> Rule:
    def rule(w, g, s, t, lr):
        before, b = s.get("velocity", 0 * w), 1 - t**decay
        squares = g**2 + small
        if w.ndim < 2:
            v = b * before + (1 - b) * squares
        else:  # of v as it was made of them, means of rows and columns are what Keras keeps beside it
            r = b * before.mean(-1) + (1 - b) * squares.mean(-1)
            c = b * before.mean(-2) + (1 - b) * squares.mean(-2)
            v = (r / r.mean(-1, keepdims=True))[..., None] * c[..., None, :]
        s["velocity"] = v
        u = g / np.sqrt(v)
        u = u / max(1.0, math.sqrt((u**2).mean()) / threshold)
        return w - max(least, math.sqrt((w**2).mean())) * min(lr, 1 / math.sqrt(t)) * u

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
        "amsgrad": (lambda o: o.Adam(0.03, amsgrad=True), adam(amsgrad=True), 0.03),
        "adamw amsgrad": (
            lambda o: o.AdamW(0.03, weight_decay=0.1, amsgrad=True),
            adam(weight_decay=0.1, amsgrad=True),
            0.03,
        ),
        "adamw": (lambda o: o.AdamW(0.03, weight_decay=0.1), adam(weight_decay=0.1), 0.03),
        "adadelta": (lambda o: o.Adadelta(1.0, rho=0.9, epsilon=1e-3), adadelta(0.9, 1e-3), 1.0),
        "adamax": (lambda o: o.Adamax(0.03, beta_1=0.8, beta_2=0.95), adamax(0.8, 0.95), 0.03),
        "nadam": (lambda o: o.Nadam(0.03, beta_1=0.8, beta_2=0.95), nadam(0.8, 0.95), 0.03),
        "ftrl": (lambda o: o.Ftrl(0.1), ftrl(), 0.1),
        "ftrl with all": (
            lambda o: o.Ftrl(0.1, -0.6, 0.2, 0.3, 0.1, 0.05, 0.4),
            ftrl(-0.6, 0.2, 0.3, 0.1, 0.05, 0.4),
            0.1,
        ),
        "lamb": (lambda o: o.Lamb(0.03, beta_1=0.8, beta_2=0.95), lamb(0.8, 0.95), 0.03),
        "adafactor": (lambda o: o.Adafactor(0.03), adafactor(), 0.03),
        "adafactor with all": (
            lambda o: o.Adafactor(0.9, -0.6, 1e-4, 0.5, 0.7, relative_step=False),
            adafactor(-0.6, 1e-4, 0.5, 0.7),
            0.9,
        ),
        "lion": (lambda o: o.Lion(0.01, beta_1=0.8, beta_2=0.9), lion(0.8, 0.9), 0.01),
    }


def clip(gradients: list[np.ndarray], limit: float) -> list[np.ndarray]:
    """Scale gradients down together so that their norm does not exceed a limit."""
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))
    return [g * min(1.0, limit / norm) for g in gradients]


class Training:
    """What Keras's base class does around a rule, on whole arrays, step by step: rule and settings may be others in each.

    Source: `apply` and `_backend_apply_gradients` of keras.optimizers.Optimizer, Keras 3.

    Attributes:
        weights, averages: as they are now.
    """

    def __init__(self, weights: list[np.ndarray]) -> None:
        self.weights = [w.copy() for w in weights]
        self.averages, self._sums = [0 * w for w in weights], [0 * w for w in weights]
        self._slots: list[Slots] = [{} for _ in weights]
        self.calls = 0

    def step(
        self,
        rule: Rule,
        gradients: list[np.ndarray | None],
        rate: float,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        gradient_accumulation_steps: int | None = None,
        loss_scale_factor: float | None = None,
    ) -> None:
        """Take a step; a variable whose gradient is None stays as it is, but for its average."""
        several = gradient_accumulation_steps or 1
        iterations, self.calls = self.calls // several, self.calls + 1
        having = [i for i, gradient in enumerate(gradients) if gradient is not None]
        for i in having:
            self._sums[i] = self._sums[i] + gradients[i] / (loss_scale_factor or 1.0)
        if self.calls % several == 0:
            mean = [self._sums[i] / several for i in having]
            if clipnorm is not None:
                mean = [clip([g], clipnorm)[0] for g in mean]
            elif global_clipnorm is not None:
                mean = clip(mean, global_clipnorm)
            elif clipvalue is not None:
                mean = [np.clip(g, -clipvalue, clipvalue) for g in mean]
            for i, gradient in zip(having, mean, strict=True):
                weights = self.weights[i] - self.weights[i] * (weight_decay or 0.0) * rate
                self.weights[i] = rule(weights, gradient, self._slots[i], iterations + 1, rate)
                self._sums[i] = 0 * gradient
        if use_ema:
            momentum = ema_momentum if iterations else 0.0
            self.averages = [
                momentum * a + (1 - momentum) * w for a, w in zip(self.averages, self.weights, strict=True)
            ]
            if ema_overwrite_frequency and (iterations + 1) % ema_overwrite_frequency == 0:
                self.weights = [a.copy() for a in self.averages]


def apply(
    rule: Rule,
    weights: list[np.ndarray],
    gradients: Callable[[int], list[np.ndarray]],
    calls: int,
    rate: float,
    **settings: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Take `calls` steps of a `Training` with the same settings; return weights and averages at the end."""
    training = Training(weights)
    for call in range(calls):
        training.step(rule, gradients(call), rate, **settings)
    return training.weights, training.averages


#: What may be said of any optimizer, and some of it together.
SETTINGS: dict[str, dict[str, Any]] = {
    "loss scale": {"loss_scale_factor": 8.0},
    "loss scale, clip, accumulate": {"loss_scale_factor": 3.0, "clipnorm": 5.0, "gradient_accumulation_steps": 2},
    "weight_decay": {"weight_decay": 0.05},
    "clipnorm": {"clipnorm": 5.0},
    "clipvalue": {"clipvalue": 0.5},
    "global_clipnorm": {"global_clipnorm": 100.0},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
    "ema overwrite": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulate": {"gradient_accumulation_steps": 3},
    "accumulate, clip, decay, ema": {
        "gradient_accumulation_steps": 2,
        "clipnorm": 5.0,
        "weight_decay": 0.05,
        "use_ema": True,
        "ema_momentum": 0.7,
        "ema_overwrite_frequency": 3,
    },
    "accumulate, global clip": {"gradient_accumulation_steps": 2, "global_clipnorm": 50.0},
}


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
