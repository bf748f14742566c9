"""The common part of all variables: read-only arrays to NumPy, with methods to write them, and gradients."""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..base.arguments import tensorflow_names
from ..base.errors import explain
from ..base.masks import unmasked
from ..base.types import VariableAggregation, VariableSynchronization
from ..comm.arrays import to_host
from .placement import Description, Placement
from .scatter import ScatterMethods

if TYPE_CHECKING:
    from typing_extensions import Self

    # A base of any type lets a type checker accept the call of a class that has abstract methods.
    _Operators: Any
else:
    from numpy.lib.mixins import NDArrayOperatorsMixin as _Operators

__all__ = ["ArrayVariable"]


class _Array(_Operators, metaclass=ABCMeta):
    """The attributes of a variable, and its NumPy protocols, which read its `array` and refuse writes."""

    __slots__ = ("__weakref__", "_description", "dtype", "placement", "shape")

    def _hold(self, placement: Placement, description: Description) -> None:
        self.placement = placement
        self._description = description
        self.shape = description.shape
        self.dtype = description.dtype

    # attributes

    @property
    def name(self) -> str:
        """Its name, unique in the strategy. Parts of a ShardedVariable are named name/part_0, name/part_1, ..."""
        return self._description.name

    @property
    def trainable(self) -> bool:
        """True if optimizers update it."""
        return self._description.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        return self._description.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The reduction of the replicas' values."""
        return self._description.aggregation

    @property
    @abstractmethod
    def array(self) -> Any:
        """The numbers as a read-only array."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of one copy."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.array
        if self.placement.arenas.on_gpu:
            raise TypeError("Variable: a variable on a GPU is not converted to NumPy implicitly. Use v.numpy()")
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError("Variable: a conversion to another dtype needs a copy, got copy=False")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        targets = (out if isinstance(out, tuple) else (out,)) if out is not None else ()
        if any(isinstance(target, _Array) for target in targets) or (method == "at" and isinstance(inputs[0], _Array)):
            self._refuse_in_place(f"numpy.{ufunc.__name__} with a Variable as output")
        if targets:
            kwargs["out"] = targets
        arrays = (value.array if isinstance(value, _Array) else value for value in inputs)
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.array[unmasked(index, "Variable", f"{self.name}[...]")]

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

    __hash__ = object.__hash__  # == compares elements, but as a key a variable is compared by identity

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        remedy = "Use v.numpy() for its numbers, strategy.save(path) for all variables"
        text = explain("Variable", self.name, expected="no pickling and no copying", got="a copy", remedy=remedy)
        raise TypeError(text)


class ArrayVariable(ScatterMethods, _Array):
    """The common base of `Variable` and `ShardedVariable`: reading, writing and gradients."""

    __slots__ = ()

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True after the strategy was closed."""

    @abstractmethod
    def _close(self) -> None:
        """Free the memory; later use raises ClosedError. The strategy calls it."""

    # reading

    def numpy(self) -> np.ndarray:
        """Return a copy in the host's memory. Collective for ON_READ variables in cross-replica context only."""
        array = self.array
        return array.copy() if type(array) is np.ndarray else to_host(array)

    def value(self) -> Any:
        """Return a copy on the variable's device. Collective for ON_READ variables in cross-replica context only."""
        return self.array.copy()

    def read_value(self) -> Any:
        """Return a copy, like `value`. Collective for ON_READ variables in cross-replica context only."""
        return self.value()

    # writing

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Self:
        """Write a value and return the variable. Collective, except ON_READ in replica context.

        In cross-replica and update context every rank passes the same value, which is compared. In replica context the
        replicas' values (also Python numbers) are aggregated, while an ON_READ variable's own copy is written. A
        ShardedVariable writes each shard its rows, after checking the whole value.

        Args:
            value: array of exactly the variable's shape, of its dtype or one that NumPy casts within its kind.
            use_locking, name, read_value: accepted for TensorFlow's signature and ignored; the result is not a copy.

        Raises:
            ValueError: another shape; a PerReplica in cross-replica context; aggregation NONE in replica context; a variable of
                another strategy's scope.
            TypeError: numbers of another kind, such as a float for an integer variable.
            CollectiveMismatchError: on every rank: ranks pass different values in cross-replica context.
        """
        return self._update("assign", value)

    @tensorflow_names(delta="value")
    def assign_add(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Add a value to the variable and return it. Collective, except ON_READ in replica context; see `assign`.

        Raises:
            ValueError: also for an ON_READ variable with SUM in cross-replica context: it is ambiguous which copy to change.
        """
        return self._update("assign_add", value)

    @tensorflow_names(delta="value")
    def assign_sub(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Subtract a value from the variable and return it. Collective and errors as `assign_add`."""
        return self._update("assign_sub", value)

    @abstractmethod
    def _update(self, op: str, value: Any) -> Self:
        """Write, add or subtract, depending on the context."""

    # gradients

    @property
    def grad(self) -> Any:
        """This replica's gradient: a writable array of the variable's shape. Values written there are never copied.

        Exception: `apply_gradients` copies the gradient of a ShardedVariable to its shards; `v.parts(g)`, or pairs of
        `(part.grad, part)`, save that copy and its memory. Assignment copies: `v.grad = g`. The gradient is zero at first, and
        `apply_gradients` does not clear it.

        Raises:
            ValueError: the variable has no gradients.
            ContextError: outside replica context on a rank with several local replicas.
        """
        return self.gradient(self._local_replica("grad"))

    @grad.setter
    def grad(self, value: Any) -> None:
        target = self.grad
        if value is not target:
            target[...] = unmasked(value, "Variable.grad", self.name)

    @abstractmethod
    def gradient(self, local_replica: int) -> Any:
        """Return the gradient array of one local replica, writable.

        Raises:
            ValueError: the variable has no gradients.
        """

    @abstractmethod
    def _local_replica(self, function: str) -> int:
        """Return the local replica of a call; `function` is named in errors.

        Raises:
            ContextError: outside replica context on a rank with several local replicas.
        """
