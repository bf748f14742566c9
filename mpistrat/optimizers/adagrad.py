"""Adagrad: each weight's rate shrinks with the sum of its squared gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from .hyperparameters import Rate, Settings
from .optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Adagrad"]


@final
class Adagrad(Optimizer):
    """a += g²; w -= rate * g / sqrt(a + epsilon).

    Args:
        learning_rate: a number, a schedule or a callable.
        initial_accumulator_value: of a; not negative.
        epsilon: keeps the divisor from zero.
        settings: those that all have in common, by name; see `Optimizer`.

    Raises:
        ValueError: initial_accumulator_value is negative.

    Source: keras.optimizers.Adagrad of Keras 3; Duchi et al., http://www.jmlr.org/papers/volume12/duchi11a/duchi11a.pdf.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **settings: Unpack[Settings],
    ) -> None:
        self.initial_accumulator_value = self._at_least_zero("initial_accumulator_value", initial_accumulator_value)
        self.epsilon = float(epsilon)
        super().__init__(
            learning_rate,
            slot_names=("accumulator",),
            slot_start=self.initial_accumulator_value,
            **settings,
        )

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
        work, accumulator = scratch[0][: gradient.size], slots["accumulator"]
        np.multiply(gradient, gradient, out=work)
        np.add(accumulator, work, out=accumulator)
        np.add(accumulator, self.epsilon, out=work)
        np.sqrt(work, out=work)
        np.multiply(gradient, rate, out=gradient)
        np.divide(gradient, work, out=work)
        np.subtract(weights, work, out=weights)
