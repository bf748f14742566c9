"""How what the replicas wrote becomes one value, and which combinations of variable and write have a meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..distributed_values import DistributedValues, PerReplica
from ..errors import explain
from ..types import IndexedSlices, ReduceOp, VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    from .variable import Variable

__all__ = ["aggregate", "aggregate_slices", "check_kind", "check_replica_write", "check_scatter"]

_NONE, _FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA
_SUM, _MEAN = VariableAggregation.SUM, VariableAggregation.MEAN
_SCATTERS = {"add": (_SUM, _MEAN, _FIRST), "sub": (_SUM, _MEAN, _FIRST), "mul": (_SUM, _FIRST), "div": (_SUM, _FIRST)}


def check_kind(
    synchronization: VariableSynchronization, aggregation: VariableAggregation, trainable: bool | None, dtype: np.dtype
) -> tuple[VariableSynchronization, bool]:
    """Return the synchronisation that AUTO stands for, and whether the variable is trainable.

    Raises:
        ValueError: a combination that has no meaning.

    Example:
        >>> check_kind(VariableSynchronization.AUTO, VariableAggregation.NONE, None, np.dtype("f4"))
        (<VariableSynchronization.ON_WRITE: 2>, True)
    """
    for argument, value, kind in (
        ("synchronization", synchronization, VariableSynchronization),
        ("aggregation", aggregation, VariableAggregation),
    ):
        if not isinstance(value, kind):
            legal = f"a member of ms.{kind.__name__}"
            raise ValueError(explain("Variable", argument, expected=legal, got=repr(value)))
    if synchronization is VariableSynchronization.NONE:
        remedy = "Copies that nobody brings together are no variable of a strategy: use a plain array"
        text = explain("Variable", "synchronization", expected="AUTO, ON_WRITE or ON_READ", got="NONE", remedy=remedy)
        raise ValueError(text)
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    if aggregation is _MEAN and dtype.kind in "biu":
        text = explain("Variable", "aggregation", expected="a floating dtype for MEAN", got=str(dtype))
        raise ValueError(text)
    if aggregation is _SUM and dtype.kind == "b":
        raise ValueError(explain("Variable", "aggregation", expected="a dtype of numbers for SUM", got="bool"))
    on_read = synchronization is VariableSynchronization.ON_READ
    if on_read and trainable:
        text = explain("Variable", "trainable", expected="False for an ON_READ variable", got="True")
        raise ValueError(text)
    return synchronization, (not on_read if trainable is None else bool(trainable))


def check_replica_write(variable: Variable, function: str) -> None:
    """Do nothing if the variable may be written in replica context.

    Raises:
        ValueError: its aggregation is NONE: the replicas' copies would drift apart.
    """
    if variable.aggregation is _NONE:
        remedy = "Create the variable with aggregation=ms.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        expected, got = "an aggregation for a write in replica context", "NONE"
        raise ValueError(explain(function, variable.name, expected=expected, got=got, remedy=remedy))


def check_scatter(variable: Variable, op: str) -> None:
    """Do nothing if the scatter operation has a meaning in replica context.

    Raises:
        ValueError: the aggregation is NONE.
        NotImplementedError: it is one under which the operation has no meaning.
    """
    check_replica_write(variable, f"Variable.scatter_{op}")
    legal = _SCATTERS.get(op, (_FIRST,))
    if variable.aggregation not in legal:
        expected = f"aggregation {' or '.join(one.name for one in legal)} in replica context"
        text = explain(f"Variable.scatter_{op}", variable.name, expected=expected, got=variable.aggregation.name)
        raise NotImplementedError(text)


def aggregate(variable: Variable, values: Sequence[Any]) -> Any:
    """Return what the local replicas' values and all others' become. Collective.

    Args:
        variable: says how.
        values: one array for each local replica.

    Raises:
        ValueError: the aggregation is NONE.
    """
    ops = variable.placement.ops
    if variable.aggregation is _NONE:
        remedy = "Create the variable with another aggregation"
        expected, got = "an aggregation for a read in cross-replica context", "NONE"
        raise ValueError(explain("Variable", variable.name, expected=expected, got=got, remedy=remedy))
    if variable.aggregation is _FIRST:
        return _here(ops.broadcast(PerReplica(values), root=0))
    return _here(ops.reduce(ReduceOp[variable.aggregation.name], PerReplica(values)))


def aggregate_slices(variable: Variable, deltas: Sequence[IndexedSlices]) -> IndexedSlices:
    """Return the rows of all replicas in replica order; MEAN divides them. Collective."""
    how = ReduceOp.SUM
    if variable.aggregation is _MEAN:
        how = ReduceOp.MEAN
    elif variable.aggregation is _FIRST:
        first = variable.placement.group.topology.replica_offset
        deltas = [
            delta if first + local == 0 else IndexedSlices(delta.values[:0], delta.indices[:0])
            for local, delta in enumerate(deltas)
        ]
    return _here(variable.placement.ops.reduce(how, PerReplica(deltas)))


def _here(value: Any) -> Any:
    return value.values[0] if isinstance(value, DistributedValues) else value
