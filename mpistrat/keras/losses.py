"""Losses that divide by a sum over the rows of a batch: of masks, or of sample weights. Divide by that of all ranks' rows.

Keras divides a loss with a mask by the number of valid elements, and with `reduction="mean_with_sample_weight"` by the sum of
weights. A rank knows those of its own rows only. So in a step, each such loss is multiplied by the rank's mean of the mask or
weights over the mean of all ranks: the mean over ranks, weighted by rows, is then the loss of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import keras
from keras import ops
from keras.src.losses import loss as keras_losses

from .link import ModelLink
from .optimizer import sum_over_ranks

__all__ = ["over_ranks"]

_reduce = keras_losses.reduce_weighted_values


class _Sums:
    """The sums of a step's losses over all ranks.

    Attributes:
        link: of the model.
        last: the last sum that was made, JAX's array or tracer.
    """

    def __init__(self, link: ModelLink) -> None:
        self.link = link
        self.last: Any = None


_sums: ContextVar[_Sums | None] = ContextVar("mpistrat_keras_losses", default=None)


@contextlib.contextmanager
def over_ranks(link: ModelLink) -> Iterator[None]:
    """Inside, divide losses by sums over the rows of all ranks. Their computation is collective then."""
    if keras_losses.reduce_weighted_values is _reduce:
        keras_losses.reduce_weighted_values = _reduced
    token = _sums.set(None if link.size == 1 or link.served else _Sums(link))
    try:
        yield
    finally:
        _sums.reset(token)


def _reduced(
    values: Any, sample_weight: Any = None, mask: Any = None, reduction: str = "sum_over_batch_size", dtype: Any = None
) -> Any:
    """Return a loss as Keras does, in a step its part of that of all ranks' rows."""
    exact = keras.backend.standardize_dtype(dtype or keras.config.floatx()) == "float64"
    divisors, exact_dtype = mask, "float64" if exact else "float32"
    if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        given = sample_weight  # copied, since apply_mask changes it in place
        given = None if given is None else ops.convert_to_tensor(given, exact_dtype) * 1.0
        divisors = keras_losses.apply_mask(given, mask, exact_dtype, reduction)
    loss = _reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    sums = _sums.get()
    if sums is None or divisors is None:
        return loss
    mine = ops.stop_gradient(ops.mean(ops.cast(divisors, exact_dtype)))
    if keras.backend.backend() == "jax":
        mine = _after(sums.last, mine)
    (sums.last,) = sum_over_ranks(sums.link, [mine], lambda: sums.link.share)
    return loss * ops.cast(ops.divide_no_nan(mine, sums.last), loss.dtype)


def _after(first: Any, second: Any) -> Any:
    """Return JAX's second array, to be computed after the first one: all ranks sum in one order."""
    import jax

    if first is None or getattr(first, "_trace", None) is not getattr(second, "_trace", None):
        return second
    return jax.lax.optimization_barrier((first, second))[1]
