"""What the callers of a CrossDeviceOps pass and get: plain and per-replica values, destinations, results on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cluster.devices import parse
from ..comm.arrays import as_array, import_cupy, is_gpu, to_host
from ..comm.process_group import ProcessGroup
from ..distributed_values import DistributedValues, Mirrored
from ..errors import CollectiveMismatchError, explain
from ..types import IndexedSlices, ReduceOp

__all__ = [
    "check_destinations",
    "local_arrays",
    "local_values",
    "may_repeat",
    "place",
    "reduced_already",
    "reducible_values",
]


_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)  # what makes the value itself of equal values


def check_destinations(destinations: Any, function: str) -> None:
    """Do nothing if destinations are legal: None, a device, a value or a Variable.

    Raises:
        ValueError: for a list or tuple of them.
    """
    if isinstance(destinations, (list, tuple)):
        expected = "one Variable, value or device string"
        raise ValueError(explain(function, "destinations", expected=expected, got=f"a {type(destinations).__name__}"))


def reduced_already(reduce_op: ReduceOp, value: Any, group: ProcessGroup) -> bool:
    """Return whether the only rank's value is its own reduction.

    That is a Mirrored or plain value under MEAN, and a plain zero, which TF lets pass under SUM too.
    """
    if group.topology.size > 1 or group.topology.num_local_replicas == 1:
        return False
    if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
        return False
    return reduce_op is ReduceOp.MEAN or (
        reduce_op is ReduceOp.SUM and not isinstance(value, Mirrored) and may_repeat(reduce_op, value)
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
    return local_values(value, group, function, repeat=repeat or may_repeat(reduce_op, value))


def may_repeat(reduce_op: ReduceOp, value: Any) -> bool:
    """Return whether a plain value may stand for every local replica: not in a SUM or PROD, but zeros."""
    if reduce_op in _IDEMPOTENT:
        return True
    return not isinstance(value, IndexedSlices) and not as_array(value, "reduce").any()


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


def place(result: Any, destinations: Any) -> Any:
    """Return a result on the device that destinations name, where they name one.

    Example:
        >>> place(np.ones(2), "cpu:0")
        array([1., 1.])
    """
    if not isinstance(destinations, str):
        return result
    kind, index = parse(destinations)
    if isinstance(result, Mirrored):
        result = result.values[0]
    if isinstance(result, IndexedSlices):
        rows, indices = place(result.values, destinations), place(result.indices, destinations)
        return IndexedSlices(rows, indices, result.dense_shape)
    if kind == "cpu":
        return to_host(result) if is_gpu(result) else result
    cupy = import_cupy("reduce")
    with cupy.cuda.Device(index):
        return cupy.asarray(result)
