"""Horovod's collectives: in place or not, blocking or not, of one tensor or of several, with gradients.

A call is matched with the other ranks' calls of the same name, in any order. Without a name it is matched by its number among the
unnamed calls of its operation. All tensors of a call are on the CPU, or on one GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...base.errors import explain
from ...torch.backend.gpus import is_on_gpu
from ..engine import Prepared
from ..process_sets import RankSet, global_process_set
from .basics import engine
from .compression import Compression, Compressor

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "ReductionName", "RepeatedReduction", "Sum", "allgather",
    "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip


class ReductionName(NamedTuple):
    """A reduction, such as `hvd.Sum`."""

    name: str


Average, Sum, Adasum = ReductionName("Average"), ReductionName("Sum"), ReductionName("Adasum")
Min, Max, Product = ReductionName("Min"), ReductionName("Max"), ReductionName("Product")

_SUMMED = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def _first(tensors: Any) -> Any:
    return tensors[0]


def _checked(function: str, tensors: Sequence[torch.Tensor], *, summed: bool = False) -> list[torch.Tensor]:
    """Return the tensors without history.

    Raises:
        ValueError: a tensor is sparse, neither on the CPU nor on a GPU, on another device than the first, or of a dtype that
            cannot be summed.
    """
    for tensor in tensors:
        got = f"one of {tensor.dtype}" if summed and tensor.dtype not in _SUMMED else ""
        if tensor.device.type != "cpu" and not is_on_gpu(tensor):
            got = f"one on {tensor.device}"
        elif tensor.device != tensors[0].device:
            got = f"one on {tensors[0].device} and one on {tensor.device}"
        got = "a sparse one" if tensor.layout is not torch.strided else got
        if got:
            expected = f"dense tensors{' of numbers' if summed else ''} on the CPU or on one GPU"
            remedy = "Sparse ones: hvd.sparse_allreduce_async" if got == "a sparse one" else ""
            raise ValueError(explain(f"hvd.{function}", "tensor", expected=expected, got=got, remedy=remedy))
    return [tensor.detach() for tensor in tensors]


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def synchronize(handle: int | None) -> Any:
    """Wait for an asynchronous call, and return its result; None if the handle's result was taken already.

    Raises:
        HorovodInternalError: the call failed. The text names the tensor and the ranks.
    """
    running = engine("synchronize")
    return running.wait(handle) if handle is not None and running.knows(handle) else None


def poll(handle: int) -> bool:
    """Return True if an asynchronous call has ended, so that `synchronize` does not wait."""
    return engine("poll").ready(handle)


# reductions


def _operation(function: str, op: ReductionName | None, average: bool | None) -> ReductionName:
    if op is not None and average is not None:
        raise ValueError(explain(f"hvd.{function}", "average", expected="None where op is given", got=average))
    if op is None:
        return Sum if average is False else Average
    return op


class _Reduction(NamedTuple):
    """The common arguments of the calls of a reduction."""

    function: str
    name: str | None
    op: ReductionName
    pre: float
    post: float
    process_set: RankSet

    def ask(self, tensors: Sequence[torch.Tensor], prefix: str, finish: Callable[[Any], Any]) -> int:
        own = _checked(self.function, tensors, summed=True)
        return engine(self.function).submit(self.prepare(own, prefix), own, finish)

    def prepare(self, own: Sequence[torch.Tensor], prefix: str) -> Prepared:
        return engine(self.function).prepare(
            "allreduce", self.process_set, own, self.name, prefix,
            op=self.op.name, pre=float(self.pre), post=float(self.post),
        )  # fmt: skip

    def start(self, tensors: Sequence[torch.Tensor], in_place: bool, several: bool) -> int:
        own = list(tensors) if in_place else _copies(tensors)
        prefix = "grouped_allreduce" if several else "allreduce"
        return self.ask(own, prefix, (lambda _: own) if several else (lambda _: own[0]))


class RepeatedReduction:
    """Repeated `grouped_allreduce_async_` under one name: tensors with the same forms as the last ones are not checked again.

    Args:
        name, op, prescale_factor, postscale_factor, process_set: as of that function.
    """

    def __init__(
        self, name: str, op: ReductionName, prescale_factor: float, postscale_factor: float, process_set: RankSet
    ) -> None:
        function = "grouped_allreduce_async_"
        self._call = _Reduction(function, name, op, prescale_factor, postscale_factor, process_set)
        self._prepared: Prepared | None = None
        self._like: Any = None  # the forms of the tensors that it was prepared for
        self._running: Any = lambda: None  # the engine

    def start(self, tensors: Sequence[torch.Tensor]) -> int:
        """Start the reduction in place. Return a handle for `synchronize`. Collective over the process set."""
        call, prepared, running = self._call, self._prepared, engine(self._call.function)
        like = [(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in tensors]
        if (
            prepared is None
            or like != self._like
            or self._running() is not running
            or prepared.key[0] != call.process_set.process_set_id
        ):
            prepared = call.prepare(_checked(call.function, tensors, summed=True), "grouped_allreduce")
            self._prepared, self._like, self._running = prepared, like, weakref.ref(running)
        own = [tensor.detach() for tensor in tensors]
        return running.submit(prepared, own, lambda _: tensors)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> int:
    """Start `allreduce`. Return a handle. Collective over the process set."""
    how = _operation("allreduce_async", op, average)
    call = _Reduction("allreduce_async", name, how, prescale_factor, postscale_factor, process_set)
    return call.start([tensor], in_place=False, several=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> int:
    """Start `allreduce_`, in place. Return a handle. Collective over the process set."""
    how = _operation("allreduce_async_", op, average)
    call = _Reduction("allreduce_async_", name, how, prescale_factor, postscale_factor, process_set)
    return call.start([tensor], in_place=True, several=False)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Reduction, several: bool, *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.several = call, several
        found = synchronize(call.start(tensors, in_place=False, several=several))
        return tuple(found) if several else found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        call, several = ctx.call._replace(name=None), ctx.several
        found = _Allreduce.apply(call, several, *[gradient.contiguous() for gradient in gradients])
        return None, None, *(found if several else (found,))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of a tensor over all ranks. Collective over the process set.

    Args:
        tensor: of numbers, the same shape and dtype on all ranks.
        average: as in older versions of Horovod: False for `Sum`.
        name: matches the calls of the ranks.
        compression: of the sent tensor.
        op: `Average` (default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor, postscale_factor: multiply the tensor before, and the result after. Integers are rounded towards zero.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: on every rank, if shapes, dtypes or options differ, or ranks do not arrive in time.
        ValueError: a tensor that cannot be reduced, or a name whose last call has not ended.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Sum)
        tensor([1., 2.])
        >>> hvd.shutdown()
    """
    how = _operation("allreduce", op, average)
    call = _Reduction("allreduce", name, how, prescale_factor, postscale_factor, process_set)
    small, context = compression.compress(tensor)
    return compression.decompress(_Allreduce.apply(call, False, small), context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place, and return it. Collective over the process set. See `allreduce`."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`. Return a handle. Collective over the process set."""
    how = _operation("grouped_allreduce_async", op, average)
    call = _Reduction("grouped_allreduce_async", name, how, prescale_factor, postscale_factor, process_set)
    return call.start(tensors, in_place=False, several=True)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> int:
    """Start `grouped_allreduce_`, in place. Return a handle. Collective over the process set."""
    how = _operation("grouped_allreduce_async_", op, average)
    call = _Reduction("grouped_allreduce_async_", name, how, prescale_factor, postscale_factor, process_set)
    return call.start(tensors, in_place=True, several=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors as one call. Collective over the process set. See `allreduce`.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.grouped_allreduce([torch.ones(1), torch.zeros(1)], op=hvd.Max)
        [tensor([1.]), tensor([0.])]
        >>> hvd.shutdown()
    """
    how = _operation("grouped_allreduce", op, average)
    call = _Reduction("grouped_allreduce", name, how, prescale_factor, postscale_factor, process_set)
    packed = [compression.compress(tensor) for tensor in tensors]
    found = _Allreduce.apply(call, True, *[small for small, _ in packed])
    return [compression.decompress(each, context) for each, (_, context) in zip(found, packed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place as one call, and return them. Collective over the process set. See `allreduce`."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReductionName, process_set: RankSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse tensors. Return a function that returns the result. Collective.

    Args:
        tensor: a sparse tensor in coordinate form. Ranks may have entries at different indices.
        name: matches the calls of the ranks.
        op: `Average` or `Sum`.
        process_set: the ranks that take part.

    Raises:
        ValueError: another reduction, or a tensor that is not sparse.
    """
    function = "hvd.sparse_allreduce_async"
    if op not in (Average, Sum):
        raise ValueError(explain(function, "op", expected="Average or Sum", got=op.name))
    if not tensor.is_sparse:
        raise ValueError(explain(function, "tensor", expected="a sparse tensor", got=f"one of layout {tensor.layout}"))
    own = tensor.detach().coalesce()
    values = allgather_async(own.values().contiguous(), f"{name}.values", process_set)
    indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set)

    def wait() -> torch.Tensor:
        found, places = synchronize(values), synchronize(indices)
        if op == Average:
            found = found / len(process_set.ranks)
        return torch.sparse_coo_tensor(places.t(), found, tensor.shape, check_invariants=True).coalesce()

    return wait


# gather


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: RankSet = global_process_set) -> int:
    """Start `allgather`. Return a handle. Collective over the process set."""
    own = _checked("allgather_async", _copies([tensor]))
    return engine("allgather_async").ask("allgather", process_set, own, name, "allgather", _first)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: RankSet = global_process_set
) -> int:
    """Start `grouped_allgather`. Return a handle. Collective over the process set."""
    own = _checked("grouped_allgather_async", _copies(tensors))
    return engine("grouped_allgather_async").ask("allgather", process_set, own, name, "grouped_allgather", list)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: RankSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set, ctx.shapes = process_set, [tensor.shape for tensor in tensors]
        rows = torch.tensor([tensor.shape[0] if tensor.dim() else 1 for tensor in tensors])
        if any(ctx.needs_input_grad):
            later = allgather_async(rows, None if name is None else f"{name}.rows", process_set)
        found = tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))
        if any(ctx.needs_input_grad):
            ctx.rows = synchronize(later).view(-1, len(tensors))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dense = [gradient.contiguous() for gradient in gradients]
        means = synchronize(grouped_allreduce_async(dense, op=Average, process_set=ctx.process_set))
        own, found = ctx.process_set.rank(), []
        for number, mean in enumerate(means):
            low, count = int(ctx.rows[:own, number].sum()), int(ctx.rows[own, number])
            found.append(mean[low : low + count].view(ctx.shapes[number]))
        return None, None, *found


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: RankSet = global_process_set) -> torch.Tensor:
    """Return the tensors of all ranks, joined along the first dimension. Collective over the process set.

    The gradient is the average of the ranks' gradients, as in Horovod.

    Args:
        tensor: ranks may have different numbers of rows. One without dimensions counts as one row.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: on every rank, if dtypes or the other dimensions differ, or ranks do not arrive in time.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2])
        >>> hvd.shutdown()
    """
    if not tensor.requires_grad:
        return synchronize(allgather_async(tensor, name, process_set))
    return _Allgather.apply(name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: RankSet = global_process_set
) -> list[torch.Tensor]:
    """Return `allgather` of several tensors as one call. Collective over the process set."""
    return list(_Allgather.apply(name, process_set, *tensors))


# broadcast


def _start_broadcast(
    function: str, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: RankSet
) -> int:
    running = engine(function)
    if root_rank not in process_set.ranks:
        expected = f"a rank of the process set, one of {process_set.ranks}"
        raise ValueError(explain(f"hvd.{function}", "root_rank", expected=expected, got=root_rank, rank=running.rank))
    own = _checked(function, [tensor])
    return running.ask("broadcast", process_set, own, name, "broadcast", lambda _: tensor, root=int(root_rank))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> int:
    """Start `broadcast`. Return a handle. Collective over the process set."""
    return _start_broadcast("broadcast_async", tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> int:
    """Start `broadcast_`, in place. Return a handle. Collective over the process set."""
    return _start_broadcast("broadcast_async_", tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: RankSet) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return synchronize(broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mean = allreduce(gradients[0].contiguous(), op=Average, process_set=ctx.process_set)
        here = ctx.process_set.ranks[ctx.process_set.rank()] == ctx.root
        return mean if here else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of one rank on all. Collective over the process set.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the number of the rank in the job.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: on every rank, if shapes, dtypes or roots differ, or ranks do not arrive in time.
        ValueError: the process set has no such rank.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast(torch.tensor([3]), root_rank=0)
        tensor([3])
        >>> hvd.shutdown()
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with that of one rank, and return it. Collective over the process set. See `broadcast`."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# all-to-all


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: RankSet = global_process_set,
) -> int:
    """Start `alltoall`. Return a handle, whose result is the rows and their number by rank. Collective."""
    own = _checked("alltoall_async", _copies([tensor]))
    count = len(process_set.ranks)
    rows = tensor.shape[0] if tensor.dim() else 0
    function, remedy = "hvd.alltoall", "Pass splits, the number of rows for each rank"
    if splits is None:
        if rows % count or not tensor.dim():
            expected = f"a number of rows that {count} ranks divide"
            raise ValueError(explain(function, "tensor", expected=expected, got=rows, remedy=remedy))
        sizes = [rows // count] * count
    else:
        given = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits, dtype=torch.int32)
        if given.dtype != torch.int32:
            raise ValueError(explain(function, "splits", expected="32-bit integers", got=given.dtype))
        sizes = given.tolist()
        if len(sizes) != count or sum(sizes) > rows or min(sizes) < 0:
            expected = f"{count} numbers of rows, together at most {rows}"
            raise ValueError(explain(function, "splits", expected=expected, got=sizes))
    return engine("alltoall_async").ask("alltoall", process_set, own, name, "alltoall", tuple, splits=sizes)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: RankSet) -> Any:
        found, counts = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.counts = process_set, counts
        ctx.mark_non_differentiable(counts)
        return found, counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        handle = alltoall_async(gradients[0].contiguous(), ctx.counts, None, ctx.process_set)
        return synchronize(handle)[0], None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: RankSet = global_process_set,
) -> Any:
    """Send each rank some rows of a tensor, and return the received rows. Collective over the process set.

    Args:
        tensor: of at least one dimension.
        splits: the number of rows for each rank, of int32; default equal.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Returns:
        The rows in the order of the ranks; with `splits` also a tensor with the number of rows from each rank.

    Raises:
        HorovodInternalError: on every rank, if dtypes or the other dimensions differ, or ranks do not arrive in time.
        ValueError: the rows cannot be divided, or `splits` do not fit them.
    """
    found, counts = _Alltoall.apply(tensor, splits, name, process_set)
    return found if splits is None else (found, counts)


# scattered reductions


def _start_scattered(
    function: str, tensors: Sequence[torch.Tensor], name: str | None, op: ReductionName, process_set: RankSet,
    pre: float, post: float, finish: Callable[[Any], Any],
) -> int:  # fmt: skip
    if op == Adasum:
        raise NotImplementedError(explain(f"hvd.{function}", "op", expected="any other reduction", got="Adasum"))
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(explain(f"hvd.{function}", "tensor", expected="at least one dimension", got="a scalar"))
    own = _checked(function, _copies(tensors), summed=True)
    return engine(function).ask(
        "reducescatter", process_set, own, name, function, finish, op=op.name, pre=float(pre), post=float(post)
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReductionName = Average,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`. Return a handle. Collective over the process set."""
    return _start_scattered("reducescatter", [tensor], name, op, process_set, prescale_factor, postscale_factor, _first)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReductionName = Average,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`. Return a handle. Collective over the process set."""
    return _start_scattered(
        "grouped_reducescatter", tensors, name, op, process_set, prescale_factor, postscale_factor, list
    )


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.op, ctx.process_set, ctx.factor = call[1], call[2], call[3] * call[4]
        return tuple(synchronize(grouped_reducescatter_async(tensors, *call)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        factor = ctx.factor * (len(ctx.process_set.ranks) if ctx.op == Sum else 1)
        scaled = [(gradient * factor).contiguous() for gradient in gradients]
        return None, *synchronize(grouped_allgather_async(scaled, None, ctx.process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionName = Average,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of a tensor. Collective over the process set.

    The first ranks have one row more if the rows cannot be divided equally. Options: see `allreduce`.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(torch.ones(2, 3), op=hvd.Sum).shape
        torch.Size([2, 3])
        >>> hvd.shutdown()
    """
    found = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return found[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionName = Average,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return `reducescatter` of several tensors as one call. Collective over the process set."""
    packed = [compression.compress(tensor) for tensor in tensors]
    call = (name, op, process_set, prescale_factor, postscale_factor)
    found = _Reducescatter.apply(call, *[small for small, _ in packed])
    return [compression.decompress(each, context) for each, (_, context) in zip(found, packed, strict=True)]


# no data


def join(device: int = -1) -> int:
    """Wait for all ranks, and contribute neutral values to their reductions. Collective over all ranks.

    A rank without batches calls it, so that ranks may have different numbers of batches.

    Args:
        device: the number of this rank's GPU for reductions; default that of its last call.

    Returns:
        The last rank that called it.
    """
    running = engine("join")
    running.use_gpu(device)
    return int(running.wait(running.ask("join", global_process_set, (), None, "join", int)))


def barrier(process_set: RankSet = global_process_set) -> None:
    """Wait until all ranks arrive. Collective over the process set.

    Raises:
        HorovodInternalError: ranks do not arrive in time.
    """
    running = engine("barrier")
    running.wait(running.ask("barrier", process_set, (), None, "barrier", bool))
