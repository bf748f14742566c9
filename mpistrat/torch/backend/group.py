"""A process group of torch.distributed on the ranks of an MPI communicator.

Each operation is inside the contract of `comm.ProcessGroup`: ranks compare calls before data moves, through shared memory on
a node, by MPI between nodes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp as TorchOp

from ...base import log
from ...base.environment import Environment
from ...base.errors import CollectiveMismatchError, SharedMemoryError, explain
from ...base.options import CommunicationOptions
from ...base.text import named
from ...base.types import ReduceOp
from ...cluster.topology import Topology, running_mpi
from ...cluster.world import communicator_of
from ...comm import exchange
from ...comm.contract import Collective
from ...comm.monitor.abort import is_user_code
from ...comm.monitor.rank_monitor import user_line
from ...comm.process_group import ProcessGroup
from ...cross_device.all_to_all import reduce_scatter, small_reduce_scatter
from ...cross_device.auto import make_cross_device_ops
from ...cross_device.values import Leaves
from .arrival import arrive
from .gpus import GpuGroup, by_nccl, gpus_here, is_on_gpu, queued
from .lane import Lane
from .members import GroupRanks
from .modes import seen_as
from .monitored_barrier import monitored_barrier
from .steps import note_steps
from .transfers import Transfers, array_of, bytes_of, copy_back, dense, dtype_name
from .unreceived import Unreceived
from .work import OperationWork, WorkOfSeveral, seconds_of, torch_error

__all__ = ["NAME", "MpiProcessGroup", "create", "over"]

NAME = "mpistrat"
_SHOWN_RANKS = 20

_REDUCTIONS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.SUM,
    "PREMUL_SUM": ReduceOp.SUM,
    "MAX": ReduceOp.MAX,
    "MIN": ReduceOp.MIN,
    "PRODUCT": ReduceOp.PROD,
}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_OF_BOOLS = {"MIN": ReduceOp.MIN, "PRODUCT": ReduceOp.MIN, "BAND": ReduceOp.MIN}  # all others: MAX
_RESTART = "After a rank has died, restart the ranks: mpistrat run --restarts, or continue without it: ms.survive"
_HOOKS = (
    "A dispatch mode, such as torch's CommDebugMode, sees each operation; Work.get_future().then(function) follows one"
)
# Methods of PyTorch's groups that call a backend of C++, and what to use instead.
_ABSENT = {
    "get_reconfigure_handle": _RESTART,
    "reconfigure": _RESTART,
    "merge_remote_group": "Start all ranks as one program of MPI, and make groups of them with dist.new_group",
    "split_group": "Call dist.split_group, or dist.new_group",
    "new_window": "For windows of MPI, use mpi4py's MPI.Win",
    "register_abort_hook": _HOOKS,
    "unregister_abort_hook": _HOOKS,
    "register_pre_hook": _HOOKS,
    "unregister_pre_hook": _HOOKS,
    "register_post_hook": _HOOKS,
    "unregister_post_hook": _HOOKS,
    "_register_on_completion_hook": _HOOKS,
}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def create(opts: Any, options: Any = None) -> MpiProcessGroup:
    """Return the group that torch.distributed requests from a backend. Collective over its members.

    `Backend.register_backend(name, create, extended_api=True, devices=["cpu"])` registers it.

    Args:
        opts: torch's `_DistributedBackendOptions`: store, group_rank, group_size, timeout, group_id.
        options: options of a backend, of which this one has none.

    Raises:
        ValueError: `options` is not None.
        ClusterError: a process of the group is not a rank of this MPI program.
        CollectiveTimeoutError: a rank did not arrive in time.
    """
    function = "dist.init_process_group"
    if options is not None:
        raise ValueError(explain(function, "pg_options", expected="None", got=repr(options)))
    mpi = running_mpi(function)
    world = mpi.COMM_WORLD
    store, size, name = opts.store, opts.group_size, str(opts.group_id)
    members = list(opts.global_ranks_in_group) or list(range(size))
    # A rank of torch may have another number in MPI.
    numbers = arrive(store, name, members, opts.group_rank, world.rank, opts.timeout)
    if len(set(numbers)) != size:
        expected = f"{size} ranks of one MPI program"
        remedy = "Start the program with mpiexec or srun, not torchrun, or take another backend"
        got = f"{named('rank', numbers, _SHOWN_RANKS)} of MPI"
        raise RuntimeError(explain(function, "backend", expected=expected, got=got, remedy=remedy))
    comm = communicator_of(world, numbers, name)
    try:
        group = over(comm, store, opts.timeout, name)
    finally:
        comm.Free()
    note_steps()
    return group


def over(comm: Any, store: Any, timeout: timedelta, name: str) -> MpiProcessGroup:
    """Return the group of a communicator's ranks, by their numbers there. Collective over `comm`, which it copies.

    Args:
        comm: an intracommunicator of mpi4py.
        store: the group's store of torch.distributed.
        timeout: the default time limit of operations.
        name: the group's name, the same on all ranks.

    Raises:
        LayoutError: MPI has no more communicators.
        CollectiveTimeoutError: a rank did not arrive.
    """
    mpi = running_mpi("dist.new_group")
    environment, world = Environment.read(), mpi.COMM_WORLD
    if comm.size == 1:
        ranks = ProcessGroup(Topology.single(("cpu:0",)), environment)
    else:
        topology = Topology.create(comm, devices=("cpu:0",), function="dist.new_group")
        try:
            ranks = ProcessGroup.create(topology, environment)
        except SharedMemoryError as error:  # on every rank
            log.once(logging.WARNING, f"torch.distributed moves data by MPI, not through shared memory: {error}")
            ranks = ProcessGroup.create(topology, replace(environment, shared_memory=False))
        if comm.size < world.size:
            ranks.label = _members(comm, world)
            log.set_rank(world.rank)
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1" and hasattr(c10d, "NanCheckHook"):
        remedy = "Check gradients with torch.autograd.detect_anomaly, or tensors with torch.isnan"
        log.once(logging.WARNING, f"TORCH_DIST_NAN_CHECK: torch.distributed over MPI does not look for NaN. {remedy}")
    return MpiProcessGroup(ranks, store, timeout, name)


def _members(comm: Any, world: Any) -> str:
    """Describe the ranks of a communicator by their numbers in the world."""
    own, everyone = comm.Get_group(), world.Get_group()
    numbers = type(own).Translate_ranks(own, range(own.size), everyone)
    own.Free()
    everyone.Free()
    return named("rank", sorted(numbers), _SHOWN_RANKS)


def _refusing(name: str, remedy: str) -> Callable[..., Any]:
    """Return a method that raises NotImplementedError, with a remedy."""

    def refuse(self: MpiProcessGroup, *args: Any, **kwargs: Any) -> Any:
        expected, got = "a group that PyTorch implements in C++", f"one of {NAME!r}, which has no such method"
        raise NotImplementedError(explain(f"ProcessGroup.{name}", "group", expected=expected, got=got, remedy=remedy))

    return refuse


@final
class MpiProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed. Create it with `create` or `over` (collective).

    torch calls its methods, under the names of c10d. Each takes tensors on the CPU, or on GPUs: see `gpus`.

    Args:
        ranks: the group of ranks, which this object frees.
        store: the group's store.
        timeout: the default time limit of operations.
        name: the group's name.

    Attributes:
        gpus: decides how tensors on GPUs move; None without a GPU.
        members: the ranks, for a monitor, a timeline and checkpoints.
    """

    def __init__(self, ranks: ProcessGroup, store: Any, timeout: timedelta, name: str) -> None:
        topology = ranks.topology
        super().__init__(topology.rank, topology.size)
        self._rank, self._size = topology.rank, topology.size
        self._ranks, self._store, self._timeout = ranks, store, timeout
        self._ops = make_cross_device_ops()
        self._ops.bind(ranks)
        self._options: dict[float, CommunicationOptions] = {}
        threads = self._size == 1 or topology.thread_level >= _multiple()
        self._lane = Lane(f"mpistrat {name}", threads)
        self._unreceived = Unreceived(ranks)
        self._transfers = Transfers(ranks, threads, self._unreceived)
        self.gpus = GpuGroup(ranks, store, timeout) if gpus_here() else None
        self._coalesced = threading.local()
        self._sequence, self._monitored, self._closed = 0, 0, False
        self._group_name, self._group_desc = name, "undefined"
        self.members = GroupRanks(ranks, f"torch.distributed, backend {NAME}{ranks.label and f', {ranks.label}'}")
        own = weakref.ref(self)  # the ranks do not own the group
        ranks.lane = lambda function, call: _owner(own, function)._in_order(function, call)

    # torch asks a group for its backends, and these for optional functions: see also the end of the class

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: the group allocates no memory for tensors."""
        return False

    def _get_backend(self, device: Any) -> Any:
        """Return PyTorch's group of NCCL for the tensors that it moves, else this group."""
        if device.type in [known.type for known in self._device_types] and self._inner_of(device) is None:
            return self
        return super()._get_backend(device)

    # names and settings: C++ stores them in its own backends, of which this group has none

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    name = getBackendName

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    getRank, getSize = rank, size

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        """The description that the program gave the group."""
        return self._group_desc

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def bound_device_id(self) -> None:
        """None: the group is not bound to a device."""
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        """Ignore a device, which torch sets for GPUs."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([] if self.gpus is None else [torch.device("cuda")])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time limit of operations."""
        self._timeout = timeout
        if self.gpus is not None:
            self.gpus.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def _start_coalescing(self, device: Any) -> None:
        """Collect the works of this thread's next calls, for `_end_coalescing`. NCCL starts its own together."""
        self._coalesced.inner = inner = self._inner_of(device)
        self._coalesced.works = list[Any]()
        if inner is not None:
            inner._start_coalescing()

    def _end_coalescing(self, device: Any) -> Any:
        """Return the work of all calls since `_start_coalescing`."""
        inner, works = self._coalesced.inner, self._coalesced.works
        self._coalesced.inner = self._coalesced.works = None
        works += [] if inner is None else [inner._end_coalescing()]
        works = [work for work in works if work is not None]
        works.append(self._run("dist.barrier", [], None, (), lambda seconds: None))  # after what is in the lane
        return works[0] if len(works) == 1 else WorkOfSeveral(works)

    def noted(self, work: Any) -> Any:
        """Return a work; `_end_coalescing` of this thread waits for it."""
        works = getattr(self._coalesced, "works", None)
        if works is not None:
            works.append(work)
        return work

    def _inner_of(self, device: Any) -> Any:
        """Return PyTorch's group of NCCL if it moves tensors on a device; else None."""
        return None if self.gpus is None or device is None or device.type != "cuda" else self.gpus.inner

    def agree_on_split(self, split_ranks: Any) -> list[list[int]]:
        """Return lists of ranks, which all ranks of the group must give equally. Collective.

        Raises:
            ValueError: a list is empty, or a rank is in two lists or is not in the group.
            CollectiveMismatchError: the lists differ between ranks.
        """
        function, lists = "dist.split_group", [list(ranks) for ranks in split_ranks or [[]]]
        every = [rank for ranks in lists for rank in ranks]
        if not all(lists) or len(set(every)) < len(every) or not set(every).issubset(range(self._size)):
            expected = f"lists of different ranks of the group, 0 <= rank < {self._size}"
            raise ValueError(
                explain(function, "split_ranks", expected=expected, got=repr(split_ranks), rank=self._rank)
            )

        def compare(seconds: float) -> None:
            """Compare the lists. Collective."""
            with self._ranks.collective(function, "", None, None, f"of ranks {lists}", timeout=seconds):
                pass

        self.run_now(function, compare)
        return lists

    def shutdown(self) -> None:
        """End the lane; these ranks' next group frees memory and communicators. Local."""
        if not self._closed:
            self._closed = True
            self._lane.close()
            try:
                if self.gpus is not None:
                    self.gpus.close()
            finally:
                self._ops.close()
                self._ranks.drop()

    def abort(self) -> None:
        """Leave the group as `shutdown` does, without the pending operations."""
        self._closed = True
        if self.gpus is not None:
            self.gpus.abort()

    def __del__(self) -> None:
        """Shut down a group that the program has forgotten."""
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            if self.gpus is not None:
                self.gpus.abort()  # other ranks may be anywhere
            self.shutdown()

    # running an operation

    def _run(
        self,
        function: str,
        result: Any,
        opts: Any,
        tensors: Sequence[torch.Tensor],
        operation: Callable[[float], None],
        waits: bool = False,
    ) -> OperationWork:
        """Run an operation, a function of its time limit, in the lane; `waits` if the caller does. Return its work."""
        self._check(function, tensors)
        self._sequence += 1
        work = OperationWork(function, result)
        seconds = self._seconds(opts)
        waits = waits or (opts is not None and not getattr(opts, "asyncOp", True))
        line = "" if waits else _line_of_call()
        events = [] if self.gpus is None else queued(tensors)

        def run() -> None:
            try:
                for event in events:
                    event.synchronize()
                with torch.no_grad(), np.errstate(all="ignore"):  # NaN is a result, as in torch
                    operation(seconds)
            except Exception as error:
                raise torch_error(error, line or _line_of_call() or user_line(self._ranks.monitor.thread)) from None

        with _profiled(function):
            return self._lane.run(work, run, waits)

    def run_now(self, function: str, operation: Callable[[float], None]) -> None:
        """Run an operation, a function of its time limit, after those called before, and wait for it."""
        self._run(function, [], None, (), operation, waits=True).wait()

    def _in_order(self, function: str, call: Callable[[], Any]) -> Any:
        """Make a call as an operation, and return its result. See `ProcessGroup.in_order`."""
        results = []
        self.run_now(function, lambda seconds: results.append(call()))
        return results[0]

    def _check(self, function: str, tensors: Sequence[torch.Tensor]) -> None:
        if self._closed:
            raise RuntimeError(explain(function, "group", expected="a process group", got="one that was destroyed"))
        for tensor in tensors:
            if tensor.device.type != "cpu" and not is_on_gpu(tensor):
                expected, got = f"tensors on the CPU or on GPUs with backend {NAME!r}", f"one on {tensor.device}"
                remedy = "Copy it with .cpu()"
                raise RuntimeError(
                    explain(function, "tensor", expected=expected, got=got, remedy=remedy, rank=self._rank)
                )

    def _rooted(self, function: str, kind: type[Any], opts: Any) -> tuple[Any, int]:
        """Return the options of a call with a root, and the root; they may be passed as the root's number or omitted.

        Raises:
            ValueError: no rank of the group has this number.
        """
        if not isinstance(opts, kind):
            given, opts = opts or 0, kind()
            opts.rootRank = given
        root = int(opts.rootRank)
        if not 0 <= root < self._size:
            expected = f"a rank of the group, 0 <= rank < {self._size}"
            raise ValueError(explain(function, "root", expected=expected, got=repr(root), rank=self._rank))
        return opts, root

    def _seconds(self, opts: Any) -> float:
        """Return the time limit of a call with these options."""
        limit = seconds_of(getattr(opts, "timeout", None)) or seconds_of(self._timeout)
        return self._ranks.environment.abort_after if limit is None else limit

    def _call(
        self, function: str, like: torch.Tensor, detail: Hashable, seconds: float, *, synchronize: bool = True
    ) -> Collective:
        """Return the contract of a call that moves tensors of one form."""
        dtype, shape = dtype_name(like.dtype), tuple(like.shape)
        return self._ranks.collective(function, "", dtype, shape, detail, timeout=seconds, synchronize=synchronize)

    def _meets(self, nbytes: int) -> bool:
        """Return True if a call that moves `nbytes` needs a barrier besides that of staging memory."""
        return self._ranks.num_nodes > 1 or nbytes == 0

    # reductions

    def _reduced(self, function: str, flat: torch.Tensor, op: Any, seconds: float, detail: str = "") -> torch.Tensor:
        """Return the reduction over all ranks of a contiguous tensor, in place if the dtype allows. Collective.

        For bool a sum is True if any value is, a product if all are.
        """
        name = _name_of(function, op, flat.dtype)
        if flat.dtype == torch.bool and name != "BXOR":
            array, how = array_of(flat.view(torch.uint8)), _OF_BOOLS.get(name, ReduceOp.MAX)
            self._reduce_array(_leaves(function, array, flat.dtype, name, detail), how, array, seconds)
            return flat
        if name in _BITWISE:
            rooms = flat.new_empty((self._size, *flat.shape))
            self._gather_into(function, rooms, flat, seconds, f"{name} {detail}".rstrip())
            return functools.reduce(_BITWISE[name], rooms.unbind())
        wide = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        if name == "PREMUL_SUM":
            wide = wide * op.__getstate__()[1]  # the factor, which older versions have no other name for
        array = array_of(wide)
        self._reduce_array(_leaves(function, array, flat.dtype, name, detail), _REDUCTIONS[name], array, seconds)
        return self._averaged(wide) if name == "AVG" else wide

    def _averaged(self, total: torch.Tensor) -> torch.Tensor:
        """Divide a sum by the number of ranks, in place; integers are rounded towards zero."""
        if total.is_floating_point() or total.is_complex():
            return total.div_(self._size)
        array = array_of(total)
        np.copyto(
            array, np.sign(array) * (np.abs(array) // self._size) if array.dtype.kind == "i" else array // self._size
        )
        return total

    def _reduce_array(self, leaves: Leaves, how: ReduceOp, array: np.ndarray, seconds: float) -> None:
        if self._size == 1:
            return
        options = self._options.get(seconds)
        if options is None:
            options = self._options[seconds] = CommunicationOptions(timeout_seconds=seconds)
        try:
            self._ops.reduce_leaves(how, leaves, options, [array])
        except SharedMemoryError as error:  # on every rank, before data moves
            log.once(logging.WARNING, f"torch.distributed sums by MPI, not through shared memory: {error}")
            self._ops.close()
            self._ops = make_cross_device_ops("mpi")
            self._ops.bind(self._ranks)
            self._ops.reduce_leaves(how, leaves, options, [array])

    @seen_as("allreduce_")
    @by_nccl
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Reduce tensors over all ranks, in place. Collective."""
        opts, tensors = _options(c10d.AllreduceOptions, opts, timeout), _listed(tensors)
        op = opts.reduceOp

        def operation(seconds: float) -> None:
            for tensor in tensors:
                if tensor.is_sparse:
                    self._reduce_sparse(tensor, op, seconds)
                else:
                    copy_back(self._reduced("dist.all_reduce", dense(tensor), op, seconds), tensor)

        return self._run("dist.all_reduce", tensors, opts, tensors, operation)

    @seen_as("allreduce_coalesced_")
    @by_nccl
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> OperationWork:
        """Reduce tensors over all ranks, in place; those of one dtype in one message. Collective."""
        opts, tensors = _options(c10d.AllreduceCoalescedOptions, opts, None), _listed(tensors)
        op = opts.reduceOp

        def operation(seconds: float) -> None:
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same = [tensor for tensor in tensors if tensor.dtype == dtype]
                flat = torch.cat([dense(tensor).reshape(-1) for tensor in same])
                sizes = [tensor.numel() for tensor in same]
                total = self._reduced("dist.all_reduce_coalesced", flat, op, seconds, f"of {sizes} elements")
                for tensor, part in zip(same, total.split(sizes), strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

        return self._run("dist.all_reduce_coalesced", tensors, opts, tensors, operation)

    def _reduce_sparse(self, tensor: torch.Tensor, op: Any, seconds: float) -> None:
        """Sum a sparse tensor: the entries of all ranks are gathered and added. Collective."""
        function = "dist.all_reduce"
        if op != TorchOp.SUM:
            raise RuntimeError(
                explain(function, "op", expected="SUM for a sparse tensor", got=_name_of(function, op, tensor.dtype))
            )
        mine = tensor.coalesce().cpu()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        dtype, form = dtype_name(tensor.dtype), f"sparse, sparse_dim {tensor.sparse_dim()}"
        with self._ranks.collective(function, "", dtype, tuple(tensor.shape), form, timeout=seconds) as call:
            counts = self._ranks.all_gather_int([len(values)])[:, 0].tolist()
            found = []
            for part in (indices, values):
                rooms = [part.new_empty((count, *part.shape[1:])) for count in counts]
                exchange.all_gather_into(self._ranks, call, bytes_of(part), [bytes_of(room) for room in rooms])
                found.append(torch.cat(rooms))
        total = torch.sparse_coo_tensor(found[0].t(), found[1], tensor.shape).coalesce()
        tensor.copy_(total.to(tensor.device))

    @seen_as("reduce_")
    @by_nccl
    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> OperationWork:
        """Reduce tensors over all ranks, in place on the root; those of other ranks do not change. Collective."""
        opts, root = self._rooted("dist.reduce", c10d.ReduceOptions, opts)
        if more:
            opts.reduceOp = more[0]
        tensors, op = _listed(tensors), opts.reduceOp

        def operation(seconds: float) -> None:
            for tensor in tensors:
                flat = dense(tensor) if self._rank == root else dense(tensor).clone()
                total = self._reduced("dist.reduce", flat, op, seconds, f"root {root}")
                if self._rank == root:
                    copy_back(total, tensor)

        return self._run("dist.reduce", tensors, opts, tensors, operation)

    @seen_as("reduce_scatter_")
    @by_nccl
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *more: Any) -> OperationWork:
        """Reduce lists of one tensor for each rank; each rank receives its own. Collective."""
        if torch.is_tensor(output_tensors):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = _options(c10d.ReduceScatterOptions, opts, None)
        outputs, inputs, op = list(output_tensors), [list(each) for each in input_tensors], opts.reduceOp
        function = "dist.reduce_scatter"

        def operation(seconds: float) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self._check_list(function, "input_list", parts)
                mine = parts[self._rank]
                if (mine.dtype, mine.numel()) != (output.dtype, output.numel()):
                    raise ValueError(_forms(function, "output", mine, output, self._rank))
                flat = torch.cat([dense(part).reshape(-1) for part in parts])
                self._reduce_scatter(function, output, flat, [part.numel() for part in parts], op, seconds)

        return self._run(function, outputs, opts, [*outputs, *(part for parts in inputs for part in parts)], operation)

    def _reduce_scatter(
        self, function: str, output: torch.Tensor, flat: torch.Tensor, counts: Sequence[int], op: Any, seconds: float
    ) -> None:
        """Reduce a flat tensor of one slice per rank, and write this rank's to a tensor."""
        name = _name_of(function, op, flat.dtype)
        if name in _BITWISE or name == "PREMUL_SUM" or flat.dtype == torch.bool or len(set(counts)) > 1:
            sizes = "" if len(set(counts)) == 1 else f"sizes {counts}"
            total = self._reduced(function, flat.clone(), op, seconds, sizes)
            output.detach().copy_(total.split(list(counts))[self._rank].view(output.shape))
            return
        wide = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        direct = output.is_contiguous() and output.dtype == wide.dtype and not is_on_gpu(output)
        mine = output.detach() if direct else torch.empty(output.shape, dtype=wide.dtype)
        array, out = array_of(wide), array_of(mine.view(-1))
        how, key = _REDUCTIONS[name], (function, name, flat.dtype, array.size, seconds)
        plan: Any = self._ops.plans.get(key)
        if plan is None:
            options, leaves = CommunicationOptions(timeout_seconds=seconds), _leaves(function, array, flat.dtype, name)
            plan = small_reduce_scatter(self._ranks, leaves, how, 0, options, True)
            if plan is None:
                reduce_scatter(self._ranks, leaves, how, 0, options, [out], True, None)
            else:
                self._ops.keep_plan(key, *plan)
        if plan is not None:
            with plan[0] as call:
                out[...] = plan[1](array, call)
        if name == "AVG":
            self._averaged(mine)
        copy_back(mine, output)

    @seen_as("_reduce_scatter_base_")
    @by_nccl
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> OperationWork:
        """Reduce a tensor of one slice per rank; each rank receives its own. Collective."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @seen_as("reduce_scatter_tensor_coalesced_")
    @by_nccl
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> OperationWork:
        """Do `reduce_scatter_single` for several tensors. Collective."""
        opts, outputs, inputs = _options(c10d.ReduceScatterOptions, opts, None), list(outputs), list(inputs)
        op, function = opts.reduceOp, "dist.reduce_scatter_tensor"
        for output, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != output.numel() * self._size or whole.dtype != output.dtype:
                raise ValueError(_forms(function, "input", output, whole, self._rank, self._size))

        def operation(seconds: float) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                self._reduce_scatter(
                    function, output, dense(whole).reshape(-1), [output.numel()] * self._size, op, seconds
                )

        return self._run(function, outputs, opts, [*outputs, *inputs], operation)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # broadcast, gather, scatter

    @seen_as("broadcast_")
    @by_nccl
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Overwrite tensors with the root's. Collective. Ranks compare dtype and number of elements, as torch documents."""
        opts, root = self._rooted("dist.broadcast", c10d.BroadcastOptions, opts)
        if timeout is not None:
            opts.timeout = timeout
        tensors, function = _listed(tensors), "dist.broadcast"

        def operation(seconds: float) -> None:
            for tensor in tensors:
                flat = dense(tensor).reshape(-1)
                data = bytes_of(flat)
                with self._call(function, flat, f"root {root}", seconds, synchronize=self._meets(data.size)) as call:
                    exchange.broadcast_into(self._ranks, call, data, root)
                if self._rank != root:
                    copy_back(flat.view(tensor.shape), tensor)

        return self._run(function, tensors, opts, tensors, operation)

    def _gather_into(
        self, function: str, whole: torch.Tensor, own: torch.Tensor, seconds: float, detail: str = ""
    ) -> None:
        """Write every rank's tensor into a contiguous one with a row for each rank. Collective."""
        self._gather_bytes(
            function, list(bytes_of(whole).reshape(self._size, -1)), own, tuple(own.shape), detail, seconds
        )

    def _gather_bytes(
        self,
        function: str,
        rooms: Sequence[np.ndarray],
        own: torch.Tensor,
        shape: tuple[int, ...] | None,
        detail: str,
        seconds: float,
    ) -> None:
        """Write every rank's bytes into memory for each rank. Collective. Ranks compare the shape and the detail."""
        meets = self._meets(max(room.size for room in rooms))
        with self._ranks.collective(
            function, "", dtype_name(own.dtype), shape, detail, timeout=seconds, synchronize=meets
        ) as call:
            exchange.all_gather_into(self._ranks, call, bytes_of(own), rooms)

    @seen_as("allgather_")
    @by_nccl
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> OperationWork:
        """Write every rank's tensor into a list of tensors. Collective."""
        if torch.is_tensor(input_tensors):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = _options(c10d.AllgatherOptions, opts, None)
        outputs, inputs = [list(each) for each in output_tensors], list(input_tensors)
        function = "dist.all_gather"
        for rooms in outputs:
            self._check_list(function, "tensor_list", rooms)

        def operation(seconds: float) -> None:
            for rooms, tensor in zip(outputs, inputs, strict=True):
                self._gather_list(function, rooms, tensor, seconds)

        return self._run(function, outputs, opts, [*inputs, *(room for rooms in outputs for room in rooms)], operation)

    def _gather_list(self, function: str, rooms: Sequence[torch.Tensor], tensor: torch.Tensor, seconds: float) -> None:
        mine = rooms[self._rank]
        if (mine.dtype, mine.numel()) != (tensor.dtype, tensor.numel()):
            raise ValueError(_forms(function, f"tensor_list[{self._rank}]", tensor, mine, self._rank))
        own, flats = dense(tensor), [dense(room) for room in rooms]
        if any(own.data_ptr() == flat.data_ptr() for flat in flats):
            own = own.clone()
        shapes = [tuple(room.shape) for room in rooms]
        form: tuple[Any, str] = (shapes[0], "") if len(set(shapes)) == 1 else (None, f"of shapes {shapes}")
        self._gather_bytes(function, [bytes_of(flat) for flat in flats], own, *form, seconds)
        for flat, room in zip(flats, rooms, strict=True):
            copy_back(flat, room)

    @seen_as("_allgather_base_")
    @by_nccl
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> OperationWork:
        """Write every rank's tensor into one tensor, in the order of ranks. Collective."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @seen_as("allgather_into_tensor_coalesced_")
    @by_nccl
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> OperationWork:
        """Do `all_gather_single` for several tensors. Collective."""
        opts, outputs, inputs = _options(c10d.AllgatherOptions, opts, None), list(outputs), list(inputs)
        function = "dist.all_gather_into_tensor"
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != tensor.numel() * self._size or output.dtype != tensor.dtype:
                raise ValueError(_forms(function, "output_tensor", tensor, output, self._rank, self._size))

        def operation(seconds: float) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                whole, own = dense(output), dense(tensor)
                if whole.data_ptr() <= own.data_ptr() < whole.data_ptr() + whole.nbytes:
                    own = own.clone()
                self._gather_into(function, whole, own, seconds)
                copy_back(whole, output)

        return self._run(function, outputs, opts, [*outputs, *inputs], operation)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @seen_as("allgather_coalesced_")
    @by_nccl
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> OperationWork:
        """Write every rank's list of tensors into lists, one for each rank. Collective."""
        opts = _options(c10d.AllgatherOptions, opts, None)
        lists, inputs, function = [list(each) for each in output_lists], list(input_list), "dist.all_gather_coalesced"
        self._check_list(function, "output_tensor_lists", lists)

        def operation(seconds: float) -> None:
            for index, tensor in enumerate(inputs):
                self._gather_list(function, [each[index] for each in lists], tensor, seconds)

        return self._run(function, lists, opts, inputs, operation)

    @seen_as("gather_")
    @by_nccl
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Write every rank's tensor into a list of tensors on the root. Collective."""
        if torch.is_tensor(input_tensors):
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        function = "dist.gather"
        opts, root = self._rooted(function, c10d.GatherOptions, opts)
        outputs, (tensor,) = [list(each) for each in output_tensors], list(input_tensors)
        if self._rank == root:
            self._check_list(function, "gather_list", outputs[0])
            for room in outputs[0]:
                if (room.dtype, room.numel()) != (tensor.dtype, tensor.numel()):
                    raise ValueError(_forms(function, "gather_list", tensor, room, self._rank))

        def operation(seconds: float) -> None:
            own = dense(tensor)
            rooms = [dense(room) for room in outputs[0]] if self._rank == root else []
            with self._exchanging(function, own, f"root {root}", seconds) as call:
                exchange.gather_into(self._ranks, call, bytes_of(own), [bytes_of(room) for room in rooms], root)
            for flat, room in zip(rooms, outputs[0] if rooms else (), strict=True):
                copy_back(flat, room)

        return self._run(function, outputs, opts, [tensor, *(room for rooms in outputs for room in rooms)], operation)

    @seen_as("gather_into_tensor_")
    @by_nccl
    def gather_single(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Write every rank's tensor into one tensor on the root, in the order of ranks. Collective. From PyTorch 2.14 on."""
        function = "dist.gather_single"
        opts, root = self._rooted(function, c10d.GatherOptions, opts)
        if timeout is not None:
            opts.timeout = timeout
        output, tensor = output_tensor, input_tensor
        at_root = self._rank == root
        if at_root and (output.dtype, output.numel()) != (tensor.dtype, tensor.numel() * self._size):
            raise ValueError(_forms(function, "gather_tensor", tensor, output, self._rank, self._size))

        def operation(seconds: float) -> None:
            own, whole = dense(tensor), dense(output)
            rooms = list(bytes_of(whole).reshape(self._size, -1)) if at_root else []
            with self._exchanging(function, own, f"root {root}", seconds) as call:
                exchange.gather_into(self._ranks, call, bytes_of(own), rooms, root)
            if at_root:
                copy_back(whole, output)

        return self._run(function, [output], opts, [tensor, output], operation)

    gather_into_tensor = gather_single

    @seen_as("scatter_")
    @by_nccl
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Write the root's tensors, one for each rank, into the ranks' tensors. Collective."""
        if torch.is_tensor(output_tensors):
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        function = "dist.scatter"
        opts, root = self._rooted(function, c10d.ScatterOptions, opts)
        (output,), inputs = list(output_tensors), [list(each) for each in input_tensors]
        if self._rank == root:
            self._check_list(function, "scatter_list", inputs[0])
            for part in inputs[0]:
                if (part.dtype, part.numel()) != (output.dtype, output.numel()):
                    raise ValueError(_forms(function, "scatter_list", output, part, self._rank))

        def operation(seconds: float) -> None:
            flat = dense(output)
            parts = [bytes_of(dense(part)) for part in inputs[0]] if self._rank == root else []
            with self._exchanging(function, flat, f"root {root}", seconds) as call:
                exchange.scatter_into(self._ranks, call, parts, bytes_of(flat), root)
            copy_back(flat, output)

        return self._run(function, [output], opts, [output, *(part for parts in inputs for part in parts)], operation)

    def _exchanging(self, function: str, like: torch.Tensor, detail: str, seconds: float) -> Collective:
        """Return the contract of an exchange of messages of a tensor's form."""
        largest = like.numel() * like.element_size()
        staged = exchange.staged(self._ranks, largest) and largest > 0
        return self._call(function, like, detail, seconds, synchronize=not staged)

    # all-to-all

    @seen_as("alltoall_base_")
    @by_nccl
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> OperationWork:
        """Send each rank a slice of a tensor along dimension 0, and write received slices to another. Collective."""
        opts, function = _options(c10d.AllToAllOptions, opts, None), "dist.all_to_all_single"
        coming = _splits(function, "output", output, output_split_sizes, self._size)
        going = _splits(function, "input", input, input_split_sizes, self._size)
        equal = not output_split_sizes and not input_split_sizes
        if output.dtype != input.dtype or (equal and output.numel() != input.numel()):
            raise ValueError(_forms(function, "output", input, output, self._rank))

        def operation(seconds: float) -> None:
            flat, whole = dense(input), dense(output)
            to, come = _cut(bytes_of(flat), going), _cut(bytes_of(whole), coming)
            if equal:
                part = flat.reshape(self._size, -1)[0]
                with self._exchanging(function, part, "equal splits", seconds) as call:
                    exchange.exchange(self._ranks, call, to, come, part.numel() * part.element_size())
            else:
                self._exchange_unequal(function, flat, to, come, seconds)
            copy_back(whole, output)

        return self._run(function, [output], opts, [output, input], operation)

    alltoall_base = all_to_all_single

    @seen_as("alltoall_")
    @by_nccl
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> OperationWork:
        """Send each rank a tensor, and write the received ones to tensors. Collective."""
        opts, function = _options(c10d.AllToAllOptions, opts, None), "dist.all_to_all"
        outputs, inputs = list(output_tensors), list(input_tensors)
        self._check_list(function, "output_tensor_list", outputs)
        self._check_list(function, "input_tensor_list", inputs)

        def operation(seconds: float) -> None:
            flats, parts = [dense(output) for output in outputs], [dense(tensor) for tensor in inputs]
            to, come = [bytes_of(part) for part in parts], [bytes_of(flat) for flat in flats]
            self._exchange_unequal(function, parts[0], to, come, seconds)
            for flat, output in zip(flats, outputs, strict=True):
                copy_back(flat, output)

        return self._run(function, outputs, opts, [*outputs, *inputs], operation)

    def _exchange_unequal(
        self,
        function: str,
        like: torch.Tensor,
        to: Sequence[np.ndarray],
        come: Sequence[np.ndarray],
        seconds: float,
    ) -> None:
        """Send each rank some bytes, after the ranks have compared their numbers. Collective."""
        dtype = dtype_name(like.dtype)
        with self._ranks.collective(function, "", dtype, None, "splits of any sizes", timeout=seconds) as call:
            table = np.array([[part.size, max(each.size for each in to)] for part in to], np.int64)
            found = exchange.all_to_all(self._ranks, call, table)
            lengths, largest = found[:, 0].tolist(), int(found[:, 1].max())
            wrong = [rank for rank, room in enumerate(come) if room.size != lengths[rank]]
            rooms = [np.empty(length, np.uint8) for length in lengths] if wrong else come
            exchange.exchange(self._ranks, call, to, rooms, largest)
        if wrong:
            item, rank = like.element_size(), wrong[0]
            expected, got = f"{come[rank].size // item} elements from rank {rank}", f"{lengths[rank] // item}"
            remedy = "Compare the split sizes of both ranks: one receives what the other sends"
            raise CollectiveMismatchError(
                explain(function, "output", expected=expected, got=got, remedy=remedy, rank=self._rank)
            )

    # barriers

    @seen_as("barrier")
    def barrier(self, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Wait until all ranks arrive. Collective."""
        opts = opts or c10d.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        return self._run(
            "dist.barrier",
            [],
            opts,
            (),
            lambda seconds: self._ranks.barrier(timeout=seconds, function="dist.barrier"),
        )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks arrive; rank 0 names the missing ones. Collective. The group remains usable after an error."""
        seconds = seconds_of(timeout)
        if seconds is None:
            seconds = 0.0 if timeout is not None else self._seconds(None)
        self._monitored += 1
        self._unreceived.sent = True
        monitored_barrier(self._ranks, self._monitored, seconds, wait_all_ranks)

    # messages between two ranks

    @seen_as("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> OperationWork:
        """Send a tensor to a rank."""
        (tensor,) = _listed(tensors)
        self._check("dist.send", [tensor])
        with _profiled("dist.send"):
            return self.noted(self._transfers.send(tensor, dst, tag, self._seconds(None), _line_of_call()))

    @seen_as("recv_")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> OperationWork:
        """Receive a tensor from a rank."""
        return self._receive(tensors, src, tag)

    @seen_as("recv_any_source_")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> OperationWork:
        """Receive a tensor from any rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, source: int | None, tag: int) -> OperationWork:
        (tensor,) = _listed(tensors)
        self._check("dist.recv", [tensor])
        with _profiled("dist.recv"):
            return self.noted(self._transfers.receive(tensor, source, tag, self._seconds(None), _line_of_call()))

    def _check_list(self, function: str, argument: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._size:
            expected = f"a list of {self._size} tensors, one for each rank"
            raise ValueError(explain(function, argument, expected=expected, got=f"{len(tensors)}", rank=self._rank))


for _name in {*dir(c10d.Backend), *dir(c10d.ProcessGroup)}:  # they differ by the version of PyTorch
    if _name in _ABSENT and hasattr(c10d.ProcessGroup, _name):
        setattr(MpiProcessGroup, _name, _refusing(_name, _ABSENT[_name]))
    # a property of ProcessGroup asks a backend of C++
    if _name.startswith(("supports_", "_supports_")) and _name not in vars(MpiProcessGroup):
        setattr(MpiProcessGroup, _name, False)


def _owner(reference: weakref.ref[MpiProcessGroup], function: str) -> MpiProcessGroup:
    """Return the group of a reference.

    Raises:
        RuntimeError: it was destroyed.
    """
    group = reference()
    if group is None:
        raise RuntimeError(explain(function, "group", expected="a process group", got="one that was destroyed"))
    return group


def _multiple() -> int:
    from mpi4py import MPI

    return int(MPI.THREAD_MULTIPLE)


def _leaves(function: str, array: np.ndarray, dtype: torch.dtype, name: str, detail: str = "") -> Leaves:
    """Return an array to reduce; the ranks compare the tensor's dtype and torch's name of the reduction."""
    return Leaves(function, [array], said=(dtype_name(dtype), f"{name} {detail}".rstrip()))


def _name_of(function: str, op: Any, dtype: torch.dtype) -> str:
    """Return the name of a reduction. torch's members equal it only if it is on the left.

    Raises:
        ValueError: an unknown reduction, or one that this dtype does not have.
    """
    for name in (*_REDUCTIONS, *_BITWISE):
        if op == getattr(TorchOp, name):
            if dtype.is_complex and _REDUCTIONS.get(name) is not ReduceOp.SUM:
                expected = "SUM or AVG for complex tensors"
            elif name in _BITWISE and dtype.is_floating_point:
                expected = f"integers or bool for {name}, or another reduction for {dtype_name(dtype)}"
            else:
                return name
            raise ValueError(explain(function, "op", expected=expected, got=name))
    raise ValueError(explain(function, "op", expected=f"one of {', '.join((*_REDUCTIONS, *_BITWISE))}", got=str(op)))


def _options(kind: type[Any], opts: Any, timeout: Any) -> Any:
    """Return the options of a call; they may be passed as a reduction, or omitted."""
    if opts is None:
        opts = kind()
    elif not isinstance(opts, kind) and isinstance(opts, (TorchOp, TorchOp.RedOpType)):
        op, opts = opts, kind()
        opts.reduceOp = op
    if timeout is not None:
        opts.timeout = timeout
    return opts


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def _forms(function: str, argument: str, like: torch.Tensor, tensor: torch.Tensor, rank: int, times: int = 1) -> str:
    """Return the text of an error about a tensor that does not fit another."""
    count = f"{like.numel()} elements" if times == 1 else f"{times} x {like.numel()} elements"
    expected = f"{count} of {dtype_name(like.dtype)}"
    got = f"{tensor.numel()} of {dtype_name(tensor.dtype)}"
    return explain(function, argument, expected=expected, got=got, rank=rank)


def _splits(function: str, which: str, tensor: torch.Tensor, sizes: Sequence[int] | None, count: int) -> list[int]:
    """Return the number of bytes of a tensor for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows * tensor.element_size() if rows else 0
    if not sizes:
        if rows % count:
            expected, got = f"a first dimension that {count} ranks divide", f"{rows}"
            raise ValueError(explain(function, which, expected=expected, got=got))
        sizes = [rows // count] * count
    elif len(sizes) != count or sum(sizes) != rows or min(sizes) < 0:
        expected = f"{count} sizes, one for each rank, that make the {rows} rows of the tensor"
        raise ValueError(explain(function, f"{which}_split_sizes", expected=expected, got=repr(list(sizes))))
    return [int(size) * row for size in sizes]


def _cut(data: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    ends = itertools.accumulate(lengths, initial=0)
    return [data[low:high] for low, high in itertools.pairwise(ends)]


def _line_of_call() -> str:
    """Return `file:line` of the user's code in this thread; "" without one, as in a thread of autograd."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return user_line(threading.get_ident())
        frame = frame.f_back
    return ""


def _profiled(function: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that shows an operation in torch's profiler, if it runs. It sees the calling thread."""
    if not torch.autograd._profiler_enabled():
        return _UNSEEN
    given = getattr(c10d, "_get_comm_profiling_name", str)()  # by dist.record_comm, from PyTorch 2.13 on
    return torch.profiler.record_function(given or f"{NAME}:{function.removeprefix('dist.')}")


_UNSEEN = contextlib.nullcontext()
