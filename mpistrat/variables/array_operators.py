"""What makes an object an array to NumPy: operators, functions, indices; reading only."""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..errors import explain

if TYPE_CHECKING:
    from .placement import Placement

    # A base of any type lets a type checker accept the call of a class that has abstract methods.
    _Operators: Any
else:
    from numpy.lib.mixins import NDArrayOperatorsMixin as _Operators

__all__ = ["ArrayOperators"]


class ArrayOperators(_Operators, metaclass=ABCMeta):
    """Lets NumPy read an object through its `array`, and keeps NumPy from writing to it.

    Attributes:
        name, shape, dtype, placement: what subclasses have.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: np.dtype
    placement: Placement

    @property
    @abstractmethod
    def array(self) -> Any:
        """The numbers as a read-only array."""

    @property
    @abstractmethod
    def name(self) -> str:
        """By which messages speak of it."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.array
        if self.placement.arenas.on_gpu:
            raise TypeError("Variable: it lies on a GPU and does not become a NumPy array by itself: use v.numpy()")
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError("Variable: another dtype cannot be had without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        targets = (out if isinstance(out, tuple) else (out,)) if out is not None else ()
        if any(isinstance(target, ArrayOperators) for target in targets) or (
            method == "at" and isinstance(inputs[0], ArrayOperators)
        ):
            self._refuse_in_place(f"numpy.{ufunc.__name__} with a Variable as output")
        if targets:
            kwargs["out"] = targets
        arrays = (value.array if isinstance(value, ArrayOperators) else value for value in inputs)
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_in_place("v[...] = value")

    def _refuse_in_place(self, what: str) -> NoReturn:
        expected = "a method that every rank calls"
        remedy = "Use assign, assign_add, assign_sub or a scatter method"
        raise TypeError(explain("Variable", self.name, expected=expected, got=what, remedy=remedy))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a Variable without dimensions")
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __complex__(self) -> complex:
        return complex(self.array)

    def __index__(self) -> int:
        return self.array.__index__()

    __hash__ = object.__hash__  # == compares elements, but as a key a variable stands for itself

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        remedy = "Use v.numpy() for its numbers, strategy.save(path) for all variables"
        text = explain("Variable", self.name, expected="no pickling and no copying", got="an attempt", remedy=remedy)
        raise TypeError(text)
