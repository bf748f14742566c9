"""The usual loop of torch, and the base of all programs that differ from it in one place."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import torch

import mpistrat as ms
from tests.nets.patterns import torch_models as zoo
from tests.nets.patterns.environments import KINDS, Environment, sizes
from tests.nets.patterns.loops import Loop

Config = dict[str, Any]
Rows = collections.namedtuple("Rows", "x y")
EPOCHS = 2

# How a batch gets to the step in strategy.run: (run, step, a, b, the whole data set's x)
DELIVERIES: dict[str, Callable[..., Any]] = {
    "arguments": lambda run, step, a, b, x: run(step, args=(a, b)),
    "tuple": lambda run, step, a, b, x: run(lambda rows: step(*rows), args=((a, b),)),
    "keywords": lambda run, step, a, b, x: run(step, kwargs={"a": a, "b": b}),
    "twice": lambda run, step, a, b, x: run(lambda rows, more: step(*rows), args=((a, b), {"again": a})),
    "named_tuple": lambda run, step, a, b, x: run(lambda rows: step(rows.x, rows.y), args=(Rows(a, b),)),
    "beside_array": lambda run, step, a, b, x: run(lambda a, b, other: step(a, b), args=(a, b, x[:5])),
    "tensors": lambda run, step, a, b, x: run(step, args=(torch.from_numpy(a), torch.from_numpy(b))),
    "copies": lambda run, step, a, b, x: run(step, args=(torch.tensor(a), torch.tensor(b))),
    "closure": lambda run, step, a, b, x: run(lambda: step(a, b)),
    "views": lambda run, step, a, b, x: run(step, args=(a[:, :], b[:])),
}


class Program(Loop):
    """The usual loop. A subclass is a program of the name of its class, and changes one of the methods."""

    programs: ClassVar[dict[str, type[Program]]] = {}
    models: ClassVar[tuple[str, ...]] = tuple(zoo.MODELS)
    optimizers: ClassVar[tuple[str, ...]] = tuple(zoo.OPTIMIZERS)
    kinds: ClassVar[tuple[str, ...]] = KINDS
    clips = True  # whether it may be drawn with max_norm
    dtype = torch.float64
    tolerance: ClassVar[float | None] = None
    options: ClassVar[dict[str, Any]] = {}  # of distribute
    scheduled = False
    served = False  # whether it may be drawn with parameter servers
    epochs = EPOCHS

    def __init_subclass__(cls) -> None:
        Program.programs[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Config:
        """Draw what the program leaves open."""

        def choose(options: Iterable[str]) -> str:
            return str(rng.choice(list(options)))

        config = {
            "kind": choose(cls.kinds), "model": choose(cls.models) if rng.random() < 0.6 else cls.models[0],
            "optimizer": choose(cls.optimizers), "delivery": choose(DELIVERIES), "seed": int(rng.integers(1000)),
            "in_run": bool(rng.random() < 0.6), "clip": bool(cls.clips and rng.random() < 0.2),
            "overlap": bool(rng.random() < 0.1), "set_to_none": bool(rng.random() < 0.7),
            "schedule": choose(zoo.SCHEDULES), "fields": bool(rng.random() < 0.2),
            "layout": choose(("shared", "shared", "private", "made up")), "servers": bool(cls.served and rng.random() < 0.4),
        }  # fmt: skip
        if config["servers"]:  # steps are those of strategy.run, and servers sum
            config |= {"in_run": True, "overlap": False, "layout": "shared"}
            if config["model"] in ("batch_norm", "buffers", "spectral"):  # servers compute no buffers
                config["model"] = cls.models[0]
        elif config["overlap"]:
            config["layout"] = choose(("private", "made up"))
        model, optimizer = config["model"], config["optimizer"]
        if model == "embedding_sparse":  # few of torch's rules take sparse gradients
            config |= {"clip": False, "optimizer": "sgd"}
        # Gradients that are zero but for rounding, which adaptive rules enlarge.
        if model in ("attention", "batch_norm") and optimizer not in ("sgd", "nesterov"):
            config["optimizer"] = "nesterov"
        if model == "batch_norm" and config["kind"] == "empty":  # torch has no statistics of one row
            config["kind"] = "last"
        exact = config["optimizer"] in ("sgd", "nesterov")
        config["tolerance"] = cls.tolerance or (1e-9 if exact else 1e-6)
        return config

    def __init__(self, env: Environment, config: Config, ranks: int) -> None:
        self.env, self.config, self.ranks = env, config, ranks
        rng = np.random.default_rng(config["seed"])
        rows, self.batch_rows = sizes(config["kind"], ranks)
        precise = np.float64 if self.dtype == torch.float64 else np.float32
        self.x = rng.normal(size=(rows, zoo.FEATURES)).astype(precise)
        self.y = rng.integers(0, zoo.CLASSES, rows)
        self.rng, self.calls, self.results = rng, 0, {}
        self.net = zoo.model(config["model"], config["seed"], self.dtype)
        self.prepare_module()
        self.optimizer = self.make_optimizer(self.net)
        self.scheduler = self.make_scheduler() if config["seed"] % 2 else None
        self.before_distribute()
        self.net, self.optimizer = self.distribute(self.net, self.optimizer)
        self.scheduler = self.scheduler or self.make_scheduler()
        self.after_distribute()

    # what subclasses change

    def prepare_module(self) -> None:
        """Change the module before its optimizer is made."""

    def before_distribute(self) -> None:
        """Do something with the plain module and optimizer."""

    def after_distribute(self) -> None:
        """Do something with the distributed module and optimizer."""

    def loss(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.cross_entropy(self.net(a), b)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """Step, once the gradients are there."""
        self.clip()
        self.optimizer.step()

    def step(self, a: torch.Tensor, b: torch.Tensor) -> float:
        """Take a step of one batch; return the loss."""
        self.zero_grad()
        loss = self.loss(a, b)
        self.backward(loss)
        self.update()
        return float(loss.detach()) if len(a) else 0.0

    # what they share

    def make_optimizer(self, net: torch.nn.Module) -> torch.optim.Optimizer:
        return zoo.optimizer(self.config["optimizer"], net.parameters())

    def make_scheduler(self) -> Any:
        if not self.scheduled:
            return None
        return zoo.scheduler(self.config["schedule"], self.optimizer, self.config["optimizer"])

    def distribute(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        """Distribute a module and its optimizer, with the options that were drawn."""
        if self.env.plain:
            return net, optimizer
        options = dict(self.options) | options
        if self.config["clip"]:
            options["max_norm"] = 0.3
        if self.config["overlap"]:
            options["overlap"] = True
        if self.config["model"] == "batch_norm":
            options["sync_batch_norm"] = True
        with self.env.scope():
            return ms.torch.distribute(net, optimizer, **options)

    def data(self, seed: int = 0, batch: int | None = None) -> Iterable[Any]:
        """Return batches of the rows, in an order of its own for each seed."""
        fields = {"x": self.x, "y": self.y} if self.config["fields"] else (self.x, self.y)
        dataset = ms.data.from_arrays(fields).shuffle(seed=self.config["seed"] + seed).batch(batch or self.batch_rows)
        return self.env.data(dataset)

    def arrays(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        return (batch["x"], batch["y"]) if self.config["fields"] else batch

    def deliver(self, batch: Any, step: Callable[..., float] | None = None) -> float:
        """Take a step with a batch, in the loop or by strategy.run; then one of the scheduler."""
        a, b = self.arrays(batch)
        step = step or self.step

        def call(a: Any, b: Any) -> float:
            return step(torch.as_tensor(a), torch.as_tensor(b))

        if self.config["in_run"]:
            loss = DELIVERIES[self.config["delivery"]](self.env.run, call, a, b, self.x)
        else:
            loss = call(a, b)
        self.calls += 1
        if self.scheduler is not None:
            self.scheduler.step(*([self.env.mean(loss, len(a))] if self.config["schedule"] == "plateau" else []))
        return loss

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.config["set_to_none"])

    def clip(self) -> None:
        """Clip as max_norm does: exactly to the norm, without the 1e-6 that torch's clip_grad_norm_ adds."""
        if not (self.config["clip"] and self.env.plain):
            return
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        norm = torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients))
        if norm > 0.3:
            for gradient in gradients:
                gradient.mul_(0.3 / norm)

    @staticmethod
    def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, labels)

    def keep(self, module: torch.nn.Module, prefix: str = "") -> None:
        """Add a module's state to the results."""
        self.results |= {prefix + name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def run(env: Environment, config: Config, ranks: int) -> dict[str, np.ndarray]:
    """Run a program; return its numbers."""
    program = Program.programs[config["program"]](env, config, ranks)
    program.train()
    program.finish()
    program.net.eval()  # averages the buffers that ranks wrote differently
    program.keep(program.net)
    return program.results


def config(rng: np.random.Generator, number: int, name: str | None = None) -> Config:
    """Draw the configuration of a program: each program in turn, or always the one of a name."""
    names = list(Program.programs)
    name = name or names[number % len(names)]
    return {"program": name} | Program.programs[name].draw(rng)
