"""torch.distributed over MPI by this package, against PyTorch's own gloo: collectives by size, steps of DDP and FSDP2.

Both are process groups of one program and take turns. Collectives are of float32 tensors on the CPU. A figure is the median of
the repetitions on the slowest rank. Needs PyTorch.

mpiexec -n 2 python benchmarks/torch_backend.py --output benchmarks/results/today
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from frameworks_torch import mlp
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Module = tuple[torch.nn.Module, torch.Tensor]
SIZES = {"8 B": 2, "1 KB": 256, "64 KB": 1 << 14, "1 MB": 1 << 18, "16.8 MB": 1 << 22}  # float32 of a rank
GLOO = "gloo"


def collectives(group: Any, count: int) -> dict[str, harness.Operation]:
    """Return one call of each operation in a group, of `count` elements of each rank."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count = max(size, count - count % size)
    mine, out = torch.ones(count), torch.empty(count)
    part, every = torch.empty(count // size), torch.empty(size * count)
    rooms = list(every.split(count)) if rank == 0 else None
    parts = [torch.ones(count) for _ in range(size)] if rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(mine.fill_(1), group=group),
        "broadcast": lambda: dist.broadcast(mine, 0, group=group),
        "reduce": lambda: dist.reduce(mine.fill_(1), 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(every, mine, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, mine, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, mine, group=group),
        "gather": lambda: dist.gather(mine, rooms, 0, group=group),
        "scatter": lambda: dist.scatter(out, parts, 0, group=group),
    }


def transformer() -> Module:
    """Return an encoder of 3.2 M parameters, and a batch of 8 rows of 32 tokens."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 32, 256)


def thin_layers() -> Module:
    """Return 200 layers of 1,056 parameters, and a batch."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(200))), torch.randn(8, 32)


MODELS: dict[str, Callable[[], Module]] = {
    "MLP, 16.8 M": mlp,
    "transformer, 3.2 M": transformer,
    "200 thin layers": thin_layers,
}


def ddp(group: Any, build: Callable[[], Module]) -> harness.Operation:
    """Return a step of DDP in a group. Collective."""
    module, x = build()
    return step_of(DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True), x)


def fsdp2(group: Any, build: Callable[[], Module]) -> harness.Operation:
    """Return a step of a module whose layers are sharded over a group. Collective."""
    module, x = build()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module.children() if isinstance(module, torch.nn.Sequential) else module.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return step_of(fully_shard(module, mesh=mesh), x)


def step_of(module: torch.nn.Module, x: torch.Tensor) -> harness.Operation:
    """Return a step of Adam."""
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, seconds=1.0, step_seconds=6.0, small=False)
    torch.set_num_threads(1)
    dist.init_process_group("mpistrat")
    comm = MPI.COMM_WORLD
    groups = {harness.OURS: dist.group.WORLD, GLOO: dist.new_group(backend="gloo")}
    result: dict[str, Any] = {
        "benchmark": "torch_backend",
        "machine": harness.machine(comm),
        "seconds": {},
        "steps": {},
    }
    for label, count in SIZES.items():
        if options.small and count > 1 << 14:
            break
        of_groups = {name: collectives(group, count) for name, group in groups.items()}
        for call in of_groups[GLOO]:
            taken = {name: operations[call] for name, operations in of_groups.items()}
            times = harness.pair(comm, taken, repetitions=100_000, seconds=options.seconds)
            result["seconds"].setdefault(call, {})[label] = times
    for kind, make in (("DDP", ddp), ("FSDP2", fsdp2)) if not options.small else ():
        for model, build in MODELS.items():
            made = {name: make(group, build) for name, group in groups.items()}
            times = harness.pair(comm, made, repetitions=1000, seconds=options.step_seconds)
            result["steps"][f"{kind}, {model}"] = times
            del made
    if comm.rank == 0:
        harness.show_ratios(result, {**result["seconds"], "steps": result["steps"]}, GLOO)
        harness.save(options.output, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
