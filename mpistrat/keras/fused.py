"""The update of Keras's optimizers, in one pass with the sum: each rank of a node processes a slice.

Each rank has its own weights, since callbacks and layers may change them in place; new ones arrive through memory that the
node shares. An optimizer's state is in that memory, and Keras's variables of it are views: always whole, so files and
programs find them as usual. `TorchUpdate` and `JaxStep` (`jax_step.py`) connect it to Keras's loops.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import keras
import numpy as np

from .. import optimizers
from ..arena.arena import ALIGNMENT_BYTES, ArenaAllocator
from ..arena.reduction import BLOCK
from ..base import partition
from ..optimizers.foreign import write_share
from ..optimizers.rule import BlockUpdate
from ..optimizers.slots import owners
from .link import ModelLink

__all__ = ["CLIPS", "FusedUpdate", "TorchUpdate", "fits", "goes_on", "rule_of"]


class KerasRule(NamedTuple):
    """The package's rule with the same formula, its settings, and the names of Keras's slots."""

    kind: Any
    numbers: tuple[str, ...]
    slots: dict[str, str]

    def numbers_of(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's current settings, except its learning rate, as arguments of the rule."""
        return {name: getattr(optimizer, name) for name in (*self.numbers, "weight_decay", *CLIPS)}

    def slots_of(self, optimizer: Any) -> dict[str, list[Any]]:
        """Return Keras's variables of an optimizer's slots, by name of the rule's."""
        found = {name: getattr(optimizer, where, []) for name, where in self.slots.items()}
        return {name: variables for name, variables in found.items() if variables}


CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


_ADAM = (
    ("beta_1", "beta_2", "epsilon", "amsgrad"),
    {"momentum": "_momentums", "velocity": "_velocities", "velocity_hat": "_velocity_hats"},
)
_RULES = {
    "SGD": KerasRule(optimizers.SGD, ("momentum", "nesterov"), {"momentum": "momentums"}),
    "Adam": KerasRule(optimizers.Adam, *_ADAM),
    "AdamW": KerasRule(optimizers.AdamW, *_ADAM),
    "Adagrad": KerasRule(optimizers.Adagrad, ("epsilon",), {"accumulator": "_accumulators"}),
    "RMSprop": KerasRule(
        optimizers.RMSProp,
        ("rho", "momentum", "epsilon", "centered"),
        {"velocity": "_velocities", "momentum": "_momentums", "average_gradient": "_average_gradients"},
    ),
    "Adadelta": KerasRule(
        optimizers.Adadelta,
        ("rho", "epsilon"),
        {"accumulated_grad": "_accumulated_grads", "accumulated_delta_var": "_accumulated_delta_vars"},
    ),
    "Adamax": KerasRule(optimizers.Adamax, ("beta_1", "beta_2", "epsilon"), {"momentum": "_m", "norm": "_u"}),
    "Ftrl": KerasRule(
        optimizers.Ftrl,
        (
            "learning_rate_power",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
        ),
        {"accumulator": "_accumulators", "linear": "_linears"},
    ),
    "Lion": KerasRule(optimizers.Lion, ("beta_1", "beta_2"), {"momentum": "_momentums"}),
}


def rule_of(optimizer: Any) -> KerasRule | None:
    """Return the rule of an optimizer whose class is Keras's own."""
    kind = type(optimizer).__bases__[1]  # of the distributed one
    return _RULES.get(kind.__name__) if kind.__module__.startswith("keras.src.") else None


def goes_on(optimizer: Any) -> bool:
    """Return whether an optimizer may still be updated in one pass, given settings that can change."""
    return not (optimizer.use_ema or optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor)


def fits(optimizer: Any) -> bool:
    """Return whether a built optimizer may be updated in one pass; else Keras updates after the sum."""
    variables = optimizer._trainable_variables
    dtypes = {keras.backend.standardize_dtype(variable.dtype) for variable in variables}
    return (
        goes_on(optimizer)
        and rule_of(optimizer) is not None
        and not any(getattr(variable, "overwrite_with_gradient", False) for variable in variables)
        and dtypes in ({"float32"}, {"float64"})
    )


@final
class FusedUpdate:
    """The steps of one optimizer on its concatenated variables.

    Attributes:
        slots: Keras's variables of the state, each with its memory on the node.
        weights: the concatenated variables after a step.
        spans: the range of each variable in it.
        new: views of it in the variables' shapes.
    """

    def __init__(self, link: ModelLink, optimizer: Any) -> None:
        """Allocate shared memory. Collective."""
        rule = rule_of(optimizer)
        assert rule is not None
        self._link, self._optimizer, self._rule = link, optimizer, rule
        self._variables = list(optimizer._trainable_variables)
        dtype = np.dtype(keras.backend.standardize_dtype(self._variables[0].dtype))
        unit = ALIGNMENT_BYTES // dtype.itemsize
        sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self._starts = [0, *itertools.accumulate(-(-size // unit) * unit for size in sizes)]
        self.spans = [(start, start + size) for start, size in zip(self._starts, sizes, strict=False)]
        total = self._starts[-1] + 1  # the last one transports a request to stop
        extended = link.strategy.extended
        self._group, self._ops = extended.placement.group, extended.placement.ops
        theirs = rule.slots_of(optimizer)
        arenas, what = (
            ArenaAllocator(self._group, ["cpu:0"]),
            f"the updates of {optimizer.name}",
        )  # host memory, also of GPUs
        with self._group.collective("keras optimizer", optimizer.name, dtype, (total,), tuple(theirs)):
            self._arena, _ = arenas.allocate(total, dtype, True, what)
            made = {name: arenas.allocate(total, dtype, False, what) for name in theirs}
        self.weights = self._arena.values[:total]
        self._gradients: Any = self._arena.gradients
        self._slots = {name: arena.values[low : low + total] for name, (arena, low) in made.items()}
        self._first, last = (self._arena.owned([(0, total)]) or [(0, 0)])[0]
        self._kept, self._squares = np.empty(last - self._first, dtype), np.zeros(0)  # for clipping norms
        self.slots = [
            (variable, self._part(self._slots[name], index))
            for name, variables in theirs.items()
            for index, variable in enumerate(variables)
        ]
        self.new = [self._part(self.weights, index) for index in range(len(sizes))]
        self._own: list[np.ndarray] = []
        self._decays: list[float] = []
        self._scratch = [np.empty(min(BLOCK, total), dtype) for _ in range(4)]
        self._numbers: dict[str, Any] = {}
        self._words = ""
        self._update: BlockUpdate

    def _part(self, flat: np.ndarray, index: int) -> np.ndarray:
        low, high = self.spans[index]
        return flat[low:high].reshape(self._variables[index].shape)

    def step(
        self,
        gradients: Sequence[np.ndarray],
        there: Sequence[int],
        own: Sequence[np.ndarray],
        done: int,
        rate: float,
        share: float,
    ) -> None:
        """Sum the gradients and update. Collective. Variables without a gradient do not change.

        Args:
            gradients: this rank's.
            there: the indices of their variables.
            own: this rank's values of all variables.
            done: number of steps before this one.
            rate: the learning rate.
            share: the factor of this rank's gradients.
        """
        link = self._link
        if link.seen is not None:
            link.seen.gradients([self._variables[index] for index in there], gradients, share)
        self._follow()
        mine, ranges = self._gradients.local[0], []
        for array, index in zip(gradients, there, strict=True):
            low, high = self.spans[index]
            ranges.append((low, self._starts[index + 1]))
            write_share(array, share, mine[low:high].reshape(array.shape))
        end = self._starts[-1]
        mine[end] = link.wants_stop
        ranges = partition.merge([*ranges, (end, end + 1)])
        self._own = [array.reshape(-1) for array in own]
        self._update.begin(done + 1, rate)
        words = f", step {done + 1} at learning rate {rate!r}"
        optimizer = self._optimizer
        with self._group.collective("keras update", optimizer.name, detail=(self._words, *ranges)).stamp(words) as call:
            self._ops.call = call
            if optimizer.clipnorm is None and optimizer.global_clipnorm is None:
                self._ops.reduce_arena(self._gradients, ranges, self._take)
            else:
                self._squares = np.zeros(len(self._variables))
                self._ops.reduce_arena(self._gradients, ranges, self._keep)
                scales = self._scales()
                for low, high in partition.blocks(self._arena.owned(ranges), BLOCK):
                    self._take_kept(low, high, scales)
            self._group.node.barrier(call)
        self._own = []
        if self.weights[end]:
            link.stops = True

    def _follow(self) -> None:
        """Read the optimizer's current settings."""
        numbers = self._rule.numbers_of(self._optimizer)
        if numbers != self._numbers:
            self._numbers, self._words = numbers, ", ".join(f"{name} {value}" for name, value in numbers.items())
            self._update = BlockUpdate(self._rule.kind(1.0, **numbers), self._arena.dtype, lambda: self._scratch)
            decay = numbers["weight_decay"] or 0.0
            uses = self._optimizer._use_weight_decay
            self._decays = [decay if decay and uses(variable) else 0.0 for variable in self._variables]

    def _inside(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield the index of each variable in [low, high), and its range there."""
        last = bisect_left(self._starts, min(high, self._starts[-1]))
        for index in range(bisect_right(self._starts, low) - 1, last):
            start, stop = self.spans[index]
            if max(start, low) < min(stop, high):
                yield index, max(start, low), min(stop, high)

    def _take(self, low: int, high: int, gradient: np.ndarray) -> None:
        """Update elements [low, high) by their sum."""
        last = high > self._starts[-1]
        stop = gradient[-1] if last else 0.0
        weights, decays = self.weights[low:high], []
        for index, begin, end in self._inside(low, high):
            start = self._starts[index]
            weights[begin - low : end - low] = self._own[index][begin - start : end - start]
            if self._decays[index]:
                decays.append((begin - low, end - low, self._decays[index]))
        self._update.update(weights, [gradient], {name: flat[low:high] for name, flat in self._slots.items()}, decays)
        if last:
            weights[-1] = stop

    def _keep(self, low: int, high: int, gradient: np.ndarray) -> None:
        """Store the sum of elements [low, high), and add up its squares."""
        self._kept[low - self._first : high - self._first] = gradient
        for index, begin, end in self._inside(low, high):
            part = gradient[begin - low : end - low]
            self._squares[index] += float(np.dot(part, part))

    def _scales(self) -> list[float]:
        """Return the factor of each variable's sum that clips norms. Collective, inside one."""
        table = self._group.of_first_node(self._squares)
        norms = np.sqrt(sum(table[: len(owners(self._arena))]))
        limit = self._optimizer.clipnorm
        if limit is None:
            limit, norms = self._optimizer.global_clipnorm, np.full(len(norms), math.sqrt(float((norms**2).sum())))
        return [limit / max(norm, limit) if norm == norm else math.nan for norm in norms.tolist()]

    def _take_kept(self, low: int, high: int, scales: Sequence[float]) -> None:
        """Update elements [low, high) by their stored sum, scaled."""
        kept = self._kept[low - self._first : high - self._first]
        for index, begin, end in self._inside(low, high):
            kept[begin - low : end - low] *= scales[index]
        self._take(low, high, kept)


@final
class TorchUpdate:
    """A fused update of torch's tensors, in place."""

    def __init__(self, link: ModelLink, optimizer: Any) -> None:
        """Move the values of Keras's slot variables, equal on all ranks, to shared memory. Collective."""
        from ..torch.tensors import array_of, tensor_of

        self._optimizer, self._fused, self._array_of = optimizer, FusedUpdate(link, optimizer), array_of
        self._new = list(map(tensor_of, self._fused.new))
        for variable, memory in self._fused.slots:
            shared = tensor_of(memory)
            shared.copy_(variable.value.detach())
            variable.value.data = shared

    def leave(self) -> None:
        """Move Keras's variables to private memory: Keras updates from now on."""
        for variable, _ in self._fused.slots:
            variable.value.data = variable.value.detach().clone()

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], share: float) -> None:
        """Sum the gradients and update. Collective. Variables without a gradient do not change."""
        import torch

        optimizer, array_of = self._optimizer, self._array_of
        optimizer._check_variables_are_known(variables)
        gradients, variables = optimizer._filter_empty_gradients(gradients, variables)
        there = [optimizer._get_variable_index(variable) for variable in variables]
        dense = (gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients)
        mine = [array_of(gradient.detach()) for gradient in dense]
        own = [array_of(variable.value.detach()) for variable in optimizer._trainable_variables]
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        self._fused.step(mine, there, own, int(optimizer.iterations), rate, share)
        with torch.no_grad():
            torch._foreach_copy_([variable.value for variable in variables], [self._new[index] for index in there])
        optimizer.iterations.assign_add(1)
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
