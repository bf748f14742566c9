"""distribute: put a tree of parameters into a strategy."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np
import optax

from ..arena.layout import check_layouts
from ..base import agree, context
from ..base.errors import DeviceError, explain
from ..base.masks import plain_array
from ..base.types import Quality
from ..optimizers import Optimizer
from ..strategy.loss import check_loss
from ..variables import Variable
from .arrays import JaxLink, flatten, is_array, is_parameter, link_of, names_of
from .rule import JaxRule

__all__ = ["distribute"]

T = TypeVar("T")
Layouts = Mapping[str, Sequence[str | None]]
_FUNCTION = "ms.jax.distribute"


@overload
def distribute(
    tree: T, optimizer: None = None, *, loss: str = "mean", max_norm: None = None, layouts: Layouts | None = None
) -> T: ...
@overload
def distribute(
    tree: T,
    optimizer: optax.GradientTransformation,
    *,
    loss: str = "mean",
    max_norm: float | None = None,
    layouts: Layouts | None = None,
) -> tuple[T, Optimizer]: ...
def distribute(
    tree: Any,
    optimizer: Any = None,
    *,
    loss: str = "mean",
    max_norm: float | None = None,
    layouts: Layouts | None = None,
) -> Any:
    """Put a tree of parameters into the current strategy. Collective.

    It returns a tree of the same structure. Floating arrays have rank 0's values, and are stored once on each node; they are
    read like any JAX array, and `apply` consumes them. Other arrays get rank 0's values and are not trained; other leaves do
    not change.

    Args:
        tree: any pytree: of dicts, of flax or equinox, a NamedTuple.
        optimizer: a transformation of optax. Then the result has an optimizer for `apply`, too. If it is elementwise, its
            state is divided over the ranks of a node; any other runs whole on every rank, after the sum.
        loss: of a replica. "mean": over its rows of the batch; replicas are weighted by their rows if the batch is a
            distributed dataset's, else equally. "sum": a summand of the whole loss, as of `ms.nn.compute_average_loss`; then
            gradients are summed unchanged.
        max_norm: scale the gradients down together so that their norm over all parameters, after the sum, does not exceed it.
        layouts: under a MeshStrategy, a leaf's division, by name as "first/w" of {"first": {"w": …}}, over the ranks of a
            replica, as `ms.Variable`'s layout: the result has this rank's slice.

    Raises:
        ContextError: outside of a strategy's scope.
        ValueError: an argument is wrong; no floating array; max_norm where servers sum the gradients of workers; a layout
            that does not fit, or without a mesh; an optimizer that is not elementwise, with parameter servers, layouts that
            divide parameters, or local steps.
        TypeError: float64 without JAX's setting for it; complex numbers; not an optimizer of optax.
        RuntimeError: the tree is distributed already.
        DeviceError: JAX computes on another kind of device than the strategy's; several GPUs on a rank.
        LayoutError: a strategy with sharded_gradients.
        CollectiveMismatchError: on every rank, when their trees differ.

    Example:
        >>> with strategy.scope():  # doctest: +SKIP
        ...     params, optimizer = ms.jax.distribute(params, optax.adamw(1e-3))
    """
    context.expect_scope(_FUNCTION, "params = ms.jax.distribute(params)")
    placement = context.get_strategy().extended.placement
    placement.require(_FUNCTION, Quality.KEPT_GRADIENTS, "gradients lie in the framework's arrays")
    exchange = functools.partial(placement.creators.exchange, _FUNCTION)
    leaves, structure = flatten(tree)
    names = names_of(tree)
    with agree.together(exchange):
        check_loss(context.get_strategy(), _FUNCTION, loss, max_norm, optimizer)
        _check_devices(placement)
        for leaf, name in zip(leaves, names, strict=True):
            _check(leaf, name)
        given = layouts or {}
        check_layouts(_FUNCTION, given, [n for n, leaf in zip(names, leaves, strict=True) if is_parameter(leaf)])
        if not any(map(is_parameter, leaves)):
            raise ValueError(explain(_FUNCTION, "tree", expected="floating arrays in it", got="no floating array"))
        rule = None if optimizer is None else _rule(optimizer, tree, max_norm)
    arrays = [f"{name} {leaf.dtype}{leaf.shape}" for leaf, name in zip(leaves, names, strict=True) if is_array(leaf)]
    agree.same(exchange, ", ".join([f"{_FUNCTION} of a tree with loss={loss!r}", *arrays]), agree.mismatch)
    pairs = zip(leaves, names, strict=True)
    made = [_put(placement, leaf, name, loss == "mean", given.get(name)) for leaf, name in pairs]
    params = structure.unflatten(made)
    if rule is None:
        return params
    links = map(link_of, made)
    rule.serve([link.variable for link in links if link is not None])
    return params, rule


def _rule(optimizer: Any, tree: Any, max_norm: float | None) -> JaxRule:
    if not isinstance(optimizer, Optimizer) and callable(getattr(optimizer, "update", None)):
        return JaxRule(optimizer, tree, max_norm)
    expected, got = "a transformation of optax", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    remedy = "One of ms.optimizers goes to ms.jax.apply only"
    raise TypeError(explain(_FUNCTION, "optimizer", expected=expected, got=got, remedy=remedy))


def _check_devices(placement: Any) -> None:
    wanted, devices = "gpu" if placement.arenas.on_gpu else "cpu", placement.arenas.devices
    if jax.process_count() > 1:
        expected, found = "a JAX of its own in each rank", f"jax.distributed with {jax.process_count()} processes"
        remedy = (
            "Keep the parameters in arrays of JAX over all ranks instead, whose gradients a jitted function sums; or leave out"
            " ms.jax.initialize() and jax.distributed.initialize()"
        )
    elif backend() != wanted:
        expected, found = f"JAX on a {wanted}, as the strategy's devices {', '.join(devices)}", f"JAX on {backend()}"
        remedy = "Set JAX_PLATFORMS=cpu or cuda before JAX is imported, or devices= of the strategy"
    elif wanted == "gpu" and len(devices) > 1:
        expected, found = "one GPU in each rank", f"{len(devices)}"
        remedy = "Start a rank for each GPU"
    else:
        return
    raise DeviceError(explain(_FUNCTION, "", expected=expected, got=found, remedy=remedy))


def backend() -> str:
    """Return the kind of device on which JAX computes."""
    return str(jax.default_backend())


def _check(leaf: Any, name: str) -> None:
    if link_of(leaf) is not None:
        raise RuntimeError(explain(_FUNCTION, name, expected="a plain array", got="one of a distributed tree"))
    if not is_array(leaf):
        return
    if isinstance(leaf, np.ndarray):
        plain_array(leaf, _FUNCTION, name)
    if leaf.dtype.kind == "c":
        expected, got = "floating or integer arrays", f"{leaf.dtype}"
        remedy = "Make two leaves of it, the real and the imaginary part"
        raise TypeError(explain(_FUNCTION, name, expected=expected, got=got, remedy=remedy))
    if is_parameter(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        expected, got = "a dtype that JAX is set to", f"{leaf.dtype}, which it would make {_canonical(leaf)}"
        remedy = "jax.config.update('jax_enable_x64', True) at the beginning of the program, or convert the array"
        raise TypeError(explain(_FUNCTION, name, expected=expected, got=got, remedy=remedy))


def _canonical(leaf: Any) -> str:
    return str(jax.dtypes.canonicalize_dtype(leaf.dtype))


def _put(placement: Any, leaf: Any, name: str, mean: bool, layout: Sequence[str | None] | None) -> Any:
    """Return the leaf of the distributed tree. Collective."""
    if not is_array(leaf):
        return leaf
    if is_parameter(leaf):
        link = JaxLink(name, Variable(np.asarray(leaf), name=name, layout=layout), mean)
        array = link.make()
        placement.strategy.extended.models.add(array, link.make)
        return array
    value, group = np.array(leaf), placement.creators
    with group.collective(_FUNCTION, name, value.dtype.name, value.shape):
        group.broadcast(value)
    return jax.numpy.asarray(value) if isinstance(leaf, jax.Array) else value
