"""A module whose parameters are variables of a strategy: whose memory they have, how gradients come into it, and buffers."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from .. import context, global_batch
from .._util import log, nest
from ..errors import explain
from ..strategy.contexts import local_replica
from ..strategy.loss import share_of_batch, summed_replicas
from ..types import VariableAggregation, VariableSynchronization
from ..variables import Variable
from ..variables.layout import Part
from .sync_batch_norm import SyncBatchNorm
from .tensors import LocalGradient, array_of, slices_of, tensor_of

__all__ = [
    "DistributedModule",
    "Link",
    "check_called",
    "gradients",
    "link_of",
    "local_gradient",
    "put_into",
]

# A tensor of what a server sent is never written: parameters change by steps only.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", module="mpistrat.torch")


@final
class Link:
    """What ties a parameter of one local replica to a variable: its data is the variable's memory.

    Attributes:
        name: of the parameter in its module.
        variable: the variable.
        parameter: the parameter.
        replicas: the links of all local replicas' parameters of that name.
        gradient: where the variable's gradient lies; None for what is frozen, and where a server has the variable.
        shown: the same memory, as `parameter.grad` shows it.
        adds: whether the next gradient is added to what lies there though `parameter.grad` is None.
        share: by what this replica's gradients are multiplied before the sum.
        address: of the variable's memory; torch itself may move a tensor's, as `share_memory` does.
        divided: which part of it this rank has, where the ranks of a replica divide it; else None.
        noted: called with the link when a backward pass has completed the gradient, if anything is.
    """

    __slots__ = (
        *("_present", "adds", "address", "divided", "gradient", "name", "parameter", "replicas", "share", "shown"),
        *("noted", "tensor", "variable"),
    )

    def __init__(self, name: str, variable: Variable, parameter: torch.nn.Parameter, replica: int) -> None:
        self.name, self.variable, self.parameter = name, variable, parameter
        self.replicas: Sequence[Link] = (self,)
        self.adds, self.share = False, 1.0
        self.noted: Callable[[Link], None] | None = None
        self.divided: Part | None = None
        self.gradient: torch.Tensor | None = None
        self.shown: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None
        self.address = 0
        parameter.mpistrat = self  # type: ignore[attr-defined]
        parameter.grad = None
        if variable.placement.store is not None:
            if parameter.requires_grad:
                parameter.register_hook(self._weigh)
            return
        self.divided = variable.part if variable.part is not None and variable.part.split else None
        self.tensor = tensor_of(variable.storage(replica))
        self.address = self.tensor.data_ptr()
        parameter.data = self.tensor
        if parameter.requires_grad:
            array = variable.gradient(replica)
            self._present = array, variable
            self.gradient = tensor_of(array)
            self.shown = torch.Tensor._make_subclass(LocalGradient, self.gradient)
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """Take the gradient that a backward pass has just completed. If `shown` was there, autograd has added to it already.

        For a small module these calls, one for each parameter, take as long as a step's communication: what is not rare comes
        first, and does not go through `torch.no_grad`.
        """
        if torch.compiler.is_dynamo_compiling():  # a compiled function has called backward
            self._take_untraced(parameter)
            return
        gradient, target = parameter.grad, self.gradient
        if gradient is None or target is None:
            return
        if gradient is not self.shown:
            self._write(gradient, target)
            parameter.grad = self.shown
        if self.noted is not None:
            self.noted(self)

    def _write(self, gradient: torch.Tensor, target: torch.Tensor) -> None:
        if gradient.requires_grad:  # backward(create_graph=True)
            gradient = gradient.detach()
        if self.adds:
            target.add_(gradient, alpha=self.share)
            self.adds = False
        elif gradient.is_sparse:
            target.zero_().add_(gradient, alpha=self.share)
        elif self.share == 1:
            target.copy_(gradient)
        elif self.share:
            torch.mul(gradient, self.share, out=target)
        else:  # the mean of no row is not a number
            target.zero_()

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient that goes to a server, weighted."""
        if self.share == 1:
            return gradient
        return gradient * self.share if self.share else torch.zeros_like(gradient)

    @torch.compiler.disable
    def _take_untraced(self, parameter: torch.nn.Parameter) -> None:
        self._take(parameter)

    def whole(self) -> torch.Tensor:
        """Return a copy of the whole parameter. Collective, where ranks divide it."""
        return tensor_of(self.variable.gathered()) if self.divided is not None else self.parameter.data.clone()

    def attach(self) -> None:
        """Give the parameter the variable's memory; of a variable on a server, what is read of it now."""
        self.parameter.data = tensor_of(self.variable.array) if self.tensor is None else self.tensor

    def begin(self, share: float) -> None:
        """Begin a forward pass, whose gradients are multiplied by `share`."""
        if self.tensor is None:
            self.attach()
        self.share = share
        if share != 1 and self.parameter.grad is not None and self.parameter.grad is self.shown:
            self.adds, self.parameter.grad = True, None  # autograd would add without the factor

    def forget(self) -> None:
        """Forget the gradient."""
        self.adds, self.parameter.grad = False, None

    def pair(self, by_rows: bool) -> tuple[Any, Variable]:
        """Return the gradient and the variable, as `apply_gradients` takes them.

        Args:
            by_rows: whether a server may get the rows of a sparse gradient alone, and leaves the others as they are.

        Raises:
            RuntimeError: the parameter has lost the variable's memory, or was frozen when it was distributed.
        """
        parameter, tensor = self.parameter, self.tensor
        gradient = parameter.grad
        if tensor is None:
            if gradient is None:
                return None, self.variable
            if not gradient.is_sparse:
                return array_of(gradient), self.variable
            rows = by_rows and gradient.sparse_dim() == 1
            return slices_of(gradient) if rows else array_of(gradient.to_dense()), self.variable
        if parameter.data_ptr() != self.address or parameter.dtype is not tensor.dtype:
            cause = ".half(), .to(dtype), share_memory() or parameter.data = … after distribute"
            got = f"a {parameter.dtype} tensor elsewhere: {cause}"
            remedy = "Convert the module before ms.torch.distribute; write with parameter.copy_(…) or load_state_dict"
            self._refuse("the memory of its variable", got, remedy)
        if gradient is None:
            return None, self.variable
        if self.gradient is None:
            remedy = "Set requires_grad before ms.torch.distribute, for all that will ever be trained"
            self._refuse("a parameter that was trainable when it was distributed", "a frozen one", remedy)
        elif gradient is not self.shown:
            self.gradient.copy_(gradient)  # the program's own
        return self._present

    def __reduce__(self) -> Any:
        return type(None), ()  # of a parameter in a file, or in another process

    def _refuse(self, expected: str, got: str, remedy: str) -> None:
        got = f"{got} (rank {self.variable.placement.group.topology.rank})"
        raise RuntimeError(explain("step", self.name, expected=expected, got=got, remedy=remedy))


def link_of(parameter: Any) -> Link | None:
    """Return the link of a parameter that was distributed, else None."""
    return getattr(parameter, "mpistrat", None)


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this replica's own gradient of a parameter, as it is before the sum, to look at; None where there is none.

    Example:
        >>> ms.torch.local_gradient(module.weight).norm()  # doctest: +SKIP
        tensor(0.31)
    """
    link = link_of(parameter)
    if link is None or parameter.grad is None or parameter.grad is not link.shown:
        return parameter.grad
    return link.gradient


def gradients(module: torch.nn.Module) -> list[tuple[Any, Variable]]:
    """Return the pairs that `apply_gradients` of an optimizer of `ms.optimizers` takes; in a step, after `backward`.

    Raises:
        RuntimeError: a parameter has lost its variable's memory.

    Example:
        >>> optimizer.apply_gradients(ms.torch.gradients(module))  # doctest: +SKIP
    """
    links = vars(module).get("mpistrat_links")
    if links is None:  # a part of a distributed module
        links = [link for parameter in module.parameters() if (link := link_of(parameter)) is not None]
    replica = local_replica(links[0].variable.placement.strategy) if links else 0
    if "mpistrat_called" in vars(module):
        check_called(module, replica)
    return [link.replicas[replica].pair(by_rows=True) for link in links if link.parameter.requires_grad]


class DistributedModule(torch.nn.Module):
    """What `distribute` makes of a module's class: the class itself, and these methods first.

    Attributes:
        mpistrat_strategy: whose variables its parameters are.
        mpistrat_links: what ties each parameter to its variable.
        mpistrat_weighs: whether gradients are weighted by the rows of a replica's batch.
        mpistrat_called: whether there was a forward pass with gradients since the last step.
        mpistrat_summed: of how many replicas a server sums the gradients; each is divided by it before. Else 1.
        mpistrat_share: by what the last forward pass had them multiplied.
        mpistrat_memory: whether variables have their memory in this process; else servers have it.
        mpistrat_replicas: the modules of all local replicas; this one is the first.
        mpistrat_buffers: the variables of the buffers, by name: of statistics the mean counts, of counters the first replica's.
    """

    mpistrat_strategy: Any
    mpistrat_links: Sequence[Link]
    mpistrat_weighs: bool
    mpistrat_called: bool
    mpistrat_summed: int
    mpistrat_share: float
    mpistrat_memory: bool
    mpistrat_replicas: Sequence[torch.nn.Module]
    mpistrat_buffers: dict[str, Variable]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call this replica's module."""
        replicas = self.mpistrat_replicas
        if len(replicas) > 1:
            replica = local_replica(self.mpistrat_strategy)
            if replica:
                return replicas[replica](*args, **kwargs)
        begin = _begin_untraced if torch.compiler.is_dynamo_compiling() else _begin
        begin(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set the mode. With `eval()` running statistics become their means over all replicas: collective then."""
        if self.training and not mode:
            self._average_buffers()
        for module in self.mpistrat_replicas[1:]:
            module.train(mode)
        return super().train(mode)

    def _average_buffers(self) -> None:
        if self.mpistrat_buffers and context.current().strategy is self.mpistrat_strategy:
            context.expect_cross(self.mpistrat_strategy, "Module.eval")
        for variable in self.mpistrat_buffers.values():
            variable.assign(variable.numpy())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, as plain torch has it. Of several parameter servers none may call it.

        Collective where ranks divide parameters.
        """
        for link in self.mpistrat_links:
            if link.tensor is None:
                link.attach()
        state = super().state_dict(*args, **kwargs)
        divided = {link.address: link for link in self.mpistrat_links if link.divided is not None}
        for name, tensor in state.items() if divided else ():
            if torch.is_tensor(tensor) and tensor.data_ptr() in divided:
                state[name] = divided[tensor.data_ptr()].whole()
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a module's state, of plain torch too. Collective: every rank loads the same.

        Raises:
            CollectiveMismatchError: on every rank, when they load other numbers.
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
            array = array_of(loaded)
            link.variable.assign(array if link.divided is None else link.divided.cut(array))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that is a plain module with memory of its own, as for a moving average."""
        kind = type(self).__mro__[2]
        plain: Any = object.__new__(kind)
        memo[id(self)] = plain
        for name, value in vars(self).items():
            if not name.startswith("mpistrat_"):
                plain.__dict__[name] = copy.deepcopy(value, memo)
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
        order: names of parameters, in which their variables are made: those of a group side by side.
        weighs: whether gradients are weighted by rows.
        layouts: of parameters that the ranks of a replica divide, by name.
    """
    replicas = [module, *(copy.deepcopy(module) for _ in strategy.extended.replicas[1:])]
    parameters = [dict(each.named_parameters()) for each in replicas]
    links: list[list[Link]] = [[] for _ in replicas]
    for name in order:
        own = parameters[0][name]
        layout = layouts.get(name)
        variable = Variable(array_of(own), trainable=own.requires_grad, name=name, layout=layout)
        copies = tuple(Link(name, variable, each[name], replica) for replica, each in enumerate(parameters))
        for link, of_replica in zip(copies, links, strict=True):
            link.replicas = copies
            of_replica.append(link)
    buffers: dict[str, Variable] = {}
    own_memory = strategy.extended.placement.store is None
    for name, buffer in module.named_buffers():
        mean = buffer.is_floating_point()
        buffers[name] = variable = Variable(
            array_of(buffer),
            name=name,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.MEAN if mean else VariableAggregation.ONLY_FIRST_REPLICA,
        )
        for replica, each in enumerate(replicas):
            each.get_buffer(name).data = tensor_of(variable.storage(replica))
    for each, of_replica in zip(replicas, links, strict=True):
        kind = type(each)
        each.__class__ = type(kind.__name__, (DistributedModule, kind), {"__module__": kind.__module__})
        distributed: Any = each
        distributed.mpistrat_strategy, distributed.mpistrat_links = strategy, tuple(of_replica)
        distributed.mpistrat_weighs = weighs
        distributed.mpistrat_summed = 1 if own_memory or not weighs else summed_replicas(strategy)
        distributed.mpistrat_memory, distributed.mpistrat_share = own_memory, 1.0
        distributed.mpistrat_called = False
        distributed.mpistrat_buffers = buffers if each is module else {}
        object.__setattr__(each, "mpistrat_replicas", tuple(replicas) if each is module else (each,))
        for layer in each.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.strategy = strategy


def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note, before a forward pass, by what its gradients are multiplied."""
    share = 1.0
    if torch.is_grad_enabled():
        vars(module)["mpistrat_called"] = True  # torch's way to set an attribute takes long
        share = _share_of_batch(module)
        if share != 1 and not _has_rows((args, kwargs)):  # it is of another origin
            share = 1.0
    if module.mpistrat_share != share:
        module.mpistrat_share = share
        for layer in module.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.share = share
    elif share == 1 and module.mpistrat_memory:
        return
    for link in module.mpistrat_links:
        link.begin(share / module.mpistrat_summed)


_begin_untraced = torch.compiler.disable(_begin)


def _share_of_batch(module: Any) -> float:
    """Return by what the gradients of the batch that was handed out are multiplied, where 1 is an equal part."""
    return share_of_batch(module.mpistrat_strategy) if module.mpistrat_weighs else 1.0


def _has_rows(inputs: Any) -> bool:
    """Return whether an input may be made of the batch that was handed out: it has a dimension of as many rows."""
    rows, _ = global_batch.rows_of_batch() or (0, 0)
    if any(rows in getattr(value, "shape", ()) for value in nest.flatten(inputs)):
        return True
    what = f"no input of the module has a dimension of {rows}, the rows of this replica's part of the batch"
    log.once(
        logging.WARNING,
        f"ms.torch: {what}: its gradients count as much as those of replicas with other numbers of rows",
    )
    return False


def check_called(module: Any, replica: int) -> None:
    """Check before a step that a forward pass has noted by what gradients are multiplied.

    Raises:
        RuntimeError: only layers were called, with a batch of which replicas have unequal parts.
    """
    own = module.mpistrat_replicas[replica] if replica else module
    if not own.mpistrat_called and (own.mpistrat_share != 1 or _share_of_batch(own) != 1):
        expected, got = "a forward pass of the distributed module", "none: its layers or methods were called one by one"
        remedy = (
            "Call the module itself: there gradients are weighted by the rows of replicas' unequal parts of the batch"
        )
        raise RuntimeError(explain("step", "", expected=expected, got=got, remedy=remedy))
    vars(own)["mpistrat_called"] = False
