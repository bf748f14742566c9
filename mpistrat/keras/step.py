"""One step of a distributed model, as Keras's loops call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import keras

from .state import arrays_of, statistics_of

__all__ = ["Step"]


@final
class Step:
    """Keras's function of a step, in which metrics are this rank's own.

    A rank without a row of the batch computes with another one, whose gradient does not count; what that changed in metrics and
    running statistics is put back.
    """

    def __init__(self, model: Any, function: Callable[..., Any]) -> None:
        self._model, self._function = model, function

    @classmethod
    def around(cls, model: Any, function: Any) -> Step:
        """Return the step of a function, which may be one already."""
        return function if isinstance(function, cls) else cls(model, function)

    def __call__(self, *args: Any) -> Any:
        """Do a step: of torch (batches), of TensorFlow (iterator), of JAX (state, iterator). Collective in training."""
        *state, source = args
        if keras.backend.backend() != "torch" and self._model.steps_per_execution == 1:
            source = iter([next(source)])  # tells whether there is a row
        with self._model.mpistrat.step():
            if not self._model.mpistrat.rowless:
                return self._function(*state, source)
            return self._without_row(*state, source)

    def _without_row(self, *args: Any) -> Any:
        if keras.backend.backend() == "jax":
            import jax.numpy as jnp

            (state, source) = args  # which the step is given for its own use
            kept = [[jnp.array(array) for array in state[index]] for index in (1, -1)]
            logs, (first, _, *slots, _) = self._function(state, source)
            return logs, (first, kept[0], *slots, kept[1])
        variables = [*self._model.metrics_variables, *statistics_of(self._model)]
        arrays = arrays_of(variables)
        logs = self._function(*args)
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)
        return logs
