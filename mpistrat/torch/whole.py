"""A rule of torch on whole tensors, such as Muon: every rank runs it on copies of the parameters, after the sum.

Its state is in variables, and so in files. Each step reads the groups of the program's optimizer, and writes them back
afterwards. A rule that calls a closure, such as LBFGS, uses `run`: see `closure.py`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from ..base import log
from ..base.errors import CollectiveMismatchError, explain
from ..comm.arrays import accumulation_dtype, to_host
from ..optimizers.foreign import WholeRule
from ..optimizers.whole_state import StateArray
from ..variables import Variable
from .lbfgs import is_lbfgs, new_arrays, packed, unpacked
from .tensors import array_of, tensor_of

__all__ = ["TorchWholeRule", "tried"]

_FUNCTION = "ms.torch.distribute"


@final
class TorchWholeRule(WholeRule):
    """A copy of an optimizer, of torch or a subclass of the program, with its own parameters.

    Attributes:
        calls_closure: True if its step calls a closure itself.
    """

    calls_closure = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._source, kind = optimizer, type(optimizer)
        self.title = f"{kind.__module__}.{kind.__qualname__}"
        self.reason = f"{self.title} is not known to update each number by itself"
        self._kind, self._raw_step = kind, inspect.unwrap(kind.step)
        self._seed = sum(map(ord, self.title))

    def begin(self, variables: Sequence[Variable]) -> None:
        """Copy the optimizer, and create the variables of its state. Collective.

        Raises:
            TypeError: the step fails.
        """
        optimizer, own = self._source, object.__new__(self._kind)
        own.__dict__.update(vars(optimizer))
        own.__dict__.update(
            {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}, state=defaultdict(dict)
        )
        self._parameters = {
            v.name: torch.nn.Parameter(tensor_of(np.array(to_host(v.array), accumulation_dtype(v.dtype))))
            for v in variables
        }
        left = iter(self._parameters.values())
        copies = {id(p): next(left) for group in optimizer.param_groups for p in group["params"]}
        own.param_groups = [
            group | {"params": [copies[id(p)] for p in group["params"]]} for group in optimizer.param_groups
        ]
        for name, value in vars(optimizer).items():  # such as LBFGS's list of its parameters
            if name != "param_groups" and type(value) is list and value and all(id(each) in copies for each in value):
                own.__dict__[name] = [copies[id(each)] for each in value]
        self._own: Any = own
        group = variables[0].placement.strategy.extended.process_group
        with group.collective(_FUNCTION, "threads of PyTorch"):
            self._threads = int(group.all_gather_int([torch.get_num_threads()]).min())
        self._variables = list(variables)
        self._samples: dict[str, dict[str, Any]] = {}  # samples of the state, for the types of its values
        self._begun: dict[str, StateArray] = {}
        self._state: dict[str, dict[str, StateArray]] = {}
        for name, found in self._try().items():
            self._begun[name] = StateArray(f"torch/{name}/begun", np.zeros((), np.uint8))
            self._state[name] = {key: StateArray(f"torch/{name}/{key}", array) for key, array in found.items()}

    def _try(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the state of each parameter after a step on copies, for its forms."""
        found: dict[str, dict[str, np.ndarray]] = {}
        self.calls_closure, states = tried(self._own)
        if is_lbfgs(self._own):
            parameters = list(self._parameters.values())
            states = [new_arrays(parameters, self._own.param_groups[0]), *({} for _ in states[1:])]
        for name, state in zip(self._parameters, states, strict=True):
            known = {key: _array(value) for key, value in state.items()}
            self._samples[name] = {
                key: value.new_empty(0) if torch.is_tensor(value) else value for key, value in state.items()
            }
            left = [key for key, array in known.items() if array is None and state[key] is not None]
            if left:
                text = f"{_FUNCTION}: files do not have the state {', '.join(left)} of {self.title}: not a tensor or number"
                log.once(logging.WARNING, text)
            found[name] = {key: np.zeros_like(array) for key, array in known.items() if array is not None}
        return found

    def update(self, gradients: Mapping[str, Any], weights: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """Return new weights by name of variable; all arrays are whole. `store` writes the state.

        While `run` calls a closure, weights do not change, and the copies of the parameters get the gradients.
        """
        if not self.calls_closure:
            self._read_groups()
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in gradients:
                if not self.calls_closure:
                    parameter.data = tensor_of(np.array(weights[name]))
                parameter.grad = tensor_of(np.ascontiguousarray(gradients[name]))
            if not self.calls_closure:
                self._load(name, parameter)
        if self.calls_closure:
            return weights
        self._run(self._own, step)
        self._write_groups()
        return {name: array_of(self._parameters[name].detach()) for name in gradients}

    def run(self, closure: Callable[[], Any], step: int) -> Any:
        """Call the optimizer's own step on the copies, and return its result. `assign` writes the weights.

        Args:
            closure: returns the loss at the current `parameters()`, and sets their gradients.
            step: the number of the step.
        """
        self._read_groups()
        for variable, (name, parameter) in zip(self._variables, self._parameters.items(), strict=True):
            parameter.grad = None
            parameter.data = tensor_of(np.array(to_host(variable.array)))
            self._load(name, parameter)
        with self._alike(step) as of_this_rank:

            def evaluated() -> Any:
                with of_this_rank():
                    return closure()

            result = self._raw_step(self._own, evaluated)
        self._write_groups()
        return result

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the copies of the parameters, by name of variable."""
        return self._parameters

    def assign(self) -> None:
        """Write the weights and the state after `run` into variables. Collective; in cross-replica context.

        Raises:
            CollectiveMismatchError: on every rank, when ranks have computed different values.
        """
        try:
            for variable, parameter in zip(self._variables, self._parameters.values(), strict=True):
                variable.assign(array_of(parameter.detach()))
            for array, value in self._values():
                array.variable.assign(value.astype(array.variable.dtype))
        except CollectiveMismatchError as error:
            remedy = (
                "Seed equally on all ranks what the rule draws by NumPy or by generators of its own, and start the ranks on "
                "processors of one kind"
            )
            expected = "a rule that computes the same numbers on all ranks"
            text = explain(f"{self._kind.__name__}.step", "", expected=expected, got=str(error), remedy=remedy)
            raise CollectiveMismatchError(text) from error

    def _read_groups(self) -> None:
        for own, theirs in zip(self._own.param_groups, self._source.param_groups, strict=True):
            own.update({name: value for name, value in theirs.items() if name != "params"})

    def _write_groups(self) -> None:
        for own, theirs in zip(self._own.param_groups, self._source.param_groups, strict=True):
            theirs.update({name: value for name, value in own.items() if name != "params"})

    def _run(self, optimizer: Any, step: int) -> None:
        with self._alike(step):
            self._raw_step(optimizer)

    @contextlib.contextmanager
    def _alike(self, step: int) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
        """Make ranks compute the same bits: with equal numbers of threads, and equal random numbers.

        Yields:
            A function that restores this rank's threads and random numbers, for a closure.
        """
        own, drawn = torch.get_num_threads(), torch.get_rng_state()

        @contextlib.contextmanager
        def of_this_rank() -> Iterator[None]:
            nonlocal drawn
            shared = torch.get_rng_state()
            torch.set_rng_state(drawn)
            _set_threads(own)
            try:
                yield
            finally:
                drawn = torch.get_rng_state()
                torch.set_rng_state(shared)
                _set_threads(self._threads)

        try:
            torch.default_generator.manual_seed(self._seed + step)
            _set_threads(self._threads)
            with torch.no_grad():
                yield of_this_rank
        finally:
            torch.set_rng_state(drawn)
            _set_threads(own)

    def _load(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Set the state of the copy of a parameter from its variables."""
        new, state = self.state_of(name), self._own.state[parameter]
        state.clear()
        state.update(new)

    def new_state(self) -> Iterator[tuple[StateArray, np.ndarray]]:
        """Yield the arrays of the state with their values after the last update; none while `run` calls a closure."""
        return iter(()) if self.calls_closure else self._values()

    def _values(self) -> Iterator[tuple[StateArray, np.ndarray]]:
        for name, parameter in self._parameters.items():
            state = self._own.state.get(parameter, {})
            if state:
                yield from self._arrays_of(name, state)
                yield self._begun[name], np.ones((), np.uint8)

    def _arrays_of(self, name: str, state: Mapping[str, Any]) -> Iterator[tuple[StateArray, np.ndarray]]:
        """Yield the arrays of a parameter's state, with the values of a state of torch."""
        arrays = self._state[name]
        if arrays and is_lbfgs(self._own):
            state = packed(state, {key: tensor_of(array.variable.array) for key, array in arrays.items()})
        for key, array in arrays.items():
            if key in state:
                yield array, _checked(self.title, key, state[key])

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the state of a parameter in torch's form; {} before its first step."""
        if not self._begun[name].variable.array:
            return {}
        rest, samples = self._own.state.get(self._parameters[name], {}), self._samples[name]
        found = {key: np.array(to_host(array.variable.array)) for key, array in self._state[name].items()}
        if found and is_lbfgs(self._own):
            return unpacked({key: tensor_of(array) for key, array in found.items()})
        return {**rest, **{key: _like(array, rest.get(key, samples[key])) for key, array in found.items()}}

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Set the state of a parameter from torch's form. Collective: every rank passes the same."""
        self._begun[name].variable.assign(np.asarray(bool(state), np.uint8))
        own = self._own.state[self._parameters[name]]
        own.clear()
        own.update(state)
        for array, value in self._arrays_of(name, state) if state else ():
            array.variable.assign(value.astype(array.variable.dtype))


def tried(optimizer: torch.optim.Optimizer) -> tuple[bool, list[Mapping[str, Any]]]:
    """Try a step of a copy with gradients of zeros.

    Returns:
        Whether the step calls a closure itself, and the state of each parameter after it.

    Raises:
        TypeError: the step fails, or the optimizer has another optimizer.
        ValueError: the step calls a closure, and a parameter has 16 bits.
    """
    kind = type(optimizer)
    nested = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if nested:
        expected, got = "an optimizer that updates its parameters itself", f"one with another in its {nested[0]}"
        remedy = "Pass that one, or write the rule into one class"
        raise TypeError(explain(_FUNCTION, f"optimizer {kind.__name__}", expected=expected, got=got, remedy=remedy))
    try:
        return False, _states_after(optimizer, False)
    except Exception as error:  # of a program's own rule
        failed = error
    try:
        states = _states_after(optimizer, True)
    except Exception:
        expected = "an optimizer whose step takes gradients of zeros"
        got = f"{kind.__module__}.{kind.__qualname__} ({type(failed).__name__}: {failed})"
        remedy = "Take another, as SGD or AdamW"
        raise TypeError(explain(_FUNCTION, "optimizer", expected=expected, got=got, remedy=remedy)) from failed
    for dtype in {p.dtype for group in optimizer.param_groups for p in group["params"]}:
        if dtype.is_floating_point and dtype.itemsize < 4:  # copies, with which a closure computes, have 32 bits
            expected, got = "parameters of float32 or float64, as its step calls a closure", f"some of {dtype}"
            remedy = "Keep them in float32, and use torch.autocast in the closure"
            raise ValueError(
                explain(_FUNCTION, f"optimizer {kind.__name__}", expected=expected, got=got, remedy=remedy)
            )
    return True, states


def _states_after(optimizer: torch.optim.Optimizer, with_closure: bool) -> list[Mapping[str, Any]]:
    """Return the state of each parameter after a step of a copy with gradients of zeros."""
    kind = type(optimizer)
    trial: Any = object.__new__(kind)
    trial.__dict__.update(copy.deepcopy(vars(optimizer)))  # copy.deepcopy of an optimizer omits its own attributes
    parameters = [parameter for group in trial.param_groups for parameter in group["params"]]

    def closure() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros(())

    closure()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        inspect.unwrap(kind.step)(trial, *([closure] if with_closure else []))  # type: ignore[call-arg]
    return [trial.state[parameter] for parameter in parameters]


def _set_threads(number: int) -> None:
    """Set torch's number of threads, unless it is that already: a call ends threads."""
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _array(value: Any) -> np.ndarray | None:
    """Return a tensor or number as an array for a variable; None for other values."""
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
    """Return an array in the form of a state: a number if it was one, else a tensor."""
    if isinstance(value, (int, float)):
        return type(value)(array)
    tensor = tensor_of(array)
    return tensor.bool() if torch.is_tensor(value) and value.dtype == torch.bool else tensor
