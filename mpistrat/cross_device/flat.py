"""The base of algorithms that sum flat host arrays: it handles packs, shapes and GPUs for all of them."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..arena.arithmetic import Arithmetic, flatten_all
from ..base.distributed_values import Mirrored, PerReplica
from ..base.options import CommunicationOptions
from ..base.types import ReduceOp
from ..comm.arrays import array_module, is_gpu, on_device_of, to_host
from ..comm.contract import Collective
from ..comm.node import SMALL
from ..comm.packing import pack_sizes, plan_packs
from .ops import CrossDeviceOps, Planned

__all__ = ["Array", "Arrays", "FlatAllReduce", "device_sum", "on_devices"]


Array = np.ndarray
Arrays = Sequence[np.ndarray]


class FlatAllReduce(CrossDeviceOps):
    """A CrossDeviceOps that is one function on flat host arrays: a subclass defines `_sum_flat`.

    Attributes:
        num_packs: number of messages for a batch's values of one dtype; 0 sends each value separately.
    """

    reduce_ops = tuple(ReduceOp)
    num_packs = 1

    @abstractmethod
    def _sum_flat(self, arrays: Arrays, how: Arithmetic, out: Array | None = None) -> Array:
        """Return the reduction of the local replicas' flat arrays, a new array, or `out`. Collective, inside one.

        `out` has the dtype of the result, and may be the memory of a single array. An algorithm may leave it unused.
        """

    def _how(self, op: ReduceOp, dtype: np.dtype, options: CommunicationOptions | None) -> Arithmetic:
        """Return the arithmetic of a call."""
        return self.arithmetic(op, dtype)

    def _sum_in_place(
        self, op: ReduceOp, pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions | None
    ) -> list[Any]:
        """Return the results of values that are reduced in place, in their variable's gradient; None for the others."""
        return [None] * len(pairs)

    def _sum_on_gpus(self, values: Sequence[Any], how: Arithmetic) -> Any:
        """Return the reduction of arrays on GPUs, through host memory."""
        host = to_host(device_sum(values, how))
        return on_devices(self._sum_flat([host.reshape(-1)], how).reshape(values[0].shape), values)

    def _cuts(self, options: CommunicationOptions | None) -> tuple[int, int]:
        """Return the most bytes of a pack of values (0: no limit), and its number of messages."""
        limit = options.bytes_per_pack if options else None
        return (limit, 1) if limit is not None else (int(self.num_packs == 0), max(1, self.num_packs))

    def small_reduction(self, reduce_op: ReduceOp, array: Any) -> Planned | None:
        if is_gpu(array) or array.nbytes > SMALL:
            return None
        how = self.arithmetic(reduce_op, array.dtype)

        def reduce(array: np.ndarray, call: Collective) -> np.ndarray:
            self.call = call
            return self._sum_flat(flatten_all([array]), how).reshape(array.shape)

        return reduce

    @final
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        (found,) = self._sum_in_place(reduce_op, [(per_replica_value, destinations)], options)
        values = per_replica_value.values
        return self._reduce_one(values, self._how(reduce_op, values[0].dtype, options)) if found is None else found

    def reduce_into(
        self, reduce_op: ReduceOp, arrays: Sequence[Any], out: np.ndarray, options: CommunicationOptions | None
    ) -> None:
        if is_gpu(arrays[0]) or not out.flags.c_contiguous:
            super().reduce_into(reduce_op, arrays, out, options)
            return
        flat, values = out.reshape(-1), flatten_all(arrays)
        apart = len(values) > 1 or (flat.ctypes.data, flat.nbytes) != (values[0].ctypes.data, values[0].nbytes)
        found = [value.copy() if apart and np.may_share_memory(flat, value) else value for value in values]
        total = self._sum_flat(found, self._how(reduce_op, values[0].dtype, options), out=flat)
        if total is not flat:
            flat[...] = total

    @final
    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        results = self._sum_in_place(reduce_op, value_destination_pairs, options)
        rest = [index for index, result in enumerate(results) if result is None]
        leaves = [value_destination_pairs[index][0].values for index in rest]
        limit, messages = self._cuts(options)
        for pack in plan_packs([leaf[0] for leaf in leaves], limit):
            how, members = self._how(reduce_op, pack.dtype, options), [leaves[index] for index in pack.indices]
            if any(is_gpu(leaf[0]) for leaf in members):
                reduced = [self._reduce_one(leaf, how) for leaf in members]
            else:
                flats = [pack.pack([leaf[replica] for leaf in leaves]) for replica in range(len(members[0]))]
                reduced = pack.unpack(self._sum_in_messages(flats, how, messages))
            for index, result in zip(pack.indices, reduced, strict=True):
                results[rest[index]] = result
        return results

    def _reduce_one(self, values: Sequence[Any], how: Arithmetic) -> Any:
        if is_gpu(values[0]):
            return self._sum_on_gpus(values, how)
        return self._sum_flat(flatten_all(values), how).reshape(values[0].shape)

    def _sum_in_messages(self, arrays: Arrays, how: Arithmetic, messages: int) -> Array:
        if messages == 1:
            return self._sum_flat(arrays, how)
        ends = [0, *itertools.accumulate(pack_sizes(arrays[0].size, messages))]
        parts = [[array[low:high] for array in arrays] for low, high in itertools.pairwise(ends)]
        return np.concatenate([self._sum_flat(part, how) for part in parts])


def device_sum(values: Sequence[Any], how: Arithmetic) -> Any:
    """Return a new CuPy array, on the first value's GPU, with the reduction of the local replicas'."""
    xp = array_module(values[0])
    with on_device_of(values[0]):
        parts = [xp.asarray(value) for value in values]  # copied to this GPU from others
        total = xp.empty(values[0].shape, how.accumulate)
        total[...] = parts[0]
        for part in parts[1:]:
            how.ufunc(total, part.astype(total.dtype, copy=False), out=total)
        return total


def on_devices(result: Any, values: Sequence[Any]) -> Any:
    """Return a result on the GPUs of the values: one array, or a Mirrored with one for each GPU."""
    xp = array_module(values[0])
    copies = []
    for value in values:
        with on_device_of(value):
            copies.append(xp.asarray(result))
    several = len({value.device.id for value in values}) > 1
    return Mirrored(copies) if several else copies[0]
