"""A rule of torch on whole tensors, such as Adafactor or Muon: every rank runs it on copies of the parameters, after the sum.

Its state lies in variables, so files have it. The groups of the program's optimizer are read before each step, and get what the
rule writes there.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from ..base import log
from ..base.errors import explain
from ..comm.arrays import accumulation_dtype, to_host
from ..optimizers.foreign import WholeRule
from ..optimizers.whole_state import StateArray
from ..variables import Variable
from .tensors import array_of, tensor_of

__all__ = ["TorchWholeRule", "tried"]

_FUNCTION = "ms.torch.distribute"


@final
class TorchWholeRule(WholeRule):
    """A copy of an optimizer, of torch or a subclass of the program, with parameters of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._source, kind = optimizer, type(optimizer)
        self.title = f"{kind.__module__}.{kind.__qualname__}"
        self.reason = f"{self.title} is not known to update each number by itself"
        self._kind, self._raw_step = kind, inspect.unwrap(kind.step)
        self._seed = sum(map(ord, self.title))

    def begin(self, variables: Sequence[Variable]) -> None:
        """Copy the optimizer, and make the variables of its state. Collective.

        Raises:
            TypeError: a step that needs a closure.
        """
        optimizer, own = self._source, object.__new__(self._kind)
        own.__dict__.update(vars(optimizer))
        own.__dict__.update(
            {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}, state=defaultdict(dict)
        )
        self._parameters = {
            v.name: torch.nn.Parameter(tensor_of(np.array(v.array, accumulation_dtype(v.dtype)))) for v in variables
        }
        left = iter(self._parameters.values())
        own.param_groups = [
            group | {"params": [next(left) for _ in group["params"]]} for group in optimizer.param_groups
        ]
        self._own: Any = own
        self._begun: dict[str, StateArray] = {}
        self._state: dict[str, dict[str, StateArray]] = {}
        for name, found in self._try().items():
            self._begun[name] = StateArray(f"torch/{name}/begun", np.zeros((), np.uint8))
            self._state[name] = {key: StateArray(f"torch/{name}/{key}", array) for key, array in found.items()}

    def _try(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the state of each parameter after a step on copies, for its forms."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, state in zip(self._parameters, tried(self._own), strict=True):
            known = {key: _array(value) for key, value in state.items()}
            left = [key for key, array in known.items() if array is None and state[key] is not None]
            if left:
                text = f"{_FUNCTION}: files do not have the state {', '.join(left)} of {self.title}: it is no tensor or number"
                log.once(logging.WARNING, text)
            found[name] = {key: np.zeros_like(array) for key, array in known.items() if array is not None}
        return found

    def update(self, gradients: Mapping[str, Any], weights: Mapping[str, Any], step: int) -> dict[str, np.ndarray]:
        """Return new weights by name of variable; all arrays are whole. `store` writes the state."""
        for own, theirs in zip(self._own.param_groups, self._source.param_groups, strict=True):
            own.update({name: value for name, value in theirs.items() if name != "params"})
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in gradients:
                parameter.data = tensor_of(np.array(weights[name]))
                parameter.grad = tensor_of(np.ascontiguousarray(gradients[name]))
            self._load(name, parameter)
        self._run(self._own, step)
        for own, theirs in zip(self._own.param_groups, self._source.param_groups, strict=True):
            theirs.update({name: value for name, value in own.items() if name != "params"})
        return {name: array_of(self._parameters[name].detach()) for name in gradients}

    def _run(self, optimizer: Any, step: int) -> None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # ranks draw the same numbers
            torch.manual_seed(self._seed + step)
            self._raw_step(optimizer)

    def _load(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Give the copy of a parameter the state that its variables have."""
        state = self._own.state[parameter]
        if not self._begun[name].variable.array:
            state.clear()
            return
        for key, array in self._state[name].items():
            state[key] = _like(np.array(array.variable.array), state.get(key))

    def new_state(self) -> Iterator[tuple[StateArray, np.ndarray]]:
        """Yield the arrays of the state with their values after the last update."""
        for name, parameter in self._parameters.items():
            state = self._own.state.get(parameter, {})
            for key, array in self._state[name].items():
                if key in state:
                    yield array, _checked(self.title, key, state[key])
            if state:
                yield self._begun[name], np.ones((), np.uint8)

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the state of a parameter as torch has it; {} before its first step."""
        if not self._begun[name].variable.array:
            return {}
        rest = self._own.state.get(self._parameters[name], {})
        found = {key: np.array(to_host(array.variable.array)) for key, array in self._state[name].items()}
        return {**rest, **{key: _like(array, rest.get(key)) for key, array in found.items()}}

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Take the state of a parameter, as torch has it. Collective: every rank gives the same."""
        self._begun[name].variable.assign(np.asarray(bool(state), np.uint8))
        own = self._own.state[self._parameters[name]]
        own.clear()
        own.update(state)
        for key, array in self._state[name].items():
            if key in state:
                array.variable.assign(_checked(self.title, key, state[key]).astype(array.variable.dtype))


def tried(optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
    """Return the state of each parameter after a step of a copy with gradients of zeros.

    Raises:
        TypeError: the step fails.
    """
    kind = type(optimizer)
    trial: Any = object.__new__(kind)
    trial.__dict__.update(copy.deepcopy(vars(optimizer)))  # copy.deepcopy of an optimizer leaves its own attributes out
    parameters = [parameter for group in trial.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inspect.unwrap(kind.step)(trial)  # type: ignore[call-arg]
    except Exception as error:  # of a program's own rule
        expected = "an optimizer whose step, without a closure, takes gradients of zeros"
        got = f"{kind.__module__}.{kind.__qualname__} ({type(error).__name__}: {error})"
        remedy = "Take another, as SGD or AdamW"
        raise TypeError(explain(_FUNCTION, "optimizer", expected=expected, got=got, remedy=remedy)) from error
    return [trial.state[parameter] for parameter in parameters]


def _array(value: Any) -> np.ndarray | None:
    """Return a tensor or number as an array that a variable may have; None for another thing."""
    if torch.is_tensor(value):
        return np.array(to_host(array_of(value.detach())))
    return np.asarray(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _checked(optimizer: str, key: str, value: Any) -> np.ndarray:
    array = _array(value)
    if array is None:
        expected, got = "a tensor or a number, as after the first step", type(value).__name__
        raise RuntimeError(explain(f"{optimizer}.step", f"state {key}", expected=expected, got=got))
    return array


def _like(array: np.ndarray, value: Any) -> Any:
    """Return an array as what a state has: a number if it had one, else a tensor."""
    if isinstance(value, (int, float)):
        return type(value)(array)
    tensor = tensor_of(array)
    return tensor.bool() if torch.is_tensor(value) and value.dtype == torch.bool else tensor
