"""The weight of a pass in its graph, a factor of the gradients of a module's parameters.

A replica differentiates the mean over its own rows. With unequal shares of a batch, that gradient is weighted by the rows.
The factor is between the parameters and the pass, so it applies to all results, in any order and number of backward passes:
outputs, stored tensors, gradients of gradients. Equal shares need no factor.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ..base import log
from ..base.errors import BatchError, explain
from ..strategy.contexts import local_replica
from ..strategy.loss import weight_of_pass
from .sync_batch_norm import SyncBatchNorm

__all__ = ["ModulePasses", "plain_copy", "with_passes"]

_OWN = frozenset(dir(torch.nn.Module))
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # None in PyTorch 2.5
_passes: weakref.WeakKeyDictionary[torch.nn.Module, ModulePasses] = (
    weakref.WeakKeyDictionary()
)  # by a layer of a module


class _Weigh(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a weight; an error instead of a weight is raised.

    `torch.autograd.grad(..., create_graph=True)` gets a replica's own gradient: the pass weighs the loss made of it, once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, weight: Any) -> torch.Tensor:
        return tensor.detach()  # no view: a layer may write its weights in place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = ctx.weight
        if isinstance(weight, BatchError):
            raise weight
        own = weight == 1
        if not own and torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            try:
                own = not torch._C._will_engine_execute_node(ctx.next_functions[0][0])
            except RuntimeError:  # in torch.autograd.grad
                own = True
        if own:
            return gradient, None
        return gradient * weight if weight else torch.zeros_like(gradient), None  # the mean of no row is NaN


@final
class ModulePasses:
    """The passes of one local replica's module: outermost calls of it or its layers.

    Args:
        strategy: the strategy.
        module: the module.
        replica: the local replica.
        weighs: True if losses are means over a replica's rows.
        read: reads parameters from servers, before each pass; None without servers.

    Attributes:
        idle: True while passes need no action: shares of batches were equal so far.
    """

    def __init__(
        self, strategy: Any, module: torch.nn.Module, replica: int, weighs: bool, read: Callable[[], None] | None
    ) -> None:
        self.idle = True
        self._strategy, self._root = weakref.ref(strategy), weakref.ref(module)  # layers refer to this object
        self._name, self._replica, self._weighs, self._read = type(module).__name__, replica, weighs, read
        self._now: Any = None  # the weight of the current pass
        self._active: set[int] = set()  # the ids of the modules of the current pass
        self._open: list[
            Callable[[], Any] | None
        ] = []  # for each running call, a function that ends it and returns its weight; None in a pass
        self._recent: set[float] = set()  # the weights of passes since the last step
        self._alone = len(strategy.extended.replicas) == 1
        if read is not None or not self._alone:
            self._begin()
        elif weighs:
            strategy.extended.batches.watch(self._begin)

    def _begin(self) -> None:
        """Watch calls of layers: shares are unequal, servers have parameters, or a rank has several replicas."""
        root = self._root()
        if root is None or not self.idle:
            return
        self.idle = False
        for layer in root.modules():
            if layer is not root and (any(True for _ in layer.parameters()) or isinstance(layer, SyncBatchNorm)):
                _passes[layer] = self
                layer.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
                layer.register_forward_hook(_leave, with_kwargs=True, always_call=True)

    def call(
        self, module: torch.nn.Module, function: Callable[..., Any], args: Any, kwargs: Any, method: bool = False
    ) -> Any:
        """Call a function of the module, which may start a pass. A method without tensors of a batch starts none."""
        depth, output = len(self._open), None
        try:
            self.enter(module, (args, kwargs), method)
            if self._without_rows((args, kwargs)):
                output = _run_without_rows(module, function, args, kwargs)
            else:
                output = function(*args, **kwargs)
            return output
        finally:
            self.leave(depth, output)

    @torch.compiler.disable
    def _without_rows(self, inputs: Any) -> bool:
        """Return whether an input is empty, and this replica's share of its batch has no row."""
        if not any(map(_is_empty, _tensors(inputs))):
            return False
        if self._active or not self._weighs:
            return bool(self._now == 0)
        try:
            return weight_of_pass(self._strategy(), _tensors(inputs), f"{self._name}.forward") == 0
        except BatchError:
            return False

    @torch.compiler.disable
    def enter(self, module: torch.nn.Module, inputs: Any, method: bool = False) -> None:
        """Start a call of the module or of one of its layers; each is followed by `leave`.

        Raises:
            BatchError: shares are unequal, and the batch of the inputs cannot be identified.
            RuntimeError: the layer belongs to another local replica.
        """
        self._open.append(None)
        strategy: Any = self._strategy()
        if not self._alone and local_replica(strategy) != self._replica:
            expected = f"the layers of replica {local_replica(strategy)} in its step"
            remedy = "Call the module or its methods, which find this replica's layers"
            got = f"{type(module).__name__} of replica {self._replica}"
            raise RuntimeError(explain(f"{self._name}.forward", "", expected=expected, got=got, remedy=remedy))
        if self._active:
            return
        if self._read is not None:
            self._read()
        weighs = self._weighs and strategy.extended.batches.uneven and torch.is_grad_enabled()
        weight: Any = self._weight(module, inputs, method) if weighs else None
        if weight is None and self._read is None:
            return
        layers = list(module.modules())
        undo = [] if weight is None else _weigh_parameters(layers, weight)
        self._active, self._now = set(map(id, layers)), weight
        norms = [layer for layer in layers if isinstance(layer, SyncBatchNorm)]

        def end() -> Any:
            self._active, self._now = set(), None
            for container, key, value in undo:
                container[key] = value
            for layer in norms:
                layer.share = 1.0
            return weight

        self._open[-1] = end
        for layer in norms:
            layer.share = weight if isinstance(weight, float) else 1.0

    @torch.compiler.disable
    def leave(self, depth: int | None = None, output: Any = None) -> None:
        """End the last call, or all calls above `depth`; record the weight of the pass at its output."""
        depth = max(len(self._open) - 1, 0) if depth is None else depth
        while len(self._open) > depth:
            end = self._open.pop()
            weight = None if end is None else end()
            if isinstance(weight, float):
                _note_weight(output, weight)

    def weight_of_loss(self, loss: Any) -> float:
        """Return the factor of a loss in the sum: the weight of the passes that computed it.

        Raises:
            BatchError: passes of several weights.
        """
        if self.idle or not self._weighs:
            return 1.0
        weights = _weights_before([loss]) or set(self._recent)  # for a number, of all passes since the last step
        errors = [weight for weight in weights if isinstance(weight, BatchError)]
        if errors:
            raise errors[0]
        if len(weights) > 1:
            expected = "the loss of rows of one batch, to sum over the replicas"
            got = f"one of batches of {len(weights)} different weights"
            remedy = "Return a loss of one batch, or batches of which replicas have equal parts (drop_remainder=True)"
            raise BatchError(explain(f"{self._name}: closure", "loss", expected=expected, got=got, remedy=remedy))
        return float(weights.pop()) if weights else 1.0

    def forget(self) -> None:
        """Forget the weights of earlier passes, and calls left open by an interrupt."""
        self._recent.clear()
        self.leave(0)

    def _weight(self, module: torch.nn.Module, inputs: Any, method: bool) -> Any:
        """Return the weight of a pass, an error for its backward pass, or None."""
        if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes its pass
            if _top_hooks is not None and _top_hooks(True) is not None:  # for the saved tensors only
                return None
            if len(self._recent) == 1:
                return next(iter(self._recent))
        tensors = list(_tensors(inputs))
        known = _weights_before(tensors)
        if len(known) == 1:  # of the pass that computed the inputs
            weight = known.pop()
            self._recent.add(weight)
            return weight
        try:
            weight = weight_of_pass(self._strategy(), tensors, f"{self._name}.forward")
        except BatchError as error:
            if method and self._read is None:
                return None
            if module.training:
                raise
            return error  # most passes of evaluation have no backward pass
        self._recent.add(weight)
        return weight


def _is_empty(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and not tensor.numel()


def _run_without_rows(module: torch.nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of a module with inputs of zero rows.

    If it fails, as `x.view(x.size(0), -1)` does, it gets one row of ones instead. Then that row is removed from its outputs,
    and numbers are NaN, as means of no row are. Running statistics do not change.
    """
    layers = list(module.modules())
    norms = [x for x in layers if isinstance(x, torch.nn.modules.batchnorm._NormBase)]
    repeats = not any(
        isinstance(layer, SyncBatchNorm) and layer.training for layer in norms
    )  # its calls are collective
    before = [(b, b.clone()) for x in norms if not isinstance(x, SyncBatchNorm) for b in x.buffers(recurse=False)]
    try:
        if repeats:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # of the program's own module
                log.once(logging.DEBUG, f"{type(module).__name__}: one row instead of none: {error}")
        given, options = tree_map(_filled, (args, kwargs))
        axis = next(each.shape.index(0) for each in _tensors((args, kwargs)) if _is_empty(each))
        return tree_map(functools.partial(_cut, axis), function(*given, **options))
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # hidden from autograd, which has saved it


def _filled(value: Any) -> Any:
    """Replace zero rows of a tensor by one row of ones, whose gradients are those of no row."""
    if not _is_empty(value):
        return value
    shape = [1, *value.shape[1:]] if not value.shape[0] else [size or 1 for size in value.shape]
    ones = value.new_ones(shape)
    return ones + value.sum() if value.requires_grad else ones


def _cut(axis: int, value: Any) -> Any:
    """Remove the placeholder row from a tensor: along its first axis, else along that of the inputs' rows."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.dim() and value.is_floating_point():
        return value + torch.nan
    for each in (0, axis):
        if value.dim() > each and value.shape[each] == 1:
            return value.narrow(each, 0, 0)
    return value


def _enter(layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
    passes = _passes.get(layer)
    if passes is not None:  # None for a copy
        passes.enter(layer, (args, kwargs))


def _leave(layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    passes = _passes.get(layer)
    if passes is not None:
        passes.leave(output=output)


def _weigh_parameters(layers: list[torch.nn.Module], weight: Any) -> list[tuple[Any, Any, Any]]:
    """Replace layers' parameters by tensors with a weight; return how to undo it.

    Raises:
        BatchError: a layer whose parameters cannot be replaced.
    """
    made: dict[int, torch.Tensor] = {}
    undo: list[tuple[Any, Any, Any]] = []

    def weighed(parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in made:
            made[id(parameter)] = _Weigh.apply(parameter, weight)
            made[id(parameter)].mpistrat_of = parameter  # type: ignore[attr-defined]
        return made[id(parameter)]

    for layer in layers:
        if isinstance(layer, torch.jit.ScriptModule):
            raise BatchError(
                f"{type(layer).__name__}.forward: a compiled ScriptModule cannot weigh its gradients by the rows of unequal "
                'parts of a batch. Use drop_remainder=True for equal parts, loss="sum", or distribute the module before it '
                "is scripted"
            )
        own = layer._parameters
        for name, parameter in own.items():
            if parameter is not None and parameter.requires_grad:
                undo.append((own, name, parameter))
        attributes = vars(layer)
        for name, held in list(attributes.items()):  # such as an LSTM's list of its weights
            if (name[:1] != "_" or name == "_flat_weights") and _holds(held):
                undo.append((attributes, name, held))
    for container, key, value in undo:
        container[key] = _replaced(value, weighed)
    return undo


def _trains(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def _holds(held: Any) -> bool:
    """Return whether a nest of lists, tuples and dicts has a parameter."""
    if type(held) in (list, tuple, dict):
        return any(_trains(value) or _holds(value) for value in (held.values() if type(held) is dict else held))
    return False


def _replaced(value: Any, weighed: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace a parameter, or those in a nest, by tensors with a weight."""
    if isinstance(value, torch.Tensor):
        return weighed(value) if value.requires_grad else value
    if type(value) is dict:
        return {key: _replaced(each, weighed) for key, each in value.items()}
    return type(value)([_replaced(each, weighed) for each in value]) if type(value) in (list, tuple) else value


def _note_weight(output: Any, weight: float) -> None:
    """Record the weight of a pass at its outputs, for passes that use them."""
    for tensor in _tensors(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.metadata[_Weigh] = weight


def _weights_before(tensors: list[Any]) -> set[Any]:
    """Return the weights of the passes that computed tensors."""
    weights: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if _Weigh in node.metadata:
            weights.add(node.metadata[_Weigh])
            continue
        if isinstance(node, _Weigh._backward_cls):  # type: ignore[attr-defined]
            weights.add(node.weight)  # type: ignore[attr-defined]
            continue
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen:
                seen.add(earlier)
                nodes.append(earlier)
    return weights


def _tensors(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors and arrays in a nest, in objects' attributes, and wrapped by `vmap` and the like."""
    if isinstance(value, torch.Tensor):
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        yield value
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (str, bytes, int, float, complex, type, torch.nn.Module)) or value is None or not depth:
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _tensors(vars(value), depth - 1)


def with_passes(kind: type[torch.nn.Module]) -> dict[str, Any]:
    """Return methods that replace a module class's own, and start a pass for tensors of a batch."""
    methods: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            break
        for name, function in vars(base).items():
            own = name == "forward" or (name not in _OWN and name[:2] != "__")
            if inspect.isfunction(function) and own and name not in methods:
                methods[name] = _as_pass(name, function)
    return methods


def _as_pass(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes = vars(self).get("mpistrat_passes")
        if passes is None or passes.idle:
            return function(self, *args, **kwargs)
        replicas = self.mpistrat_replicas
        replica = local_replica(self.mpistrat_strategy) if len(replicas) > 1 else 0
        if replica:
            return getattr(replicas[replica], name)(*args, **kwargs)
        return passes.call(self, functools.partial(function, self), args, kwargs, method=True)

    return method


def plain_copy(module: torch.nn.Module) -> None:
    """Remove the hooks on calls of layers from a copy of a module."""
    for layer in module.modules():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for number, hook in list(hooks.items()):
                if hook in (_enter, _leave):
                    del hooks[number]
                    for names in (
                        layer._forward_pre_hooks_with_kwargs,
                        layer._forward_hooks_with_kwargs,
                        layer._forward_hooks_always_called,
                    ):
                        names.pop(number, None)
