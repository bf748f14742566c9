"""Reduction on one rank, from the first replica to the last, and broadcast of the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from ..arena.arithmetic import Arithmetic, finish
from ..base.devices import canonical
from ..base.options import CommunicationOptions
from ..base.types import ReduceOp
from ..comm.arrays import mpi_datatype
from .flat import Array, Arrays, FlatAllReduce

__all__ = ["ReductionToOneDevice"]

CHUNK = 1 << 18  # elements of one message
TAG = 7


@final
class ReductionToOneDevice(FlatAllReduce):
    """A gather of all replicas' values on rank 0, their sum in replica order, and a broadcast of the result.

    The sum is the left fold ((v0 + v1) + v2) + …, whatever the layout of ranks. It is slow: use it for reference, or if the order
    of the sum matters. float16 and bfloat16 are folded in float32.

    Args:
        reduce_to_device: a device of rank 0, such as "cpu:0"; sums are computed on the host.
        accumulation_fn: takes the list of all replicas' flat arrays, in replica order, and returns their sum; default: the left
            fold. It runs on rank 0 only, and supports SUM and MEAN only.

    Raises:
        DeviceError: the device string is malformed.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[np.ndarray]], np.ndarray] | None = None,
    ) -> None:
        self.reduce_to_device = None if reduce_to_device is None else canonical(reduce_to_device)
        self.accumulation_fn = accumulation_fn
        if accumulation_fn is not None:  # it returns sums
            self.reduce_ops = (ReduceOp.SUM, ReduceOp.MEAN)

    def _cuts(self, options: CommunicationOptions | None) -> tuple[int, int]:
        return super()._cuts(options) if self.accumulation_fn is None else (1, 1)  # it gets one value at a time

    def _sum_flat(self, arrays: Arrays, how: Arithmetic, out: Array | None = None) -> Array:
        group = self.group
        if self.accumulation_fn is not None:
            total = self._accumulate(self.accumulation_fn, arrays, how)
        else:
            total = self._fold(arrays, how)
        if group.topology.size > 1 and total.size:
            group.broadcast(total, root=0)
        return total

    def _fold(self, arrays: Sequence[np.ndarray], how: Arithmetic) -> np.ndarray:
        """Return the left fold over all replicas, chunk by chunk; the result is valid on rank 0 only."""
        size = arrays[0].size
        total = np.empty(size, how.accumulate)
        scratch = np.empty(min(size, CHUNK), arrays[0].dtype)
        for low in range(0, size, CHUNK):
            high = min(low + CHUNK, size)
            if self.group.topology.rank:
                self._send([array[low:high] for array in arrays])
                continue
            chunk = total[low:high]
            np.copyto(chunk, arrays[0][low:high], casting="unsafe")
            for array in arrays[1:]:
                how.ufunc(chunk, array[low:high], out=chunk, dtype=chunk.dtype)
            for rank, replicas in enumerate(self.group.topology.replicas_per_rank[1:], 1):
                for _ in range(replicas):
                    self._receive(scratch[: high - low], rank)
                    how.ufunc(chunk, scratch[: high - low], out=chunk, dtype=chunk.dtype)
        return finish(total, how) if self.group.topology.rank == 0 else np.empty(size, how.result)

    def _accumulate(
        self, function: Callable[[list[np.ndarray]], np.ndarray], arrays: Sequence[np.ndarray], how: Arithmetic
    ) -> np.ndarray:
        wide = [array.astype(how.accumulate) for array in arrays]
        if self.group.topology.rank:
            for low in range(0, arrays[0].size, CHUNK):
                self._send([array[low : low + CHUNK] for array in wide])
            return np.empty(arrays[0].size, how.result)
        for rank, replicas in enumerate(self.group.topology.replicas_per_rank[1:], 1):
            wide += [np.empty(arrays[0].size, how.accumulate) for _ in range(replicas)]
            for low in range(0, arrays[0].size, CHUNK):
                for array in wide[-replicas:]:
                    self._receive(array[low : low + CHUNK], rank)
        total = np.asarray(function(wide)).astype(how.accumulate)
        return finish(total, how)

    def _send(self, chunks: Sequence[np.ndarray]) -> None:
        for chunk in chunks:
            self.group.topology.comm.Send([chunk, mpi_datatype(chunk.dtype)], dest=0, tag=TAG)

    def _receive(self, chunk: np.ndarray, rank: int) -> None:
        self.group.topology.comm.Recv([chunk, mpi_datatype(chunk.dtype)], source=rank, tag=TAG)
