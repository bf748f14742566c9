"""distribute: put a module and its optimizer into a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch

from ..arena.layout import check_layouts
from ..base import context
from ..base.devices import parse
from ..base.errors import explain
from ..base.types import Quality
from ..strategy.loss import check_loss
from .module import divide_gradients, link_of, put_into
from .optimizer import distribute_optimizer
from .rule import is_elementwise
from .sync_batch_norm import SyncBatchNorm, convert
from .tensors import array_of
from .whole import tried

__all__ = ["check_tensors", "distribute"]

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@overload
def distribute(
    module: M,
    optimizer: None = None,
    *,
    loss: str = "mean",
    max_norm: None = None,
    sync_batch_norm: bool = False,
    layouts: Mapping[str, Sequence[str | None]] | None = None,
) -> M: ...
@overload
def distribute(
    module: M,
    optimizer: Sequence[O],
    *,
    loss: str = "mean",
    max_norm: None = None,
    sync_batch_norm: bool = False,
    find_unused_parameters: bool = False,
    layouts: Mapping[str, Sequence[str | None]] | None = None,
) -> tuple[M, list[O]]: ...
@overload
def distribute(
    module: M,
    optimizer: O,
    *,
    loss: str = "mean",
    max_norm: float | None = None,
    sync_batch_norm: bool = False,
    overlap: bool = False,
    find_unused_parameters: bool = False,
    layouts: Mapping[str, Sequence[str | None]] | None = None,
) -> tuple[M, O]: ...
def distribute(
    module: Any,
    optimizer: Any = None,
    *,
    loss: str = "mean",
    max_norm: float | None = None,
    sync_batch_norm: bool = False,
    overlap: bool = False,
    find_unused_parameters: bool = False,
    layouts: Mapping[str, Sequence[str | None]] | None = None,
) -> Any:
    """Put a module into the current strategy, and make its optimizer step for all replicas. Collective.

    It returns the same objects, so the loop does not change. The parameters start with rank 0's values, and are stored once
    on each node. Backward passes write gradients to memory that is summed; `optimizer.step()` sums and updates in one pass,
    by torch's own rule. Random numbers, as of dropout, differ between replicas.

    Args:
        module: any, on the strategy's kind of device; convert its dtype before.
        optimizer: of the module's parameters, created as usual. torch.optim's SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta,
            Adamax, RAdam, NAdam, ASGD and Rprop are divided over the ranks. Any other runs on whole tensors on every rank,
            with the closure of its step if it calls one, as LBFGS does. A sequence of several, each of other parameters, is
            returned as a list. Without it, pass `ms.torch.gradients(module)` to an optimizer of `ms.optimizers`.
        loss: of a replica. "mean": over its rows of the batch; replicas are weighted by their rows if the batch is a
            distributed dataset's, else equally. "sum": a summand of the whole loss, as of `ms.nn.compute_average_loss`; then
            gradients are summed unchanged.
        max_norm: scale the gradients down together so that their norm over all parameters, after the sum, does not exceed it.
        sync_batch_norm: replace BatchNorm layers by ones with the statistics of all replicas.
        overlap: on several nodes or GPUs, start to sum gradients within backward passes, as DDP does: see `Optimizer.begin`.
            Then all ranks must call backward equally often, and compute gradients of the same parameters.
        find_unused_parameters: a parameter that has a gradient on some replicas only counts as 0 on the others, as with DDP's
            option of that name; one without a gradient on any replica is not updated. Costs one small collective per step.
        layouts: under a MeshStrategy, a parameter's division over the ranks of a replica, by name, as `ms.Variable`'s layout.
            The parameter has this rank's slice, also if the module was created whole. `state_dict` and `load_state_dict` of
            module and optimizer have the whole.

    Raises:
        ContextError: outside of a strategy's scope.
        ValueError: an argument is wrong, or find_unused_parameters with overlap or with parameter servers, or several
            optimizers with overlap, max_norm or parameter servers; a parameter that is not the module's, or of two
            optimizers, or without memory, or complex; SyncBatchNorm, where workers do not step together; a layout that does
            not fit, or without a mesh.
        TypeError: an optimizer whose step fails with gradients of zeros, or that has another optimizer.
        RuntimeError: the module is distributed already.
        LayoutError: a strategy with sharded_gradients.
        CollectiveMismatchError: on every rank, when their modules differ.

    Example:
        >>> with strategy.scope():  # doctest: +SKIP
        ...     model, optimizer = ms.torch.distribute(model, optimizer)
    """
    function = "ms.torch.distribute"
    context.expect_scope(function, "model, optimizer = ms.torch.distribute(model, optimizer)")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(explain(function, "module", expected="a torch.nn.Module", got=type(module).__name__))
    placement = context.get_strategy().extended.placement
    placement.require(function, Quality.KEPT_GRADIENTS, "gradients lie in the framework's arrays")
    check_loss(context.get_strategy(), function, loss, max_norm, optimizer)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    if isinstance(optimizer, Sequence):
        _check_several(context.get_strategy(), optimizers, max_norm, overlap)
    if find_unused_parameters:
        _check_finding(context.get_strategy(), optimizer, overlap)
    check_tensors(module, _device_of(context.get_strategy()))
    names = {parameter: name for name, parameter in module.named_parameters()}
    if any(link_of(parameter) is not None for parameter in names):
        raise RuntimeError(explain(function, "module", expected="a plain module", got="one distributed already"))
    check_layouts(function, layouts or {}, list(names.values()))
    strategy = context.get_strategy()
    if sync_batch_norm or any(isinstance(layer, SyncBatchNorm) for layer in module.modules()):
        _check_in_sync(strategy)
    chosen = [names.get(p, "") for each in optimizers for group in each.param_groups for p in group["params"]]
    if not all(chosen):
        remedy = "Make the optimizer of module.parameters()"
        expected, got = "parameters of the module", f"{chosen.count('')} that are not"
        raise ValueError(explain(function, "optimizer", expected=expected, got=got, remedy=remedy))
    for each in optimizers:
        if not is_elementwise(type(each)):
            tried(each)
    order = list(dict.fromkeys([*chosen, *names.values()]))
    if sync_batch_norm:
        convert(module)
    put_into(strategy, module, order, loss == "mean", layouts or {})
    _seed(strategy)
    for thing in (*module.modules(), *module.parameters(), *optimizers):
        strategy.extended.models.add(thing)
    if optimizer is None:
        if loss == "mean":
            divide_gradients(module)
        return module
    for each in optimizers:
        distribute_optimizer(module, each, max_norm, loss == "mean", overlap, find_unused_parameters)
    return module, optimizers if isinstance(optimizer, Sequence) else optimizer


def _check_several(strategy: Any, optimizers: Sequence[Any], max_norm: float | None, overlap: bool) -> None:
    """Raise ValueError for optimizers that exclude each other."""
    held = [id(p) for each in optimizers for group in each.param_groups for p in group["params"]]
    if not optimizers or len(set(held)) < len(held):
        expected = "optimizers of other parameters each"
        got = f"{len(held) - len(set(held))} parameters that two have" if optimizers else "none"
        raise ValueError(explain("ms.torch.distribute", "optimizer", expected=expected, got=got))
    given = ["max_norm"] * (max_norm is not None) + ["overlap=True"] * overlap
    for name in filter(None, [*given, strategy.extended.placement.lacks(Quality.COMMON_STEPS)]):
        remedy = "Leave it out, or pass one optimizer with several groups"
        expected = "one optimizer"
        got = f"a sequence of {len(optimizers)}, with {name}"
        raise ValueError(explain("ms.torch.distribute", "optimizer", expected=expected, got=got, remedy=remedy))


def _check_finding(strategy: Any, optimizer: Any, overlap: bool) -> None:
    """Raise ValueError if parameters used by other replicas cannot be found."""
    remedy = "Leave find_unused_parameters out, or add 0 * parameter.sum() of each unused parameter to the loss"
    if lacking := strategy.extended.placement.lacks(Quality.COMMON_STEPS):
        got = f"{lacking}, whose workers send their own gradients only"
    elif optimizer is None:
        got, remedy = "no optimizer", "Pass the optimizer of torch.optim, or add 0 * parameter.sum() to the loss"
    elif overlap:
        got, remedy = "overlap=True, which starts sums in the order of the parameters", "Leave overlap out"
    else:
        return
    expected = "False with this strategy or these arguments"
    raise ValueError(
        explain("ms.torch.distribute", "find_unused_parameters", expected=expected, got=got, remedy=remedy)
    )


def _device_of(strategy: Any) -> str:
    """Return the device of modules, in torch's terms."""
    placement = strategy.extended.placement
    own = not placement.lacks(Quality.OWN_VARIABLES)
    return "cuda" if own and parse(placement.devices[0])[0] == "gpu" else "cpu"


def check_tensors(module: torch.nn.Module, device: str) -> None:
    """Check that parameters and buffers have memory, on a kind of device, of a variable's dtype.

    Raises:
        ValueError: names the first that has not.
    """
    function = "ms.torch.distribute"
    if torch.is_inference_mode_enabled():
        raise ValueError(explain(function, "", expected="a call outside of torch.inference_mode()", got="a call in it"))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            got, remedy = "a lazy one, without a shape", "Call the module once with a batch before"
        elif tensor.is_meta:
            got, remedy = (
                "one on the meta device, without memory",
                'Use module.to_empty(device="cpu"), and set numbers, before',
            )
        elif tensor.device.type != device:
            got = f"one on {tensor.device}, where the strategy's variables lie on {device}"
            remedy = f'Use module.to("{device}") before, or another devices= of the strategy'
        elif tensor.is_complex() and tensor.requires_grad:
            got, remedy = f"a trainable one of {tensor.dtype}", "Keep torch.view_as_real(...) of it as the parameter"
        elif tensor.is_inference():
            got, remedy = "one made in torch.inference_mode()", "Make the module outside of it"
        elif not _is_known(tensor.dtype):
            got, remedy = f"one of {tensor.dtype}", "Convert the module before"
        else:
            continue
        expected = "a tensor of numbers that steps can update"
        raise ValueError(explain(function, f"module: {name}", expected=expected, got=got, remedy=remedy))


def _is_known(dtype: torch.dtype) -> bool:
    """Return whether arrays may have a dtype of torch."""
    try:
        array_of(torch.empty(0, dtype=dtype))
    except TypeError:
        return False
    return True


def _check_in_sync(strategy: Any) -> None:
    lacking = strategy.extended.placement.lacks(Quality.COMMON_STEPS)
    if lacking and strategy.num_workers > strategy.workers_in_sync:
        expected = "replicas that run their forward passes together"
        got = f"{lacking} whose {strategy.num_workers} workers step by {strategy.workers_in_sync}"
        remedy = (
            "ms.ParameterServerStrategy(workers_in_sync=...) of all workers, or ms.MultiWorkerMirroredStrategy(); "
            "BatchNorm has each replica's own statistics"
        )
        raise ValueError(explain("ms.torch.distribute", "SyncBatchNorm", expected=expected, got=got, remedy=remedy))


def _seed(strategy: Any) -> None:
    """Seed replicas differently, repeatably by the program's seed; ranks of a replica equally. Collective."""
    group, alone = strategy.extended.process_group, strategy.extended.placement.lacks(Quality.COMMON_STEPS)
    number = strategy.rank if alone else strategy.extended.sync_topology.rank
    state = torch.get_rng_state().numpy()
    with group.collective("ms.torch.distribute", "random numbers"):
        first = int(group.all_gather_int([torch.initial_seed() & ((1 << 62) - 1)])[0][0])
        group.broadcast(state)
    if number:
        torch.manual_seed(int(np.random.SeedSequence([first, number]).generate_state(1, np.uint64)[0] >> 1))
    else:
        torch.set_rng_state(torch.from_numpy(state))
