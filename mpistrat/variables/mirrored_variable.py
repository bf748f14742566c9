"""The ON_WRITE variable: one copy for all ranks of a node, equal on all nodes after every write."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..comm.arrays import to_host
from ..types import IndexedSlices
from .arena import Arena
from .memory import move_like, read_only
from .on_write_variable import OnWriteVariable
from .scatter import scatter
from .values import as_flat, checksum
from .variable import Description

if TYPE_CHECKING:
    from .placement import Placement

__all__ = ["MirroredVariable"]

_IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {"assign_add": np.add, "assign_sub": np.subtract}


@final
class MirroredVariable(OnWriteVariable):
    """A variable whose copies are equal after every write, because every write is collective.

    It is a shaped view of its arena. A write is: the value is there on every rank, barrier of the node, each rank stores
    its part, barrier of the node.

    Attributes:
        arena, offset: where it lies; `offset` in elements.
    """

    __slots__ = ("_gradients", "_views")

    def __init__(self, placement: Placement, description: Description, arena: Arena, offset: int) -> None:
        """Make the views of a place in an arena."""
        self._hold(placement, description)
        self.arena: Arena = arena
        self.offset = offset
        place = slice(offset, offset + self.size)
        self._views: tuple[Any, ...] = tuple(read_only(copy[place].reshape(self.shape)) for copy in arena.copies)
        local = arena.gradients.local if arena.gradients else []
        self._gradients: tuple[Any, ...] = tuple(flat[place].reshape(self.shape) for flat in local)

    @property
    def array(self) -> Any:
        """The numbers as a read-only view, of the copy on this replica's device."""
        views = self._views
        if len(views) == 1:
            return views[0]
        self._require_open()
        return views[self._replica_or_first()]

    @property
    def values(self) -> tuple[Any, ...]:
        """What each local replica reads, in replica order: read-only views."""
        self._require_open()
        if len(self._views) > 1:
            return self._views
        return self._views * self.placement.group.topology.num_local_replicas

    @property
    def num_copies(self) -> int:
        """Physical copies that this rank writes to: 1, on GPUs one for each device."""
        self._require_open()
        return len(self._views)

    @property
    def closed(self) -> bool:
        """Whether the strategy was closed."""
        return not self._views

    def close(self) -> None:
        """Let go of the memory; every later use raises ClosedError. The strategy calls it."""
        self._views = self._gradients = ()

    def gradient(self, local_replica: int) -> Any:
        """Return the gradient array of one local replica, writable.

        Raises:
            ValueError: the variable has no gradients.
        """
        if self._gradients:
            return self._gradients[local_replica]
        return super().gradient(local_replica)

    def apply_constraint(self, compare: bool = False) -> None:
        """Replace the value by what the constraint makes of it, if there is one; optimizers call it. Collective.

        Args:
            compare: whether the ranks compare what their constraints made of it.

        Raises:
            CollectiveMismatchError: they differ.
        """
        if self.constraint is not None:
            value = self.constraint(self.array)
            flat = as_flat(value, self.shape, self.dtype, "Variable.constraint")
            self._store("constraint", flat, given=compare)

    def _compared(self, *arrays: Any) -> Hashable:
        """Return what tells one value from another, so that ranks with different ones are found."""
        return f"value #{checksum(*arrays):08x}" if self.placement.group.topology.size > 1 else ()

    def _store(self, op: str, flat: Any, only: int | None = None, given: bool = False) -> None:
        """Write a value that every rank has, to all copies or, in update context, to the one meant. Collective."""
        detail = self._compared(flat) if given else ()

        def write(copy: Any) -> None:
            low, high = self.arena.writes(self.size)
            target = copy[self.offset + low : self.offset + high]
            part = move_like(flat[low:high], target)
            if op in _IN_PLACE:
                _IN_PLACE[op](target, part, out=target)  # type: ignore[call-arg]
            else:
                target[...] = part

        self._write(op, detail, write, only)

    def _write(self, op: str, detail: Hashable, write: Callable[[Any], None], only: int | None) -> None:
        """Let every rank write its part: nobody before all have come, nobody leaves before all have written. Collective."""
        group = self.placement.group
        with group.collective(op, self.name, self.dtype, self.shape, detail) as call:
            for index, copy in enumerate(self.arena.copies):
                if only is None or only == index or len(self.arena.copies) == 1:
                    write(copy)
            group.node.barrier(call)

    # rows

    def _store_rows(
        self, op: str, depth: int, delta: IndexedSlices, only: int | None = None, given: bool = False
    ) -> None:
        """Apply updates that every rank has to the rows that this rank writes. Collective."""
        detail = self._compared(delta.indices, delta.values.reshape(-1)) if given else ()
        count = int(np.prod(self.shape[:depth], dtype=np.int64))
        width = int(np.prod(self.shape[depth:], dtype=np.int64))

        def write(copy: Any) -> None:
            low, high = self.arena.writes(count, 1)
            start = self.offset + low * width
            rows = copy[start : start + (high - low) * width].reshape(high - low, width)
            host = to_host(rows)  # the rows themselves on a CPU
            scatter(op, host, low, delta.indices, delta.values)
            if host is not rows:
                rows[...] = move_like(host, rows)

        self._write(f"scatter_{op}", detail, write, only)
