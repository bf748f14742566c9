"""`ms.types`: the closed vocabularies, such as ReduceOp."""

from .base.types import (
    CommunicationImplementation,
    IndexedSlices,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)

__all__ = [
    "CommunicationImplementation",
    "IndexedSlices",
    "ReduceOp",
    "VariableAggregation",
    "VariableSynchronization",
]
