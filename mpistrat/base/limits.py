"""Settings that are numbers within limits, or flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .errors import explain

__all__ = [
    "AT_LEAST_ZERO",
    "AT_MOST_ZERO",
    "BELOW_ONE",
    "FINITE",
    "FLAG",
    "POSITIVE",
    "UP_TO_ONE",
    "Limits",
    "checked",
    "flag",
    "number",
]


class Limits(NamedTuple):
    """The legal numbers of a setting, always without NaN and infinity."""

    text: str
    legal: Callable[[float], bool]


FLAG = Limits("True or False", lambda value: value in (0, 1))  # see `flag`
FINITE = Limits("a finite number", math.isfinite)
AT_LEAST_ZERO = Limits("a finite number >= 0", lambda number: 0 <= number < math.inf)
AT_MOST_ZERO = Limits("a finite number <= 0", lambda number: -math.inf < number <= 0)
POSITIVE = Limits("a finite number > 0", lambda number: 0 < number < math.inf)
UP_TO_ONE = Limits("a number from 0 to 1", lambda number: 0 <= number <= 1)
BELOW_ONE = Limits("0 <= value < 1", lambda number: 0 <= number < 1)


def number(function: str, argument: str, value: Any, limits: Limits) -> float:
    """Return a setting as a float.

    Raises:
        TypeError: it is not a number, for instance text, a flag or an array.
        ValueError: it is out of range.

    Example:
        >>> number("f", "rate", 1, UP_TO_ONE)
        1.0
    """
    other = (
        isinstance(value, (str, bytes, bool, np.bool_))
        or not hasattr(value, "__float__")
        or getattr(value, "ndim", False)
    )
    if other:
        raise TypeError(explain(function, argument, expected=limits.text, got=f"{type(value).__name__} {value!r:.60}"))
    found = float(value)
    if not limits.legal(found):
        raise ValueError(explain(function, argument, expected=limits.text, got=value))
    return found


def flag(function: str, argument: str, value: Any) -> bool:
    """Return a setting as a bool; accepts 0 and 1, but not text, which would always be True.

    Raises:
        TypeError: it is something else.

    Example:
        >>> flag("f", "nesterov", 0)
        False
    """
    if not isinstance(value, (int, np.integer, np.bool_)) or not FLAG.legal(float(value)):
        got = f"{type(value).__name__} {value!r:.60}"
        raise TypeError(explain(function, argument, expected=FLAG.text, got=got))
    return bool(value)


def checked(function: str, argument: str, value: Any, limits: Limits) -> float:
    """Return a setting that may be a flag or a number: see `flag` and `number`.

    Example:
        >>> checked("f", "nesterov", 1, FLAG)
        True
    """
    return flag(function, argument, value) if limits is FLAG else number(function, argument, value, limits)
