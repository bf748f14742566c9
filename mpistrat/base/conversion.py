"""Conversion of arrays to another dtype without changing values: `astype` wraps, truncates and overflows silently."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import explain

__all__ = ["converted", "not_held"]

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def converted(function: str, argument: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a new array in another dtype. Floats are rounded to narrower floats; every other value must be represented exactly.

    Raises:
        ValueError: a value that the dtype cannot represent, or text that is not one of its values.

    Example:
        >>> converted("f", "x", np.array(["1", "False"]), np.dtype(bool))
        array([ True, False])
    """
    try:
        with np.errstate(all="ignore"):
            source = array.real if array.dtype.kind == "c" and dtype.kind in "biuf" else array
            found = _truth(array) if dtype.kind == "b" and array.dtype.kind in "USO" else source.astype(dtype)
            changed = _changed(array, found)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(explain(function, argument, expected=f"values of {dtype}", got=error)) from error
    if np.any(changed):
        got, remedy = str(array[changed][0]), "Choose a dtype that holds it, or change the values beforehand"
        raise ValueError(explain(function, argument, expected=f"values that {dtype} holds", got=got, remedy=remedy))
    return found


def not_held(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return a mask of the integers that a float dtype cannot represent.

    Example:
        >>> not_held(np.array([2**53, 2**53 + 1]), np.dtype(np.float64))
        array([False,  True])
    """
    changed = np.zeros(array.shape, bool)
    exact = 2 ** np.finfo(dtype).nmant  # all integers up to here are exact
    places = np.nonzero((array > exact) | (array < -exact))
    large = array[places]
    with np.errstate(over="ignore"):
        changed[places] = large.astype(object) != large.astype(dtype).astype(object)  # Python's integers are exact
    return changed


def _truth(texts: NDArray[Any]) -> NDArray[np.bool_]:
    found = np.empty(texts.shape, bool)
    for place, value in np.ndenumerate(texts):
        text = value.decode() if isinstance(value, bytes) else str(value)
        if text.strip().lower() not in _TRUTH:
            raise ValueError(f"{text!r}, which is neither true, false, 1 nor 0")
        found[place] = _TRUTH[text.strip().lower()]
    return found


def _changed(array: NDArray[Any], found: NDArray[Any]) -> Any:
    """Return a mask of the values that `astype` changed."""
    old, new = array.dtype.kind, found.dtype.kind
    if array.dtype == found.dtype or new in "OV" or old in "bV" or (old in "USO" and new == "b"):
        return False
    if (
        old in "iuf" and array.dtype.itemsize < 8 and np.can_cast(array.dtype, found.dtype)
    ):  # of int64 to float64 it is True
        return False
    if new in "US":
        return array.astype(new) != found  # of full length
    if old in "USO":
        return _read_otherwise(array, found)
    if old in "mM":
        missing = np.isnat(array)
        return (missing & (new not in "mM")) | (~missing & (found.astype(array.dtype) != array))
    if old == "c" and new != "c":
        return (array.imag != 0) | _changed(array.real, found)
    if new == "b":
        return (array != 0) & (array != 1)
    if old == "f" and new in "iu":
        limits = np.iinfo(found.dtype)
        wide = array.astype(np.promote_types(array.dtype, np.float64))
        return ~((wide == np.trunc(wide)) & (wide >= float(limits.min)) & (wide < float(limits.max) + 1))
    if old in "iu" and new in "fc":
        return not_held(array, found.real.dtype)
    if new in "fc":
        return np.isinf(found) & np.isfinite(array)
    return (found.astype(array.dtype) != array) | ((found < found.dtype.type(0)) != (array < 0))


def _read_otherwise(texts: NDArray[Any], found: NDArray[Any]) -> Any:
    """Return a mask of the texts that differ from the numbers that were read."""
    if found.dtype.kind not in "fc":
        return False  # integers are read exactly, or not at all
    try:
        return not_held(texts.astype(np.int64), found.real.dtype)
    except (ValueError, TypeError, OverflowError):  # some are floats, which may be rounded
        return np.isinf(found) & (np.char.find(np.char.lower(texts.astype("U")), "inf") < 0)
