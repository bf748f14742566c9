"""Exchanges of a part for each replica: reduce_scatter and all_to_all, of all leaves of a nest in one exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, final

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
from ..comm.contract import Collective
from ..comm.exchange import all_to_all as equal_parts
from ..comm.exchange import exchange
from ..comm.node import SMALL
from ..comm.packing import Forms, forms_of, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup
from .parts import CutForm, Found, MessageReduction, PartsByMessage, PartsOnNode, Way, between, keep
from .small import SmallReduction
from .values import Leaves, beside, check_out, counted_axis, local_arrays, local_values, row_size

__all__ = [
    "all_to_all",
    "check_divided",
    "checked_axis",
    "reduce_scatter",
    "small_all_to_all",
    "small_reduce_scatter",
]

_FAILED = -1  # in place of a number of bytes
_POOL = BufferPool(kept=2)


def reduce_scatter(
    group: ProcessGroup,
    values: Leaves,
    op: ReduceOp,
    axis: int,
    options: CommunicationOptions | None,
    outs: Sequence[np.ndarray] | None,
    equal: bool,
    small: tuple[Collective, SmallReduction | MessageReduction] | None,
) -> list[Any]:
    """Return for each value the local replicas' parts of its reduction. Collective.

    Args:
        group: the ranks.
        values: the values to reduce.
        op: the reduction.
        axis: the dimension that is divided over the replicas; the first ones get one more if it does not divide evenly.
        options: timeout_seconds.
        outs, equal: see `Collectives.reduce_scatter`.
        small: the result of `small_reduce_scatter`.

    Raises:
        Exception: see `ReplicaContext.reduce_scatter`.
    """
    topology, function = group.topology, values.function
    leaves = [local_arrays(local_values(value, group, function, repeat=False), function) for value in values.values]
    if small is not None:
        call, planned = small
        for out in outs or ():
            check_out(out, planned.shape, planned.dtype, function)
        with call:
            part = planned(to_host(leaves[0][0]), call)
        for out in outs or ():
            out[...] = part
        return [beside(part, leaves[0][0])]
    with _reduce_scatter_call(group, values, op, axis, options, leaves, True) as call:
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


def _reduce_scatter_call(
    group: ProcessGroup,
    values: Leaves,
    op: ReduceOp,
    axis: int,
    options: CommunicationOptions | None,
    leaves: Sequence[Sequence[Any]],
    synchronize: bool,
) -> Collective:
    timeout = None if options is None else options.timeout_seconds
    if values.said is not None:
        (dtype, detail), shape = values.said, leaves[0][0].shape
        return group.collective(
            values.function, values.name, dtype, shape, detail, timeout=timeout, synchronize=synchronize
        )
    forms = tuple((dtype_name(arrays[0].dtype), tuple(arrays[0].shape)) for arrays in leaves)
    words = op.value, "axis", axis, *forms
    return group.collective(values.function, values.name, detail=words, timeout=timeout, synchronize=synchronize)


def small_reduce_scatter(
    group: ProcessGroup, values: Leaves, op: ReduceOp, axis: int, options: CommunicationOptions | None, equal: bool
) -> tuple[Collective, SmallReduction | MessageReduction] | None:
    """Return the call and the reduction of this rank's part of a small array; None for all others.

    Also None if `reduce_scatter` raises an error, which it does after the ranks have compared their calls.
    """
    topology, function = group.topology, values.function
    if not _is_one_array(group, values):
        return None
    array = local_arrays(local_values(values.values[0], group, function, repeat=False), function)[0]
    try:
        how, along = arithmetic(op, array.dtype, topology.num_replicas, function), checked_axis(array, axis, function)
        if equal:
            check_divided(array, along, topology.size, function)
    except (TypeError, ValueError):
        return None
    if array.size * how.accumulate.itemsize > SMALL:
        return None
    call = _reduce_scatter_call(group, values, op, axis, options, [[array]], group.num_nodes > 1)
    if group.num_nodes > 1:
        return call, MessageReduction(group, array, how, along)
    part = (*(slice(None),) * along, slice(*bounds(array.shape[along], topology.size)[topology.rank]))
    return call, SmallReduction(group, array.shape, how, part)


def _is_one_array(group: ProcessGroup, values: Leaves) -> bool:
    """Return True if each rank has one array of one replica."""
    topology = group.topology
    return 1 < topology.size == topology.num_replicas and len(values.values) == 1


def _summed_here(topology: Topology, arrays: Sequence[Any], how: Arithmetic) -> np.ndarray:
    """Return the array that this rank sends of a leaf: its own, or the reduction of its replicas."""
    hosts = [to_host(array) for array in arrays]
    if topology.num_replicas == topology.size:
        return hosts[0]
    total = np.empty(hosts[0].shape, how.accumulate)
    combine(how.ufunc, hosts, total)
    return total


def all_to_all(
    group: ProcessGroup,
    values: Leaves,
    splits: Any,
    axis: int,
    joined: int | None,
    small: tuple[Collective, SmallAllToAll] | None,
) -> tuple[list[Any], Any]:
    """Return for each value what the local replicas receive, and the lengths that each received from every one. Collective.

    Args:
        group, values: see `reduce_scatter`.
        splits: int64 lengths of the parts of the local replica, or a PerReplica of them; None for equal parts.
        axis: the dimension that is cut.
        joined: the dimension along which parts are concatenated, if all ranks have one replica and arrays of one shape: no
            lengths are exchanged; default `axis`.
        small: the result of `small_all_to_all`.

    Raises:
        Exception: see `ReplicaContext.all_to_all` and `Mesh.reshard`.
    """
    topology, function, equal = group.topology, values.function, joined is not None
    leaves = [
        [as_array(v, function) for v in local_values(value, group, function, repeat=False)] for value in values.values
    ]
    if small is not None:
        call, planned = small
        with call:
            result, lengths = planned(to_host(leaves[0][0]), call, splits)
        return [beside(result, leaves[0][0])], lengths
    axes = [counted_axis(axis, arrays[0].ndim) for arrays in leaves]
    with _all_to_all_call(group, values, splits is None, axis, joined, leaves, True) as call:
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
        if len(leaves) == 1 and along == 0 == after and topology.num_replicas == topology.size:  # parts are adjacent
            local = [room.view(arrays[0].dtype).reshape(int(came.sum()), *arrays[0].shape[1:])]
        else:
            local = _joined(topology, [each[leaf] for each in found], came[:, :, leaf], arrays[0].shape, along, after)
        results.append(_placed(local, arrays))
    received = [came[:, local].max(axis=1, initial=0) for local in range(topology.num_local_replicas)]
    return results, received[0] if len(received) == 1 else PerReplica(received)


def _all_to_all_call(
    group: ProcessGroup,
    values: Leaves,
    divided: bool,
    axis: int,
    joined: int | None,
    leaves: Sequence[Sequence[Any]],
    synchronize: bool,
) -> Collective:
    function = values.function
    forms = [
        _form(arrays, None if joined is not None else counted_axis(axis, arrays[0].ndim), function) for arrays in leaves
    ]
    how = f"to axis {joined}" if joined is not None else "equal parts" if divided else "splits"
    return group.collective(function, values.name, detail=(how, "axis", axis, *forms), synchronize=synchronize)


def small_all_to_all(
    group: ProcessGroup, values: Leaves, splits: Any, axis: int, joined: int | None
) -> tuple[Collective, SmallAllToAll] | None:
    """Return the call and the exchange of one array of each rank; None for all others. See `all_to_all`.

    Also None if `all_to_all` raises an error, which it does after the ranks have compared their calls.
    """
    function = values.function
    if not _is_one_array(group, values):
        return None
    array = as_array(local_values(values.values[0], group, function, repeat=False)[0], function)
    try:
        along = checked_axis(array, axis, function)
        onto = along if joined is None else checked_axis(array, joined, function)
        check_movable(array.dtype, function)
    except (TypeError, ValueError):
        return None
    if joined is not None and onto == along:
        return None
    call = _all_to_all_call(group, values, splits is None, axis, joined, [[array]], group.num_nodes > 1)
    return call, SmallAllToAll(group, function, array, along, onto, joined is not None)


@final
class SmallAllToAll:
    """The exchange of parts of an array of each rank.

    The ranks exchange lengths, and small arrays, in the barrier that compares the call on a node, and in one message between
    nodes.

    Args:
        group: the ranks.
        function: name of the public caller, for errors.
        array: an array of this rank, with the dtype and shape of all later ones.
        axis, onto: the dimension that is cut, and the one along which parts are concatenated.
        equal: True if all ranks have arrays of one shape.
    """

    def __init__(self, group: ProcessGroup, function: str, array: Any, axis: int, onto: int, equal: bool) -> None:
        self._group, self._function, self._onto = group, function, onto
        self._form, self._equal = CutForm(array, axis), equal
        way: type[Way] = PartsOnNode if group.num_nodes == 1 else PartsByMessage
        self._way = way(group, array, axis, equal)
        self._sent: dict[Hashable, tuple[int, ...]] = {}

    def __call__(self, array: np.ndarray, call: Call, splits: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts of all ranks, and the length of each. Collective, inside one.

        Raises:
            ValueError: on every rank, for lengths that do not fit an array on one.
        """
        key: Hashable = None
        sent, failure = None, None
        try:
            if splits is not None:
                splits = np.asarray(splits.values[0] if isinstance(splits, PerReplica) else splits)
                key = splits.tobytes(), splits.dtype, splits.shape
            sent = self._sent.get(key)
            if sent is None:
                lengths = _lengths(
                    self._group.topology, self._function, [[array]], splits, [self._form.axis], self._equal
                )
                sent = tuple(lengths.reshape(-1).tolist())
                keep(self._sent, key, sent)
        except Exception as error:
            failure = error  # the lengths, if ranks send any, report it to the others
        found = self._way.move(call, array, sent)
        if failure is not None and self._equal:  # on every rank
            raise failure
        if found is None:
            with together(self._group.all_gather_text):
                if failure is not None:
                    raise failure
        assert found is not None and sent is not None
        if found.parts:
            return np.concatenate(found.parts, axis=self._onto), found.came.copy()
        return self._by_messages(array, call, sent, found), found.came.copy()

    def _by_messages(self, array: np.ndarray, call: Call, sent: Sequence[int], found: Found) -> np.ndarray:
        form, came = self._form, found.came.tolist()
        array = np.asarray(array, form.dtype)  # in this machine's byte order, as the receivers expect
        cuts = itertools.pairwise(itertools.accumulate(sent, initial=0))
        parts = [[np.ascontiguousarray(between(array, form.axis, *cut)).reshape(-1)] for cut in cuts]
        expected = [[((length * form.row // form.dtype.itemsize,), form.dtype)] for length in came]
        room, flats = _exchanged(self._group, call, parts, expected, found.largest)
        if form.axis == 0 == self._onto:  # the parts are adjacent
            return form.part(room, sum(came))
        arrays = [form.part(flat[0].view(np.uint8), length) for flat, length in zip(flats, came, strict=True)]
        return np.concatenate(arrays, axis=self._onto)


def _moved(
    group: ProcessGroup,
    call: Call,
    function: str,
    leaves: Sequence[Sequence[np.ndarray]],
    splits: Any,
    axes: Sequence[int],
    equal: bool,
) -> tuple[np.ndarray, np.ndarray, list[list[np.ndarray]]]:
    """Return the received lengths, like `_received`; all parts as bytes; and by rank the parts of each leaf. Collective.

    From each rank these are its replicas' parts for each local replica.
    """
    topology, failure = group.topology, None
    ranks = _replicas_of_ranks(topology)
    try:
        sent = _lengths(topology, function, leaves, splits, axes, equal)
        parts = [[_part(arrays, sent[:, :, i], axes[i], *ends) for i, arrays in enumerate(leaves)] for ends in ranks]
        largest = max(num_bytes(forms_of(part)) for part in parts)
    except Exception as error:  # their lengths report it to the others
        if equal:
            raise
        failure, largest = error, _FAILED
        sent = np.zeros((topology.num_local_replicas, topology.num_replicas, len(leaves)), np.int64)
    came, most = (sent.swapaxes(0, 1), largest) if equal else _received(group, call, sent, largest)
    if most == _FAILED:
        with together(group.all_gather_text):
            if failure is not None:
                raise failure
    rows = [row_size(arrays[0], axis) for arrays, axis in zip(leaves, axes, strict=True)]
    expected = [
        [((int(came[low:high, :, i].sum()) * rows[i],), arrays[0].dtype) for i, arrays in enumerate(leaves)]
        for low, high in ranks
    ]
    return came, *_exchanged(group, call, parts, expected, most)


def _part(arrays: Sequence[np.ndarray], lengths: np.ndarray, axis: int, low: int, high: int) -> np.ndarray:
    """Return the flat part of a leaf that the local replicas send to some replicas; `lengths` are from each of them to all."""
    flats = []
    for array, own in zip(arrays, lengths, strict=True):
        start = int(own[:low].sum())
        for length in own[low:high].tolist():
            flats.append(np.ascontiguousarray(between(array, axis, start, start + length)).reshape(-1))
            start += length
    return flats[0] if len(flats) == 1 else np.concatenate(flats)


def _form(arrays: Sequence[Any], axis: int | None, function: str) -> tuple[str, ...]:
    """Return the form that the arrays of all replicas must share: without the length along an axis, if one is given.

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
    topology: Topology, function: str, leaves: Sequence[Sequence[Any]], splits: Any, axes: Sequence[int], equal: bool
) -> np.ndarray:
    """Return the lengths that each local replica sends to each replica of each leaf: int64 (local replicas, replicas, leaves).

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
                remedy = "Pad the array there" if equal else "Give splits, one length for each replica"
                check_divided(array, axis, replicas, function, remedy)
                found[index, :, leaf] = length // replicas
                continue
            own = given[index]
            if own.shape != (replicas,) or own.dtype.kind not in "iu" or (own < 0).any() or own.sum() != length:
                expected = f"{replicas} lengths, one for each replica, that make the {length} along axis {axis}"
                raise ValueError(explain(function, "splits", expected=expected, got=f"{own.tolist()}"))
            found[index, :, leaf] = own
    return found


def _received(group: ProcessGroup, call: Call, sent: np.ndarray, largest: int) -> tuple[np.ndarray, int]:
    """Exchange the lengths that each replica sends to each other one. Collective.

    Returns:
        The lengths that each local one receives, of each leaf: int64 (replicas, local replicas, leaves); the largest of all
        ranks' numbers `largest`, or _FAILED if any is.
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
    """Return each local replica's array of a leaf, from each rank's parts: its replicas' parts, for each local one."""
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
    """Send each rank some arrays, and return the received ones as bytes, and as arrays by rank. Collective, inside a collective.

    Args:
        group, call: the ranks, and the current call.
        parts: the arrays for each rank.
        expected: shapes and dtypes of the arrays from each.
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
    """Return an axis of the array, counted from 0; raise ValueError for an invalid one."""
    if array.ndim == 0:
        remedy = "Give it a dimension: value.reshape(1)"
        raise ValueError(explain(function, "value", expected="at least one dimension", got="a scalar", remedy=remedy))
    if not isinstance(axis, int) or not -array.ndim <= axis < array.ndim:
        expected = f"-{array.ndim} <= axis < {array.ndim}, a dimension of an array of shape {tuple(array.shape)}"
        raise ValueError(explain(function, "axis", expected=expected, got=repr(axis)))
    return axis % array.ndim


def check_divided(array: Any, axis: int, count: int, function: str, remedy: str = "") -> None:
    """Raise ValueError unless a number of replicas divides the length of an array along an axis."""
    if array.shape[axis] % count:
        expected, got = f"a length that {count} replicas divide, along axis {axis}", f"{array.shape[axis]}"
        raise ValueError(explain(function, "value", expected=expected, got=got, remedy=remedy))


def _replicas_of_ranks(topology: Topology) -> list[tuple[int, int]]:
    """Return for each rank its first replica and the one after its last."""
    return list(itertools.pairwise([0, *itertools.accumulate(topology.replicas_per_rank)]))


def _placed(local: Sequence[np.ndarray], like: Sequence[Any]) -> Any:
    """Return the local replicas' results on the devices of their values: a single array, or a PerReplica."""
    placed = [beside(result, array) for result, array in zip(local, like, strict=True)]
    return placed[0] if len(placed) == 1 else PerReplica(placed)
