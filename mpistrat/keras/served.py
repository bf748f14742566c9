"""A model's weights on parameter servers: workers push gradients, and pull new weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import keras
import numpy as np

from ..base.errors import explain
from ..strategy.loss import sums_workers
from ..variables import Variable
from .fused import CLIPS, fits, rule_of
from .link import ModelLink, arrays_of

__all__ = ["ServedUpdate", "check_served"]


@final
class ServedUpdate:
    """The steps of one optimizer on the servers, by the package's rule with its formula.

    Workers step independently. Between epochs all ranks have the servers' weights, and Keras's optimizer their state, as if
    it had updated itself: so callbacks, evaluation and files work as usual.
    """

    def __init__(self, link: ModelLink, optimizer: Any) -> None:
        """Create the variables of a checked optimizer. Collective, servers included."""
        rule = rule_of(optimizer)
        assert rule is not None
        self._form = rule
        self._link, self._optimizer = link, optimizer
        self._weights = list(optimizer._trainable_variables)
        with link.strategy.scope():
            self._rule = rule.kind(_rate_of(optimizer), **rule.numbers_of(optimizer))
            self._variables = [
                Variable(array, name=weight.path)
                for weight, array in zip(self._weights, arrays_of(self._weights), strict=True)
            ]
        kept = zip(self._weights, self._variables, strict=True)
        self._rule.exclude_from_weight_decay([v for weight, v in kept if not optimizer._use_weight_decay(weight)])
        self._slots = rule.slots_of(optimizer)
        self._there: list[np.ndarray] = []  # the servers' weights, as this rank last saw them

    # steps, on workers

    def step(self, gradients: Sequence[np.ndarray], there: Sequence[int]) -> list[np.ndarray]:
        """Push some gradients, and return all weights, as new arrays. In any thread."""
        link = self._link
        if link.rowless:
            scaled = [np.zeros_like(gradient) for gradient in gradients]
        else:
            scaled = [np.asarray(gradient * gradient.dtype.type(link.share)) for gradient in gradients]
        pairs = [(gradient, self._variables[index]) for gradient, index in zip(scaled, there, strict=True)]
        try:
            new: list[np.ndarray] = link.strategy.run(functools.partial(self._push_and_pull, pairs))
            return new
        except BaseException as error:
            link.failure = error
            raise

    def _push_and_pull(self, pairs: list[tuple[np.ndarray, Any]]) -> list[np.ndarray]:
        self._rule.apply_gradients(pairs)
        return [np.array(variable.numpy()) for variable in self._variables]

    # epochs, on all ranks

    def begin(self) -> None:
        """Send the state of Keras's optimizer to the servers. Collective."""
        names = [variable.name for variable in self._variables]
        slots: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
        for slot, variables in self._slots.items():
            for name, array in zip(names, arrays_of(variables), strict=True):
                slots[name][slot] = array
        iterations = int(keras.ops.convert_to_numpy(self._optimizer.iterations))
        self._rule.set_state({"iterations": iterations, "slots": slots if iterations and self._slots else {}})

    def begin_epoch(self) -> None:
        """Send changed weights to the servers, and start a pass. Collective."""
        link = self._link
        for name, value in self._form.numbers_of(self._optimizer).items():
            if value != getattr(self._rule, name):
                setattr(self._rule, name, value)
        rate = _rate_of(self._optimizer)
        if isinstance(rate, float) and rate != self._rule._core.given_rate:
            self._rule.learning_rate = rate
        if link.writes:
            arrays = arrays_of(self._weights)
            for index, (variable, array) in enumerate(zip(self._variables, arrays, strict=True)):
                if not self._there or not np.array_equal(array, self._there[index], equal_nan=True):
                    variable.assign(array)
            link.strategy.flush()
        link.numbers("weights sent")
        link.in_epoch = True
        if not link.strategy.is_server:
            link.strategy.resume_pass()

    def leave(self) -> None:
        """End this worker's epoch; its input may continue in the next one."""
        if not self._link.strategy.is_server:
            self._link.strategy.suspend_pass()

    def end_epoch(self) -> None:
        """Set Keras's variables of this rank to the servers' values. Collective, when all workers have left.

        The weights on the root only.
        """
        link, rule = self._link, self._rule
        link.in_epoch = False
        if link.writes:
            self._there = [np.array(variable.numpy()) for variable in self._variables]
            for weight, array in zip(self._weights, self._there, strict=True):
                weight.assign(array)
        for index, variable in enumerate(self._variables):
            slots = rule.slots(variable)
            for name, array in slots.items():
                self._slots[name][index].assign(array)
        self._optimizer.iterations.assign(rule._core.all_iterations())


def _rate_of(optimizer: Any) -> float | Callable[[int], float]:
    """Return the learning rate for servers: a number, or a schedule."""
    given = optimizer._learning_rate
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return lambda step: float(keras.ops.convert_to_numpy(given(step)))
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def check_served(link: ModelLink, optimizer: Any) -> None:
    """Check that servers can apply a built optimizer in single steps.

    Raises:
        ValueError: they cannot.
    """
    function = "fit"
    if link.steps > 1:
        got = f"{link.steps}, with parameter servers"
        raise ValueError(explain("compile", "steps_per_execution", expected="1", got=got))
    constrained = [v.path for v in optimizer._trainable_variables if v.constraint is not None]
    if not fits(optimizer) or constrained:
        expected = "SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, Ftrl or Lion of Keras's own, whose update servers have"
        got = f"constraints of {', '.join(constrained)}" if constrained else type(optimizer).__name__
        remedy = (
            "Without use_ema, gradient_accumulation_steps, loss scaling and constraints; or use "
            "ms.MultiWorkerMirroredStrategy()"
        )
        raise ValueError(explain(function, "optimizer", expected=expected, got=got, remedy=remedy))
    clips = [name for name in CLIPS if getattr(optimizer, name) is not None]
    if clips and sums_workers(link.strategy):
        expected = "no clipping, where servers sum the gradients of workers, which see their own only"
        remedy = "Set workers_in_sync=... to all workers, or use ms.MultiWorkerMirroredStrategy()"
        raise ValueError(explain(function, "optimizer", expected=expected, got=", ".join(clips), remedy=remedy))
