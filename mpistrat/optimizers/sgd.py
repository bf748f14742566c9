"""Gradient descent, plain, with momentum, and with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from .hyperparameters import Rate, Settings
from .optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SGD", "Momentum"]


@final
class SGD(Optimizer):
    """w -= rate * g; with momentum m = momentum * m - rate * g and w += m; Nesterov: w += momentum * m - rate * g.

    Args:
        learning_rate: a number, a schedule or a callable.
        momentum: 0 ≤ momentum.
        nesterov: look ahead by one step.
        settings: those that all have in common, by name; see `Optimizer`.

    Raises:
        ValueError: momentum is negative.

    Source: keras.optimizers.SGD of Keras 3; Sutskever et al., http://proceedings.mlr.press/v28/sutskever13.pdf.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        self.momentum = self._at_least_zero("momentum", momentum)
        self.nesterov = bool(nesterov)
        super().__init__(learning_rate, slot_names=("momentum",) if momentum else (), **settings)

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
        np.multiply(gradient, rate, out=gradient)
        if not self.momentum:
            np.subtract(weights, gradient, out=weights)
            return
        momentum = slots["momentum"]
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, gradient, out=momentum)
        if self.nesterov:
            ahead = scratch[0][: gradient.size]
            np.multiply(momentum, self.momentum, out=ahead)
            np.subtract(ahead, gradient, out=ahead)
            np.add(weights, ahead, out=weights)
        else:
            np.add(weights, momentum, out=weights)


def Momentum(
    learning_rate: Rate = 0.01,
    momentum: float = 0.9,
    nesterov: bool = False,
    **settings: Unpack[Settings],
) -> SGD:
    """Return SGD with momentum, in Keras's form (TF: MomentumOptimizer).

    Args:
        learning_rate, momentum, nesterov, settings: as for `SGD`.

    Example:
        >>> Momentum(0.1).slot_names
        ('momentum',)
    """
    named: Settings = {"name": "momentum", **settings}
    return SGD(learning_rate, momentum, nesterov, **named)
