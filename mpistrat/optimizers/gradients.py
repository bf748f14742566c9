"""Gradients of the program, checked and copied into the variables' gradient memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..arena.values import move_like
from ..base import loops
from ..base.distributed_values import DistributedValues
from ..base.errors import explain
from ..base.types import IndexedSlices
from ..base.underflow import may_underflow
from ..comm.arrays import array_module, as_array, as_buffer, is_gpu, on_device_of, to_host
from ..variables.scatter import checked_slices
from ..variables.variable import Variable, explain_foreign, require_gradient

__all__ = [
    "Pairs", "ReplicaPairs", "check_rule", "check_same", "check_variables", "checked", "flat_gradient", "in_place",
    "load_gradients", "pairs_of",
]  # fmt: skip

_FUNCTION = "apply_gradients"
Pairs = Sequence[tuple[Any, Variable]]


@final
class ReplicaPairs:
    """The pairs of one replica; a leaf of nested structures."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[Any, Variable]]) -> None:
        self.pairs = pairs


def pairs_of(given: Any) -> list[list[tuple[Any, Variable]]]:
    """Return the pairs of each local replica."""
    return [each.pairs for each in given.values] if isinstance(given, DistributedValues) else [given.pairs]


def check_variables(strategy: Any, pairs: Pairs) -> tuple[list[Variable], list[Variable]]:
    """Return the variables with a gradient, and those without.

    Raises:
        TypeError: one is not a variable.
        ValueError: no gradient at all; a variable twice, without gradients or of another strategy.
    """
    chosen: dict[int, Variable] = {}
    left_out: list[Variable] = []
    for gradient, variable in pairs:
        placement = getattr(variable, "placement", None)
        if placement is None:
            raise TypeError(explain(_FUNCTION, "grads_and_vars", expected="variables", got=type(variable).__name__))
        if placement.strategy is not strategy:
            raise ValueError(explain_foreign(_FUNCTION, variable, strategy))
        if gradient is None:
            left_out.append(variable)
            continue
        if id(variable) in chosen:
            raise ValueError(
                explain(_FUNCTION, variable.name, expected="each variable once", got=f"{variable.name!r} twice")
            )
        require_gradient(variable)
        chosen[id(variable)] = variable
    if not chosen:
        names = ", ".join(variable.name for variable in left_out) or "no variables"
        raise ValueError(explain(_FUNCTION, "grads_and_vars", expected="a gradient", got=f"none for {names}"))
    return list(chosen.values()), left_out


def check_rule(optimizer: Any, variables: Sequence[Variable]) -> None:
    """Raise ValueError if an optimizer's rule needs whole variables and they are not."""
    kind = type(optimizer).__name__
    divided = [v.name for v in variables if v.ndim > 1 and v.part is not None and v.part.split]
    if optimizer._factored and divided:
        expected, got = f"matrices that each rank has whole, for {kind}", f"parts of {', '.join(divided)}"
        remedy = "Remove their layout, or use Adam"
        raise ValueError(explain(_FUNCTION, optimizer.name, expected=expected, got=got, remedy=remedy))


def check_same(replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
    """Raise ValueError unless all local replicas have gradients for the same variables; `key` as in `load_gradients`."""
    for replica, pairs in enumerate(replicas):
        if replica and tuple([id(v) if g is not None else -id(v) for g, v in pairs]) != key:
            got = f"others on local replica {replica}"
            expected = "gradients for the same variables on all replicas"
            raise ValueError(explain(_FUNCTION, "grads_and_vars", expected=expected, got=got))


def load_gradients(replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
    """Copy the local replicas' gradients into the arenas, unless they are there.

    `key` has the ids of the variables of the first replica, negative for those without a gradient.

    Raises:
        ValueError: the replicas have gradients for other variables; a shape that is not the variable's.
        TypeError: numbers that do not fit.
    """
    if len(replicas) > 1:
        check_same(replicas, key)
    for replica, pairs in enumerate(replicas):
        for gradient, variable in pairs:
            if gradient is not None:
                target = variable.gradient(replica)
                if gradient is not target:
                    _load(gradient, target, variable)


def flat_gradient(gradient: Any, variable: Variable) -> Any:
    """Return a gradient as a flat array, for variables whose gradients are submitted early.

    Raises:
        ValueError, TypeError: as `checked`.
    """
    array = checked(gradient, variable)
    if isinstance(array, IndexedSlices):
        dense = np.zeros(variable.shape, variable.dtype)
        _scatter(array, dense)
        array = dense
    return to_host(array).reshape(-1)


def checked(gradient: Any, variable: Variable) -> Any:
    """Return a gradient that fits a variable: an array, or IndexedSlices of arrays.

    Raises:
        ValueError: another shape.
        TypeError: numbers that do not fit.
    """
    if isinstance(gradient, IndexedSlices):
        slices = checked_slices(gradient, variable, _FUNCTION)
        _check_dtype(slices.values, variable)
        return slices
    array = as_array(gradient, _FUNCTION, variable.name)
    if array.shape != variable.shape:
        expected, got = f"a gradient of shape {variable.shape}", f"shape {tuple(array.shape)}"
        raise ValueError(explain(_FUNCTION, variable.name, expected=expected, got=got))
    _check_dtype(array, variable)
    return array


def _load(gradient: Any, target: Any, variable: Variable) -> None:
    array = checked(gradient, variable)
    if isinstance(array, IndexedSlices):
        _scatter(array, target)
    elif not (in_place(array, target) or _copied(array, target)):
        _converted(array, target)


@may_underflow
def _converted(array: Any, target: Any) -> None:
    with on_device_of(target):
        target[...] = move_like(array, target)


def _copied(array: Any, target: Any) -> bool:
    """Copy an array of the target's dtype with all threads, if possible; return whether it was."""
    return bool(array.dtype == target.dtype and loops.copy(as_buffer(target), as_buffer(array)))


def in_place(array: Any, target: Any) -> bool:
    """Return whether a gradient is in the memory of the variable's gradient."""
    if array is target:
        return True
    if type(array) is not np.ndarray or type(target) is not np.ndarray:
        return False
    mine, its = array.__array_interface__, target.__array_interface__
    return mine["data"][0] == its["data"][0] and mine["strides"] == its["strides"] and array.dtype == target.dtype


def _check_dtype(array: Any, variable: Variable) -> None:
    if array.dtype.kind in "biu" or variable.dtype == array.dtype or variable.dtype.kind == "V":
        return
    if array.dtype.kind != "V" and not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        expected = f"a gradient that {variable.dtype} can hold"
        raise TypeError(explain(_FUNCTION, variable.name, expected=expected, got=str(array.dtype)))


@may_underflow
def _scatter(slices: IndexedSlices, target: Any) -> None:
    """Make sparse rows dense; rows of equal index are summed."""
    values, indices = slices.values, slices.indices
    if is_gpu(target):
        with on_device_of(target):
            target[...] = 0
            array_module(target).add.at(target, move_like(indices, target), move_like(values, target))
    else:
        target[...] = 0
        np.add.at(target, indices, values.astype(target.dtype, copy=False))
