"""Everything to one rank, summed there from the first replica to the last, and the sum sent to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from ..cluster.devices import canonical
from ..comm.dtypes import mpi_datatype
from ..distributed_values import PerReplica
from ..options import CommunicationOptions
from ..types import ReduceOp
from .arithmetic import Arithmetic, finish
from .cross_device_ops import CrossDeviceOps
from .flat import reduce_one, reduce_packs

__all__ = ["ReductionToOneDevice"]

CHUNK = 1 << 18  # elements that travel at a time
TAG = 7


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Gathers all replicas' values on rank 0, sums them there in replica order, and broadcasts the result.

    The sum is the left fold ((v0 + v1) + v2) + …, whatever the layout of ranks; slow, and of use as a reference or
    where the order of the sum matters. float16 and bfloat16 are folded in float32.

    Args:
        reduce_to_device: a device of rank 0, such as "cpu:0"; sums are formed on the host.
        accumulation_fn: takes the list of all replicas' flat arrays, in replica order, and returns their sum; default:
            the left fold. It runs on rank 0 only, and serves SUM and MEAN only.

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
        if accumulation_fn is None:  # which returns sums
            self.reduce_ops = tuple(ReduceOp)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        values = per_replica_value.values
        return reduce_one(self._sum, values, self.arithmetic(reduce_op, values[0].dtype))

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        leaves = [value.values for value, _ in value_destination_pairs]
        if self.accumulation_fn is not None:  # sees one value at a time
            return [reduce_one(self._sum, leaf, self.arithmetic(reduce_op, leaf[0].dtype)) for leaf in leaves]
        limit = (options.bytes_per_pack if options else None) or 0
        return reduce_packs(self._sum, leaves, lambda dtype: self.arithmetic(reduce_op, dtype), limit)

    def _sum(self, parts: Sequence[np.ndarray], how: Arithmetic) -> np.ndarray:
        group = self.group
        if self.accumulation_fn is not None:
            total = self._accumulate(self.accumulation_fn, parts, how)
        else:
            total = self._fold(parts, how)
        if group.topology.size > 1 and total.size:
            group.broadcast(total, root=0)
        return total

    def _fold(self, parts: Sequence[np.ndarray], how: Arithmetic) -> np.ndarray:
        """The left fold over all replicas, chunk by chunk; the result is right on rank 0 only."""
        size = parts[0].size
        total = np.empty(size, how.accumulate)
        scratch = np.empty(min(size, CHUNK), parts[0].dtype)
        for low in range(0, size, CHUNK):
            high = min(low + CHUNK, size)
            if self.group.topology.rank:
                self._send([part[low:high] for part in parts])
                continue
            chunk = total[low:high]
            np.copyto(chunk, parts[0][low:high], casting="unsafe")
            for part in parts[1:]:
                how.ufunc(chunk, part[low:high], out=chunk, dtype=chunk.dtype)
            for rank, replicas in enumerate(self.group.topology.replicas_per_rank[1:], 1):
                for _ in range(replicas):
                    self._receive(scratch[: high - low], rank)
                    how.ufunc(chunk, scratch[: high - low], out=chunk, dtype=chunk.dtype)
        return finish(total, how) if self.group.topology.rank == 0 else np.empty(size, how.result)

    def _accumulate(
        self, function: Callable[[list[np.ndarray]], np.ndarray], parts: Sequence[np.ndarray], how: Arithmetic
    ) -> np.ndarray:
        wide = [part.astype(how.accumulate) for part in parts]
        if self.group.topology.rank:
            for low in range(0, parts[0].size, CHUNK):
                self._send([part[low : low + CHUNK] for part in wide])
            return np.empty(parts[0].size, how.result)
        for rank, replicas in enumerate(self.group.topology.replicas_per_rank[1:], 1):
            wide += [np.empty(parts[0].size, how.accumulate) for _ in range(replicas)]
            for low in range(0, parts[0].size, CHUNK):
                for part in wide[-replicas:]:
                    self._receive(part[low : low + CHUNK], rank)
        total = np.asarray(function(wide)).astype(how.accumulate)
        return finish(total, how)

    def _send(self, pieces: Sequence[np.ndarray]) -> None:
        for piece in pieces:
            self.group.topology.comm.Send([piece, mpi_datatype(piece.dtype)], dest=0, tag=TAG)

    def _receive(self, piece: np.ndarray, rank: int) -> None:
        self.group.topology.comm.Recv([piece, mpi_datatype(piece.dtype)], source=rank, tag=TAG)
