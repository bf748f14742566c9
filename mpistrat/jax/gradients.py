"""value_and_grad and grad: gradients of a replica's rows, weighted by their batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from ..base.errors import explain
from ..comm.arrays import accumulation_dtype
from ..strategy.contexts import local_replica
from ..strategy.loss import weight_of_pass
from .arrays import ByIdentity, JaxLink, is_array, is_parameter, link_of

__all__ = ["grad", "is_weighted", "value_and_grad"]

_weighted = ByIdentity()  # True for weighted gradients


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function like `jax.value_and_grad(fun)`, whose gradients are weighted by the batch of its arguments. Local.

    The gradient is multiplied by this replica's share of the batch. The mean over the replicas, which `apply` computes, is
    then that of the global batch; sums of such gradients are right, too. The batch is that of the other arguments, or of
    `strategy.batch`. `apply` does not weight these gradients again.

    Call it outside of traced functions; if `fun` is a result of `jax.jit`, loss and gradients are compiled together.

    Args:
        fun: a function that returns a loss, the mean over its rows.
        argnums: the positional arguments to differentiate: parameters of `distribute`.
        has_aux: True if `fun` returns a pair, of the loss and of anything else.

    Raises:
        BatchError: replicas have unequal shares of batches, and the arguments do not identify the batch.
        TypeError: a call in a traced function.
        ValueError: no parameter of `distribute` to differentiate.

    Example:
        >>> @ms.jax.value_and_grad  # doctest: +SKIP
        ... @jax.jit
        ... def step(params, x, y):
        ...     return ((x @ params["w"] - y) ** 2).mean()
        >>> loss, grads = step(params, x, y)  # doctest: +SKIP
    """
    return _function("ms.jax.value_and_grad", fun, argnums, has_aux)


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function like `jax.grad(fun)`, whose gradients are weighted. See `value_and_grad`.

    Example:
        >>> grads = ms.jax.grad(loss_of)(params, x, y)  # doctest: +SKIP
    """
    both = _function("ms.jax.grad", fun, argnums, has_aux)

    @functools.wraps(fun)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradients


def _function(name: str, fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool) -> Callable[..., Any]:
    differentiated = jax.value_and_grad(fun, argnums, has_aux)
    compute = _Compiled(differentiated) if hasattr(fun, "lower") else differentiated
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def both(*args: Any, **kwargs: Any) -> Any:
        chosen = {number % len(args) for number in numbers} if args else set[int]()
        inputs = jax.tree.leaves(([arg for place, arg in enumerate(args) if place not in chosen], kwargs))
        wanted = jax.tree.leaves([args[number] for number in numbers if -len(args) <= number < len(args)])
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*inputs, *wanted)):
            expected, got = "a call outside of traced functions", "values of a traced function"
            remedy = f"Trace the function itself: {name}(jax.jit(fun))"
            raise TypeError(explain(name, "", expected=expected, got=got, remedy=remedy))
        links = [link_of(leaf) for leaf in wanted]
        known = [link for link in links if link is not None]
        if not known:
            expected, got = "parameters that ms.jax.distribute or ms.jax.apply returned", "other values"
            raise ValueError(explain(name, f"argnums={argnums!r}", expected=expected, got=got))
        strategy = known[0].variable.placement.strategy
        weight = 1.0
        if any(link.mean for link in known):
            weight = weight_of_pass(strategy, [leaf for leaf in inputs if is_array(leaf)], name)
        value, grads = compute(*args, **kwargs)
        if weight != 1:
            leaves, structure = jax.tree.flatten(grads)
            scaled = [link is None or link.mean for link in links]
            grads = structure.unflatten(_scaled(leaves, scaled, weight))
        if strategy.extended.batches.uneven:
            for leaf in jax.tree.leaves(grads):
                if isinstance(leaf, jax.Array):
                    _weighted.set(leaf, True)
        replica = local_replica(strategy)
        for link in known:
            link.weighted[replica] = True
        return value, grads

    return both


@final
class _Compiled:
    """A function of a compiled one, compiled together with it, if possible."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._jitted: Any = jax.jit(self._joined, static_argnums=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._jitted is None:
            return self._function(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [isinstance(leaf, (bool, int, float, jax.Array)) or is_array(leaf) for leaf in leaves]
        dynamic = [leaf for leaf, own in zip(leaves, traced, strict=True) if own]
        static = tuple(None if own else (leaf,) for leaf, own in zip(leaves, traced, strict=True))
        try:
            return self._jitted(dynamic, (structure, static))
        except (
            TypeError,
            ValueError,
            jax.errors.JAXTypeError,
        ):  # an argument that must be static, or the function's own error
            result = self._function(*args, **kwargs)
        self._jitted = None
        return result

    def _joined(self, dynamic: Sequence[Any], given: tuple[Any, tuple[Any, ...]]) -> Any:
        structure, static = given
        left = iter(dynamic)
        args, kwargs = structure.unflatten([next(left) if each is None else each[0] for each in static])
        return self._function(*args, **kwargs)


def _scaled(leaves: list[Any], chosen: Sequence[bool], weight: float) -> list[Any]:
    """Return gradients times a weight; zeros for weight 0, as the mean of no row is NaN."""
    return [
        _times(leaf, weight) if own and is_parameter(leaf) else leaf for leaf, own in zip(leaves, chosen, strict=True)
    ]


@jax.jit
def _product(leaf: Any, weight: Any) -> Any:
    wide = accumulation_dtype(leaf.dtype)
    return (leaf.astype(wide) * weight.astype(wide)).astype(leaf.dtype)


def _times(leaf: Any, weight: float) -> Any:
    return _product(leaf, jnp.asarray(weight, float)) if weight else jnp.zeros_like(leaf)


def is_weighted(gradient: Any, link: JaxLink, replica: int) -> bool | None:
    """Return whether a gradient of a leaf is weighted; None if that is unknown.

    True if `value_and_grad` returned it, or has differentiated the leaf since the last `apply`: then it may be a sum. False if
    `value_and_grad` has never differentiated the leaf.
    """
    if _weighted.get(gradient):
        return True
    return {None: False, True: True, False: None}[link.weighted.get(replica)]
