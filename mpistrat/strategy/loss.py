"""The right scale of a loss: gradients of the replicas are summed, so each divides by the examples of all of them."""

from __future__ import annotations

import operator
from typing import Any

from .. import context, global_batch
from ..comm.arrays import array_module, as_array, on_device_of
from ..errors import ContextError, explain
from .reductions import as_scalar

__all__ = [
    "check_loss",
    "compute_average_loss",
    "scale_regularization_loss",
    "share_of_batch",
    "summed_replicas",
    "sums_workers",
]


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """Return this replica's part of the mean loss over the global batch: the sum of its losses over G.

    The sum of what all replicas get is the mean over the global batch, however unevenly it is divided.

    Args:
        per_example_loss: array of at least one dimension; the first counts this replica's examples.
        sample_weight: factor of each loss: a number, one for each example, or an array of the losses' shape.
        global_batch_size: G; default the rows over all replicas of the batch among the step's arguments, as the
            distributed dataset handed it out; of arrays of another origin this replica's examples times the number of
            replicas. Where batches of different sizes are among the arguments, the one with as many rows as losses.

    Returns:
        A NumPy scalar of the losses' dtype; 0 for G = 0.

    Raises:
        ValueError: a scalar loss, weights that do not fit, a negative size.
        ContextError: in cross-replica context; and where it cannot be told of which batch the losses are.

    Example:
        >>> float(compute_average_loss(np.array([1.0, 2.0, 3.0]), global_batch_size=4))
        1.5
    """
    _require_replica("compute_average_loss")
    loss = as_array(per_example_loss, "compute_average_loss", "per_example_loss")
    if loss.ndim == 0:
        remedy = "Pass one loss for each example; average over other dimensions first"
        expected, got = "at least one dimension", "a scalar"
        raise ValueError(explain("compute_average_loss", "per_example_loss", expected=expected, got=got, remedy=remedy))
    size = _global_size(loss, global_batch_size)
    with on_device_of(loss):
        weighted = loss if sample_weight is None else loss * _weights(loss, sample_weight)
        total = weighted.sum()
        mean = total / size if size else total * 0
        return as_scalar(array_module(loss).asarray(mean, loss.dtype if loss.dtype.kind in "fcV" else None))


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
        return global_batch.size_of_losses(int(loss.shape[0]), context.get_strategy().num_replicas_in_sync)
    try:
        size = operator.index(given)
    except TypeError:
        size = -1
    if size < 0:
        text = explain("compute_average_loss", "global_batch_size", expected="an integer from 0 up", got=repr(given))
        raise ValueError(text)
    return size


def _weights(loss: Any, given: Any) -> Any:
    """The weights in a shape that multiplies the losses: a number, one for each example, or one for each loss."""
    weights = as_array(given, "compute_average_loss", "sample_weight")
    if weights.ndim == loss.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    if weights.shape != loss.shape[: weights.ndim]:
        expected = f"shape (), {loss.shape[:1]} or {loss.shape}"
        text = explain("compute_average_loss", "sample_weight", expected=expected, got=f"shape {weights.shape}")
        raise ValueError(text)
    weights = weights.reshape(weights.shape + (1,) * (loss.ndim - weights.ndim))
    return weights.astype(loss.dtype, copy=False) if loss.dtype.kind in "fcV" else weights


def check_loss(strategy: Any, function: str, loss: str, max_norm: float | None, optimizer: Any) -> None:
    """Check what `distribute` of a framework is told about the loss and its gradients.

    Raises:
        ValueError: a setting is wrong, or means another thing under the strategy.
    """
    if loss not in ("mean", "sum"):
        raise ValueError(explain(function, "loss", expected='"mean" or "sum"', got=repr(loss)))
    if max_norm is None:
        return
    if optimizer is None or not max_norm > 0:
        raise ValueError(explain(function, "max_norm", expected="a number > 0, with an optimizer", got=repr(max_norm)))
    if sums_workers(strategy):
        expected, got = "None, where servers sum the gradients of workers, which see their own only", str(max_norm)
        remedy = "Set workers_in_sync=… to all workers, or use ms.MultiWorkerMirroredStrategy()"
        raise ValueError(explain(function, "max_norm", expected=expected, got=got, remedy=remedy))


def share_of_batch(strategy: Any) -> float:
    """Return what multiplies this replica's gradient of the mean over its own rows, before a mean over `summed_replicas`.

    1 is an equal part. The batch is that of the step's arguments, outside of `run` the last that was handed out; where none is
    known, parts are equal.
    """
    rows, total = global_batch.rows_of_batch() or (0, 0)
    if total and sums_workers(strategy) and not strategy.backup_workers:  # a step's batches are those of all workers
        everyones = global_batch.rows_of_workers()
        if everyones:
            return rows * summed_replicas(strategy) / everyones
    return rows * int(strategy.num_replicas_in_sync) / total if total else 1.0


def summed_replicas(strategy: Any) -> int:
    """Return of how many replicas gradients are added up before one update."""
    replicas = int(strategy.num_replicas_in_sync)
    if sums_workers(strategy):
        replicas *= strategy.num_workers // strategy.workers_in_sync - strategy.backup_workers
    return replicas


def sums_workers(strategy: Any) -> bool:
    """Return whether servers add up the gradients of workers that do not step together otherwise."""
    return getattr(strategy, "max_staleness", None) == 0 and strategy.num_workers > strategy.workers_in_sync
