"""Variables in the values of a step or a collective, replaced by the replicas' values."""

from __future__ import annotations

from typing import Any

from ..base import nest
from ..base.distributed_values import Mirrored, PerReplica
from ..base.types import VariableSynchronization
from ..variables import SyncOnReadVariable, Variable

__all__ = ["copies_of_variables", "read_variables"]


def copies_of_variables(value: Any, replicas: int, alone: bool) -> Any:
    """Return a nest with each variable replaced by the local replicas' values.

    With one replica in total, an ON_WRITE variable is left as it is. `alone` is True for the default strategy.
    """
    if isinstance(value, SyncOnReadVariable) and value.led:
        return value.array
    if isinstance(value, Variable):
        if value.synchronization is VariableSynchronization.ON_READ and not alone:
            return PerReplica(value.values)
        return Mirrored(value.values) if replicas > 1 else value
    if nest.is_nested(value):
        return nest.map_structure(lambda leaf: copies_of_variables(leaf, replicas, alone), value)
    return value


def read_variables(value: Any) -> Any:
    """Return a nest with each variable replaced by this replica's value."""
    return nest.map_structure(lambda leaf: leaf.array if isinstance(leaf, Variable) else leaf, value)
