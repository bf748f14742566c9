"""NCCL between the GPUs of all ranks, within nodes and between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

from ..arena.arithmetic import Arithmetic, finish
from ..arena.reduction import GPU_BLOCK, Consume, Gradients, StartedSums
from ..base.distributed_values import Mirrored, PerReplica
from ..base.errors import DeviceError, explain
from ..base.log import once
from ..base.options import CommunicationOptions
from ..base.partition import blocks, merge
from ..base.types import CommunicationImplementation, ReduceOp
from ..comm.arrays import array_module, import_cupy, is_gpu, on_device_of
from ..comm.gpu import NcclCommunicator, nccl_datatype_name, own_gpus, require_nccl, why_not_nccl
from ..comm.packing import pack_sizes, plan_packs
from ..comm.process_group import ProcessGroup
from .hierarchical import HierarchicalAllReduce
from .mpi import MpiAllReduce
from .ops import CrossDeviceOps

__all__ = ["NcclAllReduce"]


@final
class NcclAllReduce(CrossDeviceOps, implementation=CommunicationImplementation.NCCL):
    """An all-reduce of CuPy arrays over the GPUs of all ranks with NCCL; each replica needs its own GPU.

    HierarchicalAllReduce or MpiAllReduce, logged once, reduces arrays on the host, dtypes that NCCL does not support, and MIN,
    MAX and PROD, whose result for NaN NCCL does not define. Not yet run on several GPUs.

    Args:
        num_packs: number of messages for `batch_reduce`'s values of one dtype, the last with the remainder; 0 sends each value
            separately. `bytes_per_pack` of the options takes precedence.

    Raises:
        MissingDependencyError: CuPy or NCCL is missing, with the remedy.
        ValueError: num_packs is negative.

    Its reductions raise DeviceError, on every rank, if replicas share a GPU.
    """

    reduce_ops = tuple(ReduceOp)

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(explain("NcclAllReduce", "num_packs", expected=">= 0", got=num_packs))
        require_nccl("NcclAllReduce")
        self.num_packs = num_packs
        self._communicator: NcclCommunicator | None = None
        self._early = _EarlyBlocks(
            self._start, lambda: self._connected().drop(RuntimeError("ranks started other sums"))
        )
        self._on_host = HierarchicalAllReduce()
        self._unknown = MpiAllReduce()

    def bind(self, group: ProcessGroup) -> None:
        super().bind(group)
        self._on_host.bind(group)
        self._unknown.bind(group)

    def close(self) -> None:
        """Destroy the NCCL communicators. Collective the first time; later calls do nothing."""
        super().close()
        self._on_host.close()
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        values = per_replica_value.values
        other = self._other(values, reduce_op)
        if other is not None:
            return other.reduce_implementation(reduce_op, per_replica_value, destinations, options)
        how = self.arithmetic(reduce_op, values[0].dtype)
        return _wrap(_finished(self._total(values, how), how, values), values)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        pairs = list(value_destination_pairs)
        results: list[Any] = [None] * len(pairs)
        leaves = [value.values for value, _ in pairs]
        for index, (value, destination) in enumerate(pairs):
            if self._other(leaves[index], reduce_op) is not None:
                results[index] = self.reduce_implementation(reduce_op, value, destination, options)
        mine = [index for index, result in enumerate(results) if result is None]
        limit = options.bytes_per_pack if options else None
        cut = self.num_packs if limit is None else 1
        for pack in plan_packs([leaves[index][0] for index in mine], 1 if cut == 0 else limit):
            how = self.arithmetic(reduce_op, pack.dtype)
            first, packed = leaves[mine[0]], []
            for replica, value in enumerate(first):
                with on_device_of(value):
                    packed.append(pack.pack([leaves[index][replica] for index in mine]))
            flats = self._wide(packed, how)
            self._sum_in_place(flats, max(1, cut))
            totals = [pack.unpack(flat) for flat in _finished(flats, how, first)]
            for position, members in zip(pack.indices, zip(*totals, strict=True), strict=True):
                results[mine[position]] = _wrap(members, leaves[mine[position]])
        return results

    def node_gradients(self, arena: Gradients) -> Sequence[Any] | None:
        return arena.local if self.group.topology.num_replicas == 1 else None

    def reduce_arena(self, arena: Gradients, ranges: Sequence[tuple[int, int]], consume: Consume) -> None:
        # Meanwhile MPI sends weights that are exchanged in pieces.
        on_gpus = is_gpu(arena.local[0]) and arena.pieces(ranges) is None
        if not on_gpus or self._other(arena.local, ReduceOp.SUM) is not None or self.group.topology.num_replicas == 1:
            super().reduce_arena(arena, ranges, consume)
            return
        how = self.arithmetic(ReduceOp.SUM, arena.dtype)
        with self._connected().one_wait(later=True):
            begun = self._early.take(arena.key, ranges)
            for low, high in blocks(ranges, GPU_BLOCK):
                total = begun.pop((low, high), None)
                if total is None:
                    total = self._total([flat[low:high] for flat in arena.local], how)[0]
                for begin, end in arena.owned([(low, high)]):
                    consume(begin, end, total[begin - low : end - low])

    def early_sums(self, arena: Gradients) -> StartedSums | None:
        # The first step connects the ranks. Replicas of one rank announce together, each on its own GPU.
        connected = self._communicator is not None and len(self._communicator.devices) == 1
        return self._early if connected and is_gpu(arena.local[0]) else None

    def _start(self, value: Any) -> Any:
        """Start to sum this rank's flat array over all replicas, and return the new array; see `NcclCommunicator.start`."""
        totals, sources = self._prepared([value], self.arithmetic(ReduceOp.SUM, value.dtype))
        self._connected().start(totals, sources)
        return totals[0]

    def _other(self, values: Sequence[Any], reduce_op: ReduceOp) -> CrossDeviceOps | None:
        """Return the algorithm for values that NCCL cannot reduce; None if it can."""
        if not is_gpu(values[0]):
            once(logging.WARNING, "NcclAllReduce: arrays on the host are summed by HierarchicalAllReduce")
            self._on_host.call = self.call
            return self._on_host
        shared = len({value.device.id for value in values}) < len(values)
        sums = reduce_op in (ReduceOp.SUM, ReduceOp.MEAN)
        if shared or not sums or nccl_datatype_name(values[0].dtype) is None:
            reason = f"NCCL does not sum {values[0].dtype}" if sums else f"{reduce_op.value} is not reduced by NCCL"
            reason = "replicas share a GPU" if shared else reason
            once(logging.WARNING, f"NcclAllReduce: {reason}: MpiAllReduce takes over")
            if self._communicator is not None:
                with self._communicator.one_wait():
                    pass  # started sums end before MPI gets memory of the GPU, see `comm.gpu`
            return self._unknown
        return None

    def _connected(self) -> NcclCommunicator:
        """Return the communicator of all ranks' GPUs. Collective the first time."""
        if self._communicator is None:
            reason = why_not_nccl(self.group)
            if reason:
                remedy = (
                    "Start one rank for each GPU, or choose AUTO, which goes through the host where NCCL cannot sum"
                )
                expected = "a GPU for each replica, which NCCL requires"
                raise DeviceError(explain("NcclAllReduce", "devices", expected=expected, got=reason, remedy=remedy))
            self._communicator = NcclCommunicator(self.group, own_gpus(self.group))
        return self._communicator

    def _wide(self, values: Sequence[Any], how: Arithmetic) -> list[Any]:
        """Return new contiguous arrays in the dtype of accumulation, on the GPUs of the communicator."""
        copies, alone = [], self.group.topology.num_replicas == 1
        devices = [values[0].device.id] if alone else self._connected().devices
        for device, value in zip(devices, values, strict=True):
            with import_cupy("NcclAllReduce").cuda.Device(device):
                copies.append(array_module(value).array(value, dtype=how.accumulate, order="C"))
        return copies

    def _total(self, values: Sequence[Any], how: Arithmetic) -> list[Any]:
        """Return the sums over all replicas, as new arrays in the accumulation dtype on the GPUs of the communicator."""
        totals, sources = self._prepared(values, how)
        if sources is None:
            self._sum_in_place(totals)
        else:
            flats = [total.reshape(-1) for total in totals]
            self._connected().all_reduce(flats, [source.reshape(-1) for source in sources])
        return totals

    def _prepared(self, values: Sequence[Any], how: Arithmetic) -> tuple[list[Any], Sequence[Any] | None]:
        """Return new arrays for sums, and the arrays that NCCL sums; None if the new arrays hold the numbers."""
        if not self._sums_without_a_copy(values, how):
            return self._wide(values, how), None
        totals = []
        for value in values:
            with on_device_of(value):
                totals.append(array_module(value).empty(value.shape, value.dtype))
        return totals, values

    def _sums_without_a_copy(self, values: Sequence[Any], how: Arithmetic) -> bool:
        """Return True if NCCL can read the values directly."""
        if self.group.topology.num_replicas == 1 or values[0].size == 0:
            return False
        fits = all(value.dtype == how.accumulate and value.flags.c_contiguous for value in values)
        return fits and tuple(value.device.id for value in values) == self._connected().devices

    def _sum_in_place(self, arrays: Sequence[Any], messages: int = 1) -> None:
        """Sum arrays on the GPUs of the communicator over all replicas, in `messages` messages."""
        if self.group.topology.num_replicas == 1:
            return
        flats, low = [array.reshape(-1) for array in arrays], 0
        for size in pack_sizes(flats[0].size, messages):
            if size:
                self._connected().all_reduce([flat[low : low + size] for flat in flats])
            low += size


@final
class _EarlyBlocks:
    """Sums of an arena's blocks that start before the step: those of the last step, so that the sums have its bits.

    They start from the last block to the first, as a backward pass ends, and nothing else does on any rank.

    Args:
        start: starts to sum an array, and returns the new one.
        drop: ends started sums that no step takes.
    """

    def __init__(self, start: Callable[[Any], Any], drop: Callable[[], None]) -> None:
        self._start, self._drop = start, drop
        self._left: dict[str, list[tuple[int, int]]] = {}  # by arena
        self._given: dict[str, list[tuple[int, int]]] = {}
        self._started: dict[str, dict[tuple[int, int], Any]] = {}

    def begin(self, arena: Gradients, ranges: Sequence[tuple[int, int]]) -> None:
        """Start the sums of blocks that are complete with these ranges."""
        left, started = self._left.get(arena.key, []), self._started.setdefault(arena.key, {})
        given = self._given[arena.key] = merge([*self._given.get(arena.key, ()), *ranges])
        while left and any(low <= left[-1][0] and left[-1][1] <= high for low, high in given):
            low, high = left.pop()
            started[low, high] = self._start(arena.local[0][low:high])

    def take(self, key: str, ranges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Return the started sums of ranges of an arena; the next step has the same ranges."""
        own, started = blocks(ranges, GPU_BLOCK), self._started.get(key, {})
        self._left[key], self._given[key] = list(own), []
        return {block: started.pop(block) for block in own if block in started}

    def forget(self, key: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Discard the started sums of ranges of an arena after an error, with which ranks may have started others."""
        started, self._given[key] = self._started.get(key, {}), []
        dropped = [block for block in started if any(low < block[1] and block[0] < high for low, high in ranges)]
        if dropped:
            self._drop()  # while their memory is referenced
            self._left[key] = []
            for block in dropped:
                del started[block]


def _finished(totals: Sequence[Any], how: Arithmetic, values: Sequence[Any]) -> list[Any]:
    """Return reductions of sums, each on the GPU of its value; the sums are overwritten."""
    results = []
    for total, value in zip(totals, values, strict=True):
        with on_device_of(total):
            result = finish(total, how)
        with on_device_of(value):
            results.append(array_module(value).asarray(result))
    return results


def _wrap(results: Sequence[Any], values: Sequence[Any]) -> Any:
    return results[0] if len(values) == 1 else Mirrored(results)
