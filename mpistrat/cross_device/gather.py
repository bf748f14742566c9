"""Concatenation of the replicas' arrays in replica order, ragged along the axis of concatenation."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..comm.arrays import array_module, is_gpu, on_device_of, to_host
from ..comm.dtypes import check_movable
from ..comm.process_group import ProcessGroup
from ..errors import CollectiveMismatchError, explain

__all__ = ["gather"]

_LARGE = 1 << 30  # bytes; above, the counts of one call might not fit MPI's


def gather(group: ProcessGroup, values: Sequence[Any], axis: int, function: str = "gather") -> Any:
    """Return the arrays of all replicas concatenated along an axis, in replica order. Collective, inside one.

    Args:
        group: the ranks.
        values: one array for each local replica; lengths along `axis` may differ, the rest may not.
        axis: 0 ≤ axis < number of dimensions.
        function: the public caller to name in errors.

    Raises:
        CollectiveMismatchError: on every rank, naming a rank and both shapes, before any data moved.
        ValueError: a scalar, or an axis out of range.
        TypeError: Python objects or structured arrays.
    """
    totals = _agree(group, values, axis, function)
    local = _join(values, axis)
    if group.topology.size == 1:
        return local
    host = np.ascontiguousarray(to_host(local))
    joined = _exchange(group, host, axis, totals)
    if not is_gpu(local):
        return joined
    with on_device_of(local):
        return array_module(local).asarray(joined)


def _join(values: Sequence[Any], axis: int) -> Any:
    if len(values) == 1:
        return values[0].copy()
    with on_device_of(values[0]):
        return array_module(values[0]).concatenate(values, axis=axis)


def _form(value: Any, axis: int) -> str:
    """The form that all replicas must share: everything but the length along the axis."""
    shape = ["*" if dim == axis else str(size) for dim, size in enumerate(value.shape)]
    return f"{value.dtype.name} of shape ({', '.join(shape)})"


def _agree(group: ProcessGroup, values: Sequence[Any], axis: int, function: str) -> list[int]:
    """Compare the forms of all replicas; return each rank's length along the axis."""
    forms = list(dict.fromkeys(_form(value, axis) for value in values))
    length = sum(value.shape[axis] for value in values if 0 <= axis < value.ndim)
    table = group.all_gather_int([zlib.crc32("; ".join(forms).encode()), length])
    if len(forms) > 1 or len(set(table[:, 0].tolist())) > 1:
        shapes = " and ".join(dict.fromkeys(f"{value.dtype.name} {tuple(value.shape)}" for value in values))
        raise CollectiveMismatchError(_mismatch(function, group.all_gather_text(shapes), table[:, 0].tolist()))
    value = values[0]
    if value.ndim == 0:
        remedy = "Reduce it, or give it a dimension: value.reshape(1)"
        raise ValueError(explain(function, "value", expected="at least one dimension", got="a scalar", remedy=remedy))
    if not 0 <= axis < value.ndim:
        raise ValueError(explain(function, "axis", expected=f"0 ≤ axis < {value.ndim}", got=axis))
    check_movable(value.dtype, function)
    return [int(n) for n in table[:, 1]]


def _mismatch(function: str, shapes: list[str], hashes: list[int]) -> str:
    common = max(set(hashes), key=lambda h: (hashes.count(h), -hashes.index(h)))
    odd = next((rank for rank, h in enumerate(hashes) if h != common), 0)
    usual = hashes.index(common)
    if odd == usual:  # one rank, or every rank in the same way
        return explain(
            function, "value", expected="equal shapes but for the axis on every replica", got=shapes[0], rank=0
        )
    return explain(
        function,
        "value",
        expected=f"{shapes[usual]} as on rank {usual}, but for the length along the axis",
        got=shapes[odd],
        rank=odd,
    )


def _exchange(group: ProcessGroup, local: np.ndarray, axis: int, totals: list[int]) -> np.ndarray:
    rest = local.shape[:axis] + local.shape[axis + 1 :]
    row = int(np.prod(rest, dtype=np.int64))
    ends = np.cumsum([total * row for total in totals]).tolist()
    flat = np.empty(ends[-1], local.dtype)
    _all_gather(group, local.reshape(-1), flat, [0, *ends])
    if axis == 0:
        return flat.reshape(ends[-1] // row if row else sum(totals), *rest)
    parts = []
    for rank, total in enumerate(totals):
        shape = (*local.shape[:axis], total, *local.shape[axis + 1 :])
        parts.append(flat[ends[rank] - total * row : ends[rank]].reshape(shape))
    return np.concatenate(parts, axis=axis)


def _all_gather(group: ProcessGroup, local: np.ndarray, flat: np.ndarray, borders: list[int]) -> None:
    """Fill `flat` with every rank's elements; rank r's lie between borders r and r + 1."""
    if flat.nbytes > _LARGE:
        for rank, low in enumerate(borders[:-1]):
            piece = flat[low : borders[rank + 1]]
            if rank == group.topology.rank:
                piece[...] = local
            if piece.size:
                group.broadcast(piece, root=rank)
        return
    from mpi4py import MPI

    item = flat.itemsize
    counts = [(high - low) * item for low, high in itertools.pairwise(borders)]
    target = [flat.view(np.uint8), counts, [low * item for low in borders[:-1]], MPI.BYTE]
    group.topology.comm.Allgatherv([local.view(np.uint8), MPI.BYTE], target)
