"""An optimizer's rule on one block of weights: what every step does, whoever keeps weights and slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..comm.dtypes import accumulation_dtype

if TYPE_CHECKING:
    from .optimizer import Optimizer

__all__ = ["BlockUpdate"]


@final
class BlockUpdate:
    """Updates blocks of one dtype. 16-bit weights are widened, updated, and rounded once.

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
        self._rule = optimizer.update
        self.narrow = accumulation_dtype(dtype) != dtype
        self._step, self._rate = 0, 0.0

    def begin(self, step: int, rate: float) -> None:
        """Set what is the same for all blocks of a step. Not collective."""
        self._step, self._rate = step, rate

    def update(
        self, target: Any, gradient: Any, slots: Mapping[str, Any], decays: Iterable[tuple[int, int, float]]
    ) -> None:
        """Update a block of weights and its slots in place; the gradient is overwritten. Not collective.

        Args:
            target: flat array of the weights.
            gradient: flat array of their size, of the dtype in which gradients are summed.
            slots: flat arrays like it.
            decays: which elements [low, high) of the block decay, and by what, times the rate.
        """
        weights = target
        if self.narrow:
            weights = self._wide[: target.size]
            weights[...] = target
        for low, high, decay in decays:
            piece = weights[low:high]
            np.multiply(piece, 1 - decay * self._rate, out=piece)
        self._rule(gradient, weights, slots, self._step, self._rate, self._scratch)
        if self.narrow:
            target[...] = weights
