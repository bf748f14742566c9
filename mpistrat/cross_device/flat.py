"""From an algorithm that sums flat host arrays to one that reduces what users pass: shapes, packs, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..comm.arrays import array_module, is_gpu, on_device_of, to_host
from ..comm.packing import Pack, plan_packs
from ..distributed_values import Mirrored
from .arithmetic import Arithmetic, flatten_all

__all__ = ["SumFlat", "device_sum", "on_devices", "reduce_one", "reduce_packs"]

#: Takes the local replicas' flat host arrays and returns the reduced flat array, a new one.
SumFlat = Callable[[Sequence[np.ndarray], Arithmetic], np.ndarray]


def reduce_one(sum_flat: SumFlat, values: Sequence[Any], how: Arithmetic) -> Any:
    """Return the reduction of one array. Collective, inside one.

    Args:
        sum_flat: the algorithm.
        values: one array of NumPy or CuPy for each local replica, of one shape.
        how: see `arithmetic`.
    """
    first = values[0]
    if is_gpu(first):
        # Not yet run on a GPU.
        host = to_host(device_sum(values, how))
        return on_devices(sum_flat([host.reshape(-1)], how).reshape(first.shape), values)
    return sum_flat(flatten_all(values), how).reshape(first.shape)


def reduce_packs(
    sum_flat: SumFlat, leaves: Sequence[Sequence[Any]], how: Callable[[np.dtype], Arithmetic], bytes_per_pack: int
) -> list[Any]:
    """Return the reductions of several arrays, which travel in packs of one dtype. Collective, inside one.

    Args:
        sum_flat: the algorithm.
        leaves: for each array, one of them for each local replica.
        how: gives the arithmetic of a dtype.
        bytes_per_pack: most bytes in a pack; 0 makes one pack for each dtype.
    """
    results: list[Any] = [None] * len(leaves)
    for pack in plan_packs([leaf[0] for leaf in leaves], bytes_per_pack):
        for index, result in zip(pack.indices, _reduce_pack(sum_flat, leaves, pack, how(pack.dtype)), strict=True):
            results[index] = result
    return results


def _reduce_pack(sum_flat: SumFlat, leaves: Sequence[Sequence[Any]], pack: Pack, how: Arithmetic) -> list[Any]:
    replicas = len(leaves[pack.indices[0]])
    first = [leaves[index][0] for index in pack.indices]
    if any(is_gpu(leaf) for leaf in first):
        return [reduce_one(sum_flat, leaves[index], how) for index in pack.indices]
    flats = [pack.pack([leaf[replica] for leaf in leaves]) for replica in range(replicas)]
    return pack.unpack(sum_flat(flats, how))


def device_sum(values: Sequence[Any], how: Arithmetic) -> Any:
    """Return a new CuPy array, on the first value's GPU, with what the local replicas' become.

    Not yet run on a GPU.
    """
    xp = array_module(values[0])
    with on_device_of(values[0]):
        parts = [xp.asarray(value) for value in values]  # copied to this GPU where they lie on another
        total = xp.empty(values[0].shape, how.accumulate)
        total[...] = parts[0]
        for part in parts[1:]:
            how.ufunc(total, part.astype(total.dtype, copy=False), out=total)
        return total


def on_devices(result: Any, values: Sequence[Any]) -> Any:
    """Return a result on the GPUs of the values: one array, or a Mirrored with one for each GPU.

    Not yet run on a GPU.
    """
    xp = array_module(values[0])
    copies = []
    for value in values:
        with on_device_of(value):
            copies.append(xp.asarray(result))
    several = len({value.device.id for value in values}) > 1
    return Mirrored(copies) if several else copies[0]
