"""RMSProp: each weight's gradient is divided by the root of its recent mean square."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from .hyperparameters import Rate, Settings
from .optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RMSProp"]


@final
class RMSProp(Optimizer):
    """v = rho * v + (1 - rho) * g²; w -= rate * g / sqrt(v + epsilon).

    Args:
        learning_rate: a number, a schedule or a callable.
        rho: how much of v is kept at each step.
        momentum: if not 0, the step is m = momentum * m + rate * g / sqrt(v + epsilon).
        epsilon: keeps the divisor from zero.
        centered: divide by the root of the variance instead: v less the square of the gradient's own mean.
        settings: those that all have in common, by name; see `Optimizer`.

    Raises:
        ValueError: momentum is negative.

    Source: keras.optimizers.RMSprop of Keras 3; Hinton's lecture 6,
    http://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        self.rho = float(rho)
        self.momentum = self._at_least_zero("momentum", momentum)
        self.epsilon = float(epsilon)
        self.centered = bool(centered)
        slots = ["velocity"]
        if self.momentum:
            slots.append("momentum")
        if self.centered:
            slots.append("average_gradient")
        super().__init__(learning_rate, slot_names=tuple(slots), **settings)

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
        work, velocity = scratch[0][: gradient.size], slots["velocity"]
        np.multiply(gradient, gradient, out=work)
        self._average(velocity, work)
        if self.centered:
            mean = slots["average_gradient"]
            np.copyto(work, gradient)
            self._average(mean, work)
            np.multiply(mean, mean, out=work)
            np.subtract(velocity, work, out=work)
            np.add(work, self.epsilon, out=work)
        else:
            np.add(velocity, self.epsilon, out=work)
        np.sqrt(work, out=work)
        np.multiply(gradient, rate, out=gradient)
        np.divide(gradient, work, out=gradient)
        if self.momentum:
            momentum = slots["momentum"]
            np.multiply(momentum, self.momentum, out=momentum)
            np.add(momentum, gradient, out=momentum)
            gradient = momentum
        np.subtract(weights, gradient, out=weights)

    def _average(self, average: Any, work: Any) -> None:
        """average = rho * average + (1 - rho) * work; overwrites work."""
        np.multiply(average, self.rho, out=average)
        np.multiply(work, 1 - self.rho, out=work)
        np.add(average, work, out=average)
