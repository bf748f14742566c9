"""The contenders of `frameworks.py` for PyTorch: ours, DDP on gloo, one flat gradient through MPI, and no communication."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch

import mpistrat as ms

DDP, FLAT = "torch DDP, fused Adam", "one flat MPI_Allreduce, fused Adam"
PACKAGES = ("torch",)
STEPS = 1  # of one call of an operation
WIDTH, ROWS = 2048, 8

Built = tuple[torch.nn.Module, torch.Tensor]


def mlp() -> Built:
    """Return a module of 16.8 M parameters, and a batch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


def conv_net() -> Built:
    """Return a module of 24 K parameters, and a batch."""
    torch.manual_seed(0)
    n = torch.nn
    channels, layers = (1, 16, 32, 64), []
    for before, after in itertools.pairwise(channels):
        layers += [n.Conv2d(before, after, 3, padding=1), n.BatchNorm2d(after), n.ReLU()]
    return n.Sequential(*layers, n.AdaptiveAvgPool2d(1), n.Flatten(), n.Linear(64, 10)), torch.randn(ROWS, 1, 8, 8)


MODELS: dict[str, Callable[[], Built]] = {"MLP, 16.8 M": mlp, "conv net, 24 K": conv_net}


def start(comm: Any) -> Callable[[], None]:
    """Begin, with one thread a rank; return what is called at the end. Collective."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as the first optimizer does: 75 MB that are nobody's parameters
    dist = harness.gloo(comm)
    return lambda: dist.destroy_process_group()


def contenders(strategy: Any, model: str) -> dict[str, Callable[[], harness.Operation]]:
    """Return what makes each contender's step, by name: ours first, the pass alone last. Making one is collective."""
    build = MODELS[model]
    return {
        harness.OURS: lambda: ours(strategy, build),
        DDP: lambda: ddp(build),
        FLAT: lambda: flat(strategy.comm, build),
        harness.ALONE: lambda: alone(build),
    }


def parameters(strategy: Any, model: str) -> dict[str, Callable[[], Any]]:
    """Return what makes the parameters alone, without gradients, as each contender keeps them, by name. Collective."""

    def frozen() -> torch.nn.Module:
        return MODELS[model]()[0].requires_grad_(False)

    def distributed() -> torch.nn.Module:
        module = frozen()
        with strategy.scope():
            ms.torch.distribute(module)
        return module

    return {harness.OURS: distributed, DDP: frozen}


def ours(strategy: Any, build: Callable[[], Built]) -> harness.Operation:
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


def ddp(build: Callable[[], Built]) -> harness.Operation:
    """Return DDP's step. Collective."""
    module, x = build()
    wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(wrapped.parameters(), 1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        wrapped(x).square().mean().backward()
        optimizer.step()

    return step


def flat(comm: Any, build: Callable[[], Built]) -> harness.Operation:
    """Return a step with one MPI_Allreduce of all gradients, which are views of one array."""
    from mpi4py import MPI

    module, x = build()
    parameters = list(module.parameters())
    gradient = np.zeros(sum(p.numel() for p in parameters), np.float32)
    start = 0
    for p in parameters:
        p.grad = torch.from_numpy(gradient[start : start + p.numel()]).view_as(p)
        start += p.numel()
    optimizer = torch.optim.Adam(parameters, 1e-3, fused=True)

    def step() -> None:
        gradient[:] = 0
        module(x).square().mean().backward()
        comm.Allreduce(MPI.IN_PLACE, gradient)
        np.divide(gradient, comm.size, out=gradient)
        optimizer.step()

    return step


def alone(build: Callable[[], Built]) -> harness.Operation:
    """Return the forward and backward pass."""
    module, x = build()
    parameters = list(module.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        module(x).square().mean().backward()

    return step
