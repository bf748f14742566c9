"""The ON_READ variable: each replica has a copy of its own; they become one value when read in cross-replica context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from .. import context
from ..errors import explain
from ..types import VariableAggregation
from .aggregation import aggregate
from .memory import move_like, read_only, zeros
from .values import as_flat, checksum, one_value
from .variable import Description, Variable

if TYPE_CHECKING:
    from .placement import Placement

__all__ = ["SyncOnReadVariable"]


@final
class SyncOnReadVariable(Variable):
    """A variable that each replica writes without talking to the others, such as a sum of losses or a counter.

    In replica and update context reading and writing concern the replica's own copy and are not collective. In
    cross-replica context they are: a read gives the copies' aggregate; `assign` writes the value to every copy, but under
    SUM each copy's share of it, so that the aggregate is what was written, for integers too; `assign_add` and
    `assign_sub` change every copy, and raise under SUM. Inside `variable_sync_on_read_context` a read in replica context
    gives the aggregate too, and every replica must take part in it.

    Attributes:
        copies: one array for each local replica; writable, for the package's own use.
    """

    __slots__ = ("copies",)

    def __init__(self, placement: Placement, description: Description) -> None:
        """Make zeroed copies."""
        self._hold(placement, description)
        on_gpu = placement.arenas.on_gpu
        count = placement.group.topology.num_local_replicas
        devices = placement.arenas.devices if on_gpu else ("cpu:0",) * count
        self.copies: list[Any] = [zeros(self.shape, self.dtype, device) for device in devices]

    @property
    def array(self) -> Any:
        """This replica's copy as a read-only view; in cross-replica context the aggregate of all. See the class."""
        frame = self._frame("array")
        index = self._local_index(frame)
        if index is None:
            return self._aggregate()
        if frame.replica is not None and context.in_sync_on_read_context():
            return frame.replica.merge_call(lambda strategy: self._aggregate())
        return read_only(self.copies[index])

    @property
    def values(self) -> tuple[Any, ...]:
        """The copy of each local replica, in replica order: read-only views."""
        self._require_open()
        return tuple(read_only(copy) for copy in self.copies)

    @property
    def num_copies(self) -> int:
        """Physical copies that this rank writes to: one for each local replica."""
        self._require_open()
        return len(self.copies)

    @property
    def closed(self) -> bool:
        """Whether the strategy was closed."""
        return not self.copies

    def close(self) -> None:
        """Let go of the memory; every later use raises ClosedError. The strategy calls it."""
        self.copies = []

    def gathered(self) -> np.ndarray:
        """See `Variable.gathered`. Where workers step alone, each has a value of its own: the first one's is returned.

        Collective.
        """
        value, world = self.numpy(), self.placement.world
        if world is not None:
            with world.collective("gathered", self.name, self.dtype, self.shape):
                world.broadcast(value, self.placement.first_worker)
        return value

    def _aggregate(self) -> Any:
        total = aggregate(self, self.copies)
        return total if self.placement.arenas.on_gpu else np.asarray(total)

    def _update(self, op: str, value: Any) -> Variable:
        function = f"Variable.{op}"
        index = self._local_index(self._frame(op))
        flat = as_flat(one_value(value, function), self.shape, self.dtype, function)
        if index is not None:
            self._change(index, op, flat)
            return self
        if op != "assign" and self.aggregation is VariableAggregation.SUM:
            remedy = "Call it in replica context, or use assign"
            expected, got = "another aggregation in cross-replica context", "SUM, which leaves open which copy is meant"
            raise ValueError(explain(function, self.name, expected=expected, got=got, remedy=remedy))
        topology = self.placement.group.topology
        detail = f"value #{checksum(flat):08x}" if topology.size > 1 else ()
        with self.placement.group.collective(op, self.name, self.dtype, self.shape, detail):
            for index in range(len(self.copies)):
                replica = topology.replica_offset + index
                share = flat if self.aggregation is not VariableAggregation.SUM else self._share(flat, replica)
                self._change(index, op, share)
        return self

    def _share(self, flat: Any, replica: int) -> Any:
        """Return what one of all replicas gets of a value, so that the copies' sum is the value."""
        replicas = self.placement.group.topology.num_replicas
        if self.dtype.kind in "iu":
            share, rest = np.divmod(flat, replicas)
            return share + (replica < rest)
        return (flat / replicas).astype(self.dtype)

    def _change(self, index: int, op: str, flat: Any) -> None:
        copy = self.copies[index]
        value = move_like(flat, copy).reshape(self.shape)
        if op == "assign":
            copy[...] = value
        elif op == "assign_add":
            copy += value
        else:
            copy -= value

    def _scatter(self, op: str, depth: int, indices: np.ndarray, updates: np.ndarray) -> NoReturn:
        expected, got = "an ON_WRITE variable", "ON_READ"
        text = explain(f"Variable.scatter_{op}", self.name, expected=expected, got=got)
        raise NotImplementedError(text)
