"""Keras's step on the JAX backend: compiled up to the gradients, then the sum and the update.

A computation that calls back into Python takes JAX's slow path: its arrays are copied, and each rank updates all weights. A
step of a million parameters would take three times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import keras
import numpy as np

from ..base.errors import explain
from .fused import FusedUpdate, fits
from .optimizer import DistributedOptimizer

__all__ = ["JaxStep"]


@final
class JaxStep:
    """A function of (state, batch), as Keras compiles of `train_step`; the state is the arrays of Keras's variables."""

    def __init__(self, model: Any) -> None:
        import jax

        self._model, self._link = model, model.mpistrat
        self._compute = jax.jit(self._gradients, donate_argnums=(1, 3))
        self._update: Callable[..., tuple[Any, Any]] | None = None

    @classmethod
    def of(cls, model: Any) -> JaxStep | None:
        """Return a model's step; None if its own `train_step`, or one without jit, needs Keras's."""
        if keras.backend.backend() != "jax" or not model.mpistrat.updates_itself or keras.config.is_nnx_enabled():
            return None
        own = type(model).train_step is not keras.Model.train_step
        compiled = model.jit_compile and not model.run_eagerly
        return cls(model) if compiled and not own and isinstance(model.optimizer, DistributedOptimizer) else None

    def __call__(self, state: tuple[Any, ...], data: Any) -> tuple[Any, tuple[Any, ...]]:
        """Take a step. Collective."""
        weights, others, slots, metrics = state
        logs, others, metrics, gradients = self._compute(weights, others, slots, metrics, data)
        if self._update is None:
            self._update = self._updater()
        weights, slots = self._update(weights, slots, list(map(np.asarray, gradients)))
        return logs, (weights, others, slots, metrics)

    def _gradients(self, weights: Any, others: Any, slots: Any, metrics: Any, data: Any) -> tuple[Any, ...]:
        with self._link.left_out() as left:
            logs, (_, others, _, metrics) = self._model.train_step((weights, others, slots, metrics), data)
        (gradients,) = left
        known = len(self._model.optimizer._trainable_variables)
        if len(gradients) != known:
            expected, got = f"gradients of the {known} variables that it was built with", f"those of {len(gradients)}"
            remedy = "Compile with a new optimizer when layers become trainable or frozen"
            raise ValueError(explain("fit", "optimizer", expected=expected, got=got, remedy=remedy))
        return logs, others, metrics, gradients

    def _updater(self) -> Callable[..., tuple[Any, Any]]:
        optimizer = self._model.optimizer
        if not self._link.alone:
            return _KerasUpdate(optimizer)
        if optimizer.mpistrat_update is None and fits(optimizer) and not _constrained(optimizer):
            vars(optimizer)["mpistrat_update"] = _Update(optimizer)
        return optimizer.mpistrat_update or _KerasUpdate(optimizer)


def _constrained(optimizer: Any) -> bool:
    return any(variable.constraint is not None for variable in optimizer._trainable_variables)


@final
class _KerasUpdate:
    """Keras's update after the sum, compiled."""

    def __init__(self, optimizer: Any) -> None:
        import jax

        def updated(slots: Any, gradients: Any, weights: Any) -> Any:
            with optimizer.mpistrat.after_sum():
                return optimizer.stateless_apply(slots, gradients, weights)

        self._link, self._updated = optimizer.mpistrat, jax.jit(updated, donate_argnums=(0, 2))
        weigh = functools.partial(self._link.share_of_step, optimizer)
        self._sum = functools.partial(self._link.sum_gradients, weigh=weigh, of=list(optimizer._trainable_variables))

    def __call__(self, weights: Any, slots: Any, gradients: Sequence[np.ndarray]) -> tuple[Any, Any]:
        weights, slots = self._updated(slots, self._sum(*gradients), weights)
        return weights, slots


@final
class _Update:
    """A fused update of the arrays of Keras's state. Those of the slots stay the same, in the node's memory."""

    def __init__(self, optimizer: Any) -> None:
        """Allocate shared memory. Collective."""
        import jax

        fused = self._fused = FusedUpdate(optimizer.mpistrat, optimizer)
        self._weigh = functools.partial(optimizer.mpistrat.share_of_step, optimizer)
        self._all, shapes = range(len(fused.new)), [memory.shape for memory in fused.new]

        def made(flat: Any, done: Any) -> tuple[list[Any], Any]:
            pairs = zip(fused.spans, shapes, strict=False)
            return [flat[low:high].reshape(shape) for (low, high), shape in pairs], done + 1

        self._flat, self._made = jax.dlpack.from_dlpack(fused.weights, copy=False), jax.jit(made)
        places = {id(variable): place for place, variable in enumerate(optimizer.variables)}
        self._iterations = places[id(optimizer.iterations)]
        schedule = optimizer._learning_rate
        self._rate = places.get(id(schedule))
        self._schedule = jax.jit(schedule) if self._rate is None else None
        self._memory = {places[id(variable)]: memory for variable, memory in fused.slots}
        self._aliases = {place: jax.dlpack.from_dlpack(memory, copy=False) for place, memory in self._memory.items()}

    def __call__(self, weights: Any, slots: Any, gradients: Sequence[np.ndarray]) -> tuple[Any, Any]:
        slots = list(slots)
        for place, alias in self._aliases.items():
            if slots[place] is not alias:  # of a file or another rank: equal values on all ranks
                np.copyto(self._memory[place], np.asarray(slots[place]))
                slots[place] = alias
        done = int(slots[self._iterations])
        rate = slots[self._rate] if self._schedule is None else self._schedule(slots[self._iterations])
        self._fused.step(gradients, self._all, list(map(np.asarray, weights)), done, float(rate), self._weigh())
        # That memory is not written until all ranks have the next gradients, which need these weights.
        weights, slots[self._iterations] = self._made(self._flat, slots[self._iterations])
        return weights, slots
