"""The scale of a loss: gradients of replicas are summed, so each divides by the examples of all."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..base import context, global_batch
from ..base.errors import ContextError, explain
from ..base.masks import plain_array
from ..base.underflow import may_underflow
from ..comm.arrays import array_module, as_array, on_device_of
from ..cross_device.collectives import as_scalar
from .contexts import local_replica

__all__ = [
    "check_loss",
    "compute_average_loss",
    "scale_regularization_loss",
    "summed_replicas",
    "sums_workers",
    "weight_of_pass",
]


@may_underflow
def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
    """Return this replica's part of the mean loss over the global batch: the sum of its losses over G. Local.

    The parts of all replicas add up to the mean over the global batch, even if it is divided unevenly.

    Args:
        per_example_loss: array of at least one dimension; the first counts this replica's examples. A tensor of torch or an
            array of JAX keeps its history: the result can be differentiated.
        sample_weight: factor of each loss: a number, one for each example, or an array of the losses' shape.
        global_batch_size: G; default the rows over all replicas of the batch among the step's arguments, or of the batches that
            had as many rows here; for other arrays this replica's examples times the number of replicas, if all replicas have
            equal parts of batches. Of several batches of different sizes, the one with as many rows as losses.

    Returns:
        A scalar of the losses' dtype and library; 0 for G = 0.

    Raises:
        ValueError: a scalar loss, weights that do not fit, a negative size.
        ContextError: in cross-replica context; or it is ambiguous of which batch the losses are.
        TypeError: a value in a function that JAX compiles, without global_batch_size: the compiled function would keep the
            size.

    Example:
        >>> float(compute_average_loss(np.array([1.0, 2.0, 3.0]), global_batch_size=4))
        1.5
    """
    _require_replica("compute_average_loss")
    foreign = type(per_example_loss).__module__.partition(".")[0] in ("torch", "jax", "jaxlib")
    loss = per_example_loss if foreign else as_array(per_example_loss, "compute_average_loss", "per_example_loss")
    if loss.ndim == 0:
        remedy = "Pass one loss for each example; average over other dimensions first"
        expected, got = "at least one dimension", "a scalar"
        raise ValueError(explain("compute_average_loss", "per_example_loss", expected=expected, got=got, remedy=remedy))
    if foreign and global_batch_size is None and _is_compiled(loss):
        expected, got = "the size, in a function that JAX compiles and uses again", "none"
        remedy = "Pass ms.context.global_batch_size(x) to the compiled function as an argument"
        raise TypeError(explain("compute_average_loss", "global_batch_size", expected=expected, got=got, remedy=remedy))
    traced = foreign and hasattr(global_batch_size, "dtype")
    size = global_batch_size if traced else _global_size(loss, global_batch_size)
    if foreign:
        total = (loss if sample_weight is None else loss * _foreign_weights(loss, sample_weight)).sum()
        return total / size if traced or size else total * 0
    with on_device_of(loss):
        weighted = loss if sample_weight is None else loss * _weights(loss, sample_weight)
        total = weighted.sum()
        mean = total / size if size else total * 0
        return as_scalar(array_module(loss).asarray(mean, loss.dtype if loss.dtype.kind in "fcV" else None))


@may_underflow
def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return this replica's part of a loss that is the same on all: its sum divided by the replicas.

    Args:
        regularization_loss: a number or array.

    Raises:
        ContextError: in cross-replica context.

    Example:
        >>> float(scale_regularization_loss([1.0, 2.0]))
        3.0
    """
    _require_replica("scale_regularization_loss")
    loss = as_array(regularization_loss, "scale_regularization_loss", "regularization_loss")
    return as_scalar(loss.sum() / context.get_strategy().num_replicas_in_sync)


def _require_replica(function: str) -> None:
    if context.has_strategy() and context.in_cross_replica_context():
        expected, got = "a call in replica context", "one in cross-replica context"
        raise ContextError(explain(function, "", expected=expected, got=got, remedy="Call it in the step"))


def _global_size(loss: Any, given: int | None) -> int:
    if given is None:
        ledger = context.get_strategy().extended.batches if context.has_strategy() else None
        return global_batch.size_of_losses(ledger, int(loss.shape[0]))
    try:
        size = operator.index(given)
    except TypeError:
        size = -1
    if size < 0:
        text = explain("compute_average_loss", "global_batch_size", expected="an integer from 0 up", got=repr(given))
        raise ValueError(text)
    return size


def _weights(loss: Any, given: Any) -> Any:
    """Return the weights in a shape that multiplies the losses: a number, one for each example, or one for each loss."""
    weights = as_array(given, "compute_average_loss", "sample_weight")
    if weights.ndim == loss.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    if weights.shape != loss.shape[: weights.ndim]:
        expected = f"shape (), {loss.shape[:1]} or {loss.shape}"
        text = explain("compute_average_loss", "sample_weight", expected=expected, got=f"shape {weights.shape}")
        raise ValueError(text)
    weights = weights.reshape(weights.shape + (1,) * (loss.ndim - weights.ndim))
    return weights.astype(loss.dtype, copy=False) if loss.dtype.kind in "fcV" else weights


def _foreign_weights(loss: Any, given: Any) -> Any:
    """Return the weights of tensors of torch or arrays of JAX, in a shape that multiplies them."""
    if isinstance(given, np.ndarray):
        given = plain_array(given, "compute_average_loss", "sample_weight")
    elif not hasattr(given, "shape"):
        given = plain_array(given, "compute_average_loss", "sample_weight")
        given = given.tolist() if given.ndim == 0 else loss.new_tensor(given) if hasattr(loss, "new_tensor") else given
    shape = tuple(getattr(given, "shape", ()))
    if len(shape) == loss.ndim + 1 and shape[-1] == 1:
        given, shape = given[..., 0], shape[:-1]
    if shape != tuple(loss.shape)[: len(shape)]:
        expected = f"shape (), {tuple(loss.shape)[:1]} or {tuple(loss.shape)}"
        raise ValueError(explain("compute_average_loss", "sample_weight", expected=expected, got=f"shape {shape}"))
    return given.reshape(shape + (1,) * (loss.ndim - len(shape))) if shape else given


def _is_compiled(value: Any) -> bool:
    """Return whether a value belongs to a function that JAX compiles: it has no number."""
    try:
        bool((value != value).any())
    except TypeError:
        return True
    return False


def check_loss(strategy: Any, function: str, loss: str, max_norm: float | None, optimizer: Any) -> None:
    """Check the arguments of a framework's `distribute` about the loss and its gradients.

    Raises:
        ValueError: a setting is wrong, or has another meaning under the strategy.
    """
    if loss not in ("mean", "sum"):
        raise ValueError(explain(function, "loss", expected='"mean" or "sum"', got=repr(loss)))
    if max_norm is None:
        return
    if optimizer is None or not max_norm > 0:
        raise ValueError(explain(function, "max_norm", expected="a number > 0, with an optimizer", got=repr(max_norm)))
    if sums_workers(strategy):
        expected, got = "None, where servers sum the gradients of workers, which see their own only", str(max_norm)
        remedy = "Set workers_in_sync=... to all workers, or use ms.MultiWorkerMirroredStrategy()"
        raise ValueError(explain(function, "max_norm", expected=expected, got=got, remedy=remedy))


def weight_of_pass(strategy: Any, inputs: Iterable[Any], function: str) -> float:
    """Return the factor of this replica's gradient of the mean over its own rows, before a mean over `summed_replicas`.

    Args:
        strategy: the strategy.
        inputs: the arrays of the pass, of NumPy, CuPy, torch or JAX; other values are skipped.
        function: the caller, for the error.

    Raises:
        BatchError: replicas have unequal parts of batches, and the batch of the inputs is ambiguous.
    """
    return float(strategy.extended.batches.weight(inputs, function, local_replica(strategy), f"; rank {strategy.rank}"))


def summed_replicas(strategy: Any) -> int:
    """Return the number of replicas whose gradients are added up before one update."""
    replicas = int(strategy.num_replicas_in_sync)
    if sums_workers(strategy):
        replicas *= strategy.num_workers // strategy.workers_in_sync - strategy.backup_workers
    return replicas


def sums_workers(strategy: Any) -> bool:
    """Return whether servers add up the gradients of workers that do not step together."""
    return getattr(strategy, "max_staleness", None) == 0 and strategy.num_workers > strategy.workers_in_sync
