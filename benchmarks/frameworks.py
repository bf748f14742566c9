"""A training step of PyTorch modules: ours against DDP on gloo, and against MPI_Allreduce of one flat gradient and fused Adam.

    mpiexec -n 2 python benchmarks/frameworks.py --output benchmarks/results/today

Each contender computes the same forward and backward pass; its figure is also given less that pass alone. CPU seconds are
those of all threads of the slowest rank, since MPI spins while it waits, and gloo does not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch

import mpistrat as ms

OURS, DDP, FLAT = "mpistrat.torch", "torch DDP on gloo, fused Adam", "MPI_Allreduce of one flat gradient, fused Adam"
ALONE = "forward and backward alone"
WIDTH, ROWS = 2048, 8


def mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a module of 16.8 M parameters, and a batch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


def conv_net() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a module of 24 K parameters, and a batch."""
    torch.manual_seed(0)
    n = torch.nn
    channels, layers = (1, 16, 32, 64), []
    for before, after in itertools.pairwise(channels):
        layers += [n.Conv2d(before, after, 3, padding=1), n.BatchNorm2d(after), n.ReLU()]
    return n.Sequential(*layers, n.AdaptiveAvgPool2d(1), n.Flatten(), n.Linear(64, 10)), torch.randn(ROWS, 1, 8, 8)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {"MLP, 16.8 M": mlp, "conv net, 24 K": conv_net}


def ours(strategy: Any, build: Any) -> harness.Operation:
    """Return the step of a distributed module. Collective."""
    module, x = build()
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    with strategy.scope():
        ms.torch.distribute(module, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    return step


def ddp(build: Any) -> harness.Operation:
    """Return DDP's step. Collective."""
    module, x = build()
    wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(wrapped.parameters(), 1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        wrapped(x).square().mean().backward()
        optimizer.step()

    return step


def flat(comm: Any, build: Any) -> harness.Operation:
    """Return a step with one MPI_Allreduce of all gradients, which are views of one array."""
    module, x = build()
    parameters = list(module.parameters())
    gradient = np.zeros(sum(p.numel() for p in parameters), np.float32)
    start = 0
    for p in parameters:
        p.grad = torch.from_numpy(gradient[start : start + p.numel()]).view_as(p)
        start += p.numel()
    optimizer = torch.optim.Adam(parameters, 1e-3, fused=True)
    from mpi4py import MPI

    def step() -> None:
        gradient[:] = 0
        module(x).square().mean().backward()
        comm.Allreduce(MPI.IN_PLACE, gradient)
        np.divide(gradient, comm.size, out=gradient)
        optimizer.step()

    return step


def alone(build: Any) -> harness.Operation:
    """Return the forward and backward pass."""
    module, x = build()

    def step() -> None:
        for p in module.parameters():
            p.grad = None
        module(x).square().mean().backward()

    return step


def cpu_seconds(comm: Any, operations: dict[str, harness.Operation], rounds: int) -> dict[str, float]:
    """Return the CPU seconds of each operation on the slowest rank: the smallest of some rounds, taken in turns. Collective."""
    best = dict.fromkeys(operations, float("inf"))
    for _ in range(rounds):
        for name, operation in operations.items():
            comm.Barrier()
            before = time.process_time()
            operation()
            best[name] = min(best[name], time.process_time() - before)
    from mpi4py import MPI

    return {name: comm.allreduce(value, MPI.MAX) for name, value in best.items()}


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, repetitions=40, seconds=20.0, rounds=15)
    torch.set_num_threads(1)
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    dist = harness.gloo(comm)
    result: dict[str, Any] = {
        "benchmark": "frameworks",
        "machine": harness.machine(comm),
        "seconds": {},
        "cpu_seconds": {},
    }
    for model, build in MODELS.items():
        operations = {OURS: ours(strategy, build), DDP: ddp(build), FLAT: flat(comm, build), ALONE: alone(build)}
        wall = harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds)
        cpu = cpu_seconds(comm, operations, options.rounds)
        result["seconds"][model], result["cpu_seconds"][model] = wall, cpu
        if comm.rank == 0:
            rest, rest_cpu = ({k: t - times[ALONE] for k, t in times.items()} for times in (wall, cpu))
            rows = [
                [name, harness.describe(wall[name]), harness.describe(max(rest[name], 0)), f"{rest[name] / rest[OURS]:.2f} ×",
                 harness.describe(max(rest_cpu[name], 0)), f"{rest_cpu[name] / rest_cpu[OURS]:.2f} ×"]
                for name in operations if name != ALONE
            ]  # fmt: skip
            about = result["machine"]
            header = ["step", "wall", "less compute", "against ours", "CPU less compute", "against ours"]
            print(
                harness.table(f"{model}, {about['ranks']} ranks on {about['nodes']} node(s)", header, rows), flush=True
            )
    if comm.rank == 0:
        harness.save(options.output, result)
    dist.destroy_process_group()
    strategy.close()


if __name__ == "__main__":
    main()
