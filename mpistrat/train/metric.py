"""Metrics over all replicas: a replica adds to its own sums in a step; `result` adds them up.

So the result is that of all rows, however they are divided. Names, arguments and numbers are those of Keras's metrics
(https://keras.io/api/metrics/), in float64.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np

from ..base import context
from ..base.types import Quality, VariableAggregation, VariableSynchronization
from ..base.underflow import may_underflow
from ..comm.arrays import to_host
from ..strategy.contexts import in_step, stepping
from ..variables import Variable
from ..variables.variable import value_for_file
from .foreign_metrics import FUNCTION, ForeignMetric, adapt, merged, results_of
from .weights import METRIC

__all__ = ["Mean", "MeanOf", "Metric", "Sum", "known", "mean_of_rows", "results"]

UPDATE = "Metric.update_state"  # in errors


class Metric(abc.ABC):
    """Sums of a metric, one vector per replica.

    Create it in a strategy's scope. A subclass defines `added` and `result_of`.

    Attributes:
        name: its key in the result of `results`.
        sums: an ON_READ variable of float64, added up over the replicas, also in files of `Strategy.save`.
    """

    def __init__(self, name: str, size: int) -> None:
        """Create the sums, zeros.

        Args:
            name: of the metric.
            size: the number of sums.
        """
        self.name = name
        self.sums = Variable(
            np.zeros(size),
            name=f"{METRIC}{name}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
            trainable=False,
        )

    @abc.abstractmethod
    def added(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return a batch's contribution to the sums: a vector of float64."""

    @abc.abstractmethod
    def result_of(self, sums: np.ndarray) -> Any:
        """Compute the result of sums: a number, or an array."""

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch: in a step, or outside on ranks with one replica.

        Arguments are arrays of NumPy, CuPy, PyTorch or JAX, or convertible to NumPy's.
        """
        added = self.added(*args, **kwargs)
        strategy = self.sums.placement.strategy
        remedy = "Call it in the function that strategy.run calls"
        in_step(strategy, lambda: self.sums.assign_add(added), f"{type(self).__name__}.update_state", remedy)

    def result(self) -> Any:
        """Return the metric over all replicas, on every rank. Collective; in a step, this replica's own."""
        if stepping(self.sums.placement.strategy):
            return self.result_of(np.asarray(self.sums.numpy()))
        return results([self])[self.name]

    def reset_state(self) -> None:
        """Set sums to zero: in a step this replica's, under a coordinator all workers', else this rank's."""
        strategy = self.sums.placement.strategy
        if stepping(strategy) or strategy.extended.coordination.leads:
            self.sums.assign(np.zeros(self.sums.shape))
            return
        for replica in range(self.sums.num_copies):
            self.sums.storage(replica)[...] = 0


def results(metrics: Iterable[Any], strategy: Any = None) -> dict[str, Any]:
    """Return metrics over all replicas by name, on every rank. Collective: one sum for all of this package.

    Metrics of torchmetrics and Keras may be among them: each rank updates its own object, and the result is that of all ranks,
    by the reduction that each state declares (`dist_reduce_fx`, `aggregation`). A metric of torchmetrics has the name of its
    class; a MetricCollection sets other names.

    Under parameter servers all ranks call it, after the workers' passes; with a coordinator only the chief does.

    Args:
        metrics: the metrics.
        strategy: for metrics of other libraries; default that of the other metrics, else the current one.

    Raises:
        TypeError: no metric.
        ValueError: two results have the same name; a Keras variable that cannot be combined.
        ContextError: in a step; metrics of other libraries without a strategy, with a coordinator, or on ranks with several
            replicas.

    Example:
        >>> loss = ms.train.Mean("loss")
        >>> loss.update_state([1.0, 3.0])
        >>> ms.train.results([loss])
        {'loss': 2.0}
    """
    chosen = [known(FUNCTION, metric) for metric in metrics]
    ours = [metric for metric in chosen if isinstance(metric, Metric)]
    others = [metric for metric in chosen if isinstance(metric, ForeignMetric)]
    merged({metric.name: None} for metric in ours)  # raises before the first collective
    if strategy is None and others:
        strategy = ours[0].sums.placement.strategy if ours else context.get_strategy()
    found = [_own_results(ours)] if ours else []
    return merged([*found, results_of(strategy, others)] if others else found)


def known(function: str, metric: Any) -> Metric | ForeignMetric:
    """Return a metric in a form that `results` takes: of this package, or `ForeignMetric`."""
    return metric if isinstance(metric, (Metric, ForeignMetric)) else adapt(function, metric)


def _own_results(metrics: Sequence[Metric]) -> dict[str, Any]:
    strategy = metrics[0].sums.placement.strategy
    context.expect_cross(strategy, FUNCTION)
    if not metrics[0].sums.placement.lacks(Quality.COMMON_STEPS):
        totals = strategy.reduce("SUM", [metric.sums for metric in metrics])
    else:
        strategy.extended.coordination.announce("gathered", *(metric.sums for metric in metrics))
        totals = [value_for_file(metric.sums) for metric in metrics]
    return {
        metric.name: metric.result_of(to_host(total).reshape(metric.sums.shape))
        for metric, total in zip(metrics, totals, strict=True)
    }


@may_underflow
def mean_of_rows(values: Any, weight: Any) -> np.ndarray:
    """Return the weighted sum of rows' values, means over their other dimensions, and the sum of weights."""
    array = np.asarray(to_host(values, UPDATE, "values"), np.float64)
    if weight is None:
        array = array.reshape(array.shape or (1,))
        return np.array([_mean(array, 1).sum(), len(array)])
    weights = np.asarray(to_host(weight, UPDATE, "sample_weight"), np.float64)
    array, weights = same_rank(array, weights)
    if array.ndim > weights.ndim:
        array = _mean(array, weights.ndim)
    weights = np.broadcast_to(weights, array.shape)
    return np.array([_mean(array * weights, 1).sum(), _mean(weights, 1).sum()])


def _mean(array: np.ndarray, first: int) -> np.ndarray:
    """Return the mean over all dimensions from one on."""
    axes = tuple(range(first, array.ndim))
    return array.mean(axes) if axes and array.size else array.sum(axes) if axes else array


def same_rank(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays, without a last dimension of size 1 that only one has."""
    if a.ndim == b.ndim + 1 and a.shape[-1] == 1:
        return a[..., 0], b
    if b.ndim == a.ndim + 1 and b.shape[-1] == 1:
        return a, b[..., 0]
    return a, b


@may_underflow
def ratio(a: Any, b: Any) -> Any:
    """Return a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b))), where=np.asarray(b) != 0)


@final
class Sum(Metric):
    """The weighted sum of values.

    Example:
        >>> rows = ms.train.Sum("rows")
        >>> rows.update_state([1, 3, 5, 7], sample_weight=[1, 1, 0, 0])
        >>> rows.result()
        4.0
    """

    def __init__(self, name: str = "sum") -> None:
        super().__init__(name, 1)

    @may_underflow
    def added(self, values: Any, sample_weight: Any = None) -> np.ndarray:
        array = np.asarray(to_host(values, UPDATE, "values"), np.float64)
        if sample_weight is None:
            return np.array([array.sum()])
        weights = np.asarray(to_host(sample_weight, UPDATE, "sample_weight"), np.float64)
        array, weights = same_rank(array, weights)
        return np.array([(array.sum(tuple(range(weights.ndim, array.ndim))) * weights).sum()])

    def result_of(self, sums: np.ndarray) -> float:
        return float(sums[0])


class _MeanOfRows(Metric):
    """The weighted sum of rows' values, and the sum of weights; 0 without rows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)

    def result_of(self, sums: np.ndarray) -> float:
        return float(ratio(sums[0], sums[1]))


@final
class Mean(_MeanOfRows):
    """The weighted mean of values over rows; 0 without rows.

    Example:
        >>> loss = ms.train.Mean("loss")
        >>> loss.update_state([1, 3, 5, 7], sample_weight=[1, 1, 0, 0])
        >>> loss.result()
        2.0
    """

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name)

    def added(self, values: Any, sample_weight: Any = None) -> np.ndarray:
        return mean_of_rows(values, sample_weight)


class MeanOf(_MeanOfRows):
    """The weighted mean over rows of a function of labels and predictions."""

    @abc.abstractmethod
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        """Compute a value for each row, or for each element of it."""

    def added(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> np.ndarray:
        return mean_of_rows(self.values(*host(y_true=y_true, y_pred=y_pred)), sample_weight)


def host(**arrays: Any) -> Sequence[np.ndarray]:
    """Convert arguments of `update_state`, arrays of any library, to NumPy's."""
    return [to_host(array, UPDATE, argument) for argument, array in arrays.items()]
