"""Metrics of torchmetrics over the ranks of a strategy, by the reduction that each state declares (`dist_reduce_fx`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
import torchmetrics
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from ..base import nest
from ..base.errors import explain
from ..base.metric_state import MetricState
from ..comm.arrays import to_host
from .tensors import copy_of

__all__ = ["TorchMetric", "is_torch_metric"]


def is_torch_metric(value: Any) -> bool:
    """Return whether a value is a metric, or a collection of metrics, of torchmetrics."""
    return isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))


@final
class TorchMetric:
    """A `torchmetrics.Metric` or `MetricCollection`; its parts are all metrics inside it.

    Attributes:
        name: the class's name, as in a MetricCollection.
    """

    def __init__(self, metric: Any) -> None:
        self._metric, self.name = metric, type(metric).__name__

    def _parts(self) -> list[Any]:
        return [module for module in self._metric.modules() if isinstance(module, torchmetrics.Metric)]

    def states(self) -> list[list[MetricState] | None]:
        return [_states_of(part) if part.update_called else None for part in self._parts()]

    def result(self, values: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
        parts, before = self._parts(), []
        try:
            for part, states in zip(parts, values, strict=True):
                names = ("_to_sync", "_computed", "_update_count", *_reductions(part))
                before.append({name: getattr(part, name) for name in names})
                part._to_sync, part._computed = False, None  # its own synchronization would count all ranks twice
                for (name, reduction), found in zip(_reductions(part).items(), states, strict=False):
                    if found:
                        part._update_count = max(part._update_count, 1)
                        setattr(part, name, _combined([_tensors(value, part.device) for value in found], reduction))
            return self._by_name(self._metric.compute())
        finally:
            for part, kept in zip(parts, before, strict=False):
                for name, value in kept.items():
                    setattr(part, name, value)

    def _by_name(self, value: Any) -> dict[str, Any]:
        found = dict(value) if isinstance(value, Mapping) else {self.name: value}
        for name, one in found.items():
            if not isinstance(one, torch.Tensor):
                expected, got = "a number, an array or a dict of them", f"{type(one).__name__} as {name!r}"
                remedy = "Leave it out of the list, and call its compute() where all rows are"
                text = explain(f"ms.train.results: {self.name}", "compute", expected=expected, got=got, remedy=remedy)
                raise TypeError(text)
        arrays = {name: to_host(one.detach().cpu()) for name, one in found.items()}
        return {name: array if array.ndim else array.item() for name, array in arrays.items()}

    def reset(self) -> None:
        self._metric.reset()


def _reductions(part: Any) -> dict[str, Callable[[Any], Any] | None]:
    """Return the `dist_reduce_fx` of each state, by name."""
    found: dict[str, Callable[[Any], Any] | None] = vars(part)["_reductions"]
    return found


def _states_of(part: Any) -> list[MetricState]:
    states = []
    for name, reduction in _reductions(part).items():
        value = getattr(part, name)
        if reduction is dim_zero_cat and isinstance(value, list) and len(value) > 1:
            value = [torch.cat([item if item.ndim else item[None] for item in value])]
        adds = reduction is dim_zero_sum and isinstance(value, torch.Tensor)
        states.append(MetricState(nest.map_structure(_array, value), adds))
    return states


def _combined(values: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    """Return one state of those of several ranks, as torchmetrics does for the processes of torch.distributed."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        found: Any = [item for value in values for item in value]
        if not found:
            return found
    elif reduction is dim_zero_cat and values[0].ndim:
        return torch.cat(values)
    else:
        found = torch.stack(values)
    return found if reduction is None else reduction(found)


def _array(leaf: Any) -> Any:
    return to_host(leaf.detach().cpu()) if isinstance(leaf, torch.Tensor) else leaf


def _tensors(value: Any, device: Any) -> Any:
    def tensor(leaf: Any) -> Any:
        return copy_of(leaf).to(device) if isinstance(leaf, np.ndarray) else leaf

    return nest.map_structure(tensor, value)
