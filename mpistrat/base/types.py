"""The package's enums: reduction of values, synchronization and aggregation of variables, qualities of strategies."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from .masks import plain_array

__all__ = [
    "CommunicationImplementation",
    "IndexedSlices",
    "Quality",
    "ReduceOp",
    "VariableAggregation",
    "VariableSynchronization",
]


class Quality(enum.Enum):
    """A property that features may need of a strategy. What takes it away says so in `Placement.lacking`."""

    COMMON_STEPS = "ranks that take each step together"
    EQUAL_NODES = "nodes that step together"
    KEPT_GRADIENTS = "gradients that are kept until the step"
    OWN_VARIABLES = "variables that its ranks store and update"
    WHOLE_REPLICAS = "whole replicas on each rank"

    __hash__ = object.__hash__


class ReduceOp(enum.Enum):
    """The reduction of several replicas' values to one (TF: tf.distribute.ReduceOp, which has SUM and MEAN only).

    MIN, MAX and PROD accept integers and real floating-point numbers. As in np.minimum and np.maximum, one NaN makes the result
    NaN. PROD of integers wraps around like SUM.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a slow Python function

    @classmethod
    def parse(cls, value: ReduceOp | str, function: str = "reduce") -> ReduceOp:
        """Return the ReduceOp of a member or its name (in any case).

        Raises:
            ValueError: for anything else, a VariableAggregation included.

        Example:
            >>> ReduceOp.parse("sum")
            <ReduceOp.SUM: 'SUM'>
        """
        if type(value) is cls:
            return value
        known = _REDUCTIONS.get(value.upper()) if isinstance(value, str) else None
        if known is not None:
            return known
        names = ", ".join(cls.__members__)
        raise ValueError(f"{function}: reduce_op: expected a ReduceOp or its name ({names}), got {value!r}")


_REDUCTIONS = dict(ReduceOp.__members__)


class VariableSynchronization(enum.Enum):
    """The time at which the copies of a variable are combined (TF: tf.VariableSynchronization)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """The aggregation of the replicas' values of one write (TF: tf.VariableAggregation)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class CommunicationImplementation(enum.Enum):
    """The algorithm of a reduction; with AUTO the chooser's measured table decides. RING is TensorFlow's name for MPI."""

    AUTO = "AUTO"
    MPI = "MPI"
    RING = "MPI"  # noqa: PIE796 (another name of the same)
    HIERARCHICAL = "HIERARCHICAL"
    NCCL = "NCCL"


@dataclass(frozen=True)
class IndexedSlices:
    """Rows of a larger array: `dense[indices[k]] += values[k]`, zero elsewhere (TF: tf.IndexedSlices).

    Args:
        values: array of shape (k, ...).
        indices: integer array of shape (k,); duplicates add up.
        dense_shape: shape of the array that the rows belong to, or None if unknown.
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def to_dense(self) -> np.ndarray:
        """Return the dense array; rows of equal index are summed.

        Raises:
            ValueError: dense_shape is unknown.

        Example:
            >>> slices = IndexedSlices(np.ones((2, 1)), np.array([2, 2]), (3, 1))
            >>> slices.to_dense().ravel().tolist()
            [0.0, 0.0, 2.0]
        """
        if self.dense_shape is None:
            raise ValueError("IndexedSlices.to_dense: dense_shape: expected a shape, got None")
        values = plain_array(self.values, "IndexedSlices.to_dense", "values")
        dense = np.zeros(self.dense_shape, values.dtype)
        np.add.at(dense, plain_array(self.indices, "IndexedSlices.to_dense", "indices"), values)
        return dense
