"""The data of Horovod's calls: operations on this rank's tensors, on a process group of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from ..base.errors import explain
from .negotiation import Form

__all__ = [
    "FusedReduction", "FusionBuffers", "adasum", "allgather", "alltoall", "broadcast", "dtype_of", "reducescatter",
]  # fmt: skip

_REDUCTIONS = {
    "Average": ReduceOp.AVG,
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Example:
        >>> dtype_of("float32")
        torch.float32
    """
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@final
class FusionBuffers:
    """Memory for the messages of several tensors: one reused buffer per dtype and device."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def room(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of at least the given size, with the values of the last reduction.

        Example:
            >>> FusionBuffers().room(3, torch.float64, torch.device("cpu")).shape
            torch.Size([3])
        """
        kept = self._kept.get((dtype, device))
        if kept is None or kept.numel() < size:
            kept = self._kept[dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return kept


@final
class FusedReduction:
    """Reductions of one operation and dtype in one message.

    Args:
        forms: of the calls.
        buffers: memory for messages of several tensors.
    """

    def __init__(self, forms: Sequence[Form], buffers: FusionBuffers) -> None:
        form, self._buffers = forms[0], buffers
        self._op, self._pre, self._post = form["op"], form["pre"], form["post"]
        self._dtype = dtype_of(form["dtypes"][0])
        self._counts = [len(each["shapes"]) for each in forms]
        self._shapes = [shape for each in forms for shape in each["shapes"]]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._size = sum(self._sizes)
        self._opts = c10d.AllreduceOptions()
        self._opts.reduceOp, self._opts.asyncOp = _reduction(self._op, self._dtype), False
        self._room: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []  # of the message, in the tensors' shapes

    def __call__(self, group: Any, tensors: Sequence[Sequence[torch.Tensor] | None], device: torch.device) -> None:
        """Reduce the tensors of the calls in place. Collective.

        Args:
            group: the process group.
            tensors: those of each call; None if this rank has joined, and takes part with neutral values.
            device: of the tensors.
        """
        own: list[torch.Tensor | None] = []
        for count, given in zip(self._counts, tensors, strict=True):
            own += [None] * count if given is None else given
        first = own[0]
        if len(own) == 1 and first is not None and first.is_contiguous():
            flat = first.view(-1)
            total = self._reduced(group, flat)
            if total is not flat:
                flat.copy_(total)
            return
        room = self._buffers.room(self._size, self._dtype, device)
        if room is not self._room:
            self._room, self._parts = room, self._cut(room)
        flat = room[: self._size]
        if None in tensors:
            flat.fill_(_neutral(self._op, self._dtype))
        _copy(own, self._parts)
        total = self._reduced(group, flat)
        _copy(self._parts if total is flat else self._cut(total), own)

    def _reduced(self, group: Any, flat: torch.Tensor) -> torch.Tensor:
        """Return the reduction, scaled before and after: the same tensor if there is no factor."""
        total = _scaled(flat, self._pre)
        group.allreduce([total], self._opts).wait()
        return _scaled(_divided(total, self._op, group.size()), self._post)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat[: self._size].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _copy(sources: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> None:
    """Copy tensors pairwise, unless one of a pair is None."""
    pairs = [(source, to) for source, to in zip(sources, targets, strict=True) if source is not None and to is not None]
    if pairs:
        torch._foreach_copy_([to for _, to in pairs], [source for source, _ in pairs])


def _reduction(op: str, dtype: torch.dtype) -> Any:
    """Return PyTorch's reduction: of integers an average is a sum, which `_divided` divides."""
    return ReduceOp.SUM if op == "Average" and not dtype.is_floating_point else _REDUCTIONS[op]


def _divided(total: torch.Tensor, op: str, size: int) -> torch.Tensor:
    """Return the average of integers, rounded towards zero, from their sum; other reductions unchanged."""
    if op != "Average" or total.is_floating_point():
        return total
    return torch.div(total, size, rounding_mode="trunc")


def _neutral(op: str, dtype: torch.dtype) -> float:
    """Return the neutral value of a reduction."""
    if op in ("Min", "Max"):
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        return limits.max if op == "Min" else limits.min
    return 1 if op == "Product" else 0


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product with a factor, rounded once; integers are rounded towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor if tensor.is_floating_point() else (tensor.double() * factor).to(tensor.dtype)


def adasum(group: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the Adasum of the ranks' tensors, on the CPU. Collective.

    Pairs of ranks at distances 1, 2, 4, … combine a and b to (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, in float64.

    Raises:
        ValueError: the number of ranks is not a power of two.

    Source: S. Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020.
    """
    size, rank = group.size(), group.rank()
    if size & (size - 1):
        raise ValueError(explain("Adasum", "ranks", expected="a power of two", got=size))
    mine, distance = tensor.to("cpu", torch.float64) * factor, 1
    while distance < size:
        peer, theirs = rank ^ distance, torch.empty_like(mine)
        send, receive = group.send([mine], peer, distance), group.recv([theirs], peer, distance)
        receive.wait()
        send.wait()
        one, other = (mine, theirs) if rank < peer else (theirs, mine)
        dot, squares = (one * other).sum(), [(each * each).sum() for each in (one, other)]
        parts = [1 - (dot / (2 * square) if square else 0) for square in squares]
        mine = parts[0] * one + parts[1] * other
        distance *= 2
    return mine.to(tensor.dtype)


def allgather(group: Any, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the ranks' tensors, joined along the first dimension. Collective.

    Args:
        group: the process group.
        tensor: this rank's.
        shapes: of all ranks' tensors; one without dimensions counts as one row.
    """
    rooms = [torch.empty(list(shape) or [1], dtype=tensor.dtype, device=tensor.device) for shape in shapes]
    group.allgather([rooms], [tensor.contiguous().view(rooms[group.rank()].shape)]).wait()
    return torch.cat(rooms)


def broadcast(group: Any, tensor: torch.Tensor, root: int) -> None:
    """Overwrite a tensor with that of a rank of the group. Collective."""
    opts, dense = c10d.BroadcastOptions(), tensor.contiguous()
    opts.rootRank = root
    group.broadcast([dense], opts).wait()
    if dense is not tensor:
        tensor.copy_(dense)


def alltoall(group: Any, tensor: torch.Tensor, table: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that the ranks sent to this one, and their number by rank. Collective.

    Args:
        group: the process group.
        tensor: this rank's rows.
        table: the number of rows that each rank sends to each.
    """
    rank = group.rank()
    going, coming = list(table[rank]), [row[rank] for row in table]
    found = torch.empty((sum(coming), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    group.all_to_all_single(found, tensor[: sum(going)].contiguous(), coming, going).wait()
    return found, torch.tensor(coming, dtype=torch.int32)


def reducescatter(group: Any, tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """Return this rank's rows of a reduction; the first ranks may have one row more. Collective."""
    size, rows = group.size(), tensor.shape[0]
    counts = [rows // size + (rank < rows % size) for rank in range(size)]
    found = torch.empty((counts[group.rank()], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    opts = c10d.ReduceScatterOptions()
    opts.reduceOp = _reduction(form["op"], tensor.dtype)
    group.reduce_scatter([found], [list(_scaled(tensor.contiguous(), form["pre"]).split(counts))], opts).wait()
    return _scaled(_divided(found, form["op"], size), form["post"])
