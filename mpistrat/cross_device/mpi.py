"""All-reduce by one MPI_Allreduce: best for small messages between nodes, and if ranks share no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.arithmetic import Arithmetic, combine, finish
from ..base.buffers import BufferPool
from ..base.types import CommunicationImplementation
from ..comm.arrays import all_reduce, all_reduce_gpu
from .flat import Array, Arrays, FlatAllReduce, device_sum, on_devices

if TYPE_CHECKING:
    from ..arena.encoded import EncodedAllReduce

__all__ = ["MpiAllReduce", "mpi_sum"]


@final
class MpiAllReduce(FlatAllReduce, implementation=CommunicationImplementation.MPI):
    """An all-reduce over the local replicas, then over all ranks by one MPI_Allreduce.

    A CUDA-aware MPI sums arrays on a GPU directly; without one, and for MIN, MAX and PROD, the arrays go through pinned host
    memory.

    Example:
        >>> import mpistrat as ms
        >>> strategy = ms.MirroredStrategy(cross_device_ops=MpiAllReduce())  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.results = BufferPool()

    def _sum_on_gpus(self, values: Sequence[Any], how: Arithmetic) -> Any:
        from ..comm.gpu_support import gpu_aware

        if how.ufunc is not np.add or self.group.topology.size == 1 or not gpu_aware():
            return super()._sum_on_gpus(values, how)
        total = device_sum(values, how)
        all_reduce_gpu(self.group.topology.comm, total)
        return on_devices(finish(total, how), values)

    def _sum_flat(self, arrays: Arrays, how: Arithmetic, out: Array | None = None) -> Array:
        comm = self.group.topology.comm if self.group.topology.size > 1 else None
        return mpi_sum(comm, arrays, how, self.results, out=out)


def mpi_sum(
    comm: Any,
    arrays: Sequence[np.ndarray],
    how: Arithmetic,
    results: BufferPool,
    encoded: EncodedAllReduce | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the reduction of flat arrays over a communicator, a new array, or `out`. Collective over `comm` (None: no MPI).

    Uses `encoded`, if given, instead of MPI_Allreduce. `out` may be the memory of a single array.
    """
    here = out is not None and how.accumulate == how.result
    total = out if out is not None and here else results.empty(arrays[0].size, how.accumulate)
    if comm is not None and len(arrays) == 1 and arrays[0].dtype == how.accumulate and encoded is None:
        in_place = here and np.may_share_memory(total, arrays[0])
        all_reduce(comm, total, None if in_place else arrays[0], how.ufunc)
    else:
        combine(how.ufunc, arrays, total)
        if encoded is not None:
            encoded.sum(total)
        elif comm is not None:
            all_reduce(comm, total, ufunc=how.ufunc)
    return finish(total, how)
