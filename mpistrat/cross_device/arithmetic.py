"""How a reduction is computed: in which dtype it is summed, by what it is divided, and to what it is rounded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..comm.dtypes import accumulation_dtype, check_reducible, mean_dtype
from ..types import ReduceOp

__all__ = ["Arithmetic", "add_all", "arithmetic", "finish", "flatten_all"]


@final
@dataclass(frozen=True)
class Arithmetic:
    """The dtypes and the divisor of one reduction.

    Attributes:
        accumulate: dtype in which everything is summed, between ranks too.
        result: dtype to which the end is rounded, once.
        divisor: 1 for a sum, the number of replicas for a mean.
    """

    accumulate: np.dtype
    result: np.dtype
    divisor: int


@functools.lru_cache(maxsize=256)
def arithmetic(reduce_op: ReduceOp, dtype: np.dtype, num_replicas: int) -> Arithmetic:
    """Return how values of a dtype are reduced. Not collective.

    Raises:
        TypeError: values of the dtype cannot be summed.

    Example:
        >>> arithmetic(ReduceOp.MEAN, np.dtype(np.int8), 4).accumulate.name
        'float64'
    """
    check_reducible(dtype, "reduce")
    if reduce_op is ReduceOp.SUM:
        return Arithmetic(accumulation_dtype(dtype), dtype, 1)
    mean = mean_dtype(dtype)
    return Arithmetic(accumulation_dtype(mean), mean, num_replicas)


def flatten_all(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the values as flat contiguous arrays; only what is not contiguous is copied. Not collective."""
    return [v.reshape(-1) if v.flags.c_contiguous else np.ascontiguousarray(v).reshape(-1) for v in values]


def add_all(parts: Sequence[Any], out: Any) -> None:
    """Write the sum of the parts, from the first to the last, in the dtype of `out`. Not collective."""
    if len(parts) == 1:
        np.copyto(out, parts[0], casting="unsafe")
        return
    np.add(parts[0], parts[1], out=out, dtype=out.dtype)
    for part in parts[2:]:
        np.add(out, part, out=out, dtype=out.dtype)


def finish(total: Any, how: Arithmetic) -> Any:
    """Return the total divided and rounded as `how` says, in place where the dtype allows. Not collective."""
    if how.divisor != 1:
        total /= how.divisor
    return total if total.dtype == how.result else total.astype(how.result)
