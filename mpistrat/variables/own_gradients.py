"""Gradients that a program hands over: an array for each replica, made when it is asked for, and given up when it is summed."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, final

import numpy as np

from ..arena.values import checksum
from ..base.errors import explain

__all__ = ["HandedOver", "OwnGradients"]


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
        """Return a replica's gradient: zeros when it is first asked for in a step, `HandedOver` after it was handed over."""
        found = self._arrays[replica]
        if found is None:
            found = self._arrays[replica] = np.zeros(self._shape, self._dtype)
        return found

    def stands_for(self, replica: int, gradient: Any) -> bool:
        """Return whether a gradient is the one that a replica handed over, or what stands in its place."""
        found = self._arrays[replica]
        return isinstance(found, HandedOver) and found.stands_for(gradient)

    def changed(self, replica: int, gradient: Any) -> bool:
        """Return whether a gradient is the array that a replica handed over, with other numbers since, if that is noted."""
        found = self._arrays[replica]
        return isinstance(found, HandedOver) and found.changed(gradient)

    def hand_over(self, noted: bool = False) -> None:
        """Give the arrays up until the end of the step; `noted`: have `changed` find what is written to them."""
        self._arrays = [HandedOver(self._name, array, noted) for array in self._arrays]

    def renew(self) -> None:
        """Have none, as at the start of a step."""
        self._arrays = [None] * len(self._arrays)


@final
class HandedOver:
    """What stands in `v.grad` for a gradient that was handed over: `apply_gradients` takes it, everything else is an error."""

    __slots__ = ("_array", "_mark", "_name")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, array: Any, noted: bool) -> None:
        self._name = name
        self._mark = checksum(array.reshape(-1)) if noted and array.size else None
        self._array = weakref.ref(array) if isinstance(array, np.ndarray) else None

    def stands_for(self, gradient: Any) -> bool:
        """Return whether a gradient is what was handed over, or this object in its place."""
        return gradient is self or (self._array is not None and gradient is not None and gradient is self._array())

    def changed(self, gradient: Any) -> bool:
        """Return whether it is the array, with other numbers than at first, where these were noted."""
        return gradient is not self and self._mark is not None and checksum(gradient.reshape(-1)) != self._mark

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        remedy = "Read it before, or make the strategy without sharded_gradients"
        expected, got = "no use of a gradient after Optimizer.begin, in a step of sharded_gradients", "one"
        raise ValueError(explain("Variable.grad", self._name, expected=expected, got=got, remedy=remedy))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__array_interface__", "__array_struct__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<the gradient of {self._name!r}, handed over>"

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __setitem__ = __len__ = __iter__ = __float__ = (
        _refuse
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = (
        _refuse
    )
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = __abs__ = __dlpack__ = _refuse
