"""assign: other weights into a distributed tree."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from ..arena.values import checksum
from ..base import agree
from ..base.errors import ContextError, explain
from ..base.masks import plain_array
from ..strategy.contexts import stepping
from .arrays import flatten, is_array, is_parameter, link_of, names_of, release

__all__ = ["assign"]

_FUNCTION = "ms.jax.assign"


def assign(params: Any, values: Any) -> Any:
    """Write other weights, of a checkpoint or a pretrained model, into a distributed tree, and return it. Collective.

    Outside of steps, with the same numbers on every rank. `params` is consumed, as by `apply`. What an optimizer keeps stays.

    Args:
        params: what `distribute` or the last `apply` returned, or a part of it; the arrays may be consumed ones.
        values: a tree like it, of arrays of the same shapes; where ranks divide a leaf, of the whole or of this rank's part.
            They are rounded to the parameters' dtypes. Leaves that are no parameters are taken as they are.

    Returns:
        The tree `params` with its arrays after the change.

    Raises:
        ContextError: in a step.
        ValueError: another structure or shape; no parameter of a strategy.
        CollectiveMismatchError: on every rank, when they give other numbers.

    Example:
        >>> params = ms.jax.assign(params, pretrained)  # doctest: +SKIP
    """
    leaves, structure = flatten(params)
    links = [link_of(leaf) for leaf in leaves]
    known = [link for link in links if link is not None]
    if not known:
        expected, got = "a tree that ms.jax.distribute returned", "none of its arrays"
        raise ValueError(explain(_FUNCTION, "params", expected=expected, got=got))
    placement = known[0].variable.placement
    if stepping(placement.strategy):
        raise ContextError(explain(_FUNCTION, "", expected="a call outside of steps", got="one in strategy.run"))
    exchange = functools.partial(placement.creators.exchange, _FUNCTION)
    others: list[str] = []
    arrays: list[Any] = []
    with agree.together(exchange):
        given, form = flatten(values)
        if form != structure:
            raise ValueError(explain(_FUNCTION, "values", expected=f"a tree like params, {structure}", got=form))
        for leaf, link, name in zip(given, links, names_of(params), strict=True):
            arrays.append(leaf if link is None else _fitting(leaf, link.variable, name))
            if link is None and is_array(leaf):
                others.append(f"{name} #{checksum(np.ascontiguousarray(leaf).reshape(-1)):08x}")
    agree.same(exchange, ", ".join([f"{_FUNCTION} of {len(known)} parameters", *others]), agree.mismatch)
    if placement.store is None:
        release(known)
    for link, array in zip(links, arrays, strict=True):
        if link is not None:
            link.variable.assign(array)
    return structure.unflatten(
        [array if link is None else link.make() for link, array in zip(links, arrays, strict=True)]
    )


def _fitting(value: Any, variable: Any, name: str) -> np.ndarray:
    """Return a value as an array of a variable's shape and dtype."""
    if not is_parameter(value):
        got = type(value).__name__ if not is_array(value) else f"{value.dtype}{value.shape}"
        raise ValueError(explain(_FUNCTION, name, expected="a floating array", got=got))
    array, part = plain_array(jax.block_until_ready(value), _FUNCTION, name), variable.part
    if part is not None and array.shape == part.whole_shape:
        array = part.cut(array)
    if array.shape != variable.shape:
        raise ValueError(explain(_FUNCTION, name, expected=f"shape {variable.shape}", got=f"shape {array.shape}"))
    return np.array(array, variable.dtype)
