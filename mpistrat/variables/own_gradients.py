"""Gradients that a program submits early: an array for each replica, created on first use, and released when summed."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, final

import numpy as np

from ..arena.values import checksum
from ..base.errors import explain
from .variable import Variable

__all__ = ["HandedOver", "OwnGradients", "own_gradients_of"]


@final
class OwnGradients:
    """The gradients of one variable, by local replica: `gradients[replica]`."""

    __slots__ = ("_arrays", "_dtype", "_name", "_shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, replicas: int) -> None:
        self._name, self._shape, self._dtype = name, shape, dtype
        self._arrays: list[np.ndarray | HandedOver | None] = [None] * replicas

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, replica: int) -> Any:
        """Return a replica's gradient: zeros at its first use in a step, `HandedOver` after it was submitted."""
        found = self._arrays[replica]
        if found is None:
            found = self._arrays[replica] = np.zeros(self._shape, self._dtype)
        return found

    def stands_for(self, replica: int, gradient: Any) -> bool:
        """Return whether a gradient is the one that a replica submitted, or its placeholder."""
        found = self._arrays[replica]
        return isinstance(found, HandedOver) and found.stands_for(gradient)

    def changed(self, replica: int, gradient: Any) -> bool:
        """Return whether a gradient is the array that a replica submitted, changed since; False without checksums."""
        found = self._arrays[replica]
        return isinstance(found, HandedOver) and found.changed(gradient)

    def hand_over(self, noted: bool = False) -> None:
        """Release the arrays until the end of the step; `noted`: store checksums for `changed`."""
        self._arrays = [HandedOver(self._name, array, noted) for array in self._arrays]

    def renew(self) -> None:
        """Reset the arrays, as at the start of a step."""
        self._arrays = [None] * len(self._arrays)


def own_gradients_of(variable: Variable) -> OwnGradients | None:
    """Return the gradients of a variable that are released when submitted; None if they stay."""
    found = getattr(variable, "_gradients", None)
    return found if isinstance(found, OwnGradients) else None


@final
class HandedOver:
    """The placeholder in `v.grad` for a submitted gradient: only `apply_gradients` takes it, other use raises."""

    __slots__ = ("_array", "_mark", "_name")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, array: Any, noted: bool) -> None:
        self._name = name
        self._mark = checksum(array.reshape(-1)) if noted and array.size else None
        self._array = weakref.ref(array) if isinstance(array, np.ndarray) else None

    def stands_for(self, gradient: Any) -> bool:
        """Return whether a gradient is the submitted array, or this object."""
        return gradient is self or (self._array is not None and gradient is not None and gradient is self._array())

    def changed(self, gradient: Any) -> bool:
        """Return whether it is the submitted array, changed since; False without a checksum."""
        return gradient is not self and self._mark is not None and checksum(gradient.reshape(-1)) != self._mark

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        remedy = "Read it before, or create the strategy without sharded_gradients"
        expected, got = "no use of a gradient after Optimizer.begin with sharded_gradients", "a read or write of v.grad"
        raise ValueError(explain("Variable.grad", self._name, expected=expected, got=got, remedy=remedy))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__array_interface__", "__array_struct__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<the gradient of {self._name!r}, submitted>"

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __setitem__ = __len__ = __iter__ = __float__ = (
        _refuse
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = (
        _refuse
    )
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = __abs__ = __dlpack__ = _refuse
