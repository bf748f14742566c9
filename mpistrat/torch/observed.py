"""A session of `ms.shadow` sees modules and optimizers of torch, by torch's own hooks for all of them.

**Random numbers.** A module that changes the state of its generator while it runs draws random numbers, and ranks draw others
than one process for the same rows. Masks of dropout are replayed: the rank draws those of the whole batch from the recorded
state, and uses its rows of them. Any other module, and dropout on GPUs, ends the comparison of outputs: what follows cannot be
equal.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from ..base import context
from ..base.context import Parameter

__all__ = ["hooked"]

_DROPOUT: dict[type, Callable[..., torch.Tensor]] = {
    torch.nn.Dropout: torch.nn.functional.dropout,
    torch.nn.Dropout1d: torch.nn.functional.dropout1d,
    torch.nn.Dropout2d: torch.nn.functional.dropout2d,
    torch.nn.Dropout3d: torch.nn.functional.dropout3d,
}


_COMPUTED = "as its rows are computed, and rounding changes them"


class TorchObserver(Protocol):
    """An object that sees the calls: a session of `shadow/`."""

    done: bool
    begun: bool
    inputs_known: bool

    def begin(self, inputs: Mapping[str, Any], parameters: Iterable[Parameter]) -> None: ...

    def value(self, kind: str, operation: str, value: Any, factor: float = 1.0, about: str = "") -> None: ...

    def draw(self, operation: str, state: Any, shape: Sequence[int] | None) -> Any: ...

    def gradient(self, name: str, value: Any, factor: float = 1.0, local: bool = True) -> None: ...

    def end(self, ranks: Any, parameters: Iterable[Parameter]) -> None: ...

    def leave_out(self, operation: str, reason: str, rest: bool = False) -> None: ...


@contextlib.contextmanager
def hooked(session: TorchObserver) -> Iterator[None]:
    """Return the context in which a session sees the calls of torch. Local."""
    seen = _Modules(session)
    handles = [
        modules.register_module_forward_pre_hook(seen.before),
        modules.register_module_forward_hook(seen.after, always_call=True),
        optimizers.register_optimizer_step_pre_hook(seen.before_step),
        optimizers.register_optimizer_step_post_hook(seen.after_step),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Frame(NamedTuple):
    """A module that runs."""

    module: torch.nn.Module
    state: torch.Tensor  # of the generator before it


@final
class _Modules:
    """The modules that run."""

    def __init__(self, session: TorchObserver) -> None:
        self._session = session
        self._frames: list[_Frame] = []
        self._known = torch.empty(0, dtype=torch.uint8)  # the state of the generator after the last draw that was seen
        self._names: dict[int, str] = {}
        self._root: torch.nn.Module | None = None
        self._known_parameters: dict[int, Parameter] = {}  # of all models, by id
        self._models = 0
        self._skipped = False
        self._outputs = collections.deque[torch.Tensor](
            maxlen=16
        )  # of models; their memory is not used again meanwhile
        self._drew: list[bool] = []

    def _ignores(self, module: torch.nn.Module) -> bool:
        recomputes = torch._C._current_graph_task_id() != -1  # in a backward pass
        return self._session.done or recomputes or torch.jit.is_tracing()

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Handle the start of a module."""
        if self._ignores(module):
            return
        if not self._frames:
            skipped = not module.training or not torch.is_grad_enabled() or _is_keras(module)
            self._skipped = skipped or not self._begin(module, args)
        if not self._skipped:
            self._look()
        self._frames.append(_Frame(module, self._known))
        self._drew.append(False)

    def _begin(self, module: torch.nn.Module, args: Any) -> bool:
        """Begin a pass; return False if it has no row."""
        if self._root is not module:
            self._root = module
            inner = getattr(module, "module", None)
            self._names = {id(each): name for name, each in module.named_modules()}
            if isinstance(module, torch.nn.parallel.DistributedDataParallel) and inner is not None:
                self._names = {id(each): name for name, each in inner.named_modules()}
        inputs = {}
        for number, value in enumerate(_tensors(args)):
            if value.ndim:
                if not len(value):
                    return False
                inputs[f"input {number} of {type(module).__name__}"] = value
        if not inputs:
            return False
        self._name_parameters(module)
        parameters = [self._known_parameters[id(each)] for _, each in _parameters_of(module) if each.requires_grad]
        session, self._known = self._session, _generators()
        inside = context.has_strategy() and context.get_replica_context() is not None
        kept = {_memory(each) for each in self._outputs}
        computed = any(_memory(each) in kept for each in inputs.values())
        if computed and not session.begun:
            session.leave_out(f"outputs of {type(module).__name__} in a pass that begins a step", _COMPUTED)
            return False
        computed = computed or (session.begun and any(each.requires_grad for each in inputs.values()))  # as of a loss
        if computed or (inside and session.inputs_known):
            for name, value in inputs.items():
                session.value("rows", name, value)
        else:
            session.begin(inputs, parameters)
        return True

    def _name_parameters(self, module: torch.nn.Module) -> None:
        """Name the parameters of a model; those of further models get its number."""
        new = [(name, each) for name, each in _parameters_of(module) if id(each) not in self._known_parameters]
        self._models += bool(new)
        more = f" of model {self._models}" if self._models > 1 else ""
        self._known_parameters |= {id(each): Parameter(_plain(name) + more, each) for name, each in new}

    def _look(self) -> None:
        """Record whether the module that runs has drawn random numbers since the last look."""
        state = _generators()
        if self._drew and not torch.equal(state, self._known):
            self._drew[-1] = True
        self._known = state

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Handle the end of a module; return another output if random numbers are replayed."""
        if self._session.done or not self._frames or self._frames[-1].module is not module:
            return None
        if self._skipped or output is None:
            self._frames.pop()
            self._drew.pop()
            return None
        self._look()
        frame, drew = self._frames.pop(), self._drew.pop()
        name = self._names.get(id(module), "")
        operation = f"output of {_plain(name) or 'the model'}"
        if drew:
            output = self._replayed(frame, operation, args, output)
        for value in _tensors(output):
            self._session.value("rows", operation, value, about=type(module).__name__)
            if not self._frames and _memory(value) not in {0, *map(_memory, _tensors(args))}:
                self._outputs.append(value.detach())
        return output

    def _replayed(self, frame: _Frame, operation: str, args: Any, output: Any) -> Any:
        """Return the output of dropout by the recorded random numbers, or the same output."""
        draws = _DROPOUT.get(type(frame.module))
        replayable = draws is not None and not args[0].is_cuda
        replay = self._session.draw(operation, frame.state.numpy(), args[0].shape if replayable else None)
        if replay is None or draws is None:
            return output
        given: torch.Tensor = args[0]
        own = torch.get_rng_state()
        torch.set_rng_state(torch.from_numpy(replay.state[: len(own)]))
        mask = draws(torch.ones(tuple(replay.shape), dtype=given.dtype), frame.module.p, True)
        torch.set_rng_state(own)
        return given * mask.index_select(replay.axis, torch.from_numpy(replay.mine))

    # optimizers that are not this package's

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Handle the start of a step of a plain optimizer, whose gradients are those of all ranks."""
        self._frames.clear()
        self._drew.clear()
        if self._session.done or self._root is None or hasattr(optimizer, "mpistrat_rule"):
            return
        parameters = self._parameters(optimizer)
        if not self._session.begun:  # a rank without rows
            self._session.begin({}, parameters)
        for name, value, _ in parameters:
            if value.grad is not None:
                self._session.gradient(name, value.grad, local=False)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Handle the end of a step of a plain optimizer. Collective."""
        if self._session.done or self._root is None or hasattr(optimizer, "mpistrat_rule"):
            return
        self._session.end(context.ranks_of(None, "ms.shadow"), self._parameters(optimizer))

    def _parameters(self, optimizer: Any) -> list[Parameter]:
        mine = {id(each): each for group in optimizer.param_groups for each in group["params"]}
        found = [each for key, each in self._known_parameters.items() if key in mine]
        others = [
            each for key, each in mine.items() if key not in self._known_parameters
        ]  # of no module that was called
        return [*found, *(Parameter(f"{place} without a module", each) for place, each in enumerate(others))]


def _parameters_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters by name, not the tensors that stand for them in a pass with a weight."""
    for name, each in module.named_parameters():
        yield name, getattr(each, "mpistrat_of", each)


def _generators() -> torch.Tensor:
    """Return the state of the generators: of CPUs, and of the current GPU if torch uses one."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state


def _is_keras(module: torch.nn.Module) -> bool:
    """Return True for a layer of Keras, whose model reports its steps itself."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(module, keras.layers.Layer)


def _memory(value: torch.Tensor) -> int:
    """Return the identity of a tensor's memory; 0 if it has none of its own, as a sparse one."""
    return int(value.untyped_storage()._cdata) if value.layout is torch.strided else 0


def _plain(name: str) -> str:
    """Return a name without the prefix of DistributedDataParallel."""
    return name.removeprefix("module.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
