"""A module whose parameters share a strategy's variables' memory: their gradients, and buffers.

Each replica writes its own buffers, as BatchNorm's statistics; `eval` makes them equal.
"""

from __future__ import annotations

import collections
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, final

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from ..arena.layout import Box
from ..arena.values import checksum
from ..base import context
from ..base.errors import explain
from ..base.types import Quality, VariableAggregation, VariableSynchronization
from ..comm.arrays import to_host
from ..strategy.contexts import local_replica
from ..strategy.loss import summed_replicas
from ..variables import Variable
from ..variables.sharded import each_variable
from ..variables.variable import box_of
from .sync_batch_norm import SyncBatchNorm
from .tensors import LocalGradient, array_of, slices_of, tensor_of
from .weights import ModulePasses, plain_copy, with_passes

__all__ = [
    "Buffers",
    "DistributedModule",
    "TorchLink",
    "check_parameters",
    "divide_gradients",
    "forget_gradients",
    "gradients",
    "link_of",
    "local_gradient",
    "pairs_of_links",
    "put_into",
]


class _Known(NamedTuple):
    """A buffer of one local replica: its name in the module, and the tensor with the variable's memory."""

    place: str
    tensor: torch.Tensor


_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Known]] = (
    weakref.WeakKeyDictionary()
)  # by layer, then by name


@final
class Buffers:
    """The buffers of a module, of all local replicas. Creating them is collective.

    Attributes:
        variables: by name: the mean over the replicas for statistics, the first replica's for counters.
    """

    def __init__(self, strategy: Any, replicas: Sequence[torch.nn.Module]) -> None:
        self._strategy = strategy
        self.variables: dict[str, Variable] = {}
        self._replicas = [weakref.ref(each) for each in replicas]
        for place, buffer in replicas[0].named_buffers():
            mean = buffer.is_floating_point()
            self.variables[place] = variable = Variable(
                array_of(buffer),
                name=place,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.MEAN if mean else VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for replica, each in enumerate(replicas):
                layer, name = _layer_of(each, place)
                tensor = tensor_of(variable.storage(replica))
                own = each.get_buffer(place)
                own.data = tensor
                _known.setdefault(layer, {})[name] = _Known(place, own)

    def average(self) -> None:
        """Replace buffers that differ between replicas by their means. Collective.

        Raises:
            ContextError: in a step.
            RuntimeError: a buffer was replaced by one of another shape or dtype.
        """
        if not self.variables:
            return
        if context.current().strategy is self._strategy:
            context.expect_cross(self._strategy, "Module.eval")
        self.collect()
        replicas = len(self._replicas)
        digests = [
            checksum(np.ascontiguousarray(to_host(variable.storage(replica))).reshape(-1)) & ((1 << 62) - 1)
            for replica in range(replicas)
            for variable in self.variables.values()
        ]
        group = self._strategy.extended.placement.group
        with group.collective("Module.eval", "buffers", str(len(self.variables))):
            everyones = np.asarray(group.all_gather_int(digests)).reshape(-1, len(self.variables))
        for number, variable in enumerate(self.variables.values()):
            if (everyones[:, number] != everyones[0, number]).any():
                variable.assign(variable.numpy())

    def collect(self) -> None:
        """Copy values that the program assigned to buffers into their variables."""
        for reference in self._replicas:
            module = reference()
            for layer in module.modules() if module is not None else ():
                buffers = vars(layer)["_buffers"]
                for name in _known.get(layer, {}):
                    buffers[name] = _assigned(layer, name, buffers.get(name))


def _layer_of(module: torch.nn.Module, place: str) -> tuple[torch.nn.Module, str]:
    path, _, name = place.rpartition(".")
    return module.get_submodule(path), name


@torch.compiler.disable
def _assigned(layer: torch.nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """Return an assigned buffer's value: its own tensor, or a value with a history."""
    known = _known[layer].get(name)
    if known is None or value is None or value is known.tensor:
        return value
    own = known.tensor
    if value.shape != own.shape or value.dtype != own.dtype or value.device != own.device:
        expected = f"a tensor {own.dtype}{tuple(own.shape)} on {own.device}, as when the module was distributed"
        got = f"{value.dtype}{tuple(value.shape)} on {value.device}"
        remedy = "Keep what changes its shape or dtype as a plain attribute, or convert the module before ms.torch.distribute"
        raise RuntimeError(
            explain(type(layer).__name__, f"buffer {known.place}", expected=expected, got=got, remedy=remedy)
        )
    with torch.no_grad():
        own.copy_(value)
    return value if value.requires_grad else own


def _registered(layer: torch.nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """Handle any module's registered or assigned buffer; called by torch."""
    return _assigned(layer, name, value) if layer in _known else None


torch.nn.modules.module.register_module_buffer_registration_hook(_registered)

# A tensor that a server sent is never written: parameters only change by steps.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", module="mpistrat.torch")


@final
class TorchLink:
    """The link of a local replica's parameter to a variable, whose memory is its data.

    Attributes:
        name: of the parameter in its module.
        variable: the variable.
        replicas: the links of all local replicas' parameters of that name.
        gradient: the memory of the variable's gradient; for a parameter frozen when distributed, private memory until its
            first step. None before that, and if a server has the variable.
        shown: the same memory, as `parameter.grad` shows it.
        summed: the number of replicas that a server sums, which divides their gradients. Else 1.
        address: of the variable's memory; torch itself may move a tensor's, as `share_memory` does.
        dtype: of that memory, None if a server has the variable.
        replica: the local replica.
        box: this rank's place in the whole, if the ranks of a replica divide it.
        optimized: True if an optimizer has the parameter.
        noted: called with the link when the gradient is complete, if set.
    """

    __slots__ = (
        *(
            "__weakref__",
            "_late",
            "_parameter",
            "_present",
            "address",
            "box",
            "dtype",
            "gradient",
            "name",
            "noted",
            "optimized",
            "replica",
            "replicas",
            "shown",
        ),
        *("summed", "tensor", "variable"),
    )

    def __init__(self, name: str, variable: Variable, parameter: torch.nn.Parameter, replica: int, summed: int) -> None:
        self.name, self.variable, self._parameter = name, variable, weakref.ref(parameter)
        self.replicas: Sequence[TorchLink] = (self,)
        self.summed, self.replica = summed, replica
        self.optimized = False
        self._late = False  # True if the gradient is not in the variable's memory yet
        self.noted: Callable[[TorchLink], None] | None = None
        self.box = Box(parameter.shape)
        self.gradient: torch.Tensor | None = None
        self.shown: LocalGradient | None = None
        self.tensor: torch.Tensor | None = None
        self.address = 0
        self.dtype: torch.dtype | None = None
        parameter.mpistrat = self  # type: ignore[attr-defined]
        parameter.grad = None
        if variable.placement.lacks(Quality.OWN_VARIABLES):
            return
        self.box = box_of(variable)
        self.tensor = tensor_of(variable.storage(replica))
        self.address, self.dtype = self.tensor.data_ptr(), self.tensor.dtype
        parameter.data = self.tensor
        trains = parameter.requires_grad
        if trains:
            self._hold(variable.gradient(replica))
        else:
            self._late = True
        if parameter.is_floating_point():
            # The garbage collector does not see torch's hooks: this one must not refer to the link.
            parameter.requires_grad_(True)  # else torch refuses the hook
            parameter.register_post_accumulate_grad_hook(functools.partial(_take, weakref.ref(self)))
            parameter.requires_grad_(trains)

    def _hold(self, array: Any) -> None:
        """Use an array for the gradient from now on."""
        self._present = array, self.variable
        self.gradient = tensor_of(array)
        self.shown = torch.Tensor._make_subclass(LocalGradient, self.gradient)
        self.shown.strategy = weakref.ref(self.variable.placement.strategy)

    def _hold_own(self, gradient: torch.Tensor) -> None:
        """Use private memory for the gradient, as for a thawed parameter before its first step."""
        plain = gradient.detach()
        self._hold(array_of(plain.to_dense() if plain.is_sparse else plain.contiguous()))

    def _hold_late(self) -> None:
        """Use the variable's memory for the gradient, now allocated for a thawed parameter."""
        parameter, own, shown = self.parameter, self.gradient, self.shown
        self._hold(self.variable.gradient(self.replica))
        self._late = False
        if own is not None and parameter.grad is shown:
            self.gradient.copy_(own)  # type: ignore[union-attr]
            parameter.grad = self.shown

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter.

        Raises:
            RuntimeError: the program has deleted it.
        """
        parameter = self._parameter()
        if parameter is None:
            remedy = "Replace layers before ms.torch.distribute"
            self._refuse("the parameter that was distributed", "none: its layer was replaced or removed", remedy)
        return parameter

    def whole(self) -> torch.Tensor:
        """Return a copy of the whole parameter. Collective, if ranks divide it."""
        return self.parameter.data.clone() if self.box.is_whole else tensor_of(self.variable.gathered())

    def attach(self) -> None:
        """Set the parameter's data to the variable's memory; for a variable on a server, to its current value."""
        self.parameter.data = tensor_of(self.variable.array) if self.tensor is None else self.tensor

    def pair(self, by_rows: bool) -> tuple[Any, Variable]:
        """Return the gradient and the variable, as `apply_gradients` takes them.

        Args:
            by_rows: True if a server may get only the rows of a sparse gradient.

        Raises:
            RuntimeError: the parameter has lost the variable's memory, or is a complex one that was frozen.
        """
        parameter, tensor = self.parameter, self.tensor
        gradient = parameter.grad
        if tensor is None:
            if gradient is None:
                return None, self.variable
            if self.summed != 1:
                gradient = gradient.detach() / self.summed
            if not gradient.is_sparse:
                return array_of(gradient), self.variable
            rows = by_rows and gradient.sparse_dim() == 1
            return slices_of(gradient) if rows else array_of(gradient.to_dense()), self.variable
        self.check_memory()
        if self._late and self.variable.trainable:
            self._hold_late()
            gradient = parameter.grad
        if gradient is None:
            return None, self.variable
        if self.gradient is None:
            if not parameter.is_floating_point():
                remedy = "Keep torch.view_as_real(...) of it as the parameter"
                self._refuse("a trained parameter of floating numbers", f"one of {parameter.dtype}", remedy)
            self._hold_own(gradient)
        elif gradient is not self.shown:
            _fill(self.gradient, gradient)  # the program's own
        return self._present

    def check_memory(self) -> None:
        """Raise RuntimeError if the parameter has lost the memory of its variable."""
        parameter = self.parameter
        moved = parameter.data_ptr() != self.address or parameter.dtype is not self.dtype
        if self.tensor is not None and moved:
            cause = ".half(), .to(dtype), share_memory() or parameter.data = ... after distribute"
            got = f"a {parameter.dtype} tensor elsewhere: {cause}"
            remedy = "Convert the module before ms.torch.distribute; write with parameter.copy_(...) or load_state_dict"
            self._refuse("the memory of its variable", got, remedy)

    def require_gradients(self) -> None:
        """Raise RuntimeError for the gradient of a parameter thawed after `distribute`: `ms.optimizers` cannot update it."""
        if self.tensor is not None and not self.variable.trainable and self.parameter.grad is not None:
            remedy = "Set requires_grad before ms.torch.distribute, or pass an optimizer of torch.optim to it"
            self._refuse("a parameter that was trainable when it was distributed", "a frozen one", remedy)

    def __reduce__(self) -> Any:
        return type(None), ()  # of a parameter in a file, or in another process

    def _refuse(self, expected: str, got: str, remedy: str) -> NoReturn:
        got = f"{got} (rank {self.variable.placement.group.topology.rank})"
        raise RuntimeError(explain("step", self.name, expected=expected, got=got, remedy=remedy))


def _fill(target: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient, which may be sparse, into a dense tensor."""
    if gradient.is_sparse:
        target.zero_().add_(gradient)
    else:
        target.copy_(gradient)


def _take(reference: weakref.ref[TorchLink], parameter: torch.nn.Parameter) -> None:
    """Move a completed gradient into place. If it is `shown`, autograd has added to it already.

    These calls, one per parameter, may take as long as communication, so the common case is one Python call without
    `torch.no_grad`.
    """
    if is_dynamo_compiling():  # a compiled function has called backward
        _take_untraced(reference, parameter)
        return
    link, gradient = reference(), parameter.grad
    if link is None or gradient is None:
        return
    target, shown = link.gradient, link.shown
    if target is None:
        link._hold_own(gradient)
        parameter.grad = link.shown
    elif gradient is not shown:
        if gradient.is_sparse or gradient.requires_grad:  # the latter of backward(create_graph=True)
            _fill(target, gradient.detach())
        else:
            target.copy_(gradient)
        parameter.grad = shown
    if link.noted is not None:
        link.noted(link)


_take_untraced = torch.compiler.disable(_take)


def forget_gradients(links: Iterable[TorchLink], set_to_none: bool) -> None:
    """Delete the gradients of links, or set existing ones to zero."""
    for link in links:
        parameter = link._parameter()
        if parameter is None:
            parameter = link.parameter  # raises
        gradient = None if set_to_none else parameter.grad
        if gradient is None:
            parameter.grad = None
        elif gradient is link.shown and link.gradient is not None:
            link.gradient.zero_()
        else:
            gradient.detach_().zero_()


def pairs_of_links(links: Iterable[TorchLink], by_rows: bool) -> list[tuple[Any, Variable]]:
    """Return the pairs, of variables or their parts, of links whose parameter is trained or has a gradient.

    The common case, that of a gradient in place, comes first.
    """
    pairs: list[tuple[Any, Variable]] = []
    for link in links:
        parameter = link._parameter()
        if parameter is None:
            parameter = link.parameter  # raises
        gradient = parameter.grad
        in_place = gradient is not None and gradient is link.shown and not link._late
        if in_place and parameter.data_ptr() == link.address and parameter.dtype is link.dtype:
            pairs.append(link._present)
        elif gradient is not None or parameter.requires_grad:
            pairs += each_variable([link.pair(by_rows)])
    return pairs


def link_of(parameter: Any) -> TorchLink | None:
    """Return the link of a parameter that was distributed, else None."""
    return getattr(parameter, "mpistrat", None)


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this replica's own gradient of a parameter, before the sum, for inspection; None without one.

    Example:
        >>> ms.torch.local_gradient(module.weight).norm()  # doctest: +SKIP
        tensor(0.31)
    """
    link = link_of(parameter)
    if link is None or parameter.grad is None or parameter.grad is not link.shown:
        return parameter.grad
    return link.gradient


def gradients(module: torch.nn.Module) -> list[tuple[Any, Variable]]:
    """Return the pairs for `apply_gradients` of an optimizer of `ms.optimizers`; in a step, after `backward`.

    Raises:
        RuntimeError: a parameter has lost its variable's memory.

    Example:
        >>> optimizer.apply_gradients(ms.torch.gradients(module))  # doctest: +SKIP
    """
    links = vars(module).get("mpistrat_links")
    if links is None:  # a submodule of a distributed module
        links = [link for parameter in module.parameters() if (link := link_of(parameter)) is not None]
    replica = local_replica(links[0].variable.placement.strategy) if links else 0
    if "mpistrat_replicas" in vars(module):
        check_parameters(module, replica)
    trained = [link.replicas[replica] for link in links if link.parameter.requires_grad]
    for link in trained:
        link.require_gradients()
    return [link.pair(by_rows=True) for link in trained]


class DistributedModule(torch.nn.Module):
    """Methods that `distribute` adds before those of a module's class.

    Attributes:
        mpistrat_strategy: the strategy of its variables.
        mpistrat_links: the link of each parameter to its variable.
        mpistrat_frozen: those of parameters frozen when distributed.
        mpistrat_twice: the layers in several places, with their names.
        mpistrat_passes: weighs passes by rows, and reads parameters from servers.
        mpistrat_changed: True if layers or parameters were registered since the last step.
        mpistrat_replicas: the modules of all local replicas; this one is the first.
        mpistrat_buffers: the variables of the buffers; on the first local replica's module only.
    """

    mpistrat_strategy: Any
    mpistrat_links: Sequence[TorchLink]
    mpistrat_frozen: Sequence[TorchLink]
    mpistrat_twice: Sequence[tuple[str, torch.nn.Module]]
    mpistrat_passes: ModulePasses
    mpistrat_changed: bool
    mpistrat_replicas: Sequence[torch.nn.Module]
    mpistrat_buffers: Buffers | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain module: those made of a distributed one, such as `model[:-1]`, are plain."""
        kind: Any = cls.__mro__[2]
        return kind(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call this replica's module."""
        replicas = self.mpistrat_replicas
        if len(replicas) > 1:
            replica = local_replica(self.mpistrat_strategy)
            if replica:
                return replicas[replica](*args, **kwargs)
        passes = self.mpistrat_passes
        if passes.idle:
            return super().__call__(*args, **kwargs)
        return passes.call(self, super().__call__, args, kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield this replica's parameters."""
        replicas = self.mpistrat_replicas
        replica = local_replica(self.mpistrat_strategy) if len(replicas) > 1 else 0
        return (
            replicas[replica].named_parameters(*args, **kwargs)
            if replica
            else super().named_parameters(*args, **kwargs)
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Set the mode. With `eval()` statistics that differ between replicas become their means: collective then."""
        before, trained = self.training, any(layer.training for layer in self.modules())
        result = super().train(*args, **kwargs)
        if self.training != before:
            for module in self.mpistrat_replicas[1:]:
                module.train(*args, **kwargs)
        if trained and not self.training and self.mpistrat_buffers is not None:
            self.mpistrat_buffers.average()
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, as plain torch does. Several parameter servers must not call it.

        Collective if ranks divide parameters.
        """
        for link in self.mpistrat_links:
            if link.tensor is None:
                link.attach()
        state = super().state_dict(*args, **kwargs)
        boxes = {link.address: link for link in self.mpistrat_links if not link.box.is_whole}
        for name, tensor in state.items() if boxes else ():
            if torch.is_tensor(tensor) and tensor.data_ptr() in boxes:
                state[name] = boxes[tensor.data_ptr()].whole()
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a module's state, also of plain torch. Collective: every rank loads the same.

        Raises:
            CollectiveMismatchError: on every rank, when they load different values.
        """
        links = self.mpistrat_links
        for link in links:
            link.parameter.data = link.whole()  # private: ranks of a node share the other memory
        try:
            found = super().load_state_dict(state_dict, strict)
        except BaseException:
            for link in links:
                link.attach()
            raise
        for link in links:
            loaded = link.parameter.data
            link.attach()
            link.variable.assign(link.box.cut(array_of(loaded)))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that is a plain module with memory of its own, as for a moving average."""
        kind = type(self).__mro__[2]
        plain: Any = object.__new__(kind)
        memo[id(self)] = plain
        for name, value in vars(self).items():
            if not name.startswith("mpistrat_"):
                plain.__dict__[name] = copy.deepcopy(value, memo)
        plain_copy(plain)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(1)  # from protocol 2 on pickle looks for this object's class in it


def put_into(
    strategy: Any,
    module: torch.nn.Module,
    order: Iterable[str],
    weighs: bool,
    layouts: Mapping[str, Sequence[str | None]],
) -> None:
    """Make a module a distributed one. Collective, in the strategy's scope.

    Args:
        strategy: the current one.
        module: any.
        order: names of parameters, in the order of their variables: those of a group are adjacent.
        weighs: True if gradients are weighted by rows.
        layouts: of parameters that the ranks of a replica divide, by name.
    """
    replicas = [module, *(copy.deepcopy(module) for _ in strategy.extended.replicas[1:])]
    parameters = [dict(each.named_parameters()) for each in replicas]
    links: list[list[TorchLink]] = [[] for _ in replicas]
    own_memory = not strategy.extended.placement.lacks(Quality.OWN_VARIABLES)
    summed = 1 if own_memory or not weighs else summed_replicas(strategy)
    for name in order:
        own = parameters[0][name]
        layout = layouts.get(name)
        variable = Variable(array_of(own), trainable=own.requires_grad, name=name, layout=layout)
        copies = tuple(
            TorchLink(name, variable, each[name], replica, summed) for replica, each in enumerate(parameters)
        )
        for link, of_replica in zip(copies, links, strict=True):
            link.replicas = copies
            of_replica.append(link)
    buffers = Buffers(strategy, replicas)
    for number, (each, of_replica) in enumerate(zip(replicas, links, strict=True)):
        kind = type(each)
        methods = {"__module__": kind.__module__, **with_passes(kind)}
        each.__class__ = type(kind.__name__, (DistributedModule, kind), methods)
        distributed: Any = each
        distributed.mpistrat_strategy, distributed.mpistrat_links = strategy, tuple(of_replica)
        distributed.mpistrat_changed = False
        distributed.mpistrat_frozen = tuple(x for x in of_replica if x.tensor is not None and x.gradient is None)
        places = collections.Counter(layer for _, layer in each.named_modules(remove_duplicate=False))
        layers = tuple((name, layer) for name, layer in each.named_modules() if places[layer] > 1)
        object.__setattr__(each, "mpistrat_twice", layers)
        distributed.mpistrat_buffers = buffers if each is module else None
        object.__setattr__(each, "mpistrat_replicas", tuple(replicas) if each is module else (each,))
        for name, layer in each.named_modules():
            _roots[layer] = weakref.ref(each)
            if isinstance(layer, SyncBatchNorm):
                layer.strategy, layer.place = strategy, name
        read = None if own_memory else functools.partial(_read, tuple(of_replica))
        distributed.mpistrat_passes = ModulePasses(strategy, each, number, weighs, read)


def divide_gradients(module: Any) -> None:
    """Divide gradients by the number of replicas: `ms.optimizers` sum them."""
    replicas = summed_replicas(module.mpistrat_strategy)
    for link in module.mpistrat_links if replicas > 1 else ():
        for each in link.replicas:
            if each.gradient is not None:
                each.parameter.register_hook(functools.partial(torch.mul, other=1.0 / replicas))


def _read(links: Sequence[TorchLink]) -> None:
    """Read parameters from servers."""
    for link in links:
        link.attach()


_roots: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()  # by each layer


def _changed(layer: torch.nn.Module, name: str, value: Any) -> None:
    """Record a new layer or parameter of any module; called by torch."""
    reference = _roots.get(layer)
    root = None if reference is None else reference()
    if root is not None:
        vars(root)["mpistrat_changed"] = True


torch.nn.modules.module.register_module_module_registration_hook(_changed)
torch.nn.modules.module.register_module_parameter_registration_hook(_changed)


def check_parameters(module: Any, replica: int) -> None:
    """Check a module's parameters before a step, and forget the weights of earlier passes.

    Raises:
        RuntimeError: a layer was added or replaced, or holds a tensor in place of a parameter.
    """
    own = module.mpistrat_replicas[replica] if replica else module
    for path, layer in own.mpistrat_twice:
        for name, value in layer._parameters.items():
            if value is not None and not isinstance(value, torch.nn.Parameter):
                expected, got = (
                    "the parameter that was distributed",
                    "a tensor: torch.func.functional_call leaves its argument",
                )
                remedy = "Pass copy.deepcopy(module) to functional_call: it restores no layer that a module has twice"
                rank = f" (rank {module.mpistrat_strategy.rank})"
                raise RuntimeError(explain("step", f"{path}.{name}", expected=expected, got=got + rank, remedy=remedy))
    if own.mpistrat_changed:
        for name, parameter in own.named_parameters():
            if link_of(parameter) is None and parameter.requires_grad:
                expected, got = (
                    "the parameters that were distributed",
                    "one of a layer that was added or replaced after it",
                )
                remedy = "Add and replace layers before ms.torch.distribute"
                rank = f" (rank {module.mpistrat_strategy.rank})"
                raise RuntimeError(explain("step", name, expected=expected, got=got + rank, remedy=remedy))
        vars(own)["mpistrat_changed"] = False
    for link in own.mpistrat_frozen:  # they are in files, too
        link.check_memory()
    if not own.mpistrat_passes.idle:
        own.mpistrat_passes.forget()
