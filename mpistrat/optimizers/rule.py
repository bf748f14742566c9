"""The rule of an optimizer, separate from the steps that apply it: blocks of weights, and the common work on each.

`Optimizer` is the public class; the fused step of arenas and the updates of a parameter server work on blocks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

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

if TYPE_CHECKING:
    from .kernels import StoredSteps

__all__ = ["Block", "BlockUpdate", "UpdateRule", "UpdateRun", "form_mean", "multiply_spans"]


class Block(NamedTuple):
    """A block of weights and the inputs of its update; all but the group are the arguments of `Optimizer.update`."""

    gradient: Any
    weights: Any
    slots: Mapping[str, Any]
    step: int
    rate: float
    scratch: Sequence[Any]
    group: int


class UpdateRule(Hyperparameters):
    """The update of a block of weights by its gradient, with its numbers: the hooks of an optimizer that steps call.

    A rule has `update`, or `update_block` if it needs more of the block. The other hooks are the package's own.

    Attributes:
        slot_names: the slots that each weight has between steps.
        _passes: the passes over kept sums before the update, in order; most rules have none. "factor": in each matrix of a
            variable, the slot `_factored`, written by `_form_moments`, becomes row sum times column sum over the matrix's sum.
            "direct": each variable is updated along a `_direction`, scaled by a `_ratio` of the norms of the whole variable and
            direction. "whole": `_update_whole` computes the new weights of all variables together, on every rank;
            `update_block` then gets them as gradients.
        _factored: see "factor".
    """

    slot_names: tuple[str, ...]
    _passes: tuple[str, ...] = ()
    _factored: ClassVar[str] = ""

    @abstractmethod
    def update_block(self, block: Block) -> None:
        """Update the weights and slots of a block in place; the gradient may be overwritten."""

    def _loop(self, step: int, rate: float) -> CompiledLoop | None:
        """Return the compiled loop of `update_block`; None if there is none."""
        return None

    def _kernel(self, step: int, rate: float) -> CompiledLoop | None:
        """Return the GPU kernel of `update_block`; None if there is none."""
        return self._loop(step, rate)

    def _direction(self, block: Block) -> None:
        """Write the direction of the update over the gradient of a block, and update its slots but not the weights."""
        raise NotImplementedError(f"{type(self).__name__}._direction")

    def _form_moments(self, block: Block) -> None:
        """Update the factored slot; the gradient is not changed, and there are no weights."""
        raise NotImplementedError(f"{type(self).__name__}._form_moments")

    def _ratio(self, weights: float, direction: float, size: int, step: int, rate: float) -> float:
        """Return the factor of a variable's direction for `update_block`.

        Args:
            weights, direction: their norms.
            size: the number of elements of each.
            step, rate: as for a block.
        """
        raise NotImplementedError(f"{type(self).__name__}._ratio")

    def _update_whole(self, gradients: dict[str, Any], weights: dict[str, Any]) -> Mapping[str, Any]:
        """Return new weights by name of variable, from whole arrays, which are not changed."""
        raise NotImplementedError(f"{type(self).__name__}._update_whole")

    def _store_whole(self) -> None:
        """Store this rank's part of the state after `_update_whole` has run on all ranks of the node."""
        raise NotImplementedError(f"{type(self).__name__}._store_whole")

    def _group_of(self, variable: Any) -> int:
        """Return the number of a variable's group; groups have their own hyperparameters. 0 if all are equal."""
        return 0

    @abstractmethod
    def _slot_start(self) -> Mapping[str, float]:
        """Return the value before the first step of each slot that does not start at 0."""

    def _on_restart(self, variables: Collection[Variable]) -> None:
        """Act after the slots of variables were reset. All ranks call it."""

    @abstractmethod
    def get_settings(self) -> list[dict[str, Any]]:
        """Return the numbers that a program may change: one dict for each group of variables."""

    @abstractmethod
    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Restore the settings of `get_settings`. Call it on every rank with the same."""


class UpdateRun(ABC):
    """The step of one optimizer on one set of variables: created at the first step, then reused.

    Attributes:
        strategy: of the variables; opaque.
    """

    strategy: Any

    @property
    def may_skip(self) -> bool:
        """True if the GPU can skip the step without the host, see `device_scale`; the same on every rank."""
        return False

    @abstractmethod
    def describe(self) -> None:
        """Update the description of the optimizer, after its numbers have changed."""

    @abstractmethod
    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Take the gradients of each local replica; `key` identifies the set of variables."""

    @abstractmethod
    def run(self, aggregate: bool) -> None:
        """Take the step; in cross-replica context. Collective over the replicas in sync.

        Without `aggregate`, gradients are already equal on all replicas, and not summed.
        """


@final
class BlockUpdate:
    """The update of blocks of one dtype: decay, clipping by value, the rule, averages.

    16-bit weights are widened, and rounded once. It is one pass by `loops.update`, or on a GPU by `kernels.update`, if the rule
    has one; else NumPy, with the same bits. `scratch` returns four flat arrays, blocks in the dtype of sums; larger arrays are
    cut into such blocks for NumPy. It is called on first use.

    Attributes:
        narrow: whether weights are widened.
    """

    def __init__(self, rule: UpdateRule, dtype: np.dtype, scratch: Callable[[], Sequence[Any]]) -> None:
        self._rule, self._new_memory = rule, scratch
        self.narrow = accumulation_dtype(dtype) != dtype
        self._step, self._rate, self._factor = 0, 0.0, 1.0
        self._limit: float | None = None
        self._momentum: float | None = None  # of the averages, None without averages
        self._overwrites = False
        self._loop: CompiledLoop | None = None
        self._overflow: StoredSteps | None = None

    @functools.cached_property
    def _memory(self) -> Sequence[Any]:
        return self._new_memory()

    @property
    def _scratch(self) -> Sequence[Any]:
        return self._memory[:2]

    @property
    def block(self) -> Any:
        """A block of gradients; the caller may use it."""
        return self._memory[3]

    def begin(self, step: int, rate: float, factor: float = 1.0, overflow: StoredSteps | None = None) -> None:
        """Set the values that all blocks of a step share; sums of parts are multiplied by the factor.

        `overflow` decides on the GPU whether the step is skipped.
        """
        self._step, self._rate, self._factor, self._overflow = step, rate, factor, overflow
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
        """Update weights and their slots in place by the sum of parts, which are not changed; of any size.

        With `calls` the gradient is the mean of that sum and the accumulated gradients, which are reset to 0.

        Args:
            target: the weights.
            parts: gradients of them.
            slots: of them.
            decays: ranges [low, high) with their decay, to be multiplied by the rate.
            group: of all these variables.
            scales: ranges of the gradient with their factors.
            calls: the number of calls that accumulated, 0 for none.
        """
        decays = list(decays)
        if self._in_one_pass(target, parts, slots, decays, scales, calls):
            return
        block, size = self.block, target.size
        for low in range(0, size, block.size):
            high = min(low + block.size, size)
            gradient = block[: high - low]
            own = slots if high - low == size else {name: slot[low:high] for name, slot in slots.items()}
            self._sum(parts, low, high, gradient)
            if calls:
                form_mean(gradient, own[GRADIENT_SUM], calls)
            if scales:
                multiply_spans(gradient, spans_within(scales, low, high))
            spans = list(spans_within(decays, low, high)) if decays else ()
            self._by_numpy(target[low:high], gradient, own, spans, group)
            if calls:
                own[GRADIENT_SUM][...] = 0

    def form_moments(self, gradient: Any, slots: Mapping[str, Any]) -> None:
        """Clip a block of a gradient, and update the slot that the rule factors."""
        self._rule._form_moments(self._clipped(gradient, slots))

    def direct(self, gradient: Any, slots: Mapping[str, Any]) -> None:
        """Replace a block of a gradient by the direction of the update."""
        self._rule._direction(self._clipped(gradient, slots))

    def _clipped(self, gradient: Any, slots: Mapping[str, Any]) -> Block:
        limit = self._rule.clipvalue
        if limit is not None:
            np.clip(gradient, -limit, limit, out=gradient)
        return Block(gradient, None, slots, self._step, self._rate, self._scratch, 0)

    def accumulate(self, target: Any, parts: Sequence[Any], slots: Mapping[str, Any]) -> None:
        """Accumulate the sum of parts, in a step that does not update the weights, and update the averages of these."""
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
        """Update the averages of weights that a step does not change, or overwrite the weights with them; of any size."""
        for low in range(0, target.size, self.block.size):
            high = min(low + self.block.size, target.size)
            self._average_only(target[low:high], {AVERAGE: slots[AVERAGE][low:high]})

    def _sum(self, parts: Sequence[Any], low: int, high: int, gradient: Any) -> None:
        combine(np.add, [part[low:high] for part in parts], gradient)
        if self._factor != 1:
            multiply_spans(gradient, [(0, high - low, self._factor)])

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
        around = Around(self._limit, list(scales), factors, sums, calls, *last)
        return _fused(loop, target, parts, slots, around, self._overflow)

    def _by_numpy(
        self, target: Any, gradient: Any, slots: Mapping[str, Any], decays: Sequence[Span], group: int
    ) -> None:
        weights = self.widened(target) if self.narrow else target
        if decays:
            multiply_spans(weights, [(low, high, 1 - decay * self._rate) for low, high, decay in decays])
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
        """Return a block of weights in the dtype of sums: a copy in scratch memory if they are 16-bit."""
        if not self.narrow:
            return target
        weights = self._memory[2][: target.size]
        if not loops.add(weights, [as_buffer(target)]):
            weights[...] = target
        return weights

    @may_underflow
    def _average(self, weights: Any, average: Any, momentum: float) -> None:
        """Set average = momentum * average + (1 - momentum) * weights; copy it to the weights if this step overwrites them."""
        work = self._scratch[0][: weights.size]
        np.multiply(weights, 1 - momentum, out=work)
        np.multiply(average, momentum, out=average)
        np.add(average, work, out=average)
        if self._overwrites:
            weights[...] = average


def _fused(
    loop: CompiledLoop,
    target: Any,
    parts: Sequence[Any],
    slots: Mapping[str, Any],
    around: Around,
    overflow: StoredSteps | None = None,
) -> bool:
    """Update weights in place in one pass, if possible; return whether it was."""
    arrays = tuple([slots.get(name) for name in loop.slots])
    if is_gpu(target):
        from . import kernels

        return kernels.update(loop.rule, loop.numbers, parts, target, arrays, around, overflow)
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
    """Replace a gradient by the mean of it and the accumulated ones, over `calls` calls."""
    np.add(gradient, sums, out=gradient)
    np.divide(gradient, calls, out=gradient)
