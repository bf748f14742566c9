"""Dtypes: which NumPy dtypes can be sent and summed, the dtype of their sums, and the MPI datatype of each."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from ..errors import explain

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "accumulation_dtype",
    "check_movable",
    "check_reducible",
    "is_bfloat16",
    "mean_dtype",
    "mpi_datatype",
]

_MOVABLE_KINDS = "biufcmMSU"  # bool, integers, floats, complex, dates, fixed-length strings
_REDUCIBLE_KINDS = "iufc"


def is_bfloat16(dtype: np.dtype) -> bool:
    """Return whether a dtype is bfloat16, which NumPy knows only through ml_dtypes."""
    return dtype.kind == "V" and dtype.name == "bfloat16"


@functools.cache
def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values are summed: float32 for float16 and bfloat16, else the same.

    Example:
        >>> accumulation_dtype(np.dtype(np.float16)).name, accumulation_dtype(np.dtype(np.int8)).name
        ('float32', 'int8')
    """
    if dtype == np.float16 or is_bfloat16(dtype):
        return np.dtype(np.float32)
    return dtype


@functools.cache
def mean_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of a mean: float64 for integers, else the same.

    Example:
        >>> mean_dtype(np.dtype(np.uint8)).name
        'float64'
    """
    return np.dtype(np.float64) if dtype.kind in "iu" else dtype


@functools.cache
def _reducible(dtype: np.dtype) -> bool:
    return dtype.kind in _REDUCIBLE_KINDS or is_bfloat16(dtype)


def check_reducible(dtype: np.dtype, function: str, argument: str = "value") -> None:
    """Do nothing if values of a dtype can be summed over ranks.

    Raises:
        TypeError: for bool, structured and every other dtype that is no number, with the remedy.
    """
    if _reducible(dtype):
        return
    if dtype.kind == "b":
        remedy = "To count, cast it first: value.astype(np.int64)"
    elif dtype.names:
        remedy = "Reduce the fields one by one"
    else:
        remedy = ""
    got = f"dtype {dtype}"
    raise TypeError(explain(function, argument, expected="an array of numbers", got=got, remedy=remedy))


def check_movable(dtype: np.dtype, function: str, argument: str = "value") -> None:
    """Do nothing if values of a dtype can be sent as bytes.

    Raises:
        TypeError: for structured dtypes and Python objects.
    """
    if dtype.kind in _MOVABLE_KINDS or is_bfloat16(dtype):
        return
    remedy = "Send the fields one by one" if dtype.names else "Python objects are not sent between ranks"
    expected = "an array of numbers, bools, dates or fixed-length strings"
    raise TypeError(explain(function, argument, expected=expected, got=f"dtype {dtype}", remedy=remedy))


@functools.cache
def mpi_datatype(dtype: np.dtype) -> MPI.Datatype:
    """Return the MPI datatype of a NumPy dtype; float16 and bfloat16 move as 16-bit integers.

    Sums of those two are formed in `accumulation_dtype`, never in this type.

    Raises:
        TypeError: when MPI has no such type.
    """
    from mpi4py import MPI

    if dtype == np.float16 or is_bfloat16(dtype):
        return MPI.UINT16_T
    if dtype.kind in "biufc" and dtype.isnative:
        return MPI.Datatype.fromcode(dtype.char)
    expected = "a dtype of NumPy that MPI knows, in this machine's byte order"
    raise TypeError(explain("mpi_datatype", "dtype", expected=expected, got=str(dtype)))
