"""The values that callers of a CrossDeviceOps pass and get, and what needs no algorithm: gather, broadcast, sparse rows."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arena.arithmetic import Arithmetic, finish
from ..base import nest
from ..base.buffers import BufferPool
from ..base.devices import parse
from ..base.distributed_values import DistributedValues, Mirrored
from ..base.errors import CollectiveMismatchError, explain
from ..base.types import IndexedSlices, ReduceOp
from ..comm.arrays import array_module, as_array, check_movable, dtype_name, import_cupy, is_gpu, on_device_of, to_host
from ..comm.packing import forms_of, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup

__all__ = [
    "Leaves",
    "beside",
    "broadcast_all",
    "call_of",
    "check_destinations",
    "check_out",
    "check_root",
    "checked_slices",
    "counted_axis",
    "form",
    "gather_all",
    "local_arrays",
    "local_values",
    "on_destination",
    "to_gather",
    "reduce_slices",
    "reduced_already",
    "reducible_values",
]

_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)  # what makes the value itself of equal values


class Leaves(NamedTuple):
    """The values of one collective: the leaves of a nest, or one value.

    Attributes:
        function: the public caller, for errors and for the comparison of the ranks.
        values: of each leaf a PerReplica, or the value of the only local replica.
        name: the ranks and the form of the nest, for the comparison of the ranks.
        paths: the place of each leaf in the nest, for errors.
    """

    function: str
    values: Sequence[Any]
    name: str = ""
    paths: Sequence[str] = ("",)

    @classmethod
    def of(cls, function: str, value: Any, label: str) -> Leaves:
        """Return the leaves of a nest, or a single value."""
        form = nest.form(value) if nest.is_nested(value) else ""
        return cls(function, nest.flatten(value), ": ".join(filter(None, (label, form))), nest.paths(value))


def check_destinations(destinations: Any, function: str) -> None:
    """Do nothing if destinations are legal: None, a device, a value or a Variable.

    Raises:
        ValueError: for a list or tuple of them.
    """
    if isinstance(destinations, (list, tuple)):
        expected = "one Variable, value or device string"
        raise ValueError(explain(function, "destinations", expected=expected, got=f"a {type(destinations).__name__}"))


def reduced_already(reduce_op: ReduceOp, value: Any, group: ProcessGroup, function: str) -> bool:
    """Return whether the only rank's value is its own reduction.

    That is a Mirrored or plain value under MEAN, and a plain zero, which TF lets pass under SUM too.
    """
    if group.topology.size > 1 or group.topology.num_local_replicas == 1:
        return False
    if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
        return False
    return reduce_op is ReduceOp.MEAN or (
        reduce_op is ReduceOp.SUM and not isinstance(value, Mirrored) and _may_repeat(reduce_op, value, function)
    )


def local_values(value: Any, group: ProcessGroup, function: str, *, repeat: bool = True) -> Sequence[Any]:
    """Return one value for each local replica.

    A plain value is the replica's where the rank has one. Where it has several, the value is each one's if `repeat`.

    Raises:
        ValueError: another number of values than local replicas, or a plain value that may not be repeated.
    """
    replicas = group.topology.num_local_replicas
    if isinstance(value, DistributedValues):
        if len(value.values) != replicas:
            expected = f"one value for each of the {replicas} local replicas"
            raise ValueError(explain(function, "value", expected=expected, got=f"{len(value.values)}"))
        return value.values
    if replicas == 1:
        return (value,)
    if not repeat:
        remedy = "A plain value is the same on every replica: multiply it, use MEAN, or pass a PerReplica"
        expected = f"a PerReplica, for this rank has {replicas} replicas"
        got = f"a plain {type(value).__name__}"
        raise ValueError(explain(function, "value", expected=expected, got=got, remedy=remedy))
    return (value,) * replicas


def reducible_values(value: Any, group: ProcessGroup, reduce_op: ReduceOp, function: str) -> Sequence[Any]:
    """Return the local replicas' values of a reduction.

    Raises:
        ValueError: a plain value, or a Mirrored one, whose SUM or PROD over several local replicas is ambiguous.
    """
    if isinstance(value, Mirrored) and reduce_op not in _IDEMPOTENT:
        instead = "multiply it" if reduce_op is ReduceOp.SUM else "raise it to a power"
        remedy = f"It is the same on every replica: use MEAN, or {instead}"
        expected = f"a PerReplica under {reduce_op.value}"
        raise ValueError(explain(function, "value", expected=expected, got="a Mirrored", remedy=remedy))
    repeat = group.topology.num_local_replicas == 1 or isinstance(value, DistributedValues)
    return local_values(value, group, function, repeat=repeat or _may_repeat(reduce_op, value, function))


def _may_repeat(reduce_op: ReduceOp, value: Any, function: str) -> bool:
    """Return whether a plain value may stand for every local replica: not in a SUM or PROD, but zeros."""
    if reduce_op in _IDEMPOTENT:
        return True
    return not isinstance(value, IndexedSlices) and not as_array(value, function).any()


def local_arrays(values: Sequence[Any], function: str) -> list[Any]:
    """Return the local replicas' values as arrays of one shape and dtype.

    Raises:
        CollectiveMismatchError: they differ.
        TypeError: one is no array.
    """
    arrays = [as_array(value, function) for value in values]
    first = arrays[0]
    for index, array in enumerate(arrays[1:], 1):
        if array.shape != first.shape or array.dtype != first.dtype:
            expected = f"{first.dtype} of shape {first.shape} as on local replica 0"
            got = f"{array.dtype} of shape {array.shape} on local replica {index}"
            raise CollectiveMismatchError(explain(function, "value", expected=expected, got=got))
    return arrays


def call_of(arrays: Sequence[Any], detail: str) -> tuple[Any, Any, Hashable]:
    """Return dtype, shape and detail of a call, for `ProcessGroup.collective`: of one array, or in the detail of several."""
    if len(arrays) == 1:
        return arrays[0].dtype, arrays[0].shape, detail
    return None, None, (detail, *((dtype_name(array.dtype), tuple(array.shape)) for array in arrays))


def check_out(out: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, function: str) -> None:
    """Raise ValueError unless a result of this shape and dtype can be written into an array."""
    if out.shape != shape or out.dtype != dtype or not out.flags.writeable:
        got = f"{out.dtype} {out.shape}{'' if out.flags.writeable else ', read-only'}"
        expected = f"a writable array {dtype} {tuple(shape)}"
        raise ValueError(explain(function, "out", expected=expected, got=got))


def on_destination(result: Any, destinations: Any) -> Any:
    """Return a result on the device that destinations name, where they name one.

    Example:
        >>> on_destination(np.ones(2), "cpu:0")
        array([1., 1.])
    """
    if not isinstance(destinations, str):
        return result
    kind, index = parse(destinations)
    if isinstance(result, Mirrored):
        result = result.values[0]
    if isinstance(result, IndexedSlices):
        rows, indices = on_destination(result.values, destinations), on_destination(result.indices, destinations)
        return IndexedSlices(rows, indices, result.dense_shape)
    if kind == "cpu":
        return to_host(result) if is_gpu(result) else result
    cupy = import_cupy("reduce")
    with cupy.cuda.Device(index):
        return cupy.asarray(result)


# gather

_LARGE = 1 << 30  # bytes; above, the counts of one call might not fit MPI's
_POOL = BufferPool(kept=2)
_SMALL = 1 << 16  # bytes on all ranks; up to that several arrays are one message, which costs a copy on either side


def to_gather(value: Any, group: ProcessGroup, function: str, path: str) -> list[Any]:
    """Return the arrays of the local replicas of what lies at a path of a nest.

    Raises:
        TypeError: it has IndexedSlices, or what is no array.
    """
    values = local_values(value, group, function, repeat=False)
    if any(isinstance(each, IndexedSlices) for each in values):
        raise TypeError(explain(function, f"value{path}", expected="arrays", got="IndexedSlices"))
    return [as_array(each, function, f"value{path}") for each in values]


def gather_all(
    group: ProcessGroup, leaves: Sequence[Sequence[Any]], axis: int, paths: Sequence[str], function: str
) -> list[Any]:
    """Return the arrays of all replicas concatenated along an axis, in replica order, of each value. Collective, inside one.

    Small ones are one message.

    Args:
        group: the ranks.
        leaves: of each value one array for each local replica; lengths along `axis` may differ, the rest may not.
        axis: from 0, or from the end if it is negative.
        paths: where each value is in the nest, to name in errors.
        function: the public caller to name in errors.

    Raises:
        CollectiveMismatchError: on every rank, naming a rank and both shapes, before any data moved.
        ValueError: a scalar, or an axis out of range.
        TypeError: Python objects or structured arrays.
    """
    axes = [counted_axis(axis, values[0].ndim) for values in leaves]
    totals = _rank_lengths(group, leaves, axes, paths, function)
    local = [_join(values, own) for values, own in zip(leaves, axes, strict=True)]
    if group.topology.size == 1:
        return [array.copy() if array is values[0] else array for array, values in zip(local, leaves, strict=True)]
    hosts = [np.ascontiguousarray(to_host(array)) for array in local]
    whole = [sum(total) * _row(host, own) * host.itemsize for host, total, own in zip(hosts, totals, axes, strict=True)]
    small = [index for index, nbytes in enumerate(whole) if nbytes <= _SMALL and len(leaves) > 1]
    joined: list[Any] = [None] * len(leaves)
    if small:
        chosen = [hosts[i] for i in small], [axes[i] for i in small], [totals[i] for i in small]
        found = _exchange_together(group, *chosen)
        for index, result in zip(small, found, strict=True):
            joined[index] = result
    for index, host in enumerate(hosts):
        if joined[index] is None:
            joined[index] = _exchange(group, host, axes[index], totals[index])
    return [beside(result, array) for result, array in zip(joined, local, strict=True)]


def beside(result: np.ndarray, array: Any) -> Any:
    """Return a result where an array lies: on its GPU, or as it is."""
    if not is_gpu(array):
        return result
    with on_device_of(array):
        return array_module(array).asarray(result)


def _join(values: Sequence[Any], axis: int) -> Any:
    if len(values) == 1:
        return values[0]
    with on_device_of(values[0]):
        return array_module(values[0]).concatenate(values, axis=axis)


def _form_but_axis(value: Any, axis: int) -> str:
    """The form that all replicas must share: everything but the length along the axis."""
    shape = ["*" if dim == axis else str(size) for dim, size in enumerate(value.shape)]
    return f"{dtype_name(value.dtype)} of shape ({', '.join(shape)})"


def _rank_lengths(
    group: ProcessGroup, leaves: Sequence[Sequence[Any]], axes: Sequence[Any], paths: Sequence[str], function: str
) -> list[list[int]]:
    """Compare the forms of all replicas; return of each value each rank's length along the axis."""
    forms, lengths = [], []
    for values, axis in zip(leaves, axes, strict=True):
        forms.append(list(dict.fromkeys(_form_but_axis(value, axis) for value in values)))
        lengths.append(sum(value.shape[axis] for value in values if _is_axis(axis, value)))
    prints = [zlib.crc32("; ".join(form).encode()) if len(form) == 1 else -1 for form in forms]
    table = group.all_gather_int([*prints, *lengths])
    for index, (values, axis, path) in enumerate(zip(leaves, axes, paths, strict=True)):
        hashes, argument = table[:, index].tolist(), f"value{path}"
        if -1 in hashes or len(set(hashes)) > 1:
            shapes = " and ".join(dict.fromkeys(f"{dtype_name(value.dtype)} {tuple(value.shape)}" for value in values))
            raise CollectiveMismatchError(_mismatch(function, argument, group.all_gather_text(shapes), hashes))
        value = values[0]
        if value.ndim == 0:
            remedy = "Reduce it, or give it a dimension: value.reshape(1)"
            expected = "at least one dimension"
            raise ValueError(explain(function, argument, expected=expected, got="a scalar", remedy=remedy))
        if not _is_axis(axis, value):
            expected = f"-{value.ndim} <= axis < {value.ndim}"
            raise ValueError(explain(function, "axis", expected=expected, got=repr(axis)))
        check_movable(value.dtype, function, argument)
    return [[int(n) for n in table[:, len(leaves) + index]] for index in range(len(leaves))]


def counted_axis(axis: Any, ndim: int) -> Any:
    """Return an axis of an array counted from 0, where it was counted from the end; what is no axis as it is.

    Example:
        >>> counted_axis(-1, 3), counted_axis(1, 3), counted_axis(-4, 3)
        (2, 1, -4)
    """
    return int(axis) + ndim if isinstance(axis, (int, np.integer)) and -ndim <= axis < 0 else axis


def _is_axis(axis: Any, value: Any) -> bool:
    return isinstance(axis, (int, np.integer)) and 0 <= axis < value.ndim


def _mismatch(function: str, argument: str, shapes: list[str], hashes: list[int]) -> str:
    common = max(set(hashes), key=lambda h: (hashes.count(h), -hashes.index(h)))
    odd = next((rank for rank, h in enumerate(hashes) if h != common), 0)
    usual = hashes.index(common)
    if odd == usual:  # one rank, or every rank in the same way
        return explain(
            function, argument, expected="equal shapes but for the axis on every replica", got=shapes[0], rank=0
        )
    return explain(
        function,
        argument,
        expected=f"{shapes[usual]} as on rank {usual}, but for the length along the axis",
        got=shapes[odd],
        rank=odd,
    )


def _row(array: np.ndarray, axis: int) -> int:
    """How many elements lie at one place along the axis."""
    return math.prod(array.shape[:axis] + array.shape[axis + 1 :])


def _exchange(group: ProcessGroup, local: np.ndarray, axis: int, totals: list[int]) -> np.ndarray:
    rest = local.shape[:axis] + local.shape[axis + 1 :]
    row = _row(local, axis)
    ends = np.cumsum([total * row for total in totals]).tolist()
    flat = _POOL.empty(ends[-1], local.dtype)
    _all_gather(group, local.reshape(-1), flat, [0, *ends])
    if axis == 0:
        return flat.reshape(ends[-1] // row if row else sum(totals), *rest)
    parts = []
    for rank, total in enumerate(totals):
        shape = (*local.shape[:axis], total, *local.shape[axis + 1 :])
        parts.append(flat[ends[rank] - total * row : ends[rank]].reshape(shape))
    return np.concatenate(parts, axis=axis)


def _exchange_together(
    group: ProcessGroup, local: Sequence[np.ndarray], axes: Sequence[int], totals: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """As `_exchange` of several arrays, in one message of each rank."""
    forms = [
        [
            ((*array.shape[:axis], lengths[rank], *array.shape[axis + 1 :]), array.dtype)
            for array, axis, lengths in zip(local, axes, totals, strict=True)
        ]
        for rank in range(group.topology.size)
    ]
    ends = np.cumsum([num_bytes(form) for form in forms]).tolist()
    flat = np.empty(ends[-1], np.uint8)
    _all_gather(group, to_bytes(local), flat, [0, *ends])
    rows = [of_bytes(part, form) for part, form in zip(np.split(flat, ends[:-1]), forms, strict=True)]
    return [np.concatenate(parts, axis=axis) for axis, parts in zip(axes, zip(*rows, strict=True), strict=True)]


def _all_gather(group: ProcessGroup, local: np.ndarray, flat: np.ndarray, borders: list[int]) -> None:
    """Fill `flat` with every rank's elements; rank r's lie between borders r and r + 1."""
    if flat.nbytes > _LARGE:
        for rank, low in enumerate(borders[:-1]):
            part = flat[low : borders[rank + 1]]
            if rank == group.topology.rank:
                part[...] = local
            if part.size:
                group.broadcast(part, root=rank)
        return
    low, high = borders[group.topology.rank : group.topology.rank + 2]
    flat[low:high] = local
    from ..comm.exchange import gather_parts

    gather_parts(group.topology.comm, flat, [end - begin for begin, end in itertools.pairwise(borders)])


# broadcast


def check_root(root: int, group: ProcessGroup, function: str) -> None:
    """Raise an error where no replica has this number.

    Raises:
        ValueError: naming the function.
    """
    replicas = group.topology.num_replicas
    if not 0 <= root < replicas:
        raise ValueError(explain(function, "root", expected=f"a replica from 0 to {replicas - 1}", got=repr(root)))


def broadcast_all(
    group: ProcessGroup, leaves: Sequence[Sequence[Any]], root: int, paths: Sequence[str], function: str
) -> list[Any]:
    """Return global replica `root`'s array of each value, a new one. Collective, inside one. See `gather_all`.

    Raises:
        TypeError: Python objects or structured arrays.
    """
    for values, path in zip(leaves, paths, strict=True):
        check_movable(values[0].dtype, function, f"value{path}")
    rank, index = group.topology.rank_of_replica(root)
    if rank == group.topology.rank:
        hosts = [np.array(to_host(values[index]), order="C") for values in leaves]
    else:
        hosts = [_POOL.empty(values[0].size, values[0].dtype).reshape(values[0].shape) for values in leaves]
    if group.topology.size > 1:
        small = [host for host in hosts if host.nbytes <= _SMALL and len(leaves) > 1]
        if small:
            packed = to_bytes(small) if rank == group.topology.rank else np.empty(num_bytes(forms_of(small)), np.uint8)
            group.broadcast(packed, root=rank)
            for host, sent in zip(small, of_bytes(packed, forms_of(small)), strict=True):
                host[...] = sent
        for host in hosts:
            if host.nbytes > _SMALL or len(leaves) == 1:
                group.broadcast(host, root=rank)
    return [beside(host, values[0]) for host, values in zip(hosts, leaves, strict=True)]


# IndexedSlices


def checked_slices(values: Sequence[Any], reduce_op: ReduceOp, function: str) -> list[IndexedSlices]:
    """Return the local replicas' slices with arrays in them, checked, all of one form.

    Raises:
        CollectiveMismatchError: a local replica's value is no IndexedSlices, or has another form than the first.
        ValueError: indices are not one integer for each row of the values.
        TypeError: another reduction than SUM and MEAN, which concatenated rows cannot represent.
    """
    if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
        expected, got = f"dense arrays for {reduce_op.value}", "IndexedSlices"
        remedy = "IndexedSlices have SUM and MEAN only: pass to_dense() of them"
        raise TypeError(explain(function, "value", expected=expected, got=got, remedy=remedy))
    slices = []
    for index, value in enumerate(values):
        if not isinstance(value, IndexedSlices):
            got = f"a {type(value).__name__} on local replica {index}"
            raise CollectiveMismatchError(explain(function, "value", expected="IndexedSlices on all", got=got))
        slices.append(_as_slices(value, function))
        if form(slices[-1]) != form(slices[0]):
            expected = f"{form(slices[0])} as on local replica 0"
            got = f"{form(slices[-1])} on local replica {index}"
            raise CollectiveMismatchError(explain(function, "value", expected=expected, got=got))
    return slices


def _as_slices(value: IndexedSlices, function: str) -> IndexedSlices:
    values = as_array(value.values, function, "value.values")
    indices = as_array(value.indices, function, "value.indices")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        got = f"{indices.dtype} of shape {indices.shape}"
        raise ValueError(explain(function, "value.indices", expected="one dimension of integers", got=got))
    if values.ndim == 0 or values.shape[0] != indices.shape[0]:
        expected = f"one row for each of the {indices.shape[0]} indices"
        raise ValueError(explain(function, "value.values", expected=expected, got=f"shape {values.shape}"))
    shape = None if value.dense_shape is None else tuple(int(n) for n in value.dense_shape)
    return IndexedSlices(values, indices, shape)


def form(value: IndexedSlices) -> Hashable:
    """Return what must be equal on every rank: all but the number of rows."""
    return (
        "IndexedSlices",
        value.values.dtype.name,
        value.values.shape[1:],
        value.indices.dtype.name,
        value.dense_shape,
    )


def reduce_slices(
    group: ProcessGroup, how: Arithmetic, values: Sequence[IndexedSlices], function: str
) -> IndexedSlices:
    """Return the rows and indices of all replicas in replica order; MEAN divides the rows. Collective, inside one.

    `values` come from `checked_slices`.
    """
    rows, indices = (
        gather_all(group, [leaf], 0, [""], function)[0]
        for leaf in ([value.values for value in values], [value.indices for value in values])
    )
    return IndexedSlices(_divide(rows, how), indices, values[0].dense_shape)


def _divide(rows: Any, how: Arithmetic) -> Any:
    if how.divisor == 1:
        return rows
    with on_device_of(rows):
        return finish(array_module(rows).asarray(rows, how.accumulate), how)
