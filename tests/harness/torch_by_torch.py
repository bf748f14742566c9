"""Steps by PyTorch's own parts, without a GPU: gloo stands for NCCL.

As on a GPU, each rank has all variables in memory of its own: in arenas like those of GPUs, or as a node of its own.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from mpistrat.arena import arena
from mpistrat.step import on_stream
from mpistrat.torch import torch_step
from mpistrat.torch.backend import gpus
from mpistrat.torch.backend import group as group_module


def step_by_torch(monkeypatch, nodes_of_one_rank=False):
    """Have steps of torch's optimizers go by PyTorch's own parts until a test ends; return the names of gloo's calls.

    With `nodes_of_one_rank` the other steps, by the parts of the package, work, too.
    """
    from mpi4py import MPI

    names = []
    on_gpu = lambda tensor: tensor.is_floating_point()  # noqa: E731
    call = gpus._call

    def noted(inner, name, args, kwargs):
        names.append(name)
        return call(inner, name, args, kwargs)

    def inner_group(timeout):
        make = lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
        return make, dist.ProcessGroup.BackendType.GLOO

    if nodes_of_one_rank:
        monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
        monkeypatch.setattr(torch_step, "goes_by_torch", lambda placement: True)
    else:
        always = property(lambda self: True, lambda self, value: None)
        monkeypatch.setattr(arena.ArenaAllocator, "on_gpu", always, raising=False)
        monkeypatch.setattr(arena.ArenaAllocator, "_free_bytes", lambda self: arena.UNLIMITED)
        monkeypatch.setattr(on_stream, "in_order", lambda: names.append("in order") or contextlib.nullcontext())
    monkeypatch.setattr(group_module, "gpus_here", lambda: True)
    for module in (group_module, gpus):
        monkeypatch.setattr(module, "is_on_gpu", on_gpu)
    monkeypatch.setattr(gpus, "_number_of", lambda device: (MPI.COMM_WORLD.rank, 0))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(gpus, "inner_group", inner_group)
    monkeypatch.setattr(gpus, "_call", noted)
    return names
