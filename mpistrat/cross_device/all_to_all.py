"""What each replica sends every other one a part of: reduce_scatter and all_to_all, of all leaves of a nest in one exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arena.arithmetic import Arithmetic, arithmetic, combine, finish
from ..base.agree import together
from ..base.buffers import BufferPool
from ..base.distributed_values import PerReplica
from ..base.errors import CollectiveMismatchError, explain
from ..base.options import CommunicationOptions
from ..base.partition import bounds
from ..base.types import ReduceOp
from ..cluster.topology import Topology
from ..comm.arrays import as_array, check_movable, dtype_name, to_host
from ..comm.call import Call
from ..comm.exchange import all_to_all as equal_parts
from ..comm.exchange import exchange
from ..comm.packing import Forms, forms_of, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup
from .values import Leaves, beside, check_out, counted_axis, local_arrays, local_values

__all__ = ["all_to_all", "between", "check_divided", "checked_axis", "reduce_scatter"]

_FAILED = -1  # in place of a number of bytes
_POOL = BufferPool(kept=2)


def reduce_scatter(
    group: ProcessGroup,
    values: Leaves,
    op: ReduceOp,
    axis: int,
    options: CommunicationOptions | None,
    equal: bool,
    outs: Sequence[np.ndarray] | None,
) -> list[Any]:
    """Return for each value the local replicas' parts of its reduction. Collective.

    Args:
        group: the ranks.
        values: the values to reduce.
        op: the reduction.
        axis: the dimension that the replicas divide, the first ones getting one more where it does not divide evenly.
        options: timeout_seconds.
        equal, outs: see `Collectives.reduce_scatter`.

    Raises:
        Exception: see `ReplicaContext.reduce_scatter`.
    """
    topology, function = group.topology, values.function
    leaves = [local_arrays(local_values(value, group, function, repeat=False), function) for value in values.values]
    forms = tuple((dtype_name(arrays[0].dtype), tuple(arrays[0].shape)) for arrays in leaves)
    timeout = None if options is None else options.timeout_seconds
    with group.collective(function, values.name, detail=(op.value, "axis", axis, *forms), timeout=timeout) as call:
        hows = [arithmetic(op, arrays[0].dtype, topology.num_replicas, function) for arrays in leaves]
        axes = [checked_axis(arrays[0], axis, function) for arrays in leaves]
        for arrays, along in zip(leaves, axes, strict=True) if equal else ():
            check_divided(arrays[0], along, topology.num_replicas, function)
        own = [_summed_here(topology, arrays, how) for arrays, how in zip(leaves, hows, strict=True)]
        cuts = [
            [0, *(end for _, end in bounds(array.shape[along], topology.num_replicas))]
            for array, along in zip(own, axes, strict=True)
        ]
        parts = [
            [between(array, along, at[low], at[high]) for array, along, at in zip(own, axes, cuts, strict=True)]
            for low, high in _replicas_of_ranks(topology)
        ]
        mine = forms_of(parts[topology.rank])
        for out, how, (shape, _) in zip(outs, hows, mine, strict=True) if outs is not None else ():
            check_out(out, shape, how.result, function)
        largest = max(num_bytes(forms_of(part)) for part in parts)
        _, found = _exchanged(group, call, parts, [mine] * topology.size, largest)
    results = []
    for index, (how, at) in enumerate(zip(hows, cuts, strict=True)):
        if outs is not None and how.accumulate == how.result:
            total = outs[index]
        else:
            total = _POOL.empty(math.prod(mine[index][0]), how.accumulate).reshape(mine[index][0])
        combine(how.ufunc, [each[index] for each in found], total)
        total = finish(total, how)
        if outs is not None and total is not outs[index]:
            outs[index][...] = total
        low = topology.replica_offset
        own_cuts = [cut - at[low] for cut in at[low : low + topology.num_local_replicas + 1]]
        local = [between(total, axes[index], *ends) for ends in itertools.pairwise(own_cuts)]
        results.append(_placed(local, leaves[index]))
    return results


def _summed_here(topology: Topology, arrays: Sequence[Any], how: Arithmetic) -> np.ndarray:
    """Return what this rank sends of a leaf: its array, or where ranks have several replicas, their reduction."""
    hosts = [to_host(array) for array in arrays]
    if topology.num_replicas == topology.size:
        return hosts[0]
    total = np.empty(hosts[0].shape, how.accumulate)
    combine(how.ufunc, hosts, total)
    return total


def all_to_all(
    group: ProcessGroup, values: Leaves, splits: Any, axis: int, joined: int | None = None
) -> tuple[list[Any], Any]:
    """Return for each value what the local replicas get of it, and the lengths that each got of every one. Collective.

    Args:
        group, values: see `reduce_scatter`.
        splits: int64 lengths of the parts of the local replica, or a PerReplica of them; None for equal parts.
        axis: the dimension that is cut.
        joined: the dimension along which parts are concatenated, where all ranks have one replica and arrays of one shape: no
            lengths are exchanged; default `axis`.

    Raises:
        Exception: see `ReplicaContext.all_to_all` and `Mesh.reshard`.
    """
    topology, function, equal = group.topology, values.function, joined is not None
    leaves = [
        [as_array(v, function) for v in local_values(value, group, function, repeat=False)] for value in values.values
    ]
    axes = [counted_axis(axis, arrays[0].ndim) for arrays in leaves]
    forms = tuple(_form(arrays, None if equal else along, function) for arrays, along in zip(leaves, axes, strict=True))
    how = f"to axis {joined}" if equal else "equal parts" if splits is None else "splits"
    with group.collective(function, values.name, detail=(how, "axis", axis, *forms)) as call:
        onto = axes
        for arrays in leaves:
            checked_axis(arrays[0], axis, function)
            check_movable(arrays[0].dtype, function)
        if joined is not None:
            onto = [checked_axis(arrays[0], joined, function) for arrays in leaves]
            if any(before == after for before, after in zip(onto, axes, strict=True)):
                raise ValueError(explain(function, "new", expected="another dimension than old", got=repr(axis)))
        hosts = [[to_host(array) for array in arrays] for arrays in leaves]
        came, room, found = _moved(group, call, function, hosts, splits, axes, equal)
    results = []
    for leaf, (arrays, along, after) in enumerate(zip(leaves, axes, onto, strict=True)):
        if len(leaves) == 1 and along == 0 == after and topology.num_replicas == topology.size:  # they lie side by side
            local = [room.view(arrays[0].dtype).reshape(int(came.sum()), *arrays[0].shape[1:])]
        else:
            local = _joined(topology, [each[leaf] for each in found], came[:, :, leaf], arrays[0].shape, along, after)
        results.append(_placed(local, arrays))
    received = [came[:, local].max(axis=1, initial=0) for local in range(topology.num_local_replicas)]
    return results, received[0] if len(received) == 1 else PerReplica(received)


def _moved(
    group: ProcessGroup,
    call: Call,
    function: str,
    leaves: Sequence[Sequence[np.ndarray]],
    splits: Any,
    axes: Sequence[int],
    equal: bool,
) -> tuple[np.ndarray, np.ndarray, list[list[np.ndarray]]]:
    """Return how much comes, as `_received` does, all of it as bytes, and from each rank what comes of each leaf. Collective.

    Of each of its replicas that is the part for each local one.
    """
    topology, failure = group.topology, None
    ranks = _replicas_of_ranks(topology)
    try:
        sent = _lengths(topology, function, leaves, splits, axes)
        parts = [[_part(arrays, sent[:, :, i], axes[i], *ends) for i, arrays in enumerate(leaves)] for ends in ranks]
        largest = max(num_bytes(forms_of(part)) for part in parts)
    except Exception as error:  # of which the others learn with their lengths
        if equal:
            raise
        failure, largest = error, _FAILED
        sent = np.zeros((topology.num_local_replicas, topology.num_replicas, len(leaves)), np.int64)
    came, most = (sent.swapaxes(0, 1), largest) if equal else _received(group, call, sent, largest)
    if most == _FAILED:
        with together(group.all_gather_text):
            if failure is not None:
                raise failure
    rows = [
        math.prod(arrays[0].shape[:axis] + arrays[0].shape[axis + 1 :])
        for arrays, axis in zip(leaves, axes, strict=True)
    ]
    expected = [
        [((int(came[low:high, :, i].sum()) * rows[i],), arrays[0].dtype) for i, arrays in enumerate(leaves)]
        for low, high in ranks
    ]
    return came, *_exchanged(group, call, parts, expected, most)


def _part(arrays: Sequence[np.ndarray], lengths: np.ndarray, axis: int, low: int, high: int) -> np.ndarray:
    """Return what the local replicas send of a leaf to some replicas, flat; lengths are those of each of them to all."""
    flats = []
    for array, own in zip(arrays, lengths, strict=True):
        start = int(own[:low].sum())
        for length in own[low:high].tolist():
            flats.append(np.ascontiguousarray(between(array, axis, start, start + length)).reshape(-1))
            start += length
    return flats[0] if len(flats) == 1 else np.concatenate(flats)


def _form(arrays: Sequence[Any], axis: int | None, function: str) -> tuple[str, ...]:
    """Return what the arrays of all replicas must share: all but their length along an axis, if one is given.

    Raises:
        CollectiveMismatchError: those of the local replicas do not.
    """
    forms = [
        (dtype_name(array.dtype), *("*" if dim == axis else str(length) for dim, length in enumerate(array.shape)))
        for array in arrays
    ]
    for index, form in enumerate(forms):
        if form != forms[0]:
            expected, got = f"{forms[0]} as on local replica 0", f"{form} on local replica {index}"
            raise CollectiveMismatchError(explain(function, "value", expected=expected, got=got))
    return forms[0]


def _lengths(
    topology: Topology, function: str, leaves: Sequence[Sequence[Any]], splits: Any, axes: Sequence[int]
) -> np.ndarray:
    """Return how much each local replica sends to each replica of each leaf: int64 (local replicas, replicas, leaves).

    Raises:
        ValueError: splits that are not one length for each replica, or not all of the array; without splits, a length that the
            replicas do not divide.
    """
    replicas = topology.num_replicas
    found = np.zeros((topology.num_local_replicas, replicas, len(leaves)), np.int64)
    given = None if splits is None else (splits.values if isinstance(splits, PerReplica) else [splits])
    for leaf, (arrays, axis) in enumerate(zip(leaves, axes, strict=True)):
        for index, array in enumerate(arrays):
            length = array.shape[axis]
            if given is None:
                check_divided(array, axis, replicas, function, "Give splits, one length for each replica")
                found[index, :, leaf] = length // replicas
                continue
            own = given[index]
            if own.shape != (replicas,) or own.dtype.kind not in "iu" or (own < 0).any() or own.sum() != length:
                expected = f"{replicas} lengths, one for each replica, that make the {length} along axis {axis}"
                raise ValueError(explain(function, "splits", expected=expected, got=f"{own.tolist()}"))
            found[index, :, leaf] = own
    return found


def _received(group: ProcessGroup, call: Call, sent: np.ndarray, largest: int) -> tuple[np.ndarray, int]:
    """Exchange how much each replica sends to each other one. Collective.

    Returns:
        How much comes to each local one, of each leaf: int64 (replicas, local replicas, leaves); the largest of all ranks'
        numbers `largest`, or _FAILED if any is.
    """
    topology, most = group.topology, max(group.topology.replicas_per_rank)
    table = np.zeros((topology.size, 1 + most * most * sent.shape[2]), np.int64)
    table[:, 0] = largest
    lengths = table[:, 1:].reshape(topology.size, most, most, sent.shape[2])
    for rank, (low, high) in enumerate(_replicas_of_ranks(topology)):
        lengths[rank, : len(sent), : high - low] = sent[:, low:high]
    table[:, 1:] = lengths.reshape(topology.size, -1)
    came = equal_parts(group, call, table)
    numbers = came[:, 0]
    came = came[:, 1:].reshape(lengths.shape)
    rows = [came[rank, :count] for rank, count in enumerate(topology.replicas_per_rank)]
    found = np.concatenate(rows)[:, : topology.num_local_replicas]
    return found, _FAILED if (numbers == _FAILED).any() else int(numbers.max())


def _joined(
    topology: Topology, flats: Sequence[np.ndarray], came: np.ndarray, shape: tuple[int, ...], axis: int, onto: int
) -> list[np.ndarray]:
    """Return each local replica's array of a leaf, of what came from each rank: its replicas' parts, for each local one."""
    parts: list[list[np.ndarray]] = [[] for _ in range(came.shape[1])]
    for flat, (low, high) in zip(flats, _replicas_of_ranks(topology), strict=True):
        start = 0
        for replica in range(low, high):
            for local, length in enumerate(came[replica].tolist()):
                part_shape = (*shape[:axis], length, *shape[axis + 1 :])
                size = math.prod(part_shape)
                parts[local].append(flat[start : start + size].reshape(part_shape))
                start += size
    return [np.concatenate(each, axis=onto) for each in parts]


# bytes of several arrays


def _exchanged(
    group: ProcessGroup,
    call: Call,
    parts: Sequence[Sequence[np.ndarray]],
    expected: Sequence[Forms],
    largest: int,
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Send each rank some arrays, and return what came as bytes, and as the arrays from each. Collective, inside a collective.

    Args:
        group, call: the ranks, and the call that is under way.
        parts: the arrays for each rank.
        expected: shapes and dtypes of those that come from each.
        largest: the most bytes that any rank sends to one.
    """
    sent = [to_bytes(arrays) for arrays in parts]
    ends = np.cumsum([num_bytes(forms) for forms in expected])
    room = _POOL.empty(int(ends[-1]), np.dtype(np.uint8))
    rows = np.split(room, ends[:-1])
    exchange(group, call, sent, rows, largest)
    return room, [of_bytes(row, forms) for row, forms in zip(rows, expected, strict=True)]


# small things


def checked_axis(array: Any, axis: int, function: str) -> int:
    """Return an axis of the array, counted from 0; raise ValueError for what is none."""
    if array.ndim == 0:
        remedy = "Give it a dimension: value.reshape(1)"
        raise ValueError(explain(function, "value", expected="at least one dimension", got="a scalar", remedy=remedy))
    if not isinstance(axis, int) or not -array.ndim <= axis < array.ndim:
        expected = f"-{array.ndim} <= axis < {array.ndim}, a dimension of an array of shape {tuple(array.shape)}"
        raise ValueError(explain(function, "", expected=expected, got=repr(axis)))
    return axis % array.ndim


def check_divided(array: Any, axis: int, count: int, function: str, remedy: str = "") -> None:
    """Raise ValueError unless a number of replicas divides the length of an array along an axis."""
    if array.shape[axis] % count:
        expected, got = f"a length that {count} replicas divide, along axis {axis}", f"{array.shape[axis]}"
        raise ValueError(explain(function, "value", expected=expected, got=got, remedy=remedy))


def _replicas_of_ranks(topology: Topology) -> list[tuple[int, int]]:
    """Return of each rank its first replica and the one behind its last."""
    return list(itertools.pairwise([0, *itertools.accumulate(topology.replicas_per_rank)]))


def between(array: Any, axis: int, low: int, high: int) -> Any:
    """Return a part of an array along an axis, a view."""
    return array[(slice(None),) * axis + (slice(low, high),)]


def _placed(local: Sequence[np.ndarray], like: Sequence[Any]) -> Any:
    """Return the local replicas' results where their values lie: an array of the only one, or a PerReplica."""
    placed = [beside(result, array) for result, array in zip(local, like, strict=True)]
    return placed[0] if len(placed) == 1 else PerReplica(placed)
