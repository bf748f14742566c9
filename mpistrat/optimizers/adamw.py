"""AdamW: Adam, with weights that decay on their own, apart from the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from .adam import adam_slots, adam_update
from .hyperparameters import Rate, SettingsButDecay
from .optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AdamW"]


@final
class AdamW(Optimizer):
    """Adam after w -= w * weight_decay * rate.

    Args:
        learning_rate: a number, a schedule or a callable.
        weight_decay: how much of each weight is lost at a step, times the rate.
        beta_1, beta_2, epsilon, amsgrad: as for `Adam`.
        settings: the others that all have in common, by name; see `Optimizer`.

    Raises:
        ValueError: weight_decay is negative; beta_1 or beta_2 is out of range.

    Source: keras.optimizers.AdamW of Keras 3; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        weight_decay: float | None = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **settings: Unpack[SettingsButDecay],
    ) -> None:
        self.beta_1 = self._fraction("beta_1", beta_1)
        self.beta_2 = self._fraction("beta_2", beta_2)
        self.epsilon = float(epsilon)
        self.amsgrad = bool(amsgrad)
        super().__init__(learning_rate, slot_names=adam_slots(amsgrad), weight_decay=weight_decay, **settings)

    def update(
        self,
        gradient: Any,
        weights: Any,
        slots: Mapping[str, Any],
        step: int,
        rate: float,
        scratch: Sequence[Any],
    ) -> None:
        """Update a block of weights and slots in place, and overwrite the gradient.

        The weights have decayed already: the step does that, as `decay_of` says for each variable.
        """
        adam_update(gradient, weights, slots, step, rate, scratch, self.beta_1, self.beta_2, self.epsilon)
