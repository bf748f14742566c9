"""The data of Horovod's calls: what a decided call does with the tensors of this rank, on a process group of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from ..base.errors import explain
from .negotiation import Form

__all__ = ["adasum", "allgather", "alltoall", "broadcast", "dtype_of", "reduce_together", "reducescatter"]

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


def reduce_together(group: Any, forms: Sequence[Form], tensors: Sequence[Sequence[torch.Tensor] | None]) -> None:
    """Reduce the tensors of several calls of one operation and dtype, in place, as one message. Collective.

    Args:
        group: the process group.
        forms: of the calls.
        tensors: those of each call; None where this rank has joined, and takes part with neutral numbers.
    """
    form = forms[0]
    sizes = [math.prod(shape) for each in forms for shape in each["shapes"]]
    if len(sizes) == 1 and tensors[0] is not None and tensors[0][0].is_contiguous():
        flat = tensors[0][0].view(-1)
    else:
        flat = torch.empty(sum(sizes), dtype=dtype_of(form["dtypes"][0]))
    own: list[torch.Tensor | None] = []
    for each, given in zip(forms, tensors, strict=True):
        own += [None] * len(each["shapes"]) if given is None else given
    for part, tensor in zip(flat.split(sizes), own, strict=True):
        if tensor is None:
            part.fill_(_neutral(form["op"], flat.dtype))
        elif tensor.data_ptr() != part.data_ptr() or not tensor.is_contiguous():
            part.copy_(tensor.reshape(-1))
    total = _scaled(flat, form["pre"])
    opts = c10d.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = _REDUCTIONS[form["op"]], False
    group.allreduce([total], opts).wait()
    total = _scaled(total, form["post"])
    for part, tensor in zip(total.split(sizes), own, strict=True):
        if tensor is not None and (tensor.data_ptr() != part.data_ptr() or not tensor.is_contiguous()):
            tensor.copy_(part.view(tensor.shape))


def _neutral(op: str, dtype: torch.dtype) -> float:
    """Return the number that changes no reduction."""
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
    """Return the Adasum of the ranks' tensors. Collective.

    Pairs of ranks at distances 1, 2, 4, … combine a and b to (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, in float64.

    Raises:
        ValueError: the number of ranks is no power of two.

    Source: S. Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020.
    """
    size, rank = group.size(), group.rank()
    if size & (size - 1):
        raise ValueError(explain("Adasum", "ranks", expected="a power of two", got=size))
    mine, distance = tensor.double() * factor, 1
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
    rooms = [torch.empty(list(shape) or [1], dtype=tensor.dtype) for shape in shapes]
    group.allgather([rooms], [tensor.contiguous().view(rooms[group.rank()].shape)]).wait()
    return torch.cat(rooms)


def broadcast(group: Any, tensor: torch.Tensor, root: int) -> None:
    """Overwrite a tensor with that of a rank of the group. Collective."""
    opts = c10d.BroadcastOptions()
    opts.rootRank = root
    group.broadcast([tensor], opts).wait()


def alltoall(group: Any, tensor: torch.Tensor, table: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that the ranks sent to this one, and how many came from each. Collective.

    Args:
        group: the process group.
        tensor: this rank's rows.
        table: how many rows each rank sends to each.
    """
    rank = group.rank()
    going, coming = list(table[rank]), [row[rank] for row in table]
    found = torch.empty((sum(coming), *tensor.shape[1:]), dtype=tensor.dtype)
    group.all_to_all_single(found, tensor[: sum(going)].contiguous(), coming, going).wait()
    return found, torch.tensor(coming, dtype=torch.int32)


def reducescatter(group: Any, tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """Return this rank's rows of a reduction; the first ranks have one row more where they are unequal. Collective."""
    size, rows = group.size(), tensor.shape[0]
    counts = [rows // size + (rank < rows % size) for rank in range(size)]
    found = torch.empty((counts[group.rank()], *tensor.shape[1:]), dtype=tensor.dtype)
    opts = c10d.ReduceScatterOptions()
    opts.reduceOp = _REDUCTIONS[form["op"]]
    group.reduce_scatter([found], [list(_scaled(tensor, form["pre"]).split(counts))], opts).wait()
    return _scaled(found, form["post"])
