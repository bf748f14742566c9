"""An arena: flat arrays in which variables of one dtype lie side by side, and their gradients at the same places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from .. import partition
from ..comm.process_group import ProcessGroup

__all__ = ["Arena", "Gradients"]

ALIGNMENT_BYTES = 64  # of each variable: a cache line, and what vector instructions like


@final
class Gradients:
    """The gradient arrays of an arena: what `cross_device.GradientArena` asks for.

    Attributes:
        local: one flat array for each replica of this rank.
        node: those of all replicas of the node, in replica order; None where the node shares no memory.
    """

    __slots__ = ("_arena", "local", "node")

    def __init__(self, arena: Arena, local: Sequence[Any], node: Sequence[np.ndarray] | None) -> None:
        self._arena = arena
        self.local: list[Any] = list(local)
        self.node = None if node is None else list(node)

    @property
    def dtype(self) -> np.dtype:
        return self._arena.dtype

    @property
    def size(self) -> int:
        return self._arena.size

    @property
    def key(self) -> str:
        return self._arena.key

    def owned(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the part of element ranges that this rank reduces and updates."""
        return self._arena.owned(ranges)


@final
class Arena:
    """One slab of variables. `ArenaAllocator` makes it, equal on every rank.

    On CPUs `copies` holds one flat array, which all ranks of the node share where they can; on GPUs it holds one for each
    local device, this rank's own.

    Attributes:
        key: name of the arena, equal on every rank.
        dtype, size: of the flat arrays; size in elements.
        used: elements given to variables so far.
        copies: the physical copies of the variables that this rank writes to; writable, for the package's own use.
        gradients: the gradient arrays, None where nothing is trained.
    """

    def __init__(
        self, group: ProcessGroup, key: str, copies: Sequence[Any], shared: bool, central: bool = False
    ) -> None:
        """Wrap flat arrays that exist.

        Args:
            group: the strategy's ranks.
            key: name, equal on every rank.
            copies: flat arrays of one dtype and size.
            shared: whether the ranks of the node hold the same memory, so that each writes its part of it only.
            central: whether then the first of them writes all of it.
        """
        self.group = group
        self.key = key
        self.copies = list(copies)
        self.dtype: np.dtype = self.copies[0].dtype
        self.size: int = self.copies[0].size
        self.used = 0
        self.gradients: Gradients | None = None
        self._writer: tuple[int | None, int] = (group.node.rank, group.node.size) if shared else (0, 1)
        self._slice = (group.slice_index, group.slices) if shared or group.node.size == 1 else (0, 1)
        if shared and central:
            self._writer = self._slice = (0 if group.node.rank == 0 else None, 1)
        self._bounds: list[tuple[int, int]] | None = None

    @property
    def values(self) -> Any:
        """The first copy: on CPUs the only one."""
        return self.copies[0]

    def take(self, size: int) -> int | None:
        """Return the offset of `size` free elements and mark them used; None when they do not fit.

        Nothing is given after `bounds` was asked for: the slices are fixed then.
        """
        unit = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        offset = -(-self.used // unit) * unit
        if self._bounds is not None or offset + size > self.size:
            return None
        self.used = offset + size
        return offset

    def bounds(self) -> list[tuple[int, int]]:
        """Return the element range of each slice owner; fixed at the first call. All ranks call it.

        The variables that exist then are divided evenly. Later ones go to another arena.
        """
        if self._bounds is None:
            self._bounds = partition.aligned_bounds(self.used, self._slice[1])
        return self._bounds

    def owned(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the part of element ranges inside this rank's slice; fixes the slices. All ranks call it.

        Args:
            ranges: half-open element ranges.

        Returns:
            Those parts that are not empty, in the given order.
        """
        bounds = self.bounds()
        if self._slice[0] is None:
            return []
        low, high = bounds[self._slice[0]]
        parts = ((max(low, start), min(high, stop)) for start, stop in ranges)
        return [(start, stop) for start, stop in parts if start < stop]

    def writes(self, length: int, alignment: int = partition.ALIGNMENT) -> tuple[int, int]:
        """Return which part of `length` things this rank writes when all ranks write them together."""
        rank, size = self._writer
        if rank is None:
            return 0, 0
        return partition.aligned_bounds(length, size, alignment)[rank] if size > 1 else (0, length)
