"""Arguments of public functions: TensorFlow's names in addition to this package's own, and integers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .errors import explain
from .masks import unmasked

__all__ = ["check_range", "integer", "out_of_range", "tensorflow_names"]

F = TypeVar("F", bound=Callable[..., Any])


def integer(function: str, argument: str, value: Any, least: int | None = None, remedy: str = "") -> int:
    """Return a value as an integer.

    Raises:
        TypeError: it is not an integer, or a bool; with the remedy. Or it is masked.
        ValueError: it is smaller than `least`.

    Example:
        >>> integer("f", "n", np.int64(3), 1)
        3
    """
    unmasked(value, function, argument)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(explain(function, argument, expected="an integer", got=repr(value), remedy=remedy))
    if least is not None and number < least:
        raise ValueError(explain(function, argument, expected=f"at least {least}", got=number))
    return number


def check_range(function: str, argument: str, array: Any, dtype: np.dtype[Any]) -> None:
    """Raise OverflowError if another dtype cannot hold the integers of an array, which `astype` would wrap.

    Example:
        >>> check_range("f", "x", np.array([0, 255]), np.dtype(np.uint8))
    """
    outside = out_of_range(array, dtype)
    if outside is not None:
        limits = np.iinfo(dtype)
        expected = f"integers from {limits.min} to {limits.max}"
        raise OverflowError(explain(function, argument, expected=expected, got=outside))


def out_of_range(array: Any, dtype: np.dtype[Any]) -> int | None:
    """Return the smallest or largest integer of an array if another dtype cannot hold it.

    Example:
        >>> out_of_range(np.array([0, 256]), np.dtype(np.uint8))
        256
    """
    if dtype.kind not in "iu" or array.dtype == dtype or not array.size:
        return None
    large = array.dtype.kind == "O" and all(isinstance(value, int) for value in array.flat)  # than NumPy's integers
    if not large and array.dtype.kind not in "iu":
        return None
    limits = np.iinfo(dtype)
    extremes = (int(array.min()), int(array.max()))
    return next((extreme for extreme in extremes if not limits.min <= extreme <= limits.max), None)


def tensorflow_names(*unused: str, **ours: str) -> Callable[[F], F]:
    """Accept TensorFlow's names of a function's arguments too, and a `name`, which only graphs need.

    Args:
        unused: TensorFlow's arguments without a meaning here, in addition to `name`.
        ours: this package's name for each of TensorFlow's.

    Example:
        >>> @tensorflow_names(batch_size="global_batch_size")
        ... def batch(global_batch_size):
        ...     return global_batch_size
        >>> batch(batch_size=3, name="b"), batch(global_batch_size=4)
        (3, 4)
    """

    nothing = ("name", *unused)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                return function(*args)
            for theirs in nothing:
                kwargs.pop(theirs, None)
            for theirs, own in ours.items():
                if theirs in kwargs:
                    if own in kwargs:
                        expected = f"{own} or {theirs}, TensorFlow's name for it"
                        raise TypeError(explain(function.__qualname__, own, expected=expected, got="both"))
                    kwargs[own] = kwargs.pop(theirs)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
