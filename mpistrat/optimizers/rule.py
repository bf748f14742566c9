"""The rule of an optimizer, apart from the steps that apply it: blocks of weights, and what every step does on one.

`Optimizer` is the public class; the fused step of arenas and the updates of a parameter server work on blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from .._util import loops
from ..comm.arrays import accumulation_dtype, as_buffer
from .gradients import Pairs
from .hyperparameters import AVERAGE, Hyperparameters

__all__ = ["Block", "BlockUpdate", "Rule", "UpdateRun"]


class Block(NamedTuple):
    """A block of weights and what a rule needs to update it; all but the group are the arguments of `Optimizer.update`."""

    gradient: Any
    weights: Any
    slots: Mapping[str, Any]
    step: int
    rate: float
    scratch: Sequence[Any]
    group: int


class Rule(Hyperparameters):
    """How a block of weights is updated by its gradient, with which numbers.

    Attributes:
        slot_names: what is kept for each weight between steps.
    """

    slot_names: tuple[str, ...]
    _slot_start: float

    @property
    def slot_start(self) -> float:
        """The value of every slot of the rule before the first step."""
        return self._slot_start

    @abstractmethod
    def update_block(self, block: Block) -> None:
        """Update the weights and slots of a block in place; the gradient may be overwritten."""

    def group_of(self, variable: Any) -> int:
        """Return the group of variables with numbers of their own that a variable belongs to: 0 where all have the same."""
        return 0


class UpdateRun(ABC):
    """The step of one optimizer on one set of variables, by a strategy: made at the first step, used at every other.

    Attributes:
        strategy: whose variables they are; opaque.
    """

    strategy: Any

    @abstractmethod
    def describe(self) -> None:
        """Describe the optimizer anew, after its numbers have changed."""

    @abstractmethod
    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Take the gradients of each local replica; `key` identifies the set of variables."""

    @abstractmethod
    def run(self, aggregate: bool) -> None:
        """Take the step; in cross-replica context. Collective over the replicas in sync.

        Without `aggregate`, gradients are not summed over the replicas: they are equal on all already.
        """


@final
class BlockUpdate:
    """Updates blocks of one dtype: decay, clipping by value, the rule, averages. 16-bit weights are widened, and rounded once.

    `scratch` are four flat arrays of the dtype in which gradients are summed, at least as large as a block.

    Attributes:
        block: the last of them, for the caller's use: a block of gradients.
        narrow: whether weights are widened.
    """

    def __init__(self, rule: Rule, dtype: np.dtype, scratch: Sequence[Any]) -> None:
        *self._scratch, self._wide, self.block = scratch
        self._rule = rule
        self.narrow = accumulation_dtype(dtype) != dtype
        self._step, self._rate = 0, 0.0
        self._revision = -1  # of the rule, when its limit was read
        self._limit: float | None = None
        self._momentum: float | None = None  # of the averages, None where there are none
        self._overwrites = False

    def begin(self, step: int, rate: float) -> None:
        """Set what is the same for all blocks of a step."""
        self._step, self._rate = step, rate
        rule = self._rule
        if rule.revision != self._revision:
            self._revision, self._limit = rule.revision, rule.clipvalue
        if rule.use_ema:
            self._momentum = rule.ema_momentum if step > 1 else 0.0
            often = rule.ema_overwrite_frequency
            self._overwrites = often is not None and step % often == 0

    def update(
        self,
        target: Any,
        gradient: Any,
        slots: Mapping[str, Any],
        decays: Iterable[tuple[int, int, float]],
        group: int = 0,
    ) -> None:
        """Update a block of weights and its slots in place; the gradient, of the dtype of sums, is overwritten.

        `decays` are the elements [low, high) of the block that decay, and by what, times the rate; all elements are of one
        `group` of variables.
        """
        weights = self._widened(target)
        for low, high, decay in decays:
            decaying = weights[low:high]
            np.multiply(decaying, 1 - decay * self._rate, out=decaying)
        if self._limit is not None:
            np.clip(gradient, -self._limit, self._limit, out=gradient)
        self._rule.update_block(Block(gradient, weights, slots, self._step, self._rate, self._scratch, group))
        if self._momentum is not None:
            self._average(weights, slots[AVERAGE], self._momentum)
        if self.narrow:
            _round(target, weights)

    def average(self, target: Any, slots: Mapping[str, Any]) -> None:
        """Update the averages of a block's weights in a step that does not update these."""
        if self._momentum is not None:
            weights = self._widened(target)
            self._average(weights, slots[AVERAGE], self._momentum)
            if self.narrow and self._overwrites:
                _round(target, weights)

    def _widened(self, target: Any) -> Any:
        if not self.narrow:
            return target
        weights = self._wide[: target.size]
        if not loops.add(weights, [as_buffer(target)]):
            weights[...] = target
        return weights

    def _average(self, weights: Any, average: Any, momentum: float) -> None:
        """average = momentum * average + (1 - momentum) * weights; the weights become it where this step overwrites them."""
        work = self._scratch[0][: weights.size]
        np.multiply(weights, 1 - momentum, out=work)
        np.multiply(average, momentum, out=average)
        np.add(average, work, out=average)
        if self._overwrites:
            weights[...] = average


def _round(target: Any, weights: Any) -> None:
    """Write widened weights, rounded."""
    if not loops.narrow(as_buffer(target), weights):
        target[...] = weights
