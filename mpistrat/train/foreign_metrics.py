"""Metrics of torchmetrics and Keras next to those of this package: their states are combined over the ranks of a strategy."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np

from ..base import agree, context
from ..base.errors import ContextError, explain
from ..base.metric_state import MetricAdapter, MetricState

__all__ = ["FUNCTION", "ForeignMetric", "adapt", "load_notes", "merged", "notes_of", "results_of"]

FUNCTION = "ms.train.results"

#: The states of each part of a metric; None for a part without updates.
_States = list[list[MetricState] | None]
#: The shape and dtype of an array that is added up; None for another state.
_Form = tuple[tuple[int, ...], str] | None


def adapt(function: str, metric: Any) -> ForeignMetric:
    """Return another library's metric in the form that this package uses.

    Raises:
        TypeError: it is no metric of a known library.
    """
    if "torchmetrics" in sys.modules:
        from ..torch.metrics import TorchMetric, is_torch_metric

        if is_torch_metric(metric):
            return ForeignMetric(TorchMetric(metric))
    if "keras" in sys.modules:
        from ..keras.metrics import KerasMetric, is_keras_metric

        if is_keras_metric(metric):
            return ForeignMetric(KerasMetric(metric))
    expected = "metrics of ms.train, torchmetrics or Keras"
    raise TypeError(explain(function, "metrics", expected=expected, got=f"{type(metric).__name__} {metric!r:.60}"))


@final
class ForeignMetric:
    """A metric of another library: this rank's updates, and those that ranks of an interrupted run had made.

    Attributes:
        adapter: the metric.
        earlier: the states of the earlier ranks.
    """

    def __init__(self, adapter: MetricAdapter) -> None:
        self.adapter = adapter
        self.earlier: list[_States] = []

    def reset_state(self) -> None:
        """Remove all updates. Local."""
        self.adapter.reset()
        self.earlier = []

    def states(self) -> list[_States]:
        """Return the states of this rank and of the earlier ones. Local."""
        return [self.adapter.states(), *self.earlier]


def results_of(strategy: Any, metrics: Sequence[ForeignMetric]) -> dict[str, Any]:
    """Return the metrics over all ranks by name, on every rank. Collective.

    Arrays that add up are summed in one collective; other states are gathered. The first rank with updates of a metric computes
    its result, so it has the same bits on every rank.

    Raises:
        ContextError: a strategy without ranks, a coordinator, or several replicas on a rank.
        ValueError: on every rank: a variable that cannot be combined.
        TypeError: on every rank: a result that is not an array.
    """
    _expect_ranks(strategy)
    context.expect_cross(strategy, FUNCTION)
    # the parts of all metrics, with the states of each rank that has them
    parts = [
        [rank for rank in ranks if rank is not None]
        for metric in metrics
        for ranks in zip(*metric.states(), strict=True)
    ]
    forms = [[_form(column) for column in zip(*part, strict=True)] for part in parts]
    table = _of_replicas(strategy, forms)
    _expect_equal_parts(strategy, table)
    holders = [[rank for rank, theirs in table.items() if theirs[number]] for number in range(len(parts))]
    values = _combine(strategy, parts, table, holders)
    computed, start = {}, 0
    with agree.together(strategy.extended.process_group.all_gather_text, agree.as_told):
        for index, metric in enumerate(metrics):
            stop = start + len(metric.adapter.states())
            root = min((rank for ranks in holders[start:stop] for rank in ranks), default=0)
            if strategy.rank == root:
                computed[index] = metric.adapter.result(values[start:stop])
            start = stop
    found: dict[int, dict[str, Any]] = {}
    for one in strategy.all_gather_object(computed):
        found |= one
    return merged(found[index] for index in range(len(metrics)))


def merged(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return results of several metrics in one dict.

    Raises:
        ValueError: two results have the same name.
    """
    every: dict[str, Any] = {}
    for one in results:
        for name, value in one.items():
            if name in every:
                expected, got = "metrics of different names", f"two of name {name!r}"
                raise ValueError(explain(FUNCTION, "metrics", expected=expected, got=got))
            every[name] = value
    return every


def _combine(
    strategy: Any, parts: list[list[list[MetricState]]], table: dict[int, list[list[_Form]]], holders: list[list[int]]
) -> list[list[list[Any]]]:
    """Return, for each part and state, its sum, or the states of all ranks. Collective."""
    counts = strategy.rank in table
    sums: dict[tuple[int, int], np.ndarray] = {}
    others: dict[tuple[int, int], list[Any]] = {}
    for number, ranks in enumerate(holders):
        part = parts[number] if counts else []
        for index in range(len(table[ranks[0]][number]) if ranks else 0):
            mine = [states[index].value for states in part]
            common = {table[rank][number][index] for rank in ranks}
            form = common.pop()
            if form is None or common:
                others[number, index] = mine
            else:
                sums[number, index] = sum(mine, np.zeros(form[0], form[1]))
    totals = strategy.extended.rank_collectives.all_reduce("SUM", list(sums.values())) if sums else []
    lists = strategy.all_gather_object(others) if others else []
    values: list[list[list[Any]]] = [[] for _ in parts]
    combined = dict(zip(sums, ([np.array(total)] for total in totals), strict=True))
    combined |= {key: [value for one in lists for value in one[key]] for key in others}
    for (number, _), value in sorted(combined.items(), key=lambda item: item[0]):
        values[number].append(value)
    return values


def _form(column: Sequence[MetricState]) -> _Form:
    """Return the form of a state of several ranks."""
    forms = {
        (state.value.shape, state.value.dtype.str)
        if state.adds and isinstance(state.value, np.ndarray) and state.value.dtype.kind in "iufc"
        else None
        for state in column
    }
    return forms.pop() if len(forms) == 1 else None


def _of_replicas(strategy: Any, value: Any) -> dict[int, Any]:
    """Return the values of the ranks that count, by rank: of a replica on several ranks the first. Collective."""
    replica = strategy.extended.replicas[0].replica_id_in_sync_group
    table, seen, all_count = {}, set(), not strategy.extended.common_steps
    for rank, (number, theirs) in enumerate(strategy.all_gather_object((replica, value))):
        if all_count or number not in seen:  # workers that step alone are all replica 0
            table[rank] = theirs
        seen.add(number)
    return table


def _expect_ranks(strategy: Any) -> None:
    extended = strategy.extended
    expected, remedy = "", "Metrics of ms.train can be used there"
    if extended.is_default:
        expected, got = "a strategy", "the default one"
        remedy = "Call it in the strategy's scope, or pass strategy"
    elif extended.coordination.leads:
        expected, got = "steps that all ranks run", "a coordinator, whose workers have copies of the metrics"
    elif len(extended.replicas) > 1:
        expected, got = "ranks with one replica", f"{len(extended.replicas)} replicas that update one object"
    if expected:
        text = explain(FUNCTION, "metrics of torchmetrics and Keras", expected=expected, got=got, remedy=remedy)
        raise ContextError(text)


def _expect_equal_parts(strategy: Any, table: dict[int, list[list[_Form]]]) -> None:
    numbers = {rank: len(theirs) for rank, theirs in table.items()}
    if len(set(numbers.values())) > 1:
        got = ", ".join(f"{number} on rank {rank}" for rank, number in numbers.items())
        raise ValueError(explain(FUNCTION, "metrics", expected="the same metrics on all ranks", got=got))


# in the notes of a checkpoint


def notes_of(strategy: Any, metrics: Sequence[ForeignMetric]) -> list[list[Any]]:
    """Return the states of all ranks, by metric, for JSON. Collective."""
    mine = [[_encoded(states) for states in metric.states()] for metric in metrics]
    table = _of_replicas(strategy, mine)
    return [
        [states for theirs in table.values() for states in theirs[index] if any(states)]
        for index in range(len(metrics))
    ]


def load_notes(metrics: Sequence[ForeignMetric], notes: Sequence[Sequence[Any]], first: bool) -> None:
    """Start with the states of an interrupted run, which one rank adds to its own. Local.

    Args:
        metrics: the metrics.
        notes: a result of `notes_of`.
        first: True on that rank.
    """
    for metric in metrics:
        metric.reset_state()
    for metric, ranks in zip(metrics, notes if first else (), strict=False):
        metric.earlier = [_decoded(states) for states in ranks]


def _encoded(states: _States) -> list[Any]:
    return [None if part is None else [[_text(state.value), state.adds] for state in part] for part in states]


def _decoded(states: Sequence[Any]) -> _States:
    return [None if part is None else [MetricState(_value(value), adds) for value, adds in part] for part in states]


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(one) for one in value]
    if not isinstance(value, np.ndarray):
        expected, got = (
            "metrics whose states are arrays and lists, in a checkpoint within an epoch",
            type(value).__name__,
        )
        remedy = "Save after epochs: ms.train.Checkpoints without every_steps and every_seconds"
        raise TypeError(explain("Trainer", "metrics", expected=expected, got=got, remedy=remedy))
    return {"dtype": value.dtype.name, "shape": value.shape, "bytes": base64.b64encode(value.tobytes()).decode()}


def _value(text: Any) -> Any:
    if isinstance(text, list):
        return [_value(one) for one in text]
    return np.frombuffer(base64.b64decode(text["bytes"]), text["dtype"]).reshape(text["shape"]).copy()
