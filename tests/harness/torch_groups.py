"""Process groups of torch.distributed on the backend of this package, for tests on ranks."""

from __future__ import annotations

import contextlib
import datetime

import pytest
import torch.distributed as dist
from torch.distributed import fsdp

from tests.harness.process_groups import set_layout

NAME = "mpistrat"


def register():
    """Make torch know the backend."""
    from mpistrat.torch.backend.group import create

    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def start(seconds=60.0, backend=NAME):
    """Make the default group of all ranks."""
    from mpi4py import MPI

    register()
    world, limit = MPI.COMM_WORLD, datetime.timedelta(seconds=seconds)
    port, store = None, None
    if world.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world.size, True, limit, wait_for_workers=False)
        port = store.port
    port = world.bcast(port, 0)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, world.size, False, limit, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)


@contextlib.contextmanager
def default_group(seconds=60.0, backend=NAME):
    """Open the default group of all ranks for a `with` block."""
    from mpi4py import MPI

    start(seconds, backend)
    try:
        yield dist.group.WORLD
        MPI.COMM_WORLD.Barrier()  # rank 0 has the store
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def group_in(layout, monkeypatch):
    """Open the default group in a layout for a `with` block: "shared", "private" memory, or "nodes" made of one machine."""
    if layout != "shared":
        set_layout(layout, monkeypatch)
    with default_group() as group:
        yield group


def need_fully_shard():
    """Skip the test where PyTorch has no public FSDP2. It needs a GPU there."""
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("FSDP2 runs on CPUs since PyTorch 2.6")


def fully_shard(module, **more):
    """Shard a module by FSDP2, or skip the test."""
    need_fully_shard()
    return fsdp.fully_shard(module, **more)
