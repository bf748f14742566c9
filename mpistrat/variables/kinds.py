"""The kinds of variables: mirrored, with copies that are equal after every write, and on-read, with a copy for each replica.

Values that replicas write, and on-read copies, are reduced by the variable's aggregation. The functions for that, and the
checks of legal combinations, are at the end.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ..arena.arena import Arena
from ..arena.layout import Receiver
from ..arena.values import as_flat, checksum, move_like, one_value, read_only, zeros
from ..base import context
from ..base.distributed_values import DistributedValues, PerReplica
from ..base.errors import ContextError, explain
from ..base.types import IndexedSlices, ReduceOp, VariableAggregation, VariableSynchronization
from ..comm.arrays import on_device_of, to_host
from .placement import Description, Placement
from .scatter import scatter
from .variable import Variable

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = [
    "MirroredVariable",
    "OnWriteVariable",
    "SyncOnReadVariable",
    "apply_constraint",
    "check_kind",
    "make_trainable",
    "receiver_of",
]

_IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {"assign_add": np.add, "assign_sub": np.subtract}


class OnWriteVariable(Variable):
    """A variable with one value: replicas' writes are aggregated first, other writes are stored as they are."""

    __slots__ = ()

    @abstractmethod
    def _store(self, op: str, flat: Any, only: int | None = None, given: bool = False) -> None:
        """Write, add or subtract a value: "assign", "assign_add" or "assign_sub".

        Args:
            only: in update context the local replica whose copy is written.
            given: whether the program passed it, so ranks may differ; else it was aggregated.
        """

    @abstractmethod
    def _store_rows(
        self, op: str, depth: int, delta: IndexedSlices, only: int | None = None, given: bool = False
    ) -> None:
        """Apply updates to rows of the first `depth` dimensions: "update", "add", "sub", "mul", "div", "min" or "max"."""

    def _update(self, op: str, value: Any) -> Self:
        function = f"Variable.{op}"
        self._require_alike(function)
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
        total = aggregate(self, self._per_replica(value))
        self._store(op, as_flat(total, self.shape, self.dtype, f"Variable.{op}"))

    def _scatter(self, op: str, depth: int, indices: np.ndarray, updates: np.ndarray) -> Self:
        self._require_alike(f"Variable.scatter_{op}")
        frame = self._frame(f"scatter_{op}")
        delta = IndexedSlices(updates, indices)
        if frame.replica is None or not self.placement.distributed:
            self._store_rows(op, depth, delta, frame.update_replica_id, given=True)
            return self
        check_scatter(self, op)
        frame.replica.merge_call(functools.partial(self._merge_rows, op, depth), args=(delta,))
        return self

    def _require_alike(self, function: str) -> None:
        """Raise ContextError if nodes have updated it separately: the outer step would undo part of a write."""
        if self in self.placement.apart:
            expected, got = "nodes with the same value", "local steps since the last outer step"
            remedy = "Call strategy.outer_step() before, or write while strategy.nodes_differ is false"
            raise ContextError(explain(function, self.name, expected=expected, got=got, remedy=remedy))

    def _merge_rows(self, op: str, depth: int, strategy: Any, delta: Any) -> None:
        self._store_rows(op, depth, aggregate_slices(self, self._per_replica(delta)))


@final
class MirroredVariable(OnWriteVariable):
    """A variable whose copies are equal after every write, because every write is collective.

    It is a shaped view of its arena. A write: every rank has the value, node barrier, each rank stores its part, node barrier.

    Attributes:
        arena, offset: its arena and first element there.
    """

    __slots__ = ("_gradients", "_views")

    def __init__(self, placement: Placement, description: Description, arena: Arena, offset: int) -> None:
        """Create views of elements of an arena."""
        self._hold(placement, description)
        self.arena: Arena = arena
        self.offset = offset
        where = slice(offset, offset + self.size)
        self._views: tuple[Any, ...] = tuple(read_only(copy[where].reshape(self.shape)) for copy in arena.copies)
        self._gradients: Any = ()
        if description.trainable:
            self._show_gradients()

    def _show_gradients(self) -> None:
        gradients, where = self.arena.gradients, slice(self.offset, self.offset + self.size)
        if gradients is not None and not gradients.local:
            from .own_gradients import OwnGradients

            self._gradients = OwnGradients(self.name, self.shape, self.dtype, len(self.placement.devices))
        elif gradients is not None:
            self._gradients = tuple(flat[where].reshape(self.shape) for flat in gradients.local)

    def _train(self) -> None:
        self._description = replace(self._description, trainable=True)
        self._show_gradients()

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
        self._require_open()
        if len(self._views) > 1:
            return self._views
        return self._views * self.placement.group.topology.num_local_replicas

    @property
    def num_copies(self) -> int:
        """The number of physical copies that this rank writes: 1, on GPUs one for each device."""
        self._require_open()
        return len(self._views)

    @property
    def closed(self) -> bool:
        return not self._views

    def _close(self) -> None:
        self._views = self._gradients = ()

    def storage(self, local_replica: int = 0) -> Any:
        self._require_open()
        copies = self.arena.copies
        copy = copies[local_replica if len(copies) > 1 else 0]
        return copy[self.offset : self.offset + self.size].reshape(self.shape)

    def gradient(self, local_replica: int) -> Any:
        if self._gradients:
            return self._gradients[local_replica]
        return super().gradient(local_replica)

    def _value_for_file(self) -> np.ndarray:
        """See `value_for_file`; a divided variable is returned on every rank."""
        value = self.numpy()
        return value if self.part is None else self.part.whole(value)

    def _compared(self, *arrays: Any) -> Hashable:
        """Return a checksum as text, so that ranks with different values are detected."""
        return f"value #{checksum(*arrays):08x}" if self.placement.group.topology.size > 1 else ()

    def _store(self, op: str, flat: Any, only: int | None = None, given: bool = False) -> None:
        """Write a value that every rank has to all copies, or in update context to one. Collective."""
        detail = self._compared(flat) if given else ()

        def write(copy: Any) -> None:
            low, high = self.arena.writes(self.size)
            target = copy[self.offset + low : self.offset + high]
            part = move_like(flat[low:high], target)
            if op in _IN_PLACE:
                _IN_PLACE[op](target, part, out=target)  # type: ignore[call-arg]
            else:
                target[...] = part

        if op not in _IN_PLACE:
            self.arena.clear_stored(self.offset, self.offset + self.size, flat if op == "constraint" else None)
        self._write(op, detail, write, only)

    def _write(self, op: str, detail: Hashable, write: Callable[[Any], None], only: int | None) -> None:
        """Call `write` on every rank between two barriers: all have arrived, all have written. Collective."""
        group = self.placement.group
        with group.collective(op, self.name, self.dtype, self.shape, detail) as call:
            for index, copy in enumerate(self.arena.copies):
                if only is None or only == index or len(self.arena.copies) == 1:
                    with on_device_of(copy):
                        write(copy)
            group.node.barrier(call)

    # rows

    def _store_rows(
        self, op: str, depth: int, delta: IndexedSlices, only: int | None = None, given: bool = False
    ) -> None:
        """Apply updates, which every rank has, to the rows that this rank writes. Collective."""
        detail = self._compared(delta.indices, delta.values.reshape(-1)) if given else ()
        count = int(np.prod(self.shape[:depth], dtype=np.int64))
        width = int(np.prod(self.shape[depth:], dtype=np.int64))

        if op == "update":
            self.arena.clear_stored(self.offset, self.offset + self.size)

        def write(copy: Any) -> None:
            low, high = self.arena.writes(count, 1)
            start = self.offset + low * width
            rows = copy[start : start + (high - low) * width].reshape(high - low, width)
            host = to_host(rows)  # the rows themselves on a CPU
            scatter(op, host, low, delta.indices, delta.values)
            if host is not rows:
                rows[...] = move_like(host, rows)

        self._write(f"scatter_{op}", detail, write, only)


def apply_constraint(variable: Variable, compare: bool = False) -> None:
    """Apply the constraint of a variable, if it has one; for optimizers. Collective.

    Args:
        variable: a variable in an arena; any other is not changed.
        compare: whether the ranks compare the results of their constraints.

    Raises:
        CollectiveMismatchError: they differ.
    """
    if isinstance(variable, MirroredVariable) and variable.constraint is not None:
        value = variable.constraint(variable.array)
        flat = as_flat(value, variable.shape, variable.dtype, "Variable.constraint")
        variable._store("constraint", flat, given=compare)


def receiver_of(variable: Variable) -> Receiver:
    """Return this rank's receiver of a value from a file; of a variable in an arena, for the elements that this rank writes."""
    if not isinstance(variable, MirroredVariable):
        value = np.empty(variable.shape, variable.dtype)
        return Receiver.whole(value, lambda: variable.load(value))
    arena, offset = variable.arena, variable.offset
    low, high = arena.writes(variable.size)
    arena.clear_stored(offset, offset + variable.size)

    def take(start: int, part: np.ndarray) -> None:
        first = offset + start
        for copy in arena.copies:
            target = copy[first : first + part.size]
            target[...] = move_like(part, target)

    return Receiver([(low, high)] if low < high else [], take)


def make_trainable(variable: MirroredVariable) -> None:
    """Allocate gradients for a variable made with trainable=False; optimizers update it from then on. Collective.

    Raises:
        CollectiveMismatchError: on every rank: other ranks do not.
        SharedMemoryError: on every rank: the shared memory of a node is too small.
    """
    placement, group = variable.placement, variable.placement.creators
    with group.collective("Variable.trainable", variable.name, variable.dtype.name, variable.shape):
        placement.arenas.add_gradients(variable.arena, variable.offset, variable.size, variable.name)
    variable._train()


class SyncOnReadVariable(Variable):
    """A variable that each replica writes without communication, such as a sum of losses or a counter.

    In replica and update context reading and writing use the replica's own copy and are local. In cross-replica context they
    are collective: a read returns the copies' aggregate; `assign` writes every copy, under SUM a share of the value to each, so
    that the aggregate is the value, for integers too; `assign_add` and `assign_sub` change every copy, and raise under SUM.
    Inside `variable_sync_on_read_context` a read in replica context returns the aggregate too, and every replica must take
    part.

    Attributes:
        copies: one array for each local replica; writable, for the package's own use.
    """

    __slots__ = ("copies",)

    def __init__(self, placement: Placement, description: Description) -> None:
        """Create zeroed copies."""
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
            return self._of_all()
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
        """The number of physical copies that this rank writes: one for each local replica."""
        self._require_open()
        return len(self.copies)

    @property
    def closed(self) -> bool:
        return not self.copies

    def _close(self) -> None:
        self.copies = []

    def storage(self, local_replica: int = 0) -> Any:
        """Return a local replica's own copy, writable; see `Variable.storage`. No rank shares it."""
        self._require_open()
        return self.copies[local_replica]

    def _value_for_file(self) -> np.ndarray:
        """Return the value for files, see `value_for_file`. Collective."""
        return np.array(to_host(self._aggregate()))

    def load(self, value: np.ndarray) -> None:
        """Write a value, see `Variable.load`."""
        self.write_copies("assign", value)

    @property
    def led(self) -> bool:
        """True if a coordinator runs on this rank: the other workers, which have the copies, act on its requests."""
        return False

    def _of_all(self) -> Any:
        """Return the value in cross-replica context. Collective."""
        return self._aggregate()

    def _assign_all(self, op: str, flat: Any) -> None:
        """Write in cross-replica context. Collective."""
        self.write_copies(op, flat)

    def _aggregate(self) -> Any:
        total = aggregate(self, self.copies)
        return total if self.placement.arenas.on_gpu else np.asarray(total)

    def _update(self, op: str, value: Any) -> Self:
        function = f"Variable.{op}"
        index = self._local_index(self._frame(op))
        flat = as_flat(one_value(value, function), self.shape, self.dtype, function)
        if index is not None:
            self._change(index, op, flat)
            return self
        if op != "assign" and self.aggregation is VariableAggregation.SUM:
            remedy = "Call it in replica context, or use assign"
            expected, got = "another aggregation in cross-replica context", "SUM, for which the copy is ambiguous"
            raise ValueError(explain(function, self.name, expected=expected, got=got, remedy=remedy))
        self._assign_all(op, flat)
        return self

    def write_copies(self, op: str, value: Any) -> None:
        """Change the copies of replicas that step together: "assign", "assign_add" or "assign_sub". Collective over them."""
        topology, flat = self.placement.group.topology, value.reshape(-1)
        detail = f"value #{checksum(flat):08x}" if topology.size > 1 else ()
        with self.placement.group.collective(op, self.name, self.dtype, self.shape, detail):
            for index in range(len(self.copies)):
                replica = topology.replica_offset + index
                share = flat if self.aggregation is not VariableAggregation.SUM else self._share(flat, replica)
                self._change(index, op, share)

    def _share(self, flat: Any, replica: int) -> Any:
        """Return the share of a value for one of all replicas, so that the copies add up to the value."""
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


# Aggregation

_NONE, _FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA
_SUM, _MEAN = VariableAggregation.SUM, VariableAggregation.MEAN
_SCATTERS = {"add": (_SUM, _MEAN, _FIRST), "sub": (_SUM, _MEAN, _FIRST), "mul": (_SUM, _FIRST), "div": (_SUM, _FIRST)}


def check_kind(
    synchronization: VariableSynchronization, aggregation: VariableAggregation, trainable: bool | None, dtype: np.dtype
) -> tuple[VariableSynchronization, bool]:
    """Return the synchronization that AUTO stands for, and whether the variable is trainable.

    Raises:
        ValueError: an illegal combination.

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
        remedy = "Use a plain array for copies that are never combined"
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
    """Raise ValueError if the aggregation is NONE: writes in replica context would make the copies differ."""
    if variable.aggregation is _NONE:
        remedy = "Create the variable with aggregation=ms.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        expected, got = "an aggregation for a write in replica context", "NONE"
        raise ValueError(explain(function, variable.name, expected=expected, got=got, remedy=remedy))


def check_scatter(variable: Variable, op: str) -> None:
    """Raise an error unless the scatter operation is legal in replica context.

    Raises:
        ValueError: the aggregation is NONE.
        NotImplementedError: the operation is undefined under the aggregation.
    """
    check_replica_write(variable, f"Variable.scatter_{op}")
    legal = _SCATTERS.get(op, (_FIRST,))
    if variable.aggregation not in legal:
        expected = f"aggregation {' or '.join(one.name for one in legal)} in replica context"
        text = explain(f"Variable.scatter_{op}", variable.name, expected=expected, got=variable.aggregation.name)
        raise NotImplementedError(text)


def aggregate(variable: Variable, values: Sequence[Any]) -> Any:
    """Return the aggregate of all replicas' values; this rank passes one for each local replica. Collective.

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
