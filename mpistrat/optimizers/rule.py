"""The rule of an optimizer, apart from the steps that apply it: blocks of weights, and what every step does on one.

`Optimizer` is the public class; the fused step of arenas and the updates of a parameter server work on blocks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from ..arena.arithmetic import combine
from ..base import loops
from ..base.loops import Around, CompiledLoop, Span
from ..base.partition import spans_within
from ..base.underflow import may_underflow
from ..comm.arrays import accumulation_dtype, as_buffer, is_gpu
from ..variables.variable import Variable
from .gradients import Pairs
from .hyperparameters import AVERAGE, GRADIENT_SUM, Hyperparameters

__all__ = ["Block", "BlockUpdate", "UpdateRule", "UpdateRun", "form_mean", "multiply_spans"]


class Block(NamedTuple):
    """A block of weights and what a rule needs to update it; all but the group are the arguments of `Optimizer.update`."""

    gradient: Any
    weights: Any
    slots: Mapping[str, Any]
    step: int
    rate: float
    scratch: Sequence[Any]
    group: int


class UpdateRule(Hyperparameters):
    """The update of a block of weights by its gradient, with its numbers: the hooks of an optimizer that steps call.

    A rule has `update`, or `update_block` where it needs more of the block. The other hooks are the package's own.

    Attributes:
        slot_names: the slots that each weight has between steps.
        _passes: the passes over kept sums before the one that updates, in order; most rules have none.
            "factor": the slot `_factored`, which `_form_moments` writes, becomes in each matrix of a variable the sum of a row
            times that of a column over that of the matrix.
            "direct": each variable's update is along a `_direction`, scaled by a `_ratio` that depends on the norms of the whole
            variable and of the direction.
            "whole": `_update_whole` computes the new weights of all variables together, on every rank; `update_block` then gets
            them for gradients.
        _factored: see "factor".
    """

    slot_names: tuple[str, ...]
    _passes: tuple[str, ...] = ()
    _factored: ClassVar[str] = ""

    @abstractmethod
    def update_block(self, block: Block) -> None:
        """Update the weights and slots of a block in place; the gradient may be overwritten."""

    def _loop(self, step: int, rate: float) -> CompiledLoop | None:
        """Return the compiled loop that does what `update_block` does, None where none does."""
        return None

    def _kernel(self, step: int, rate: float) -> CompiledLoop | None:
        """Return the kernel that does so on a GPU, None where none does."""
        return self._loop(step, rate)

    def _direction(self, block: Block) -> None:
        """Write the direction of the update over the gradient of a block, and update its slots; not the weights."""
        raise NotImplementedError(f"{type(self).__name__}._direction")

    def _form_moments(self, block: Block) -> None:
        """Update the slot that is factored; the gradient stays as it is, and there are no weights."""
        raise NotImplementedError(f"{type(self).__name__}._form_moments")

    def _ratio(self, weights: float, direction: float, size: int, step: int, rate: float) -> float:
        """Return the factor of a variable's direction, along which `update_block` then goes.

        Args:
            weights, direction: their norms.
            size: how many elements each has.
            step, rate: as for a block.
        """
        raise NotImplementedError(f"{type(self).__name__}._ratio")

    def _update_whole(self, gradients: dict[str, Any], weights: dict[str, Any]) -> Mapping[str, Any]:
        """Return new weights by name of variable, from whole arrays, which stay as they are."""
        raise NotImplementedError(f"{type(self).__name__}._update_whole")

    def _store_whole(self) -> None:
        """Store this rank's part of the state after `_update_whole`, which all ranks of the node have called."""
        raise NotImplementedError(f"{type(self).__name__}._store_whole")

    def _group_of(self, variable: Any) -> int:
        """Return the group of variables with numbers of their own that a variable belongs to: 0 where all have the same."""
        return 0

    @abstractmethod
    def _slot_start(self) -> Mapping[str, float]:
        """Return the value before the first step of each slot that does not begin with 0."""

    def _on_restart(self, variables: Collection[Variable]) -> None:
        """Act after the slots of variables got the values of before the first step. All ranks call it."""

    @abstractmethod
    def get_settings(self) -> list[dict[str, Any]]:
        """Return the numbers that a program may change, one dict for each group of variables with numbers of its own."""

    @abstractmethod
    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Take the settings that `get_settings` returned. Every rank must call it with the same."""


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

    In one pass by `loops.update`, or on a GPU by `kernels.update`, where the rule has one; else by NumPy, with the same bits.
    `scratch` returns four flat arrays of the dtype in which gradients are summed: blocks, which larger arrays are cut into for
    NumPy. It is called when they are needed first.

    Attributes:
        narrow: whether weights are widened.
    """

    def __init__(self, rule: UpdateRule, dtype: np.dtype, scratch: Callable[[], Sequence[Any]]) -> None:
        self._rule, self._new_memory = rule, scratch
        self.narrow = accumulation_dtype(dtype) != dtype
        self._step, self._rate, self._factor = 0, 0.0, 1.0
        self._limit: float | None = None
        self._momentum: float | None = None  # of the averages, None where there are none
        self._overwrites = False
        self._loop: CompiledLoop | None = None

    @functools.cached_property
    def _memory(self) -> Sequence[Any]:
        return self._new_memory()

    @property
    def _scratch(self) -> Sequence[Any]:
        return self._memory[:2]

    @property
    def block(self) -> Any:
        """A block of gradients, for the caller's use, too."""
        return self._memory[3]

    def begin(self, step: int, rate: float, factor: float = 1.0) -> None:
        """Set what is the same for all blocks of a step; sums of parts are multiplied by the factor."""
        self._step, self._rate, self._factor = step, rate, factor
        rule = self._rule
        self._loop = rule._loop(step, rate)
        self._limit = None if "direct" in rule._passes else rule.clipvalue
        if rule.use_ema:
            self._momentum = rule.ema_momentum if step > 1 else 0.0
            often = rule.ema_overwrite_frequency
            self._overwrites = often is not None and step % often == 0

    def update(
        self,
        target: Any,
        parts: Sequence[Any],
        slots: Mapping[str, Any],
        decays: Iterable[Span] = (),
        group: int = 0,
        scales: Sequence[Span] = (),
        calls: int = 0,
    ) -> None:
        """Update weights and their slots in place by the sum of parts, which stay as they are; of any size.

        With a number of `calls` the gradient is the mean of that sum and of what these accumulated, which becomes 0.

        Args:
            target: the weights.
            parts: gradients of them.
            slots: of them.
            decays: elements [low, high) of them that decay, and by what, times the rate.
            group: of variables, which all are of.
            scales: elements of the gradient, and what they are multiplied by.
            calls: the number of calls that accumulated, 0 where none did.
        """
        decays = list(decays)
        if self._in_one_pass(target, parts, slots, decays, scales, calls):
            return
        for low in range(0, target.size, self.block.size):
            high = min(low + self.block.size, target.size)
            gradient, own = self.block[: high - low], {name: slot[low:high] for name, slot in slots.items()}
            self._sum(parts, low, high, gradient)
            if calls:
                form_mean(gradient, own[GRADIENT_SUM], calls)
            multiply_spans(gradient, spans_within(scales, low, high))
            self._by_numpy(target[low:high], gradient, own, list(spans_within(decays, low, high)), group)
            if calls:
                own[GRADIENT_SUM][...] = 0

    def form_moments(self, gradient: Any, slots: Mapping[str, Any]) -> None:
        """Clip a block of a gradient, and update the slot that the rule factors."""
        self._rule._form_moments(self._clipped(gradient, slots))

    def direct(self, gradient: Any, slots: Mapping[str, Any]) -> None:
        """Make of a block of a gradient the direction of the update, where the rule has one."""
        self._rule._direction(self._clipped(gradient, slots))

    def _clipped(self, gradient: Any, slots: Mapping[str, Any]) -> Block:
        limit = self._rule.clipvalue
        if limit is not None:
            np.clip(gradient, -limit, limit, out=gradient)
        return Block(gradient, None, slots, self._step, self._rate, self._scratch, 0)

    def accumulate(self, target: Any, parts: Sequence[Any], slots: Mapping[str, Any]) -> None:
        """Add the sum of parts to what is accumulated, in a step that does not update the weights, and update their averages."""
        average = None if self._momentum is None else slots[AVERAGE]
        around = Around(None, [], [], None, 0, average, self._momentum, self._overwrites, self._factor)
        if _fused(CompiledLoop("accumulate", (), (GRADIENT_SUM,)), target, parts, slots, around):
            return
        for low in range(0, target.size, self.block.size):
            high = min(low + self.block.size, target.size)
            gradient, own = self.block[: high - low], {name: slot[low:high] for name, slot in slots.items()}
            self._sum(parts, low, high, gradient)
            np.add(own[GRADIENT_SUM], gradient, out=own[GRADIENT_SUM])
            self._average_only(target[low:high], own)

    def average(self, target: Any, slots: Mapping[str, Any]) -> None:
        """Update the averages of weights that a step leaves as they are, or overwrite the weights by them; of any size."""
        for low in range(0, target.size, self.block.size):
            high = min(low + self.block.size, target.size)
            self._average_only(target[low:high], {AVERAGE: slots[AVERAGE][low:high]})

    @may_underflow
    def _sum(self, parts: Sequence[Any], low: int, high: int, gradient: Any) -> None:
        combine(np.add, [part[low:high] for part in parts], gradient)
        if self._factor != 1:
            np.multiply(gradient, self._factor, out=gradient)

    def _in_one_pass(
        self,
        target: Any,
        parts: Sequence[Any],
        slots: Mapping[str, Any],
        decays: Sequence[Span],
        scales: Sequence[Span],
        calls: int,
    ) -> bool:
        loop = self._rule._kernel(self._step, self._rate) if is_gpu(target) else self._loop
        if loop is None:
            return False
        factors = [(low, high, 1 - decay * self._rate) for low, high, decay in decays]
        sums = slots[GRADIENT_SUM] if calls else None
        average = None if self._momentum is None else slots[AVERAGE]
        last = average, self._momentum, self._overwrites, self._factor
        return _fused(loop, target, parts, slots, Around(self._limit, list(scales), factors, sums, calls, *last))

    def _by_numpy(
        self, target: Any, gradient: Any, slots: Mapping[str, Any], decays: Sequence[Span], group: int
    ) -> None:
        weights = self.widened(target)
        multiply_spans(weights, ((low, high, 1 - decay * self._rate) for low, high, decay in decays))
        if self._limit is not None:
            np.clip(gradient, -self._limit, self._limit, out=gradient)
        self._rule.update_block(Block(gradient, weights, slots, self._step, self._rate, self._scratch, group))
        if self._momentum is not None:
            self._average(weights, slots[AVERAGE], self._momentum)
        if self.narrow:
            _round(target, weights)

    def _average_only(self, target: Any, slots: Mapping[str, Any]) -> None:
        if self._momentum is not None:
            weights = self.widened(target)
            self._average(weights, slots[AVERAGE], self._momentum)
            if self.narrow and self._overwrites:
                _round(target, weights)

    def widened(self, target: Any) -> Any:
        """Return a block of weights in the dtype of the sums: a copy in scratch memory, where they are 16-bit."""
        if not self.narrow:
            return target
        weights = self._memory[2][: target.size]
        if not loops.add(weights, [as_buffer(target)]):
            weights[...] = target
        return weights

    @may_underflow
    def _average(self, weights: Any, average: Any, momentum: float) -> None:
        """average = momentum * average + (1 - momentum) * weights; the weights become it where this step overwrites them."""
        work = self._scratch[0][: weights.size]
        np.multiply(weights, 1 - momentum, out=work)
        np.multiply(average, momentum, out=average)
        np.add(average, work, out=average)
        if self._overwrites:
            weights[...] = average


def _fused(loop: CompiledLoop, target: Any, parts: Sequence[Any], slots: Mapping[str, Any], around: Around) -> bool:
    """Update weights, where they lie, in one pass, if that can be done; return whether it was."""
    arrays = tuple([slots.get(name) for name in loop.slots])
    if is_gpu(target):
        from . import kernels

        return kernels.update(loop.rule, loop.numbers, parts, target, arrays, around)
    return loops.update(loop.rule, loop.numbers, [*map(as_buffer, parts)], as_buffer(target), arrays, around)


@may_underflow
def _round(target: Any, weights: Any) -> None:
    """Write widened weights, rounded."""
    if not loops.narrow(as_buffer(target), weights):
        target[...] = weights


@may_underflow
def multiply_spans(array: Any, spans: Iterable[Span]) -> None:
    """Multiply the elements of each span by its number."""
    for low, high, factor in spans:
        number = factor if isinstance(factor, (int, float)) else factor.cast(array.dtype)
        np.multiply(array[low:high], number, out=array[low:high])


@may_underflow
def form_mean(gradient: Any, sums: Any, calls: int) -> None:
    """Make a gradient the mean of it and of what was accumulated, over so many calls."""
    np.add(gradient, sums, out=gradient)
    np.divide(gradient, calls, out=gradient)
