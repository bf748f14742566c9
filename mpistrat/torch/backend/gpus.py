"""Tensors on GPUs in a group: by PyTorch's NCCL inside it, or through host memory."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...base import log
from ...base.text import named
from ...comm.gpu import shared_gpus
from ...comm.process_group import ProcessGroup
from .work import WorkOfSeveral

__all__ = ["GpuGroup", "by_nccl", "gpus_here", "is_on_gpu", "queued"]

F = TypeVar("F", bound=Callable[..., Any])

_DECISION = "dist: first tensor on a GPU"

# Names that PyTorch had before 2.13, and still has.
_LONG_KNOWN = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}

# PyTorch's Python only has these of a ProcessGroup, not of the backend inside.
_ONE_BY_ONE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
_UNKNOWN_TO_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def gpus_here() -> bool:
    """Return whether PyTorch can use a GPU in this process."""
    return torch.cuda.is_available()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU."""
    return tensor.is_cuda


def by_nccl(method: F) -> F:
    """Run an operation on GPUs by NCCL, if the group can use it, and it has the operation."""
    name = _LONG_KNOWN.get(method.__name__, method.__name__)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gpus is not None:
            tensor = next(_tensors(args), None)
            if tensor is not None and is_on_gpu(tensor) and _nccl_knows(tensor, args):
                inner = self.gpus.connected(self, tensor)
                if inner is not None:
                    return self.noted(_call(inner, name, args, kwargs))
        return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def _call(inner: Any, name: str, args: Any, kwargs: Any) -> Any:
    single = _ONE_BY_ONE.get(name)
    if single is None or hasattr(inner, name):
        return getattr(inner, name)(*args, **kwargs)
    outputs, inputs, *opts = args
    works = [getattr(inner, single)(*pair, *opts, **kwargs) for pair in zip(outputs, inputs, strict=True)]
    return WorkOfSeveral([work for work in works if work is not None])


def _nccl_knows(tensor: torch.Tensor, args: Any) -> bool:
    """Return whether NCCL supports a call: a dense tensor of its types, and no bitwise operation."""
    if tensor.is_sparse or tensor.dtype in _UNKNOWN_TO_NCCL:
        return False
    ops = [getattr(each, "reduceOp", each) for each in args]
    return not any(op == bitwise for op in ops if isinstance(op, _OPS) for bitwise in _BITWISE)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def queued(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return events after which the caller's queued work on the GPUs of some tensors is done."""
    events = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


@final
class GpuGroup:
    """The use of NCCL by a group, decided at its first call with tensors on GPUs.

    Args:
        ranks: the ranks of the group.
        store: its store, over which NCCL connects.
        timeout: the time limit of NCCL's operations.

    Attributes:
        inner: PyTorch's group of NCCL; None if it is not used, or not decided yet.
    """

    def __init__(self, ranks: ProcessGroup, store: Any, timeout: timedelta) -> None:
        self._ranks, self._store, self._timeout = ranks, store, timeout
        self.inner: Any = None
        self._decided = False
        self._deciding = threading.RLock()

    def connected(self, group: Any, tensor: torch.Tensor) -> Any:
        """Return NCCL's group if it moves such tensors, else None. Collective the first time, for all threads."""
        if not self._decided:
            with self._deciding:
                if not self._decided:
                    group.run_now(_DECISION, functools.partial(self._decide, group, tensor.device))
                    self._decided = True
        return self.inner

    def _decide(self, group: Any, device: torch.device, seconds: float) -> None:
        reason = self._why_not(device, seconds)
        if reason:
            log.once(
                logging.WARNING, f"torch.distributed moves tensors on GPUs through host memory, not by NCCL: {reason}"
            )
            return
        make, kind = inner_group(self._timeout)
        topology = self._ranks.topology
        inner = make(dist.PrefixStore("mpistrat nccl", self._store), topology.rank, topology.size)
        inner._set_sequence_number_for_group()
        group._register_backend(torch.device(device.type), kind, inner)
        self.inner = inner

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of NCCL's operations."""
        self._timeout = timeout
        if self.inner is not None:
            next(_found(self.inner, "set_timeout", "_set_default_timeout"))(timeout)

    def close(self) -> None:
        """End NCCL. Collective the first time; later calls do nothing."""
        inner, self.inner = self.inner, None
        if inner is not None:
            _end(inner, "shutdown", "_shutdown")

    def abort(self) -> None:
        """End NCCL without waiting for other ranks, if PyTorch can."""
        inner, self.inner = self.inner, None
        if inner is not None:
            _end(inner, "abort", "_abort", "_shutdown")

    def _why_not(self, device: torch.device, seconds: float) -> str:
        """Return the reason why NCCL cannot be used; "" if it can. Collective; the same on every rank."""
        with self._ranks.collective(_DECISION, timeout=seconds):
            rows = self._ranks.all_gather_int([int(dist.is_nccl_available()), *_number_of(device)]).tolist()
        without = [rank for rank, row in enumerate(rows) if not row[0]]
        if without:
            return f"PyTorch has no NCCL on {named('rank', without)}"
        nodes = self._ranks.topology.node_of
        shared = shared_gpus((rank, (nodes[rank], *row[1:])) for rank, row in enumerate(rows))
        return "; ".join(f"{named('rank', ranks)} share a GPU" for ranks in shared.values())


def _found(inner: Any, *names: str) -> Iterator[Callable[..., Any]]:
    """Yield those of some methods that this version of PyTorch has."""
    return (getattr(inner, name) for name in names if hasattr(inner, name))


def _end(inner: Any, *names: str) -> None:
    """Call the first of some methods that end a group. One that has none, as gloo's of PyTorch 2.5, ends when it is freed."""
    method = next(_found(inner, *names), None)
    if method is not None:
        method()


def inner_group(timeout: timedelta) -> tuple[Callable[[Any, int, int], Any], Any]:
    """Return a function that makes PyTorch's group of NCCL from store, rank and size; and its kind."""
    kind: Any = c10d
    options = kind.ProcessGroupNCCL.Options()
    options._timeout = timeout

    def make(store: Any, rank: int, size: int) -> Any:
        return kind.ProcessGroupNCCL(store, rank, size, options)

    return make, dist.ProcessGroup.BackendType.NCCL


def _number_of(device: torch.device) -> tuple[int, int]:
    """Return two numbers that identify a GPU on its node. Instances of one GPU (MIG) share them: NCCL refuses these."""
    about = torch.cuda.get_device_properties(device)
    if hasattr(about, "pci_bus_id"):
        return int(about.pci_domain_id) << 16 | int(about.pci_bus_id) << 8 | int(about.pci_device_id), 0
    uuid = bytes(about.uuid.bytes)
    return int.from_bytes(uuid[:7], "big"), int.from_bytes(uuid[7:14], "big")
