"""The values and results of a CrossDeviceOps, and operations without an algorithm: gather, broadcast, sparse rows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import nest
from ..base.buffers import BufferPool
from ..base.devices import parse
from ..base.distributed_values import DistributedValues, Mirrored
from ..base.errors import CollectiveMismatchError, explain
from ..base.types import IndexedSlices, ReduceOp
from ..comm.arrays import array_module, as_array, check_movable, dtype_name, import_cupy, is_gpu, on_device_of, to_host
from ..comm.call import Call
from ..comm.packing import forms_of, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup

__all__ = [
    "Leaves",
    "beside",
    "broadcast_all",
    "broadcast_one",
    "call_of",
    "check_destinations",
    "check_out",
    "check_root",
    "checked_slices",
    "counted_axis",
    "form",
    "local_arrays",
    "local_values",
    "on_destination",
    "reduced_already",
    "reducible_values",
    "row_size",
]

_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)  # reductions of equal values to the value itself


class Leaves(NamedTuple):
    """The values of one collective: the leaves of a nest, or one value.

    Attributes:
        function: the public caller, for errors and for the comparison of the ranks.
        values: of each leaf a PerReplica, or the value of a single local replica.
        name: the ranks and the form of the nest, for the comparison of the ranks.
        paths: the path of each leaf in the nest, for errors.
        said: dtype and reduction in the caller's words, for the comparison of the ranks; default those of the array.
    """

    function: str
    values: Sequence[Any]
    name: str = ""
    paths: Sequence[str] = ("",)
    said: tuple[str, str] | None = None

    @classmethod
    def of(cls, function: str, value: Any, label: str) -> Leaves:
        """Return the leaves of a nest, or a single value."""
        form = nest.form(value) if nest.is_nested(value) else ""
        return cls(function, nest.flatten(value), ": ".join(filter(None, (label, form))), nest.paths(value))


def check_destinations(destinations: Any, function: str) -> None:
    """Raise unless destinations are None, a device, a value or a Variable.

    Raises:
        ValueError: for a list or tuple of them.
    """
    if isinstance(destinations, (list, tuple)):
        expected = "one Variable, value or device string"
        raise ValueError(explain(function, "destinations", expected=expected, got=f"a {type(destinations).__name__}"))


def reduced_already(reduce_op: ReduceOp, value: Any, group: ProcessGroup, function: str) -> bool:
    """Return True if the only rank's value is its own reduction.

    That is a Mirrored or plain value under MEAN, and a plain zero, which TF accepts under SUM too.
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

    A plain value belongs to the rank's single replica. If it has several, each gets the value if `repeat`.

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
    """Return True if a plain value may represent every local replica: not in a SUM or PROD, except zeros."""
    if reduce_op in _IDEMPOTENT:
        return True
    return not isinstance(value, IndexedSlices) and not as_array(value, function).any()


def local_arrays(values: Sequence[Any], function: str) -> list[Any]:
    """Return the local replicas' values as arrays of one shape and dtype.

    Raises:
        CollectiveMismatchError: they differ.
        TypeError: one is not an array.
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
    """Return dtype, shape and detail of a call, for `ProcessGroup.collective`: of one array, or several in the detail."""
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
    """Return a result on the device that destinations name, if any.

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


def beside(result: np.ndarray, array: Any) -> Any:
    """Return a result on an array's device: its GPU, or unchanged."""
    if not is_gpu(array):
        return result
    with on_device_of(array):
        return array_module(array).asarray(result)


def counted_axis(axis: Any, ndim: int) -> Any:
    """Return an axis of an array counted from 0 if it was counted from the end; an invalid axis unchanged.

    Example:
        >>> counted_axis(-1, 3), counted_axis(1, 3), counted_axis(-4, 3)
        (2, 1, -4)
    """
    return int(axis) + ndim if isinstance(axis, (int, np.integer)) and -ndim <= axis < 0 else axis


_POOL = BufferPool(kept=2)
_SMALL = 1 << 16  # bytes; smaller arrays share one message, which costs a copy on either side

# broadcast


def row_size(array: Any, axis: int) -> int:
    """Return the number of elements at one index along an axis."""
    return math.prod(array.shape[:axis] + array.shape[axis + 1 :])


def check_root(root: int, group: ProcessGroup, function: str) -> None:
    """Raise unless a replica has this number.

    Raises:
        ValueError: naming the function.
    """
    replicas = group.topology.num_replicas
    if not 0 <= root < replicas:
        raise ValueError(explain(function, "root", expected=f"a replica from 0 to {replicas - 1}", got=repr(root)))


def broadcast_all(
    group: ProcessGroup, leaves: Sequence[Sequence[Any]], root: int, paths: Sequence[str], function: str
) -> list[Any]:
    """Return global replica `root`'s array of each value, a new one. Collective, inside one. Arguments as of `Gather`.

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


def broadcast_one(group: ProcessGroup, root: int, array: np.ndarray, call: Call) -> np.ndarray:
    """Return replica `root`'s array, a new one; each rank passes one of the same form. Collective, inside the call."""
    rank = group.topology.rank_of_replica(root)[0]
    if rank == group.topology.rank:
        host = np.array(array, order="C")
    else:
        host = _POOL.empty(array.size, array.dtype).reshape(array.shape)
    group.broadcast(host, root=rank)
    return host


# IndexedSlices


def checked_slices(values: Sequence[Any], reduce_op: ReduceOp, function: str) -> list[IndexedSlices]:
    """Return the local replicas' slices with arrays in them, checked, all of one form.

    Raises:
        CollectiveMismatchError: a local replica's value is not IndexedSlices, or has another form than the first.
        ValueError: indices are not one integer for each row of the values.
        TypeError: another reduction than SUM and MEAN, which concatenated rows cannot represent.
    """
    if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
        expected, got = f"dense arrays for {reduce_op.value}", "IndexedSlices"
        remedy = "IndexedSlices support SUM and MEAN only: pass to_dense() of them"
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
    """Return what must be equal on every rank: everything except the number of rows."""
    return (
        "IndexedSlices",
        value.values.dtype.name,
        value.values.shape[1:],
        value.indices.dtype.name,
        value.dense_shape,
    )
