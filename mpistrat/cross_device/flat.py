"""The base of algorithms that sum flat host arrays: packs, shapes and GPUs are dealt with here, once for all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arena.arithmetic import Arithmetic, flatten_all
from ..base.distributed_values import Mirrored, PerReplica
from ..base.options import CommunicationOptions
from ..base.types import ReduceOp
from ..comm.arrays import array_module, is_gpu, on_device_of, to_host
from ..comm.packing import plan_packs
from .ops import CrossDeviceOps

__all__ = ["FlatAllReduce", "device_sum", "on_devices"]


class FlatAllReduce(CrossDeviceOps):
    """A CrossDeviceOps that is one function on flat host arrays: a subclass defines `_sum_flat`."""

    reduce_ops = tuple(ReduceOp)

    @abstractmethod
    def _sum_flat(self, arrays: Sequence[np.ndarray], how: Arithmetic, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return the reduction of the local replicas' flat arrays, a new array, or `out`. Collective, inside one.

        `out` has the dtype of the result. It may be the memory of the only array. An algorithm may leave it unused.
        """

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        values = per_replica_value.values
        return self._reduce_one(self._sum_flat, values, self.arithmetic(reduce_op, values[0].dtype))

    def reduce_into(
        self, reduce_op: ReduceOp, arrays: Sequence[Any], out: np.ndarray, options: CommunicationOptions | None
    ) -> None:
        if is_gpu(arrays[0]) or not out.flags.c_contiguous or (options is not None and options.wire is not None):
            super().reduce_into(reduce_op, arrays, out, options)
            return
        flat, values = out.reshape(-1), flatten_all(arrays)
        apart = len(values) > 1 or (flat.ctypes.data, flat.nbytes) != (values[0].ctypes.data, values[0].nbytes)
        found = [value.copy() if apart and np.may_share_memory(flat, value) else value for value in values]
        total = self._sum_flat(found, self.arithmetic(reduce_op, values[0].dtype), out=flat)
        if total is not flat:
            flat[...] = total

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        limit = (options.bytes_per_pack if options else None) or 0
        return self._reduce_packs(
            self._sum_flat, reduce_op, [value.values for value, _ in value_destination_pairs], limit
        )

    def _reduce_one(self, sum_flat: Callable[..., np.ndarray], values: Sequence[Any], how: Arithmetic) -> Any:
        first = values[0]
        if is_gpu(first):
            # Not yet run on a GPU.
            host = to_host(device_sum(values, how))
            return on_devices(sum_flat([host.reshape(-1)], how).reshape(first.shape), values)
        return sum_flat(flatten_all(values), how).reshape(first.shape)

    def _reduce_packs(
        self, sum_flat: Callable[..., np.ndarray], reduce_op: ReduceOp, leaves: Sequence[Sequence[Any]], limit: int
    ) -> list[Any]:
        """Reduce arrays, each given as one for each local replica, in packs of one dtype of at most `limit` bytes (0: any)."""
        results: list[Any] = [None] * len(leaves)
        for pack in plan_packs([leaf[0] for leaf in leaves], limit):
            how = self.arithmetic(reduce_op, pack.dtype)
            if any(is_gpu(leaves[index][0]) for index in pack.indices):
                reduced = [self._reduce_one(sum_flat, leaves[index], how) for index in pack.indices]
            else:
                replicas = range(len(leaves[pack.indices[0]]))
                flats = [pack.pack([leaf[replica] for leaf in leaves]) for replica in replicas]
                reduced = pack.unpack(sum_flat(flats, how))
            for index, result in zip(pack.indices, reduced, strict=True):
                results[index] = result
        return results


def device_sum(values: Sequence[Any], how: Arithmetic) -> Any:
    """Return a new CuPy array, on the first value's GPU, with the reduction of the local replicas'.

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
