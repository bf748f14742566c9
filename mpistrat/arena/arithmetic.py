"""Arithmetic of a reduction: its function, accumulation dtype, divisor, and result dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..base import loops
from ..base.errors import explain
from ..base.types import ReduceOp
from ..base.underflow import may_underflow
from ..comm.arrays import accumulation_dtype, as_buffer, check_reducible, mean_dtype

__all__ = ["Arithmetic", "arithmetic", "combine", "divide", "finish", "flatten_all", "round_into"]

_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


@final
@dataclass(frozen=True)
class Arithmetic:
    """The function, the dtypes and the divisor of one reduction.

    Attributes:
        accumulate: dtype of all partial results, also between ranks.
        result: dtype to which the total is rounded, once.
        divisor: the number of replicas for a mean, else 1.
        ufunc: NumPy's function that combines two values: np.add for a sum or a mean.
        between: returns what sums flat arrays like one over nodes, None for MPI; None if it is always MPI.
    """

    accumulate: np.dtype
    result: np.dtype
    divisor: int
    ufunc: np.ufunc
    between: Callable[[np.ndarray, Arithmetic], Any] | None = None


@functools.lru_cache(maxsize=256)
def arithmetic(reduce_op: ReduceOp, dtype: np.dtype, num_replicas: int, function: str = "reduce") -> Arithmetic:
    """Return the arithmetic for values of a dtype. Errors name `function`.

    Raises:
        TypeError: the dtype cannot be reduced: bool with other operations than MIN and MAX, non-numbers, or complex with others
            than SUM and MEAN.

    Example:
        >>> arithmetic(ReduceOp.MEAN, np.dtype(np.int8), 4).accumulate.name
        'float64'
    """
    check_reducible(dtype, function, ordered=reduce_op in (ReduceOp.MIN, ReduceOp.MAX))
    ufunc = _UFUNCS[reduce_op]
    if reduce_op is ReduceOp.MEAN:
        mean = mean_dtype(dtype)
        return Arithmetic(accumulation_dtype(mean), mean, num_replicas, ufunc)
    if dtype.kind == "c" and reduce_op is not ReduceOp.SUM:
        remedy = "Complex numbers support SUM and MEAN only: reduce real and imaginary parts, or absolute values"
        expected = f"real numbers for {reduce_op.value}"
        raise TypeError(explain(function, "value", expected=expected, got=f"dtype {dtype}", remedy=remedy))
    return Arithmetic(accumulation_dtype(dtype), dtype, 1, ufunc)


def flatten_all(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the values as flat contiguous arrays; copy only those that are not contiguous."""
    return [v.reshape(-1) if v.flags.c_contiguous else np.ascontiguousarray(v).reshape(-1) for v in values]


def combine(ufunc: np.ufunc, parts: Sequence[Any], out: Any) -> None:
    """Write the reduction of the parts, from first to last, in the dtype of `out`."""
    if ufunc is np.add and loops.add(out, [as_buffer(part) for part in parts]):
        return
    if len(parts) == 1:
        out[...] = parts[0]
        return
    ufunc(parts[0], parts[1], out=out, dtype=out.dtype)
    for part in parts[2:]:
        ufunc(out, part, out=out, dtype=out.dtype)


@may_underflow
def divide(total: Any, divisor: float) -> None:
    """Divide a sum in place."""
    total /= divisor


@may_underflow
def round_into(target: Any, total: Any) -> None:
    """Write a sum in the dtype of the target."""
    np.copyto(target, total, casting="unsafe")


@may_underflow
def finish(total: Any, how: Arithmetic) -> Any:
    """Return the total divided and rounded as `how` requires, in place if the dtype allows it."""
    if how.divisor != 1:
        total /= how.divisor
    return total if total.dtype == how.result else total.astype(how.result)
