"""An optimizer's rule on one block of weights: what every step does, whoever keeps weights and slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..comm.dtypes import accumulation_dtype
from .hyperparameters import AVERAGE

if TYPE_CHECKING:
    from .optimizer import Optimizer

__all__ = ["BlockUpdate"]


@final
class BlockUpdate:
    """Updates blocks of one dtype: decay, clipping by value, the rule, averages. 16-bit weights are widened, and rounded once.

    Args:
        optimizer: whose rule it is.
        dtype: of the weights.
        scratch: four flat arrays of the dtype in which gradients are summed, at least as large as a block.

    Attributes:
        block: the last of them, for the caller's use: a block of gradients.
        narrow: whether weights are widened.
    """

    def __init__(self, optimizer: Optimizer, dtype: np.dtype, scratch: Sequence[Any]) -> None:
        *self._scratch, self._wide, self.block = scratch
        self._optimizer, self._rule = optimizer, optimizer.update
        self.narrow = accumulation_dtype(dtype) != dtype
        self._step, self._rate = 0, 0.0
        self._revision = -1  # of the optimizer, when its limit was looked at
        self._limit: float | None = None
        self._momentum: float | None = None  # of the averages, None where there are none
        self._overwrites = False

    def begin(self, step: int, rate: float) -> None:
        """Set what is the same for all blocks of a step."""
        self._step, self._rate = step, rate
        optimizer = self._optimizer
        if optimizer.revision != self._revision:
            self._revision, self._limit = optimizer.revision, optimizer.clipvalue
        if optimizer.use_ema:
            self._momentum = optimizer.ema_momentum if step > 1 else 0.0
            often = optimizer.ema_overwrite_frequency
            self._overwrites = often is not None and step % often == 0

    def update(
        self, target: Any, gradient: Any, slots: Mapping[str, Any], decays: Iterable[tuple[int, int, float]]
    ) -> None:
        """Update a block of weights and its slots in place; the gradient is overwritten.

        Args:
            target: flat array of the weights.
            gradient: flat array of their size, of the dtype in which gradients are summed.
            slots: flat arrays like it.
            decays: which elements [low, high) of the block decay, and by what, times the rate.
        """
        weights = self._widened(target)
        for low, high, decay in decays:
            piece = weights[low:high]
            np.multiply(piece, 1 - decay * self._rate, out=piece)
        if self._limit is not None:
            np.clip(gradient, -self._limit, self._limit, out=gradient)
        self._rule(gradient, weights, slots, self._step, self._rate, self._scratch)
        if self._momentum is not None:
            self._average(weights, slots[AVERAGE], self._momentum)
        if self.narrow:
            target[...] = weights

    def average(self, target: Any, slots: Mapping[str, Any]) -> None:
        """Do for a block that is not updated in this step what belongs to the averages of its weights."""
        if self._momentum is not None:
            weights = self._widened(target)
            self._average(weights, slots[AVERAGE], self._momentum)
            if self.narrow and self._overwrites:
                target[...] = weights

    def _widened(self, target: Any) -> Any:
        if not self.narrow:
            return target
        weights = self._wide[: target.size]
        weights[...] = target
        return weights

    def _average(self, weights: Any, average: Any, momentum: float) -> None:
        """average = momentum * average + (1 - momentum) * weights; the weights become it where that is due."""
        part = self._scratch[0][: weights.size]
        np.multiply(weights, 1 - momentum, out=part)
        np.multiply(average, momentum, out=average)
        np.add(average, part, out=average)
        if self._overwrites:
            weights[...] = average
