"""Creation of variables: the ranks compare them, allocate the memory, and copy global rank 0's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arena.layout import Receiver, part_of
from ..arena.values import check_name, initial_array, move_like, parse_dtype
from ..base.errors import explain
from ..base.partition import aligned_block, bounds
from ..base.types import VariableAggregation, VariableSynchronization
from ..comm.arrays import on_device_of
from ..comm.call import Call
from ..comm.process_group import ProcessGroup
from .kinds import MirroredVariable, SyncOnReadVariable, check_kind
from .placement import Description, Placement, Target
from .sharded import ShardedVariable
from .variable import Variable

__all__ = ["create_variable", "make_here"]

CHUNK = 16 << 20  # bytes of an initial value per message


def create_variable(
    placement: Placement,
    initial_value: Any = None,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    constraint: Callable[[Any], Any] | None = None,
    layout: Sequence[str | None] | None = None,
    per_worker_variable: bool = False,
    beside: Variable | None = None,
) -> Variable | ShardedVariable:
    """Return a new variable of a strategy. Collective over its ranks. Arguments and errors: see `Variable`.

    With `beside` it is placed with that variable of the strategy, and not cut into shards.
    """
    if name is not None:
        check_name("Variable", name)
    if constraint is not None and not callable(constraint):
        raise TypeError(explain("Variable", "constraint", expected="a function or None", got=repr(constraint)))
    parsed = None if dtype is None else parse_dtype(dtype)
    unique = placement.unique_name(name or "Variable")
    value, form = _initial_value(placement, initial_value, parsed, unique)
    _check_shape(form[0], shape)
    if per_worker_variable:
        from .per_worker import check_per_worker  # few programs need it

        check_per_worker(synchronization, aggregation, trainable)
        synchronization = VariableSynchronization.ON_READ
    synchronization, trainable = check_kind(synchronization, aggregation, trainable, form[1])
    near = None if beside is None else next(i for i, known in enumerate(placement.variables) if known is beside)
    on_read = synchronization is VariableSynchronization.ON_READ
    part = part_of(placement.grid, layout, form[0], unique, on_read, constraint is not None)

    def make(name: str, shape: tuple[int, ...], value: np.ndarray | None) -> Variable:
        index, own = len(placement.variables), shape if part is None else part.shape
        what = Description(
            index,
            name,
            own,
            form[1],
            trainable,
            synchronization,
            aggregation,
            constraint,
            near,
            part,
            bool(per_worker_variable),
        )
        variable = _make(placement, what, value)
        placement.variables.append(variable)
        return variable

    whole = on_read or near is not None
    shards = 1 if whole else _count_shards(placement, unique, form)
    if shards == 1:
        return make(unique, form[0], value)
    if constraint is not None:
        expected, got = "no constraint, which is a function of the whole array", f"a constraint and {shards} shards"
        remedy = "Let the partitioner leave this variable whole"
        raise ValueError(explain("Variable", f"{unique}: constraint", expected=expected, got=got, remedy=remedy))
    parts = []
    for index, (low, high) in enumerate(bounds(form[0][0], shards)):
        rows = None if value is None else value[low:high]
        parts.append(make(placement.unique_name(f"{unique}/part_{index}"), (high - low, *form[0][1:]), rows))
    return ShardedVariable.of(parts, unique)


def _count_shards(placement: Placement, name: str, form: tuple[tuple[int, ...], np.dtype]) -> int:
    shape, dtype = form
    if placement.partitioner is None or not shape:
        return 1
    from .partitioners import check_partitions

    return check_partitions(placement.partitioner(shape=shape, dtype=dtype), shape, name)


def _initial_value(
    placement: Placement, initial_value: Any, dtype: np.dtype | None, name: str
) -> tuple[np.ndarray | None, tuple[tuple[int, ...], np.dtype]]:
    """Return the value (None on ranks without it), its shape and its dtype. Collective."""
    if initial_value is None:
        raise ValueError(explain("Variable", "initial_value", expected="an array, number or callable", got="None"))
    if not callable(initial_value) or hasattr(initial_value, "__array__"):
        value = initial_array(initial_value, dtype)
        return value, (value.shape, value.dtype)
    group = placement.creators
    evaluates = group.topology.rank == 0
    result = initial_array(initial_value(), dtype) if evaluates else None
    with group.collective("initial_value", name):
        header = "" if result is None else f"{result.dtype.name} {' '.join(map(str, result.shape))}"
        found, *lengths = group.all_gather_text(header)[0].split()
    return result, (tuple(map(int, lengths)), parse_dtype(found))


def _check_shape(found: tuple[int, ...], wanted: Sequence[int | None] | None) -> None:
    if wanted is None:
        return
    wanted = tuple(wanted)
    if len(wanted) != len(found) or any(w is not None and w != f for w, f in zip(wanted, found, strict=True)):
        raise ValueError(explain("Variable", "shape", expected=f"the initial value's, {found}", got=wanted))


def _make(placement: Placement, what: Description, value: np.ndarray | None) -> Variable:
    group = placement.creators
    kind = "on GPUs" if placement.arenas.on_gpu else "on CPUs"
    layout = None if what.part is None else what.part.layout
    detail: tuple[Any, ...] = (
        what.index,
        what.trainable,
        what.synchronization.name,
        what.aggregation.name,
        kind,
        what.beside,
    )
    detail += () if layout is None else (layout,)
    detail += ("per worker",) if what.per_worker else ()
    with group.collective("Variable", what.name, what.dtype.name, what.shape, detail) as call:
        variable, targets = placement.make(placement, what)
        shared = group is placement.group and not placement.arenas.on_gpu  # an arena of the ranks of a node
        if isinstance(variable, MirroredVariable) and shared:
            _fill_arena(group, targets[0][0], value, call)
        else:
            _fill(group, targets, value, what)
        group.node.barrier(call)
    if group is not placement.group:  # ranks that step alone may read another node's values at once
        group.barrier(f"Variable {what.name!r}")
    return variable


def make_here(
    placement: Placement, what: Description, on_read: type[SyncOnReadVariable] = SyncOnReadVariable
) -> tuple[Variable, list[Target]]:
    """Return a new variable in the replicas' memory, and this rank's targets, see `Placement.make`."""
    if what.per_worker:
        from .per_worker import PerWorkerVariable

        own = PerWorkerVariable(placement, what)
        return own, [(own.storage().reshape(-1), 0, own.size)]
    if what.synchronization is VariableSynchronization.ON_READ:
        copied = on_read(placement, what)
        return copied, [(copy.reshape(-1), 0, copied.size) for copy in copied.copies]
    size = int(np.prod(what.shape, dtype=np.int64))
    has_gradients = what.trainable and what.dtype.kind not in "biu"
    arena, offset = placement.arenas.allocate(size, what.dtype, has_gradients, what.name)
    variable = MirroredVariable(placement, what, arena, offset)
    return variable, [(copy[offset : offset + size], *arena.writes(size)) for copy in arena.copies]


def _fill_arena(group: ProcessGroup, flat: np.ndarray, value: np.ndarray | None, call: Call) -> None:
    """Store global rank 0's numbers in an array that the ranks of a node share, once per node. Collective, inside a collective.

    Each owner of a slice receives it from its peer on the first node, so each node receives the value once.
    """
    if value is not None and group.topology.rank == 0:
        flat[:] = value.reshape(-1)
    if group.num_nodes == 1:
        return
    group.node.barrier(call)  # it is in the first node's memory
    if group.inter is not None and group.slice_index is not None:
        low, high = aligned_block(flat.size, group.slices, group.slice_index)
        from mpi4py import MPI

        words = flat.view(np.uint8)
        for start in range(low * flat.itemsize, high * flat.itemsize, CHUNK):
            stop = min(start + CHUNK, high * flat.itemsize)
            group.inter.Bcast([words[start:stop], MPI.BYTE], 0)


def _fill(group: ProcessGroup, targets: list[Target], value: np.ndarray | None, what: Description) -> None:
    """Store global rank 0's numbers in the range [low, high) of each target, in chunks. Collective, inside one."""
    flat = None if value is None else value.reshape(-1)
    size = what.box.whole_size
    step = max(1, CHUNK // what.dtype.itemsize) if group.topology.size > 1 else max(1, size)
    receivers = [what.box.receiver(_receiver(target)) for target in targets]
    for start in range(0, size, step):
        stop = min(start + step, size)
        if flat is not None and group.topology.rank == 0:
            chunk = np.ascontiguousarray(flat[start:stop])
        else:
            chunk = np.empty(stop - start, what.dtype)
        group.broadcast(chunk, root=0)
        for receiver in receivers:
            for low, high in receiver.ranges:
                begin, end = max(start, low), min(stop, high)
                if begin < end:
                    receiver.take(begin, chunk[begin - start : end - start])


def _receiver(target: Target) -> Receiver:
    array, low, high = target

    def take(start: int, flat: np.ndarray) -> None:
        with on_device_of(array):
            array[start : start + flat.size] = move_like(flat, array)

    return Receiver([(low, high)] if low < high else [], take)
