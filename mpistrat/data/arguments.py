"""Arguments that are whole numbers."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import explain
from .options import AUTOTUNE

__all__ = ["integer", "number_of_calls"]


def integer(function: str, argument: str, value: Any, least: int | None = None, remedy: str = "") -> int:
    """Return a value as an integer.

    Args:
        function, argument: for the error.
        value: what was given.
        least: the smallest that is legal; None for any.
        remedy: what to do where it is no integer.

    Raises:
        TypeError: it is no integer.
        ValueError: it is smaller.

    Example:
        >>> integer("f", "n", np.int64(3), 1)
        3
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(explain(function, argument, expected="an integer", got=repr(value), remedy=remedy)) from None
    if least is not None and number < least:
        raise ValueError(explain(function, argument, expected=f"at least {least}", got=number))
    return number


def number_of_calls(function: str, value: Any) -> int | None:
    """Return `num_parallel_calls`: None, AUTOTUNE or a number of at least 1.

    Raises:
        TypeError: it is no integer.
        ValueError: it is another number.
    """
    if value is None or value == AUTOTUNE:
        return None if value is None else AUTOTUNE
    return integer(function, "num_parallel_calls", value, 1, "Or ms.data.AUTOTUNE, or None for the thread that reads.")
