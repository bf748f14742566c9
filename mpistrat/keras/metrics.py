"""Metrics of Keras over the ranks of a strategy, by the `aggregation` of their variables, as Keras does with TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras
import numpy as np

from ..base.errors import explain
from ..base.metric_state import MetricState
from .link import arrays_of

__all__ = ["REMEDY", "KerasMetric", "is_keras_metric"]


def is_keras_metric(value: Any) -> bool:
    """Return whether a value is a metric of Keras."""
    return isinstance(value, keras.metrics.Metric)


@final
class KerasMetric:
    """A `keras.metrics.Metric`, of one part.

    Attributes:
        name: Keras's.
    """

    def __init__(self, metric: Any) -> None:
        self._metric, self.name = metric, str(metric.name)

    def states(self) -> list[list[MetricState] | None]:
        variables = self._metric.variables  # some are made by the first update
        mine = arrays_of(variables)
        self._metric.reset_state()
        empty = arrays_of(variables)
        _assign(variables, mine)
        for variable, start in zip(variables, empty, strict=True):
            _require_summable(self.name, variable, start)
        if all(np.array_equal(array, start) for array, start in zip(mine, empty, strict=True)):
            return [None]
        return [
            [MetricState(array, variable.aggregation == "sum") for array, variable in zip(mine, variables, strict=True)]
        ]

    def result(self, values: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
        variables = self._metric.variables
        mine = arrays_of(variables)
        try:
            for variable, found in zip(variables, values[0], strict=False):
                if found:
                    _assign([variable], [_combined(self.name, variable, found)])
            value = self._metric.result()
            by_name = value if isinstance(value, dict) else {self.name: value}
            arrays = {name: np.array(keras.ops.convert_to_numpy(one)) for name, one in by_name.items()}
        finally:
            _assign(variables, mine)
        return {name: array if array.ndim else array.item() for name, array in arrays.items()}

    def reset(self) -> None:
        self._metric.reset_state()


def _assign(variables: Sequence[Any], arrays: Sequence[np.ndarray]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array.astype(variable.dtype))


REMEDY = "Give add_variable another aggregation, such as sum; or write a subclass of ms.train.Metric, whose sums add up"


def _require_summable(name: str, variable: Any, start: np.ndarray) -> None:
    """Raise for a variable that is declared a sum and does not start at zero: each rank would add the start."""
    if variable.aggregation == "sum" and np.any(start != 0):
        expected, got = "sums that start at 0", f"{start.reshape(-1)[0]} after reset_state"
        text = explain(f"ms.train.results: {name}", variable.name, expected=expected, got=got, remedy=REMEDY)
        raise ValueError(text)


def _combined(name: str, variable: Any, found: Sequence[np.ndarray]) -> np.ndarray:
    """Return a variable's value over the ranks that have one."""
    if len(found) == 1 or variable.aggregation == "only_first_replica":
        return found[0]
    if variable.aggregation == "mean":
        return np.mean(found, axis=0)
    if any(not np.array_equal(found[0], one, equal_nan=True) for one in found):
        expected, got = "an aggregation", "'none', and values that differ between ranks"
        text = explain(f"ms.train.results: {name}", variable.name, expected=expected, got=got, remedy=REMEDY)
        raise ValueError(text)
    return found[0]
