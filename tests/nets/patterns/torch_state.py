"""Programs of torch that change settings and state: files, other rules, hooks, groups."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import torch
from mpi4py import MPI

from tests.nets.patterns import torch_models as zoo
from tests.nets.patterns.environments import Left
from tests.nets.patterns.torch_program import Program

Tensor = torch.Tensor


class Groups(Program):
    """Groups with settings of their own, one of which is added by the program later."""

    optimizers = ("adam", "adamw", "nesterov", "rmsprop")
    models = ("mlp", "tied", "convolution")

    def make_optimizer(self, net: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = list(net.parameters())
        optimizer = zoo.optimizer(self.config["optimizer"], parameters[::2])
        optimizer.add_param_group({"params": parameters[1::2], "lr": 0.03, "weight_decay": 0.1})
        return optimizer


class Flags(Program):
    served = True
    optimizers = zoo.known(*zoo.FLAGS)


class WholeTensors(Program):
    """Rules that look at whole tensors."""

    optimizers = zoo.known("adafactor", "muon", "rprop", "asgd")
    models = ("matrices",)
    kinds = ("equal", "unequal", "last", "empty")
    tolerance = 1e-6

    @classmethod
    def draw(cls, rng: Any) -> dict[str, Any]:
        config = super().draw(rng)
        # Muon orthogonalizes in bfloat16, in which the rounding of float64 sums can be a whole step.
        return config | ({"tolerance": 0.02} if config["optimizer"] == "muon" else {})


class LineSearch(Program):
    """Optimizers that call a closure several times a step, such as LBFGS."""

    optimizers = ("lbfgs", "lbfgs_search", "lbfgs_short", "sharpness")
    models = ("mlp", "tied")
    clips = False
    tolerance = 1e-6

    def step(self, a: Tensor, b: Tensor) -> float:
        def closure() -> Tensor:
            self.zero_grad()
            loss = self.loss(a, b)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        return float(loss) if len(a) else 0.0


class MomentumLater(Program):
    """SGD whose momentum is 0 at first."""

    optimizers = ("sgd",)

    def deliver(self, batch: Any, step: Any = None) -> float:
        if self.calls == 2:
            for group in self.optimizer.param_groups:
                group["momentum"] = 0.9
        return super().deliver(batch, step)


class AmsgradLater(Program):
    optimizers = ("adam", "adamw")

    def deliver(self, batch: Any, step: Any = None) -> float:
        if self.calls == 2:
            for group in self.optimizer.param_groups:
                group["amsgrad"] = True
        return super().deliver(batch, step)


class SettingsLater(Program):
    """Settings that torch reads in each step, and that its rules take at any time."""

    def deliver(self, batch: Any, step: Any = None) -> float:
        if self.calls == 2:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] = 0.05
                group |= {"betas": (0.8, 0.99)} if "betas" in group else {}
                group |= {"eps": 1e-6} if "eps" in group else {}
                group |= {"momentum": 0.5} if group.get("momentum") else {}
                group |= {"rho": 0.8} if "rho" in group else {}
                group |= {"alpha": 0.9} if "alpha" in group else {}
        return super().deliver(batch, step)


class OneCycle(Program):
    """OneCycleLR, which changes betas and momentum in each step."""

    scheduled = True
    optimizers = ("nesterov", *zoo.BETAS)

    @classmethod
    def draw(cls, rng: Any) -> dict[str, Any]:
        return super().draw(rng) | {"schedule": "onecycle"}


class StateBefore(Program):
    """The optimizer has state of plain training before distribute, from a file or of its own steps."""

    models = tuple(name for name in zoo.MODELS if name not in ("batch_norm", "spectral", "embedding_sparse"))
    optimizers = (*zoo.OPTIMIZERS, "sgd_dampening", "adamw_amsgrad")

    def before_distribute(self) -> None:
        net, optimizer = self.net, self.optimizer
        if self.config["seed"] % 2:
            net = zoo.model(self.config["model"], self.config["seed"] + 3, self.dtype)
            optimizer = self.make_optimizer(net)
        self.plain_steps(net, optimizer)
        if net is not self.net:
            self.net.load_state_dict(net.state_dict())
            self.optimizer.load_state_dict(optimizer.state_dict())

    def plain_steps(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            self.cross_entropy(net(torch.from_numpy(self.x[:8])), torch.from_numpy(self.y[:8])).backward()
            optimizer.step()


class StateAfter(StateBefore):
    """State of plain training is loaded after distribute, before or after the first step."""

    def before_distribute(self) -> None:
        net = zoo.model(self.config["model"], self.config["seed"] + 3, self.dtype)
        optimizer = self.make_optimizer(net)
        self.plain_steps(net, optimizer)
        self.given = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())

    def load(self) -> None:
        self.net.load_state_dict(self.given[0])
        self.optimizer.load_state_dict(self.given[1])

    def after_distribute(self) -> None:
        if self.config["seed"] % 2:
            self.load()

    def deliver(self, batch: Any, step: Any = None) -> float:
        if self.calls == 2 and self.config["seed"] % 2 == 0:
            self.load()
        return super().deliver(batch, step)


class LoadMiddle(Program):
    """After an epoch new objects are made, distributed, and get the state of the old ones."""

    scheduled = False

    def after_epoch(self, epoch: int) -> None:
        if epoch:
            return
        state, optimizer_state = copy.deepcopy(self.net.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        net = zoo.model(self.config["model"], self.config["seed"] + 1, self.dtype)
        optimizer = self.make_optimizer(net)
        first = self.config["seed"] % 2
        if first:
            net.load_state_dict(state)
            optimizer.load_state_dict(optimizer_state)
        self.net, self.optimizer = self.distribute(net, optimizer)
        if not first:
            self.net.load_state_dict(state)
            self.optimizer.load_state_dict(optimizer_state)


class ThroughBytes(Program):
    """Module and optimizer go through torch.save and torch.load."""

    models = ("mlp", "tied", "attention", "convolution", "buffers", "lstm")

    def after_epoch(self, epoch: int) -> None:
        held = io.BytesIO()
        torch.save({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, held)
        held.seek(0)
        state = torch.load(held)
        self.env.barrier()  # all ranks of a node have read the one copy
        for p in self.net.parameters():
            with torch.no_grad():
                if self.env.rank == 0:
                    p.zero_()
        self.env.barrier()
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


class SaveRestore(Program):
    """strategy.save after the first epoch, steps that are lost, strategy.restore; plain torch goes through copies."""

    models = ("mlp", "tied", "attention", "convolution", "buffers", "lstm")
    scheduled = True

    @classmethod
    def draw(cls, rng: Any) -> dict[str, Any]:
        return super().draw(rng) | {"schedule": "exponential"}

    def after_epoch(self, epoch: int) -> None:
        if epoch:
            return
        path = os.path.join(self.env.folder, "state.h5")
        if self.env.plain:
            kept = copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))
        else:
            self.env.strategy.save(path)
        scheduler = copy.deepcopy(self.scheduler.state_dict())
        for batch in self.data(5):
            self.deliver(batch)
        if self.env.plain:
            self.net.load_state_dict(kept[0])
            self.optimizer.load_state_dict(kept[1])
        else:
            self.env.strategy.restore(path)
        self.scheduler.load_state_dict(scheduler)


class StepHooks(Program):
    """Hooks before and after optimizer.step, registered before and after distribute, one of which changes a rate."""

    def before_distribute(self) -> None:
        self.called = [0, 0, 0]
        self.optimizer.register_step_pre_hook(lambda *_: self.count(0))
        self.optimizer.register_step_post_hook(lambda *_: self.count(1))

    def after_distribute(self) -> None:
        self.optimizer.register_step_pre_hook(self.slower)

    def count(self, hook: int) -> None:
        self.called[hook] += 1

    def slower(self, *_: Any) -> None:
        self.called[2] += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def finish(self) -> None:
        self.results["called"] = torch.tensor(self.called).numpy()


class FreezeLater(Program):
    models = tuple(name for name in zoo.MODELS if name not in ("spectral", "embedding_sparse"))

    def after_epoch(self, epoch: int) -> None:
        if epoch == 0:
            next(self.net.parameters()).requires_grad_(False)
            self.optimizer.zero_grad()


class EvaluateMiddle(Program):
    """Evaluation between epochs, with train() after it."""

    def after_epoch(self, epoch: int) -> None:
        self.net.eval()
        with torch.no_grad():
            self.results[f"evaluated {epoch}"] = self.net(torch.from_numpy(self.x[:5])).numpy().copy()
        self.net.train()


class StateCleared(Program):
    """optimizer.state.clear() between epochs: momenta begin anew."""

    def after_epoch(self, epoch: int) -> None:
        self.optimizer.state.clear()


class Offset(Program):
    """SyncBatchNorm where the mean is much larger than the deviation."""

    models = ("batch_norm",)
    optimizers = ("sgd",)
    kinds = ("equal", "unequal", "last")
    clips = False
    tolerance = 1e-6

    def prepare_module(self) -> None:
        with torch.no_grad():
            self.net[0].bias += 1e6


class OtherRanks(Program):
    """A file of some ranks is restored on others: fewer, or more."""

    models = ("mlp", "tied", "attention", "convolution", "lstm")

    def begin(self, ranks: int) -> None:
        """Make everything anew on the first ranks."""
        self.env.resize(ranks)
        net = zoo.model(self.config["model"], self.config["seed"] + 1, self.dtype)
        self.net, self.optimizer = self.distribute(net, self.make_optimizer(net))

    def train(self) -> None:
        grows = self.config["seed"] % 2
        path = os.path.join(self.env.folder, "state.h5")
        if not self.env.plain and grows:  # the first rank alone, from the weights that all would have
            state = copy.deepcopy(self.net.state_dict())
            try:
                self.begin(1)
                self.net.load_state_dict(state)
            except Left:
                pass
        alone = not self.env.plain and grows
        if not alone or MPI.COMM_WORLD.rank == 0:
            for batch in self.data():
                self.deliver(batch)
            if not self.env.plain:
                self.env.strategy.save(path)
        if not self.env.plain:
            MPI.COMM_WORLD.Barrier()
            self.begin(MPI.COMM_WORLD.size - (not grows))
            self.env.strategy.restore(path)
        for batch in self.data(5):
            self.deliver(batch)


class WholeGroups(WholeTensors):
    """Rules that look at whole tensors, with groups of other settings."""

    optimizers = zoo.known("adafactor", "muon")

    def make_optimizer(self, net: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = list(net.parameters())
        optimizer = zoo.optimizer(self.config["optimizer"], parameters[::2])
        optimizer.add_param_group({"params": parameters[1::2], "lr": 0.02, "weight_decay": 0.2})
        return optimizer


class WholeRestored(WholeTensors, SaveRestore):
    """Rules that look at whole tensors, through a file."""

    models = ("matrices",)


class SearchRestored(LineSearch, SaveRestore):
    """Optimizers that call a closure, through a file."""

    models = ("mlp", "tied")


class SearchLoaded(LineSearch, LoadMiddle):
    """Optimizers that call a closure, whose state new ones load."""

    models = ("mlp", "tied")
