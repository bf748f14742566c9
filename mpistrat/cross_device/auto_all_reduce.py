"""The algorithm that the chooser's table names for each array."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import numpy as np

from ..comm.arrays import is_gpu
from ..comm.nccl import nccl_available
from ..comm.process_group import ProcessGroup
from ..distributed_values import PerReplica
from ..log import once
from ..options import CommunicationOptions
from ..types import ReduceOp
from .chooser import Chooser
from .cross_device_ops import CrossDeviceOps
from .gradient_arena import GradientArena
from .hierarchical_all_reduce import HierarchicalAllReduce
from .mpi_all_reduce import MpiAllReduce
from .nccl_all_reduce import NcclAllReduce

__all__ = ["AutoAllReduce"]


@final
class AutoAllReduce(CrossDeviceOps):
    """Hands each reduction to the algorithm that a table names for its device, layout and size.

    Where the table says NCCL and there is none, MPI or shared memory takes over, and the log says so once.

    Args:
        chooser: the table; default: the file that MPISTRAT_CHOOSER names, else the one that ships.

    Example:
        >>> print(AutoAllReduce().chooser)  # doctest: +ELLIPSIS
        all-reduce algorithms, ...
    """

    reduce_ops = tuple(ReduceOp)

    def __init__(self, chooser: Chooser | None = None) -> None:
        self.chooser = chooser or Chooser()
        self._given = chooser is not None
        self._algorithms: dict[str, CrossDeviceOps] = {}
        self._nodes = "one"

    def bind(self, group: ProcessGroup) -> None:
        super().bind(group)
        if not self._given and group.environment.chooser:
            self.chooser = Chooser(group.environment.chooser)
        self._nodes = "one" if group.num_nodes == 1 else "several"
        self._algorithms = {"MPI": MpiAllReduce(), "HIERARCHICAL": HierarchicalAllReduce()}
        for algorithm in self._algorithms.values():
            algorithm.bind(group)

    def close(self) -> None:
        super().close()
        for algorithm in self._algorithms.values():
            algorithm.close()

    def entry(self, arrays: Sequence[Any], destinations: Any) -> tuple[bool, Hashable]:
        chosen = self._choose(arrays[0])
        synchronize, how = chosen.entry(arrays, destinations)
        return synchronize, (type(chosen).__name__, how)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        chosen = self._choose(per_replica_value.values[0])
        chosen.call = self.call
        return chosen.reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Return the reduced values; what counts is the size of all on one kind of device together. Collective."""
        results: list[Any] = [None] * len(value_destination_pairs)
        for on_gpu in (False, True):
            members = [i for i, (value, _) in enumerate(value_destination_pairs) if is_gpu(value.values[0]) == on_gpu]
            if not members:
                continue
            pairs = [value_destination_pairs[i] for i in members]
            chosen = self._algorithm("gpu" if on_gpu else "cpu", sum(value.values[0].nbytes for value, _ in pairs))
            chosen.call = self.call
            reduced = chosen.batch_reduce_implementation(reduce_op, pairs, options)
            for index, result in zip(members, reduced, strict=True):
                results[index] = result
        return results

    def reduce_arena(
        self,
        arena: GradientArena,
        ranges: Sequence[tuple[int, int]],
        consume: Callable[[int, int, np.ndarray], None],
    ) -> None:
        chosen = self._algorithms["HIERARCHICAL"]
        if is_gpu(arena.local[0]):
            chosen = self._algorithm("gpu", arena.size * arena.dtype.itemsize)
        chosen.call = self.call
        chosen.reduce_arena(arena, ranges, consume)

    def _choose(self, array: Any) -> CrossDeviceOps:
        return self._algorithm("gpu" if is_gpu(array) else "cpu", array.nbytes)

    def _algorithm(self, device: str, nbytes: int) -> CrossDeviceOps:
        name = self.chooser.choose(device, self._nodes, nbytes).algorithm
        if name == "NCCL" and name not in self._algorithms:
            self._algorithms[name] = self._nccl_or_other()
        return self._algorithms[name]

    def _nccl_or_other(self) -> CrossDeviceOps:
        reason = nccl_available()
        if reason:
            once(logging.WARNING, f"arrays on a GPU go through host memory or a CUDA-aware MPI, not NCCL: {reason}")
            return self._algorithms["MPI"]
        nccl = NcclAllReduce()
        nccl.bind(self.group)
        return nccl
