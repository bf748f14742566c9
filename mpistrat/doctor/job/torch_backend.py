"""torch.distributed with the backend "mpistrat": collectives of tensors, and a step of DistributedDataParallel."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from .collectives import SIZES, compare, raw_calls
from .trial import Skipped, Trial

__all__ = ["run"]

_LEAST, _MOST = 1 << 10, 1 << 18  # elements of the tested arrays
_WHO = "torch"


def run(trial: Trial) -> None:
    """Check and measure torch's collectives, and the gradients of DDP. Collective.

    Raises:
        Skipped: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise Skipped("PyTorch is not installed in this Python")
    trial.part("import torch")
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    trial.fact(torch=torch.__version__)
    trial.part("init_process_group")
    dist.init_process_group("mpistrat")
    for label, count in SIZES.items():
        if _LEAST <= count <= _MOST:
            for name, call in raw_calls(trial.comm, count).items():
                ours = _operation(torch, dist, name, call.mine, call.expected)
                compare(trial, f"{name} {label}", ours, _WHO, call)
    trial.part("a step of DDP")
    _ddp(trial, torch)
    trial.part("destroy_process_group")
    dist.destroy_process_group()


def _operation(torch: Any, dist: Any, name: str, mine: np.ndarray, expected: np.ndarray) -> Callable[[], np.ndarray]:
    """Return a collective of tensors that returns a new array of the expected shape."""
    given, out = torch.from_numpy(mine), torch.empty(expected.size)
    last = dist.get_world_size() - 1

    def all_reduce() -> np.ndarray:
        out.copy_(given)
        dist.all_reduce(out)
        return out.numpy()

    def broadcast() -> np.ndarray:
        out.copy_(given)
        dist.broadcast(out, src=last)
        return out.numpy()

    def into(call: Callable[[Any, Any], object]) -> np.ndarray:
        call(out, given)
        return out.numpy()

    return {
        "all_reduce": all_reduce,
        "broadcast": broadcast,
        "reduce_scatter": lambda: into(dist.reduce_scatter_tensor),
        "all_to_all": lambda: into(dist.all_to_all_single),
        "all_gather": lambda: into(dist.all_gather_into_tensor),
    }[name]


def _ddp(trial: Trial, torch: Any) -> None:
    """Compare the gradient of DDP with the mean over the ranks. Collective."""
    size, count = trial.comm.size, 1 << 16
    layer = torch.nn.Linear(count, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(trial.topology.rank)  # DDP copies rank 0's
    module = torch.nn.parallel.DistributedDataParallel(layer)
    trial.same("DDP, weights", layer.weight.detach().numpy(), np.zeros((1, count), np.float32))
    row = torch.full((1, count), float(trial.topology.rank % 16 + 1))
    module(row).sum().backward()
    mean = sum(rank % 16 + 1 for rank in range(size)) / size
    apart = np.abs(layer.weight.grad.numpy() - mean).max()
    trial.same("DDP, gradients within 1e-5 of the mean", bool(apart <= 1e-5 * mean), True)
