"""Steps of distributed models, as observers see them: rows, weights, gradients before their sum, weights after the update."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import keras
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils.naming import to_snake_case

from ..base.context import OBSERVERS, Parameter
from .link import ModelLink, arrays_of

__all__ = ["inputs_of", "observed_step", "observed_update", "report_compiled"]

_PARTS = ("inputs", "targets", "sample weights")
_OF_ROWS = "as each rank changes it by its own rows"
_RANDOM = "as it draws random numbers, and each rank draws others"
_OWN_STATISTICS = "as it normalizes by the rows of each rank: GroupNormalization or LayerNormalization do not"


def inputs_of(batch: Any, rowless: bool) -> dict[str, np.ndarray]:
    """Return the arrays of a rank's batch by name, without rows if the rank has none and computes with another one."""
    found = {}
    for name, part in zip(_PARTS, data_adapter_utils.unpack_x_y_sample_weight(batch), strict=True):
        for path, leaf in keras.tree.flatten_with_path(part):
            if leaf is not None:
                array = np.asarray(keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf)
                found[" ".join([name, *map(str, path)])] = array[:0] if rowless else array
    return found


def observed_step(model: Any, take: Callable[..., Any], *args: Any) -> Any:
    """Take a training step of a model, and report it to the observers. Collective, as the step.

    Args:
        model: distributed.
        take: Keras's function of a step.
        args: torch (batches), TensorFlow (iterator), JAX (state, iterator).
    """
    *state, source = args
    link, weights, others = model.mpistrat, model.trainable_variables, model.non_trainable_variables
    values: list[Any] | None = None
    if not state:
        before = arrays_of(others)
    else:  # of JAX, whose variables have no values now; the step may delete the state's arrays
        values, before = list(state[0][0]), [np.array(array) for array in state[0][1]]
        state = [(values, *state[0][1:])]
    generator = _generator()
    with _observing(link, weights, values) as seen:
        result = take(*state, source)
        new = arrays_of(others) if values is None else [np.asarray(array) for array in result[1][1]]
        changed = {id(each) for each, old, now in zip(others, before, new, strict=True) if not _equal(old, now)}
        if values is not None:
            values[:] = result[1][0]
        if link.size > 1:
            seen.leave_out(model, changed, not np.array_equal(generator, _generator()))
    return result


@contextlib.contextmanager
def observed_update(link: ModelLink, variables: Sequence[Any], values: list[Any] | None = None) -> Iterator[None]:
    """Report an update in a loop of the program's own to the observers. Collective, as the update.

    Args:
        link: of the model.
        variables: of the optimizer.
        values: their arrays, if those are no variables' values; the caller sets new ones.
    """
    link.read.clear()
    with _observing(link, variables, values):
        yield


def report_compiled(name: str) -> None:
    """Report to the observers that an optimizer updates in a compiled function of the program. Local."""
    for observer in OBSERVERS:
        reason = "as they are in a compiled function of the program: use fit or train_on_batch, or leave it uncompiled"
        observer.leave_out(f"the updates of {name}", reason)


@contextlib.contextmanager
def _observing(link: ModelLink, variables: Sequence[Any], values: list[Any] | None) -> Iterator[_Seen]:
    """Return the context of a step, at whose end the observers get its gradients and new weights."""
    seen = _Seen(link, list(variables), values)
    seen.begin()
    link.seen = seen
    try:
        yield seen
        link.seen = None
        seen.end()
    finally:
        link.seen = None
        link.read.clear()


@final
class _Seen:
    """A step while it runs."""

    def __init__(self, link: ModelLink, variables: Sequence[Any], values: list[Any] | None) -> None:
        self._link, self._variables, self._values = link, variables, values
        self._names = _names_of(link.model()) if link.model is not None else {}
        self._gradients: list[tuple[str, np.ndarray, float]] = []  # in any thread
        self._left_out: list[tuple[str, str, bool]] = []

    def _parameters(self) -> list[Parameter]:
        found = []
        for place, variable in enumerate(self._variables):
            if self._values is not None:
                value, assign = self._values[place], functools.partial(self._set, place)
            elif keras.backend.backend() == "torch":
                value, assign = variable.value.detach(), None
            else:
                value, assign = keras.ops.convert_to_numpy(variable.value), variable.assign
            found.append(Parameter(self._name(variable), value, assign))
        return found

    def _name(self, variable: Any) -> str:
        return self._names.get(id(variable), str(variable.path))

    def _set(self, place: int, array: np.ndarray) -> None:
        assert self._values is not None
        self._values[place] = keras.ops.convert_to_tensor(array, self._values[place].dtype)

    def begin(self) -> None:
        """Report the rows that were read before the step, and the weights."""
        for observer in OBSERVERS:
            observer.begin_pass(self._link.strategy, self._next_inputs(), self._parameters())

    def _next_inputs(self) -> Mapping[str, Any] | None:
        return self._link.read.pop(0) if self._link.read else None

    def gradients(self, variables: Sequence[Any], arrays: Sequence[np.ndarray], share: float) -> None:
        """Store this rank's gradients, and their factor in the sum. In any thread."""
        for variable, array in zip(variables, arrays, strict=True):
            self._gradients.append((self._name(variable), np.array(array), share))

    def leave_out(self, model: Any, changed: set[int], drew: bool) -> None:
        """Find what ranks compute by their own rows or random numbers.

        Args:
            model: of the step.
            changed: the ids of variables that the step changed, without weights.
            drew: True if a generator that no layer has was used.
        """
        for layer in model._flatten_layers(include_self=True):
            seeds = [each.state for each in getattr(layer, "_seed_generators", ())]
            if isinstance(layer, keras.layers.BatchNormalization) and id(layer.moving_mean) in changed:
                self._left_out.append((_plain_name(self._name(layer.moving_mean)), _OWN_STATISTICS, True))
            elif any(id(each) in changed or drew for each in seeds):
                self._left_out.append((self._names.get(id(layer), layer.name), _RANDOM, True))
        if drew and not any(reason == _RANDOM for _, reason, _ in self._left_out):
            self._left_out.append(("a layer without seed", _RANDOM, True))
        for variable in model.non_trainable_weights:
            if id(variable) in changed and "float" in variable.dtype:
                self._left_out.append((f"the state {self._name(variable)}", _OF_ROWS, False))

    def end(self) -> None:
        """Report gradients, and weights after the update. Collective."""
        strategy, parameters = self._link.strategy, self._parameters()
        more = [*self._link.read]  # of further steps in one call
        self._link.read.clear()
        for observer in OBSERVERS:
            for inputs in more:
                observer.begin_pass(strategy, inputs, ())
            for operation, reason, rest in self._left_out:
                observer.leave_out(operation, reason, rest)
            for name, array, share in self._gradients:
                observer.gradient(name, array, share)
            observer.end_step(strategy, parameters)


def _generator() -> np.ndarray:
    """Return the state of generators that belong to no layer."""
    if keras.backend.backend() != "torch":
        return np.zeros(0)
    import torch

    return np.array(torch.get_rng_state())


def _equal(old: np.ndarray, new: np.ndarray) -> bool:
    return old.tobytes() == new.tobytes()


def _plain_name(path: str) -> str:
    return path.rpartition("/")[0]


def _names_of(model: Any) -> dict[int, str]:
    """Return names of a model's layers and variables, by id: as in a process that has made no other model.

    Keras numbers the layers of a class in the order in which a process makes them, in all models.
    """
    counts: dict[str, int] = {}
    renamed: dict[str, str] = {}
    names: dict[int, str] = {}
    for layer in model._flatten_layers():
        base = to_snake_case(type(layer).__name__)
        if layer.name not in renamed and re.fullmatch(rf"{re.escape(base)}(_\d+)?", layer.name):
            number = counts[base] = counts.get(base, -1) + 1
            renamed[layer.name] = f"{base}_{number}" if number else base
        names[id(layer)] = renamed.get(layer.name, layer.name)
    for variable in model.variables:
        first, *rest = str(variable.path).split("/")
        inner = [renamed.get(each, each) for each in ([first, *rest] if first != model.name else rest)]
        names[id(variable)] = "/".join(inner) or first
    return names
