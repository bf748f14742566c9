"""Modules, optimizers and schedulers of torch that programs draw from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.utils.prune

FEATURES = 6
CLASSES = 3
Linear, Sequential, Tanh = torch.nn.Linear, torch.nn.Sequential, torch.nn.Tanh


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.last = Linear(FEATURES, 8), Linear(8, 8), Linear(8, 8), Linear(8, CLASSES)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.one, self.two):
            x = torch.tanh(layer(x))
        return self.last(x)


class SharedLayer(torch.nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        layer = Linear(8, 8)
        self.first, self.layers, self.last = (
            Linear(FEATURES, 8),
            torch.nn.ModuleList([layer, layer]),
            Linear(8, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


class Embedded(torch.nn.Module):
    """An embedding, with sparse gradients or dense ones."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(11, 5, sparse=sparse), Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding((x.abs() * 3).long() % 11).mean(1)) + 0 * x.sum()


class Recurrent(torch.nn.Module):
    """An LSTM over three time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = torch.nn.LSTM(2, 5, batch_first=True), Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(x.reshape(-1, 3, 2))[0][:, -1])


class Attention(torch.nn.Module):
    """Attention with a causal mask in a float buffer, whose numbers are -inf and 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Linear(2, 4), torch.nn.LayerNorm(4), Linear(4, CLASSES)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.reshape(-1, 3, 2))
        return self.last(self.norm(x + self.attention(x, x, x, attn_mask=self.mask)[0]).mean(1))


class Convolution(torch.nn.Module):
    """A convolution with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv1d(1, 4, 3), torch.nn.GroupNorm(2, 4)
        self.last = Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.convolution(x[:, None]))).mean(-1))


class Symmetric(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Buffers(torch.nn.Module):
    """Buffers that forward assigns anew, changes in place, and reads only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Linear(FEATURES, 8), Linear(8, CLASSES)
        self.register_buffer("anew", torch.zeros(2))
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.anew = 0.9 * self.anew + 0.1
            self.in_place.mul_(0.5).add_(1 / 3)
        return self.last(torch.tanh(self.first(x))) * self.constant[1]


class TwoHeads(torch.nn.Module):
    """One trunk, two heads of which a call chooses one, and a method next to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = Linear(FEATURES, 8), torch.nn.ModuleList([Linear(8, CLASSES), Linear(8, CLASSES)])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.trunk(x))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.encode(x))


class TwoModules(torch.nn.ModuleDict):
    """An encoder and a decoder under one optimizer, each called by itself."""

    def __init__(self) -> None:
        super().__init__({"encoder": Sequential(Linear(FEATURES, 8), Tanh()), "decoder": Linear(8, CLASSES)})


def small(*between: torch.nn.Module) -> torch.nn.Module:
    """Return two layers with others in between."""
    return Sequential(Linear(FEATURES, 8), *between, Tanh(), Linear(8, CLASSES))


def normalized(norm: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
    return Sequential(norm(Linear(FEATURES, 8)), Tanh(), Linear(8, CLASSES))


def pruned() -> torch.nn.Module:
    module = small()
    torch.nn.utils.prune.l1_unstructured(module[0], "weight", amount=0.3)
    return module


def parametrized() -> torch.nn.Module:
    module = Sequential(Linear(FEATURES, FEATURES), Tanh(), Linear(FEATURES, CLASSES))
    torch.nn.utils.parametrize.register_parametrization(module[0], "weight", Symmetric())
    return module


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": small,
    "tied": Tied,
    "shared_layer": SharedLayer,
    "weight_norm": lambda: normalized(torch.nn.utils.parametrizations.weight_norm),
    "spectral": lambda: normalized(torch.nn.utils.parametrizations.spectral_norm),
    "prune": pruned,
    "embedding": lambda: Embedded(False),
    "embedding_sparse": lambda: Embedded(True),
    "lstm": Recurrent,
    "attention": Attention,
    "batch_norm": lambda: small(torch.nn.BatchNorm1d(8)),
    "convolution": Convolution,
    "parametrized": parametrized,
    "buffers": Buffers,
}
OTHER_MODELS: dict[str, Callable[[], torch.nn.Module]] = {  # for programs that need them
    "two_heads": TwoHeads,
    "two_modules": TwoModules,
    "matrices": lambda: Sequential(Linear(FEATURES, 8, bias=False), Tanh(), Linear(8, CLASSES, bias=False)),
}


def model(name: str, seed: int, dtype: torch.dtype) -> torch.nn.Module:
    """Return a new module with the weights of a seed."""
    torch.manual_seed(seed)
    return (MODELS | OTHER_MODELS)[name]().to(dtype)


class SharpnessAware(torch.optim.Optimizer):
    """SGD by the gradients a little uphill: calls its closure twice a step."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for _, p in pairs]
        norm = torch.sqrt(sum(p.grad.square().sum() for _, p in pairs)) + 1e-12
        for _, p in pairs:
            p.add_(p.grad / norm, alpha=0.05)
        closure()
        for (group, p), value in zip(pairs, before, strict=True):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.mul_(0.5).add_(p.grad)
            p.copy_(value * (1 - group["lr"] * group["weight_decay"])).add_(mean, alpha=-group["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}
FLAGS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd_maximize": lambda p: torch.optim.SGD(p, lr=0.05, maximize=True),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam_rate_tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "adam_decoupled": lambda p: torch.optim.Adam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
}
WHOLE: dict[str, Callable[..., torch.optim.Optimizer]] = {  # rules that look at whole tensors, or that few use
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
    "lbfgs_search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "lbfgs_short": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, history_size=2),
    "sharpness": lambda p: SharpnessAware(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.02),
}
ALL_OPTIMIZERS = OPTIMIZERS | FLAGS | WHOLE


def known(*names: str) -> tuple[str, ...]:
    """Return those of some optimizers that this version of PyTorch has."""
    missing = set() if hasattr(torch.optim, "Muon") else {"muon"}
    if "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters:
        missing.add("adam_decoupled")
    return tuple(name for name in names if name not in missing)


BETAS = ("adam", "adamw", "nadam", "radam", "adamax")


def optimizer(name: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return a new optimizer."""
    return ALL_OPTIMIZERS[name](list(parameters))


def scheduler(name: str, optimizer: torch.optim.Optimizer, of: str) -> Any:
    """Return a new scheduler for an optimizer of the name `of`."""
    s = torch.optim.lr_scheduler
    return {
        "step": lambda o: s.StepLR(o, 2, 0.5),
        "cosine": lambda o: s.CosineAnnealingLR(o, 7),
        "onecycle": lambda o: s.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=of in ("nesterov", *BETAS)),
        "lambda": lambda o: s.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        "plateau": lambda o: s.ReduceLROnPlateau(o, patience=0, threshold=0.5, factor=0.5),
        "sequential": lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=3), s.CosineAnnealingLR(o, 5)], [3]),
        "cyclic": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=of == "nesterov"),
        "exponential": lambda o: s.ExponentialLR(o, 0.8),
        "chained": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.3, 3), s.ExponentialLR(o, 0.9)]),
        "multiplicative": lambda o: s.MultiplicativeLR(o, lambda epoch: 0.9),
        "warm_restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
        "polynomial": lambda o: s.PolynomialLR(o, 9, 2.0),
    }[name](optimizer)


SCHEDULES = (
    "step", "cosine", "onecycle", "lambda", "plateau", "sequential", "cyclic", "exponential", "chained", "multiplicative",
    "warm_restarts", "polynomial",
)  # fmt: skip
