"""Which replicas each worker has, and the arithmetic of batches that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._util import nest, partition
from ...errors import explain

__all__ = ["Workers", "cut"]


@dataclass(frozen=True)
class Workers:
    """The workers that read a dataset, which are the ranks of a strategy.

    Args:
        replicas: how many replicas each worker has, at least 1.
        index: which worker this is.

    Attributes:
        num_replicas: replicas of all workers.
        replica_offset: the number of this worker's first replica.

    Raises:
        ValueError: for impossible numbers.

    Example:
        >>> Workers([2, 1], index=1).blocks(7)
        [(5, 7)]
    """

    replicas: Sequence[int] = (1,)
    index: int = 0
    num_replicas: int = field(init=False)
    replica_offset: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(self.replicas))
        if not self.replicas or min(self.replicas) < 1:
            expected = "at least one worker, each with at least one replica"
            raise ValueError(explain("Workers", "replicas", expected=expected, got=self.replicas))
        if not 0 <= self.index < len(self.replicas):
            expected = f"0 <= index < {len(self.replicas)}"
            raise ValueError(explain("Workers", "index", expected=expected, got=self.index))
        object.__setattr__(self, "num_replicas", sum(self.replicas))
        object.__setattr__(self, "replica_offset", sum(self.replicas[: self.index]))

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self.replicas)

    @property
    def num_local_replicas(self) -> int:
        """Replicas of this worker."""
        return self.replicas[self.index]

    def blocks(self, rows: int) -> list[tuple[int, int]]:
        """Return this worker's replicas' ranges of the rows of a global batch."""
        first = self.replica_offset
        return [partition.block(rows, self.num_replicas, r) for r in range(first, first + self.num_local_replicas)]

    def shares(self, global_batch_size: int) -> list[int]:
        """Return how many rows of a whole global batch each worker gets.

        Example:
            >>> Workers([2, 2]).shares(7)
            [4, 3]
        """
        replicas = iter(partition.bounds(global_batch_size, self.num_replicas))
        return [sum(high - low for low, high in (next(replicas) for _ in range(n))) for n in self.replicas]

    def split(self, rows: Any, count: int) -> list[Any]:
        """Return what each local replica gets of this worker's own rows, as views."""
        if self.num_local_replicas == 1:
            return [rows]
        return cut(rows, partition.bounds(count, self.num_local_replicas))


def cut(rows: Any, ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """Return ranges of stacked rows, as views."""
    return [nest.map_structure(lambda leaf, low=low, high=high: leaf[low:high], rows) for low, high in ranges]
