"""Shared memory inside a node, MPI between nodes: each rank sums a slice of its node and all-reduces it with its peers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import numpy as np

from ..buffer_pool import BufferPool
from ..comm.arrays import is_gpu
from ..comm.packing import pack_sizes
from ..comm.process_group import ProcessGroup
from ..distributed_values import PerReplica
from ..errors import explain
from ..options import CommunicationOptions
from ..types import ReduceOp
from .arena_sum import ArenaSum
from .arithmetic import Arithmetic
from .cross_device_ops import CrossDeviceOps
from .exchange_sum import SMALL_BYTES, ExchangeSum
from .flat import reduce_one, reduce_packs
from .gradient_arena import GradientArena
from .in_place import Place, domain_parts, find_place, reduce_in_place
from .mpi_all_reduce import mpi_sum
from .staged_sum import StagedSum

__all__ = ["HierarchicalAllReduce", "HierarchicalCopyAllReduce"]


@final
class HierarchicalAllReduce(CrossDeviceOps):
    """Sums over the ranks of a node through shared memory, then over the nodes by MPI, slice by slice.

    Rank i of each node sums slice i and all-reduces it with the ranks i of the other nodes, so that every rank drives the
    network. On one node that second half is empty. Any number of ranks and of replicas on each is right. Where ranks
    share no memory it is one MPI_Allreduce.

    Arrays on a GPU go through pinned host memory (not yet run on a GPU).

    Args:
        num_packs: into how many messages `batch_reduce` cuts the values of one dtype; 0 sends each value by itself.
            `bytes_per_pack` of the options comes first.

    Raises:
        ValueError: num_packs is negative.
    """

    reduce_ops = tuple(ReduceOp)

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(explain("HierarchicalAllReduce", "num_packs", expected="≥ 0", got=num_packs))
        self.num_packs = num_packs
        self.results = BufferPool()
        self._exchange: ExchangeSum | None = None
        self._staged: StagedSum | None = None
        self._arenas: ArenaSum | None = None

    def bind(self, group: ProcessGroup) -> None:
        super().bind(group)
        self._staged = None
        self._arenas = None
        self._exchange = ExchangeSum(group, self.results) if group.num_nodes == 1 and group.node.size > 1 else None

    def close(self) -> None:
        super().close()
        self._exchange = self._staged = self._arenas = None  # memory that somebody holds cannot be freed

    def entry(self, arrays: Sequence[Any], destinations: Any) -> tuple[bool, Hashable]:
        if self._find(arrays, destinations) is not None:
            return True, "in place"
        if self._exchanged(arrays[0]):
            return False, "exchange"
        return True, ""

    def _exchanged(self, array: Any) -> bool:
        return self._exchange is not None and array.nbytes <= self._exchange.limit

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        values = per_replica_value.values
        place = self._place(values, destinations, reduce_op)
        if place is not None:
            reduce_in_place(self.group, self._arena_sum(), [place], reduce_op, self.call)
            return place.view(values[0].shape)
        return reduce_one(self._sum, values, self.arithmetic(reduce_op, values[0].dtype))

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        pairs = value_destination_pairs
        places = [self._place(value.values, destination, reduce_op) for value, destination in pairs]
        found = [place for place in places if place is not None]
        if found:
            reduce_in_place(self.group, self._arena_sum(), found, reduce_op, self.call)
        rest = [value.values for (value, _), place in zip(pairs, places, strict=True) if place is None]
        reduced = iter(self._batch(reduce_op, rest, options))
        return [
            next(reduced) if place is None else place.view(value.values[0].shape)
            for (value, _), place in zip(pairs, places, strict=True)
        ]

    def reduce_arena(
        self,
        arena: GradientArena,
        ranges: Sequence[tuple[int, int]],
        consume: Callable[[int, int, np.ndarray], None],
    ) -> None:
        if is_gpu(arena.local[0]):
            super().reduce_arena(arena, ranges, consume)
            return
        how = self.arithmetic(ReduceOp.SUM, arena.dtype)
        self._arena_sum().sum(domain_parts(arena), arena.owned(ranges), how, consume)

    def _place(self, values: Sequence[Any], destinations: Any, reduce_op: ReduceOp) -> Place | None:
        """Where in a gradient arena the values lie that shall be reduced in place; None for all others."""
        if self.arithmetic(reduce_op, values[0].dtype).result != values[0].dtype:
            return None
        return self._find(values, destinations)

    def _find(self, values: Sequence[Any], destinations: Any) -> Place | None:
        if destinations is None or values[0].nbytes <= SMALL_BYTES:
            return None
        return find_place(self.group, values, destinations)

    def _batch(
        self, reduce_op: ReduceOp, leaves: Sequence[Sequence[Any]], options: CommunicationOptions | None
    ) -> list[Any]:
        limit = options.bytes_per_pack if options else None
        sum_flat = self._sum
        if limit is None:
            limit = 1 if self.num_packs == 0 else 0
            sum_flat = self._sum_in_packs if self.num_packs > 1 else self._sum
        return reduce_packs(sum_flat, leaves, lambda dtype: self.arithmetic(reduce_op, dtype), limit)

    def _sum_in_packs(self, parts: Sequence[np.ndarray], how: Arithmetic) -> np.ndarray:
        pieces, low = [], 0
        for size in pack_sizes(parts[0].size, self.num_packs):
            pieces.append(self._sum([part[low : low + size] for part in parts], how))
            low += size
        return np.concatenate(pieces)

    def _sum(self, parts: Sequence[np.ndarray], how: Arithmetic) -> np.ndarray:
        group = self.group
        if group.num_nodes == group.topology.size:  # nobody shares memory with anybody
            return mpi_sum(group.inter, parts, how, self.results)
        if self._exchange is not None and parts[0].nbytes <= self._exchange.limit:
            return self._exchange.sum(parts, how, self.call)
        if self._staged is None:
            self._staged = StagedSum(group, self.results)
        return self._staged.sum(parts, how, self.call)

    def _arena_sum(self) -> ArenaSum:
        if self._arenas is None:
            self._arenas = ArenaSum(self.group)
        return self._arenas


#: TF's name of it.
HierarchicalCopyAllReduce = HierarchicalAllReduce
