"""Update rules and schedules of learning rates in plain NumPy float64, from the documentation of Keras and of their papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import mpistrat as ms

Slots = dict[str, np.ndarray]
Rate = Any  # a number, or the name of a schedule with its arguments


# Each takes weights, gradients, slots (which it updates), the number of the update from 1, and the learning rate.


def rule_sgd(w, g, s, t, lr, momentum=0.0, nesterov=False):
    if not momentum:
        return w - lr * g
    s["momentum"] = momentum * s["momentum"] - lr * g
    return w + (momentum * s["momentum"] - lr * g if nesterov else s["momentum"])


def rule_adam(w, g, s, t, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=False):
    s["momentum"] = beta_1 * s["momentum"] + (1 - beta_1) * g
    s["velocity"] = beta_2 * s["velocity"] + (1 - beta_2) * g * g
    v = s["velocity"]
    if amsgrad:
        v = s["velocity_hat"] = np.maximum(s["velocity_hat"], v)
    return w - lr * math.sqrt(1 - beta_2**t) / (1 - beta_1**t) * s["momentum"] / (np.sqrt(v) + epsilon)


def rule_adagrad(w, g, s, t, lr, initial_accumulator_value=0.1, epsilon=1e-7):
    s["accumulator"] = s["accumulator"] + g * g
    return w - lr * g / np.sqrt(s["accumulator"] + epsilon)


def rule_rmsprop(w, g, s, t, lr, rho=0.9, momentum=0.0, epsilon=1e-7, centered=False):
    s["velocity"] = rho * s["velocity"] + (1 - rho) * g * g
    under = s["velocity"] + epsilon
    if centered:
        s["average_gradient"] = rho * s["average_gradient"] + (1 - rho) * g
        under = under - s["average_gradient"] ** 2
    change = lr * g / np.sqrt(under)
    if momentum:
        change = s["momentum"] = momentum * s["momentum"] + change
    return w - change


def rule_adadelta(w, g, s, t, lr, rho=0.95, epsilon=1e-7):
    s["accumulated_grad"] = rho * s["accumulated_grad"] + (1 - rho) * g * g
    change = g * np.sqrt(s["accumulated_delta_var"] + epsilon) / np.sqrt(s["accumulated_grad"] + epsilon)
    s["accumulated_delta_var"] = rho * s["accumulated_delta_var"] + (1 - rho) * change * change
    return w - lr * change


def rule_adamax(w, g, s, t, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    s["momentum"] = beta_1 * s["momentum"] + (1 - beta_1) * g
    s["norm"] = np.maximum(beta_2 * s["norm"], abs(g))
    return w - lr / (1 - beta_1**t) * s["momentum"] / (s["norm"] + epsilon)


def rule_nadam(w, g, s, t, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    u = [beta_1 * (1 - 0.5 * 0.96**step) for step in range(t + 2)]
    product = math.prod(u[1 : t + 1])
    s["momentum"] = beta_1 * s["momentum"] + (1 - beta_1) * g
    s["velocity"] = beta_2 * s["velocity"] + (1 - beta_2) * g * g
    m = u[t + 1] * s["momentum"] / (1 - product * u[t + 1]) + (1 - u[t]) * g / (1 - product)
    return w - lr * m / (np.sqrt(s["velocity"] / (1 - beta_2**t)) + epsilon)


def rule_ftrl(
    w, g, s, t, lr, learning_rate_power=-0.5, initial_accumulator_value=0.1, l1_regularization_strength=0.0,
    l2_regularization_strength=0.0, l2_shrinkage_regularization_strength=0.0, beta=0.0,
):  # fmt: skip
    l1, p = l1_regularization_strength, -learning_rate_power
    l2 = l2_regularization_strength + beta / (2 * lr)
    new = s["accumulator"] + g * g
    shrunk = g + 2 * l2_shrinkage_regularization_strength * w
    s["linear"] = s["linear"] + shrunk - (new**p - s["accumulator"] ** p) / lr * w
    s["accumulator"] = new
    return (np.clip(s["linear"], -l1, l1) - s["linear"]) / (new**p / lr + 2 * l2)


def rule_lion(w, g, s, t, lr, beta_1=0.9, beta_2=0.99):
    change = np.sign(beta_1 * s["momentum"] + (1 - beta_1) * g)
    s["momentum"] = beta_2 * s["momentum"] + (1 - beta_2) * g
    return w - lr * change


def rule_lamb(w, g, s, t, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    s["momentum"] = beta_1 * s["momentum"] + (1 - beta_1) * g
    s["velocity"] = beta_2 * s["velocity"] + (1 - beta_2) * g * g
    u = s["momentum"] / (1 - beta_1**t) / (np.sqrt(s["velocity"] / (1 - beta_2**t)) + epsilon)
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - lr * (norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0) * u


def rule_adafactor(
    w, g, s, t, lr, beta_2_decay=-0.8, epsilon_1=1e-30, epsilon_2=1e-3, clip_threshold=1.0, relative_step=True
):
    if not w.size:
        return w
    b = 1 - float(t) ** beta_2_decay
    v = b * s["velocity"] + (1 - b) * (g * g + epsilon_1)
    if w.ndim > 1:
        v = v.mean(-1, keepdims=True) * v.mean(-2, keepdims=True) / v.mean((-1, -2), keepdims=True)
    s["velocity"] = v
    u = g / np.sqrt(v)
    size = max(epsilon_2, math.sqrt((w * w).mean())) * min(lr, 1 / math.sqrt(t))
    return w - size * u / max(1.0, math.sqrt((u * u).mean()) / clip_threshold)


RULES = {  # class: rule, slots of its arguments
    "SGD": (rule_sgd, lambda a: ["momentum"] * bool(a.get("momentum"))),
    "Adam": (rule_adam, lambda a: ["momentum", "velocity"] + ["velocity_hat"] * bool(a.get("amsgrad"))),
    "AdamW": (rule_adam, lambda a: ["momentum", "velocity"] + ["velocity_hat"] * bool(a.get("amsgrad"))),
    "Adagrad": (rule_adagrad, lambda a: ["accumulator"]),
    "RMSProp": (
        rule_rmsprop,
        lambda a: (
            ["velocity"] + ["momentum"] * bool(a.get("momentum")) + ["average_gradient"] * a.get("centered", False)
        ),
    ),
    "Adadelta": (rule_adadelta, lambda a: ["accumulated_grad", "accumulated_delta_var"]),
    "Adamax": (rule_adamax, lambda a: ["momentum", "norm"]),
    "Nadam": (rule_nadam, lambda a: ["momentum", "velocity"]),
    "Ftrl": (rule_ftrl, lambda a: ["accumulator", "linear"]),
    "Lion": (rule_lion, lambda a: ["momentum"]),
    "Lamb": (rule_lamb, lambda a: ["momentum", "velocity"]),
    "Adafactor": (rule_adafactor, lambda a: ["velocity"]),
}


def rate_at(rate: Rate, call: int) -> float:
    """Return the learning rate of a call, counted from 0."""
    if isinstance(rate, float):
        return rate
    name, a = rate
    if name == "callable":
        return a["start"] / (1 + call)
    if name == "PiecewiseConstantDecay":
        return a["values"][sum(call > edge for edge in a["boundaries"])]
    start, x = a["initial_learning_rate"], call / a["decay_steps"]
    if name in ("ExponentialDecay", "InverseTimeDecay"):
        x = math.floor(x) if a["staircase"] else x
        return start * a["decay_rate"] ** x if name == "ExponentialDecay" else start / (1 + a["decay_rate"] * x)
    if name == "PolynomialDecay":
        total = a["decay_steps"] * (max(1, math.ceil(x)) if a["cycle"] else 1)
        left = 1 - min(call, total) / total
        return (start - a["end_learning_rate"]) * left ** a["power"] + a["end_learning_rate"]
    target, warm = a["warmup_target"], a["warmup_steps"]
    if target is not None:
        if call < warm:
            return start + (target - start) * call / warm
        start, call = target, call - warm
    cosine = (1 + math.cos(math.pi * min(call, a["decay_steps"]) / a["decay_steps"])) / 2
    return start * ((1 - a["alpha"]) * cosine + a["alpha"])


def made_rate(rate: Rate) -> Any:
    """Return the same rate as the package takes it."""
    if isinstance(rate, float):
        return rate
    name, args = rate
    return (
        (lambda call: args["start"] / (1 + call))
        if name == "callable"
        else getattr(ms.optimizers.schedules, name)(**args)
    )
