"""Adam: momentum divided by the root of the mean square, both corrected for their start from zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from .hyperparameters import Rate, Settings
from .optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Adam", "adam_slots", "adam_update"]


@final
class Adam(Optimizer):
    """m += (g - m) * (1 - beta_1); v += (g² - v) * (1 - beta_2); w -= m * alpha / (sqrt(v) + epsilon).

    At step t, counted from 1, alpha = rate * sqrt(1 - beta_2 ** t) / (1 - beta_1 ** t).

    Args:
        learning_rate: a number, a schedule or a callable.
        beta_1, beta_2: how much of m and of v is kept at each step; at least 0, less than 1.
        epsilon: keeps the divisor from zero.
        amsgrad: divide by the root of the largest v so far.
        settings: those that all have in common, by name; see `Optimizer`.

    Raises:
        ValueError: beta_1 or beta_2 is out of range.

    Source: keras.optimizers.Adam of Keras 3; Kingma and Ba, https://arxiv.org/abs/1412.6980.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        self.beta_1 = self._fraction("beta_1", beta_1)
        self.beta_2 = self._fraction("beta_2", beta_2)
        self.epsilon = float(epsilon)
        self.amsgrad = bool(amsgrad)
        super().__init__(learning_rate, slot_names=adam_slots(amsgrad), **settings)

    def update(
        self,
        gradient: Any,
        weights: Any,
        slots: Mapping[str, Any],
        step: int,
        rate: float,
        scratch: Sequence[Any],
    ) -> None:
        """Update a block of weights and slots in place, and overwrite the gradient."""
        adam_update(gradient, weights, slots, step, rate, scratch, self.beta_1, self.beta_2, self.epsilon)


def adam_slots(amsgrad: bool) -> tuple[str, ...]:
    """Return what Adam keeps for each weight."""
    return ("momentum", "velocity", "velocity_hat") if amsgrad else ("momentum", "velocity")


def adam_update(
    gradient: Any,
    weights: Any,
    slots: Mapping[str, Any],
    step: int,
    rate: float,
    scratch: Sequence[Any],
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Do Adam's update of a block in place, in twelve passes, AMSGrad's in thirteen.

    Args:
        gradient, weights, slots, step, rate, scratch: as for `Optimizer.update`.
        beta_1, beta_2, epsilon: as for `Adam`.
    """
    momentum, velocity, work = slots["momentum"], slots["velocity"], scratch[0][: gradient.size]
    alpha = rate * math.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    np.subtract(gradient, momentum, out=work)
    np.multiply(work, 1 - beta_1, out=work)
    np.add(momentum, work, out=momentum)
    np.multiply(gradient, gradient, out=gradient)
    np.subtract(gradient, velocity, out=gradient)
    np.multiply(gradient, 1 - beta_2, out=gradient)
    np.add(velocity, gradient, out=velocity)
    if "velocity_hat" in slots:
        velocity = np.maximum(slots["velocity_hat"], velocity, out=slots["velocity_hat"])
    np.sqrt(velocity, out=gradient)
    np.add(gradient, epsilon, out=gradient)
    np.multiply(momentum, alpha, out=work)
    np.divide(work, gradient, out=work)
    np.subtract(weights, work, out=weights)
