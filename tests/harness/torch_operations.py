"""Every operation of torch.distributed as one call, to be made wrongly on some ranks."""

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

#: By their names since 2.13, or those of all versions.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _gather_single(tensor, gather_tensor=None, dst=0, group=None, async_op=False):
    """Call a group's method as `dist.gather_single` does, which is new in 2.14; gloo's groups lack it."""
    group = dist.group.WORLD if group is None else group
    if not hasattr(group, "gather_single"):
        raise RuntimeError("this group does not support gather_single")
    opts = c10d.GatherOptions()
    opts.rootRank, opts.asyncOp = dist.get_group_rank(group, dst), async_op
    work = group.gather_single(tensor.new_empty(0) if gather_tensor is None else gather_tensor, tensor, opts)
    return work if async_op else work.wait()


gather_single = getattr(dist, "gather_single", _gather_single)


def _parts(ranks, size, dtype):
    return [torch.ones(size, dtype=dtype) for _ in range(ranks)]


def _whole(ranks, size, dtype):
    return torch.ones(ranks * size, dtype=dtype)


def _sparse(size, dtype):
    return torch.sparse_coo_tensor([[0]], torch.ones(1, dtype=dtype), (size,))


#: By name: a function of tensor, number of ranks, whether this rank is the root, size, dtype, and what all take.
CALLS = {
    "all_reduce": lambda t, n, s, d, root, **more: dist.all_reduce(t, **more),
    "all_reduce async": lambda t, n, s, d, root, **more: dist.all_reduce(t, async_op=True, **more).wait(),
    "all_reduce sparse": lambda t, n, s, d, root, **more: dist.all_reduce(_sparse(s, d), **more),
    "broadcast": lambda t, n, s, d, root, **more: dist.broadcast(t, src=root, **more),
    "reduce": lambda t, n, s, d, root, **more: dist.reduce(t, dst=root, **more),
    "all_gather": lambda t, n, s, d, root, **more: dist.all_gather(_parts(n, s, d), t, **more),
    "all_gather_into_tensor": lambda t, n, s, d, root, **more: all_gather_single(_whole(n, s, d), t, **more),
    "gather": lambda t, n, s, d, root, **more: dist.gather(
        t, _parts(n, s, d) if dist.get_rank() == root else None, dst=root, **more
    ),
    "gather_single": lambda t, n, s, d, root, **more: gather_single(
        t, _whole(n, s, d) if dist.get_rank() == root else None, dst=root, **more
    ),
    "scatter": lambda t, n, s, d, root, **more: dist.scatter(
        t, _parts(n, s, d) if dist.get_rank() == root else None, src=root, **more
    ),
    "reduce_scatter": lambda t, n, s, d, root, **more: dist.reduce_scatter(t, _parts(n, s, d), **more),
    "reduce_scatter_tensor": lambda t, n, s, d, root, **more: reduce_scatter_single(t, _whole(n, s, d), **more),
    "all_to_all": lambda t, n, s, d, root, **more: dist.all_to_all(_parts(n, s, d), _parts(n, s, d), **more),
    "all_to_all_single": lambda t, n, s, d, root, **more: dist.all_to_all_single(
        _whole(n, s, d), _whole(n, s, d), **more
    ),
    "barrier": lambda t, n, s, d, root, **more: dist.barrier(**more),
}
ROOTED = ("broadcast", "reduce", "gather", "gather_single", "scatter")


def call(name, size=4, dtype=torch.float32, root=0, **more):
    """Make one call."""
    CALLS[name](torch.ones(size, dtype=dtype), dist.get_world_size(), size, dtype, root, **more)


def function_of(name):
    """Return the name in errors."""
    return f"dist.{name.split()[0]}"
