"""What the ON_WRITE variables share: how values that replicas write become the one that is stored."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import numpy as np

from ..types import IndexedSlices
from .aggregation import aggregate, aggregate_slices, check_replica_write, check_scatter
from .values import as_flat, one_value
from .variable import Variable

__all__ = ["OnWriteVariable"]


class OnWriteVariable(Variable):
    """A variable of one value: what replicas write is aggregated first, what is written outside of them is taken as it is."""

    __slots__ = ()

    @abstractmethod
    def _store(self, op: str, flat: Any, only: int | None = None, given: bool = False) -> None:
        """Write, add or subtract a value.

        Args:
            op: "assign", "assign_add" or "assign_sub".
            flat: of the variable's size and dtype.
            only: in update context the local replica whose copy is meant.
            given: whether the program gave it, so that ranks may differ; else it was aggregated.
        """

    @abstractmethod
    def _store_rows(
        self, op: str, depth: int, delta: IndexedSlices, only: int | None = None, given: bool = False
    ) -> None:
        """Apply updates to rows.

        Args:
            op: "update", "add", "sub", "mul", "div", "min" or "max".
            depth: how many dimensions number a row.
            delta: rows and their updates.
            only, given: as for `_store`.
        """

    def _update(self, op: str, value: Any) -> Variable:
        function = f"Variable.{op}"
        frame = self._frame(op)
        if frame.replica is None or not self.placement.distributed:
            flat = as_flat(one_value(value, function), self.shape, self.dtype, function)
            self._store(op, flat, frame.update_replica_id, given=True)
            return self
        check_replica_write(self, function)
        array = as_flat(value, self.shape, self.dtype, function).reshape(self.shape)
        frame.replica.merge_call(functools.partial(self._merge, op), args=(array,))
        return self

    def _merge(self, op: str, strategy: Any, value: Any) -> None:
        """Aggregate what the replicas wrote, and write it."""
        total = aggregate(self, self._per_replica(value))
        self._store(op, as_flat(total, self.shape, self.dtype, f"Variable.{op}"))

    def _scatter(self, op: str, depth: int, indices: np.ndarray, updates: np.ndarray) -> Variable:
        frame = self._frame(f"scatter_{op}")
        delta = IndexedSlices(updates, indices)
        if frame.replica is None or not self.placement.distributed:
            self._store_rows(op, depth, delta, frame.update_replica_id, given=True)
            return self
        check_scatter(self, op)
        frame.replica.merge_call(functools.partial(self._merge_rows, op, depth), args=(delta,))
        return self

    def _merge_rows(self, op: str, depth: int, strategy: Any, delta: Any) -> None:
        self._store_rows(op, depth, aggregate_slices(self, self._per_replica(delta)))
