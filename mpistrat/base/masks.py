"""Checks of arrays from users: `np.asarray` silently drops masks and rounds integers; here both are errors."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import explain

__all__ = ["check_lossless", "check_unmasked", "plain_array", "unmasked"]

T = TypeVar("T")


def plain_array(value: Any, function: str, argument: str = "", dtype: DTypeLike | None = None) -> NDArray[Any]:
    """Return `np.asarray(value, dtype)` of an array that a user passed.

    Raises:
        TypeError: numbers are masked.
        OverflowError: without a dtype: no NumPy integer dtype holds all the integers.
        ValueError: without a dtype: strings mixed with numbers.

    Example:
        >>> plain_array(np.ma.masked_equal([1, 2], 3), "f")
        array([1, 2])
    """
    found = np.asanyarray(value, dtype)
    check = check_lossless if dtype is None else check_unmasked
    return check(value, found, function, argument)


def check_lossless(value: Any, found: NDArray[Any], function: str, argument: str = "") -> NDArray[Any]:
    """Return `np.asanyarray(value)` without its class.

    Args:
        value: as the user passed it.
        found: `np.asanyarray(value)`, which is masked if `value.__array__` returns a masked array.
        function, argument: names for the error.

    Raises:
        TypeError: numbers are masked: in the array, in a list of arrays, or in an array's object elements.
        OverflowError: integers became floats or objects, as those of `[2**63, -1]` and `[2**64]`.
        ValueError: numbers became strings.
    """
    if found is not value and found.dtype.kind in "fO" and found.size and _are(value, int, "iu"):
        largest = max(found.max(), found.min(), key=abs)
        got = (
            f"{int(largest)} among them"
            if abs(largest) >= 2**63
            else f"some of different dtypes, which make {found.dtype}"
        )
        remedy = "np.array(values, np.uint64) holds integers from 0 to 2**64 - 1; pass larger ones as floats"
        expected = "integers that one dtype of NumPy's integers holds"
        raise OverflowError(explain(function, argument, expected=expected, got=got, remedy=remedy))
    if isinstance(value, (list, tuple)) and found.dtype.kind in "SU" and not _are(value, (str, bytes), "SU"):
        raise ValueError(explain(function, argument, expected="strings only, or numbers only", got="both"))
    return check_unmasked(value, found, function, argument)


def check_unmasked(value: Any, found: NDArray[Any], function: str, argument: str = "") -> NDArray[Any]:
    """Return `np.asanyarray(value)` without its class; see `check_lossless`.

    Raises:
        TypeError: numbers are masked.
    """
    if "numpy.ma" not in sys.modules:  # no masked array can exist
        return np.asarray(found)
    plain = type(found) is np.ndarray
    if plain and found.dtype.kind != "O" and not isinstance(value, (list, tuple)):
        return found
    unmasked(value if plain else found, function, argument)
    return np.asarray(found)


def unmasked(value: T, function: str, argument: str = "") -> T:
    """Return a value unchanged, which need not be an array; it may be an index.

    Raises:
        TypeError: it is masked, or numbers in it are.

    Example:
        >>> unmasked((slice(3), 1), "f")
        (slice(None, 3, None), 1)
    """
    masked = _count(value) if "numpy.ma" in sys.modules else 0
    if masked:
        got = f"{masked} masked"
        remedy = "The mask would be lost: pass value.filled(...), or value.compressed()"
        raise TypeError(explain(function, argument, expected="no masked numbers", got=got, remedy=remedy))
    return value


def _count(value: Any) -> int:
    """Return the number of masked numbers in a masked array, or in the arrays of a list or an object array."""
    if isinstance(value, np.ma.MaskedArray):
        mask = np.ma.getmask(value)  # structured for a structured array
        return 0 if mask is np.ma.nomask else int(np.count_nonzero(np.ascontiguousarray(mask).reshape(-1).view(bool)))
    if isinstance(value, np.ndarray):
        items: Any = value.reshape(-1).tolist() if value.dtype.kind == "O" else ()
    else:
        items = value if isinstance(value, (list, tuple)) else ()
    holders = tuple(kind for kind in set(map(type, items)) if issubclass(kind, (np.ndarray, list, tuple)))
    return sum(_count(item) for item in items if isinstance(item, holders)) if holders else 0


def _are(value: Any, kinds: type | tuple[type, ...], numpys: str) -> bool:
    """Return True if a value is of a kind, an array of one of NumPy's kinds, or a non-empty list of such."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_are(item, kinds, numpys) for item in value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in numpys
    return isinstance(value, kinds)
