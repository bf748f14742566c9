"""AdamW: Adam, with weights that decay on their own, apart from the gradient."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from ..errors import explain
from ..variables.sharded_variable import each_variable
from .adam import adam_update
from .optimizer import Optimizer
from .schedules import LearningRateSchedule

if TYPE_CHECKING:
    from ..variables.variable import Variable

__all__ = ["AdamW"]


@final
class AdamW(Optimizer):
    """Adam after w -= w * weight_decay * rate.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: how much of each weight is lost at a step, times the rate.
        beta_1, beta_2, epsilon: as for `Adam`.
        global_clipnorm, name: see `Optimizer`.

    Raises:
        ValueError: weight_decay is negative; beta_1 or beta_2 is out of range.

    Source: keras.optimizers.AdamW of Keras 3; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        global_clipnorm: float | None = None,
        name: str = "adamw",
    ) -> None:
        self.weight_decay = self._at_least_zero("weight_decay", weight_decay)
        self.beta_1 = self._fraction("beta_1", beta_1)
        self.beta_2 = self._fraction("beta_2", beta_2)
        self.epsilon = float(epsilon)
        self._excluded: set[Variable] = set()
        self._excluded_names: list[re.Pattern[str]] = []
        super().__init__(learning_rate, slot_names=("momentum", "velocity"), global_clipnorm=global_clipnorm, name=name)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Let variables keep their weights; every rank must say the same, before the first step. Not collective.

        Args:
            var_list: variables.
            var_names: regular expressions, searched for in the names of variables.

        Raises:
            RuntimeError: after the first `apply_gradients`.
        """
        if self.variables:
            expected, got = "a call before the first apply_gradients", "a later one"
            raise RuntimeError(explain("AdamW.exclude_from_weight_decay", "", expected=expected, got=got))
        self._excluded.update(v for _, v in each_variable((None, v) for v in var_list or ()))
        self._excluded_names.extend(re.compile(name) for name in var_names or ())

    def decay_of(self, variable: Variable) -> float:
        """Return how much of a variable's weights is lost at a step, times the rate. Not collective."""
        if variable in self._excluded or any(pattern.search(variable.name) for pattern in self._excluded_names):
            return 0.0
        return self.weight_decay

    def update(
        self,
        gradient: Any,
        weights: Any,
        slots: Mapping[str, Any],
        step: int,
        rate: float,
        scratch: Sequence[Any],
    ) -> None:
        """Update a block of weights and slots in place, and overwrite the gradient. Not collective.

        The weights have decayed already: the step does that, as `decay_of` says for each variable.
        """
        adam_update(gradient, weights, slots, step, rate, scratch, self.beta_1, self.beta_2, self.epsilon)
