"""Batches changed to another size, or to a cycle of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from ...base.arguments import integer
from ...base.errors import explain
from ..buffers import RowBuffers
from ..spec import stack_rows
from .batch import Batched, Unbatched, require_one_shape
from .node import Addresses, Batching, Node
from .stage import Stage

__all__ = ["CycledBatches", "rebatch"]

FUNCTION = "Dataset.rebatch"


@final
class CycledBatches(Stage):
    """Batches of successive rows, whose sizes repeat in a cycle."""

    def __init__(self, parent: Node, sizes: Sequence[int], drop_remainder: bool) -> None:
        super().__init__(parent, sizes, drop_remainder)
        self._sizes, self._drop_remainder = sizes, drop_remainder
        self._ends = np.cumsum(sizes).tolist()  # ends of the batches of one cycle
        self._buffers = RowBuffers()

    @property
    def batching(self) -> Batching:
        return Batching(max(self._sizes), drop_remainder=False)

    @property
    def row_spec(self) -> Any:
        spec = self._parent.row_spec
        require_one_shape(FUNCTION, spec)
        return spec

    @property
    def prefetch_depth(self) -> int | None:
        rows = self._parent.prefetch_depth
        return None if rows is None else -(-rows // max(self._sizes))

    def length_over(self, below: int) -> int:
        if below < 0:
            return below
        rounds, rest = divmod(below, self._ends[-1])
        whole = sum(end <= rest for end in self._ends)
        more = not self._drop_remainder and rest > (self._ends[whole - 1] if whole else 0)
        return rounds * len(self._sizes) + whole + more

    def _first(self, position: int) -> int:
        rounds, place = divmod(position, len(self._sizes))
        return rounds * self._ends[-1] + (self._ends[place - 1] if place else 0)

    def locate(self, epoch: int, position: int) -> Addresses:
        rows, stop = self._parent.cardinality(), self._first(position + 1)
        positions = np.arange(self._first(position), stop if rows < 0 else min(stop, rows), dtype=np.int64)
        return np.full(positions.size, epoch, np.int64), positions

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        rows = self._parent.elements(epoch, self._first(start))
        for position in itertools.count(start):
            size = self._sizes[position % len(self._sizes)]
            batch = list(itertools.islice(rows, size))
            if not batch or (self._drop_remainder and len(batch) < size):
                return
            yield stack_rows(batch, self.row_spec, self._buffers)

    def describe(self) -> str:
        return f"rebatch({list(self._sizes)}, drop_remainder={self._drop_remainder})"


def rebatch(parent: Node, global_batch_size: int | Sequence[int], drop_remainder: bool = False) -> Node:
    """Combine the rows of batches into batches of another size, like `unbatch` and `batch`.

    Directly after `batch` random access remains; else rows are read in order.

    Args:
        global_batch_size: rows in a batch, or a list of sizes used in turn; the last batch may have fewer.
        drop_remainder: drop a smaller last batch.

    Raises:
        ValueError: for a size below 1, and for an empty list.

    Example:
        >>> batches = ms.data.Dataset.range(8).batch(4)
        >>> [batch.tolist() for batch in batches.rebatch([2, 1, 1])]
        [[0, 1], [2], [3], [4, 5], [6], [7]]
    """
    given: Any = global_batch_size
    if isinstance(given, np.ndarray):
        given = np.atleast_1d(given).tolist()
    elif not isinstance(given, Sequence) or isinstance(given, str):
        given = [given]
    sizes = [integer(FUNCTION, "global_batch_size", size, 1) for size in given]
    if not sizes:
        raise ValueError(explain(FUNCTION, "global_batch_size", expected="at least one size", got="none"))
    rows = Unbatched(parent)
    if len(sizes) == 1:
        return Batched(rows, Batching(sizes[0], bool(drop_remainder)))
    return CycledBatches(rows, sizes, bool(drop_remainder))
