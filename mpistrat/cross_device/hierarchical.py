"""The hierarchical all-reduce: shared memory inside a node, MPI between nodes.

Its three steps, of which the second is empty on one node:

- Step 1, reduce inside the node: rank i of each node sums slice i of its node's arrays in shared memory.
- Step 2, all-reduce between nodes: the ranks i of all nodes all-reduce slice i by MPI, so every rank drives the network.
- Step 3, broadcast inside the node: each rank copies all slices out of shared memory.

`_StagedSum` executes them for large arrays, chunk by chunk. Small arrays on one node take one barrier (`_ExchangeSum`). Gradients
of variables are summed in place (`arena.ArenaSum`), so that step 3 needs no copy.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.arithmetic import Arithmetic, combine, divide, finish, round_into
from ..arena.reduction import ArenaSum, Consume, Destination, Gradients, StartedSums, node_gradients
from ..base.buffers import BufferPool
from ..base.distributed_values import PerReplica
from ..base.errors import explain
from ..base.options import CommunicationOptions
from ..base.partition import aligned_bounds
from ..base.types import CommunicationImplementation, ReduceOp
from ..comm.arrays import all_reduce, is_gpu
from ..comm.process_group import ProcessGroup
from .flat import Array, Arrays, FlatAllReduce
from .mpi import mpi_sum
from .ops import Planned

if TYPE_CHECKING:
    from ..arena.early import EarlyArenaSum
    from ..arena.encoded import EncodedAllReduce

__all__ = ["HierarchicalAllReduce", "HierarchicalCopyAllReduce"]

# Constants, never tuned at run time: other chunks would give other bits.
SMALL_BYTES = 1 << 17  # up to this size even gradients in shared memory are exchanged rather than summed in place
# An exchange. Total of all ranks; with more bytes and more than two ranks it is faster if each rank sums only a slice.
EXCHANGE_BYTES = 1 << 20
EXCHANGE_CHUNK = 1 << 20  # bytes of every rank that are summed at a time while in cache
_CACHED_VIEWS = 256
# Staging. Bytes of a rank that are summed at a time.
NODE_CHUNK = 1 << 21  # on one node: few barriers, which are costly on busy machines
SLICE_CHUNK = 1 << 20  # for each slice between nodes: one message
STAGING_BYTES = 1 << 25  # of all ranks of a node, half of the allocation
SMALLEST_CHUNK = 1 << 18


@final
class HierarchicalAllReduce(FlatAllReduce, implementation=CommunicationImplementation.HIERARCHICAL):
    """An all-reduce over the ranks of a node through shared memory, then over the nodes by MPI, slice by slice.

    Rank i of each node sums slice i and all-reduces it with the ranks i of the other nodes, so that every rank drives the
    network. Any number of ranks, and of replicas on each, works. If ranks share no memory it is one MPI_Allreduce. Arrays on a
    GPU go through pinned host memory.

    Args:
        num_packs: number of messages for `batch_reduce`'s values of one dtype; 0 sends each value separately. `bytes_per_pack` of
            the options takes precedence.

    Raises:
        ValueError: num_packs is negative.
    """

    sums_pieces = True
    encodes = True

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(explain("HierarchicalAllReduce", "num_packs", expected=">= 0", got=num_packs))
        self.num_packs = num_packs
        self.results = BufferPool()
        self._exchange: _ExchangeSum | None = None
        self._staged: _StagedSum | None = None
        self._arenas: ArenaSum | EarlyArenaSum | None = None
        self._between: Any = None

    def bind(self, group: ProcessGroup) -> None:
        super().bind(group)
        self._staged = self._arenas = self._between = None
        self._exchange = _ExchangeSum(group, self.results) if group.num_nodes == 1 and group.node.size > 1 else None

    def close(self) -> None:
        super().close()
        self._exchange = self._staged = self._arenas = self._between = None  # referenced memory cannot be freed

    def entry(self, arrays: Sequence[Any], destinations: Any) -> tuple[bool, Hashable]:
        if self._find(arrays, destinations) is not None:
            return True, "in place"
        return self._exchanged(arrays[0]) is None, ""

    def small_reduction(self, reduce_op: ReduceOp, array: Any) -> Planned | None:
        exchange = self._exchanged(array)
        if exchange is None:
            return super().small_reduction(reduce_op, array)
        if array.nbytes > SMALL_BYTES or is_gpu(array):
            return None
        return exchange.small(array.shape, self.arithmetic(reduce_op, array.dtype))

    # Users' own arrays

    def _sum_flat(self, arrays: Arrays, how: Arithmetic, out: Array | None = None) -> Array:
        group, encoded = self.group, None if how.between is None else how.between(arrays[0], how)
        if group.num_nodes == group.topology.size:  # no ranks share memory
            return mpi_sum(group.inter, arrays, how, self.results, encoded, out)
        exchange = self._exchanged(arrays[0])
        if exchange is not None:
            return exchange.sum(arrays, how, self.call, out)
        if self._staged is None:
            self._staged = _StagedSum(group, self.results)
        return self._staged.sum(arrays, how, self.call, encoded, out)

    def _how(self, op: ReduceOp, dtype: np.dtype, options: CommunicationOptions | None) -> Arithmetic:
        how, inter = super()._how(op, dtype, options), self.group.inter
        if options is None or inter is None or not options.between_nodes():
            return how
        if self._between is None:
            from .fewer_bytes import sums_between

            self._between = sums_between(options, inter)
        return replace(how, between=self._between)

    def _exchanged(self, array: Any) -> _ExchangeSum | None:
        exchange = self._exchange
        return exchange if exchange is not None and array.nbytes <= exchange.limit else None

    # Gradients of variables

    def _sum_in_place(
        self, op: ReduceOp, pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions | None
    ) -> list[Any]:
        if options is not None and options.between_nodes():
            return super()._sum_in_place(op, pairs, options)
        found = [self._destination(value.values, variable, op) for value, variable in pairs]
        if any(found):
            self._arena_sum().reduce_in_place([where for where in found if where is not None], op, self.call)
        return [
            None if where is None else where.view(value.values[0].shape)
            for (value, _), where in zip(pairs, found, strict=True)
        ]

    def node_gradients(self, arena: Gradients) -> Sequence[np.ndarray] | None:
        return node_gradients(self.group, arena)

    def reduce_arena(self, arena: Gradients, ranges: Sequence[tuple[int, int]], consume: Consume) -> None:
        if is_gpu(arena.local[0]):
            super().reduce_arena(arena, ranges, consume)
            return
        self._arena_sum().sum_owned(arena, ranges, self.arithmetic(ReduceOp.SUM, arena.dtype), consume)

    def early_sums(self, arena: Gradients) -> StartedSums | None:
        if is_gpu(arena.local[0]) or not arena.node_pieces() or not arena.form.may_start_early:
            return None
        sums = self._arena_sum()
        if isinstance(sums, ArenaSum):
            from ..arena.early import EarlyArenaSum

            sums = self._arenas = EarlyArenaSum(self.group, sums)
        return sums

    def _destination(self, values: Sequence[Any], variable: Any, reduce_op: ReduceOp) -> Destination | None:
        """Return the location in a gradient arena of values that are reduced in place; None for all others."""
        if self.arithmetic(reduce_op, values[0].dtype).result != values[0].dtype:
            return None
        return self._find(values, variable)

    def _find(self, values: Sequence[Any], variable: Any) -> Destination | None:
        if variable is None or values[0].nbytes <= SMALL_BYTES:
            return None
        return Destination.find(self.group, values, variable)

    def _arena_sum(self) -> ArenaSum | EarlyArenaSum:
        if self._arenas is None:
            self._arenas = ArenaSum(self.group)
        return self._arenas


#: TF's name.
HierarchicalCopyAllReduce = HierarchicalAllReduce


@final
class _StagedSum:
    """A sum of arrays of any size over all ranks through its own shared memory.

    It is a pipeline with one barrier per turn: in turn t a rank copies chunk t into its memory, sums its slice of chunk t - 1
    over the ranks of the node (and over the other nodes), and copies the sums of chunk t - 2 out. Data written before one barrier
    is read before the next, in one of two halves, which alternate.
    """

    def __init__(self, group: ProcessGroup, results: BufferPool) -> None:
        """Allocate. Collective over all ranks."""
        self._group, self._results = group, results
        node = group.node
        slices = group.slices
        wanted = NODE_CHUNK if group.num_nodes == 1 else SLICE_CHUNK * slices
        # Equal on every node, even if nodes have different numbers of ranks.
        most = STAGING_BYTES // max(group.topology.ranks_per_node) // 64 * 64
        self._chunk = min(wanted, max(SMALLEST_CHUNK, most))
        # With room for the alignment of a slice at any item size.
        sums = (-(-self._chunk // slices) // 64 + 16) * 64
        half = self._chunk + sums
        self._block = node.allocate([2 * half] * node.size, "the staging memory of all-reduce")
        self._inputs = [[s[h * half : h * half + self._chunk] for s in self._block.segments] for h in (0, 1)]
        self._sums = [[s[h * half + self._chunk : (h + 1) * half] for s in self._block.segments] for h in (0, 1)]
        self._turn = 0

    def sum(
        self,
        arrays: Sequence[np.ndarray],
        how: Arithmetic,
        call: Any,
        encoded: EncodedAllReduce | None,
        out: np.ndarray | None,
    ) -> np.ndarray:
        """Return the reduction of the local replicas' flat arrays, a new array, or `out`. Collective over all ranks.

        The barriers compare `call`.
        """
        size = arrays[0].size
        out = self._results.empty(size, how.result) if out is None else out
        step = self._chunk // how.accumulate.itemsize
        chunks = [(low, min(low + step, size)) for low in range(0, size, step)]
        for turn in range(len(chunks) + 2):
            half, before = self._turn % 2, (self._turn + 1) % 2
            if turn < len(chunks):
                self._copy_in(arrays, chunks[turn], how, half)
            if 0 < turn <= len(chunks):
                total = self._reduce_in_node(chunks[turn - 1], how, before, half)
                if total is not None:
                    self._all_reduce_between_nodes(total, how, encoded)
            if turn >= 2:
                self._broadcast_in_node(out, chunks[turn - 2], how, before)
            if turn <= len(chunks):
                self._group.node.barrier(call)
                self._turn += 1
        return out

    def _copy_in(self, arrays: Sequence[np.ndarray], chunk: tuple[int, int], how: Arithmetic, half: int) -> None:
        low, high = chunk
        mine = self._inputs[half][self._group.node.rank].view(how.accumulate)[: high - low]
        combine(how.ufunc, [array[low:high] for array in arrays], mine)

    def _reduce_in_node(self, chunk: tuple[int, int], how: Arithmetic, source: int, target: int) -> np.ndarray | None:
        """Execute step 1; return None if the slice of this rank is empty."""
        index = self._group.slice_index
        if index is None:
            return None
        low, high = self._bounds(chunk)[index]
        if low == high:
            return None
        inputs = [memory.view(how.accumulate)[low:high] for memory in self._inputs[source]]
        total = self._sums[target][self._group.node.rank][: (high - low) * how.accumulate.itemsize]
        total = total.view(how.accumulate)
        combine(how.ufunc, inputs, total)
        return total

    def _all_reduce_between_nodes(self, total: np.ndarray, how: Arithmetic, encoded: EncodedAllReduce | None) -> None:
        """Execute step 2, and the division of a mean."""
        if encoded is not None:
            encoded.sum(total)
        elif self._group.inter is not None:
            all_reduce(self._group.inter, total, ufunc=how.ufunc)
        if how.divisor != 1:
            divide(total, how.divisor)

    def _broadcast_in_node(self, out: np.ndarray, chunk: tuple[int, int], how: Arithmetic, half: int) -> None:
        """Execute step 3."""
        start = chunk[0]
        for owner, (low, high) in enumerate(self._bounds(chunk)):
            sums = self._sums[half][owner][: (high - low) * how.accumulate.itemsize].view(how.accumulate)
            combine(how.ufunc, [sums], out[start + low : start + high])

    def _bounds(self, chunk: tuple[int, int]) -> list[tuple[int, int]]:
        return aligned_bounds(chunk[1] - chunk[0], self._group.slices)


@final
class _ExchangeSum:
    """A sum of arrays over the ranks of one node through its staging memory: every rank sums everything.

    One barrier per chunk is enough: the staging memory alternates between two halves, so no rank overwrites data that another may
    still read. With P ranks each reads P - 1 others; slices would take two copies and twice the barriers. So it is used for small
    arrays, and for all on two ranks.

    Attributes:
        limit: bytes of the largest array for which it is used.
    """

    def __init__(self, group: ProcessGroup, results: BufferPool) -> None:
        self._group, self._node, self._results = group, group.node, results
        self._views: dict[tuple[int, np.dtype, int], tuple[Any, list[np.ndarray]]] = {}
        self._chunk = min(EXCHANGE_CHUNK, self._node.staging()[0].nbytes)
        self.limit = EXCHANGE_BYTES // self._node.size if self._node.size > 2 else sys.maxsize

    def sum(
        self, arrays: Sequence[np.ndarray], how: Arithmetic, call: Any, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the reduction of the local replicas' flat arrays, a new array, or `out`. Collective on the node.

        The barriers compare `call`.
        """
        size = arrays[0].size
        step = self._chunk // how.accumulate.itemsize
        if size <= step:
            total = np.empty(size, how.accumulate)
            self._sum_chunk(arrays, total, how.ufunc, call)
            return finish(total, how)
        out = self._results.empty(size, how.result) if out is None else out
        for low in range(0, size, step):
            chunk = out[low : low + step]
            total = chunk if how.accumulate == how.result else np.empty(chunk.size, how.accumulate)
            self._sum_chunk([array[low : low + step] for array in arrays], total, how.ufunc, call)
            if how.divisor != 1:
                divide(total, how.divisor)
            if total is not chunk:
                round_into(chunk, total)
        return out

    def small(self, shape: tuple[int, ...], how: Arithmetic) -> Planned | None:
        """Return the reduction of arrays of one shape if it takes one barrier, else None."""
        from .small import SmallReduction

        nbytes = int(np.prod(shape, dtype=np.int64)) * how.accumulate.itemsize
        return SmallReduction(self._group, shape, how) if nbytes <= self._chunk else None

    def _sum_chunk(self, arrays: Sequence[np.ndarray], total: np.ndarray, ufunc: np.ufunc, call: Any) -> None:
        views = self._staged(total.dtype, total.size)
        node = self._node
        combine(ufunc, arrays, views[node.rank])
        node.barrier(call)
        combine(ufunc, views, total)

    def _staged(self, dtype: np.dtype, size: int) -> list[np.ndarray]:
        """Return every rank's part of the staging half that the next barrier publishes."""
        half = self._node.staging()
        key = (id(half), dtype, size)
        cached = self._views.get(key)
        if cached is None or cached[0] is not half:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            cached = half, [memory[: size * dtype.itemsize].view(dtype) for memory in half]
            self._views[key] = cached
        return cached[1]
