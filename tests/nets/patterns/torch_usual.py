"""Programs of torch with losses, backward passes and modules as they are seen in public code."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn import functional

import mpistrat as ms
from tests.nets.patterns import torch_models as zoo
from tests.nets.patterns.torch_program import Program

Tensor = torch.Tensor


class Plain(Program):
    """The usual loop itself."""

    served = True


class Scheduled(Program):
    served = True
    scheduled = True


class Accumulate(Program):
    """Gradients of three batches in one step."""

    def step(self, a: Tensor, b: Tensor) -> float:
        if self.calls % 3 == 0:
            self.zero_grad()
        loss = self.loss(a, b) / 3
        loss.backward()
        if self.calls % 3 == 2:
            self.update()
        return float(loss.detach()) if len(a) else 0.0


class TwoForwards(Program):
    served = True

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net(a), b) + 0.5 * self.cross_entropy(self.net(a * 2), b)


class TwoBackwards(Program):
    def backward(self, loss: Tensor) -> None:
        loss.backward()
        (0.5 * self.cross_entropy(self.net(self.rows[0] * 2), self.rows[1])).backward()

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        self.rows = a, b
        return super().loss(a, b)


class RetainTwice(Program):
    """Two backward passes through one graph."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (2 * loss).backward()


class TwoLosses(Program):
    """Two forward passes, then two backward passes."""

    def step(self, a: Tensor, b: Tensor) -> float:
        self.zero_grad()
        first, second = self.cross_entropy(self.net(a), b), 0.5 * self.cross_entropy(self.net(a * 2), b)
        first.backward()
        second.backward()
        self.update()
        return float(first.detach()) if len(a) else 0.0


class LossesOfOnePass(Program):
    """Two losses of one forward pass, each with a backward pass of its own."""

    def step(self, a: Tensor, b: Tensor) -> float:
        self.zero_grad()
        output = self.net(a)
        first, second = self.cross_entropy(output, b), output.pow(2).mean()
        first.backward(retain_graph=True)
        second.backward()
        self.update()
        return float(first.detach()) if len(a) else 0.0


class Penalty(Program):
    """A gradient penalty: second derivatives."""

    models = tuple(name for name in zoo.MODELS if name not in ("lstm", "batch_norm"))

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        a = a.clone().requires_grad_(True)
        output = self.net(a)
        (gradient,) = torch.autograd.grad(output.sum(), a, create_graph=True)
        return self.cross_entropy(output, b) + (gradient**2).sum(1).mean()


class FunctionalCall(Program):
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(torch.func.functional_call(self.net, dict(self.net.named_parameters()), (a,)), b)


class PerSample(Program):
    """Gradients of each row by vmap, which the program averages itself."""

    models = ("mlp", "tied", "shared_layer", "convolution")

    def step(self, a: Tensor, b: Tensor) -> float:
        values = {name: p.detach() for name, p in self.net.named_parameters()}

        def loss(values: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            return self.cross_entropy(torch.func.functional_call(self.net, values, (row[None],)), label[None])

        gradients = {name: torch.zeros_like(value) for name, value in values.items()}
        if len(a):
            each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(values, a, b)
            gradients = {name: gradient.mean(0) for name, gradient in each.items()}
        for name, p in self.net.named_parameters():
            p.grad = gradients[name]
        self.update()
        return 0.0


class AutogradGrad(Program):
    """Gradients by torch.autograd.grad, which the program assigns."""

    def step(self, a: Tensor, b: Tensor) -> float:
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        loss = self.loss(a, b)
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        self.update()
        return float(loss.detach()) if len(a) else 0.0


class Closure(Program):
    """optimizer.step(closure)."""

    def step(self, a: Tensor, b: Tensor) -> float:
        def closure() -> Tensor:
            self.zero_grad()
            loss = self.loss(a, b)
            loss.backward()
            self.clip()
            return loss

        loss = self.optimizer.step(closure)
        return float(loss) if len(a) else 0.0


class PenaltyInLoss(Program):
    """L2 of the weights in the loss."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        # Added to the replica's mean: the weights of replicas have the mean 1.
        return super().loss(a, b) + 0.01 * sum((p**2).sum() for p in self.net.parameters())


class Checkpointed(Program):
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        reentrant = bool(self.config["seed"] % 2)
        a = a.clone().requires_grad_(True) if reentrant else a
        return self.cross_entropy(torch.utils.checkpoint.checkpoint(self.net, a, use_reentrant=reentrant), b)


class Compiled(Program):
    models = ("mlp", "tied", "shared_layer", "convolution")

    def after_distribute(self) -> None:
        self.net.compile(backend="eager" if self.config["seed"] % 2 else "aot_eager")


class SumLoss(Program):
    """A loss that the program divides by the rows of the global batch."""

    options = {"loss": "sum"}  # noqa: RUF012

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        total = len(a) if self.env.plain else ms.context.global_batch_size()
        return functional.cross_entropy(self.net(a), b, reduction="sum") / total


class SumByAverageLoss(Program):
    """A loss by compute_average_loss of a tensor."""

    options = {"loss": "sum"}  # noqa: RUF012

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        each = functional.cross_entropy(self.net(a), b, reduction="none")
        return each.mean() if self.env.plain else ms.nn.compute_average_loss(each)


class LossOfRows(Program):
    served = True

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(a), b, reduction="none").mean()


class AuxiliaryLoss(Program):
    served = True

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        output = self.net(a)
        return self.cross_entropy(output, b) + 0.1 * output.pow(2).mean()


class ForwardMethod(Program):
    """net.forward(a) in place of net(a): no hook of torch sees it."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net.forward(a), b)


class MaskedInput(Program):
    served = True

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net(a * (torch.arange(zoo.FEATURES) % 2)), b)


class TensorHooks(Program):
    def after_distribute(self) -> None:
        for p in self.net.parameters():
            p.register_hook(lambda gradient: gradient * 2)


class ModuleHooks(Program):
    models = tuple(name for name in zoo.MODELS if "embedding" not in name)

    def after_distribute(self) -> None:
        first = next(iter(self.net.children()))
        first.register_full_backward_hook(
            lambda m, inputs, outputs: tuple(None if g is None else g * 3 for g in inputs)
        )
        self.net.register_forward_hook(lambda m, inputs, output: output * 1.1)


class ChangedGradients(Program):
    """Gradients that are scaled, and looked at, before the step."""

    def update(self) -> None:
        for p in self.net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
                float(p.grad.to_dense().norm())
        super().update()


class ClippedValues(Program):
    models = tuple(name for name in zoo.MODELS if name != "embedding_sparse")
    kinds = ("equal",)  # of one replica's gradients: another number than of the sum

    def update(self) -> None:
        torch.nn.utils.clip_grad_value_(self.net.parameters(), 100.0)
        super().update()


class GradientLeftOut(Program):
    """The first parameter's gradient is dropped before each step."""

    def update(self) -> None:
        next(self.net.parameters()).grad = None
        super().update()


class TwoSteps(Program):
    def update(self) -> None:
        super().update()
        self.optimizer.step()


class ClampedWeights(Program):
    models = tuple(name for name in zoo.MODELS if name not in ("weight_norm", "spectral"))

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for p in self.net.parameters():
                p.clamp_(-0.2, 0.2)


class Truncated(Program):
    """Three steps on one batch, each from what the step before gave."""

    def step(self, a: Tensor, b: Tensor) -> float:
        before = None
        for _ in range(3):
            self.zero_grad()
            output = self.net(a if before is None else a + before.detach())
            before = output.mean(1, keepdim=True) * torch.ones_like(a)
            self.cross_entropy(output, b).backward()
            self.update()
        return 0.0


class Adversarial(Program):
    """Two modules with an optimizer each, which take steps in turn."""

    tolerance = 1e-7  # the other optimizer is Adam

    def after_distribute(self) -> None:
        torch.manual_seed(self.config["seed"] + 1)
        maker = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, zoo.FEATURES))
        maker = maker.to(self.dtype)
        optimizer = torch.optim.Adam(maker.parameters(), lr=0.02)
        self.maker, self.its_optimizer = maker, optimizer
        if not self.env.plain:
            with self.env.scope():
                self.maker, self.its_optimizer = ms.torch.distribute(maker, optimizer)

    def step(self, a: Tensor, b: Tensor) -> float:
        self.zero_grad()
        fake = self.maker(a[:, :4])
        loss = self.cross_entropy(self.net(a), b) + self.cross_entropy(self.net(fake.detach()), b * 0)
        loss.backward()
        self.update()
        self.its_optimizer.zero_grad()
        self.cross_entropy(self.net(self.maker(a[:, :4])), b * 0 + 1).backward()
        self.its_optimizer.step()
        return float(loss.detach()) if len(a) else 0.0

    def finish(self) -> None:
        self.keep(self.maker, "maker.")


class Teacher(Program):
    """A copy of the module gives targets, in a pass without gradients before the one with them."""

    models = tuple(name for name in zoo.MODELS if name != "batch_norm")

    def after_distribute(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(a)
        return super().loss(a, b) + functional.mse_loss(self.net(a), target)


class TargetNetwork(Teacher):
    """A copy that gets the weights now and then, as in DQN."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(a)
        return functional.mse_loss(self.net(a), 0.9 * target + functional.one_hot(b, zoo.CLASSES))

    def deliver(self, batch: Any, step: Any = None) -> float:
        loss = super().deliver(batch, step)
        if self.calls % 2 == 0:
            self.teacher.load_state_dict(self.net.state_dict())
        return loss


class MovingAverage(Program):
    def after_distribute(self) -> None:
        swa = torch.optim.swa_utils
        self.average = swa.AveragedModel(self.net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))

    def deliver(self, batch: Any, step: Any = None) -> float:
        loss = super().deliver(batch, step)
        self.average.update_parameters(self.net)
        return loss

    def finish(self) -> None:
        self.keep(self.average.module, "average.")


class AveragedRate(MovingAverage):
    """SWALR, and weights that are averaged from the second epoch on."""

    models = ("mlp", "tied", "attention", "convolution", "buffers")

    def after_distribute(self) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.rates = torch.optim.swa_utils.SWALR(self.optimizer, swa_lr=0.02, anneal_epochs=2)

    def deliver(self, batch: Any, step: Any = None) -> float:
        return Program.deliver(self, batch, step)

    def after_epoch(self, epoch: int) -> None:
        if epoch:
            self.average.update_parameters(self.net)
        self.rates.step()


class Single(Program):
    """float32."""

    dtype = torch.float32
    optimizers = ("sgd",)
    tolerance = 1e-5


class Autocast(Single):
    """Forward passes in bfloat16."""

    models = ("mlp", "tied", "convolution")
    tolerance = 0.02

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(a, b)
