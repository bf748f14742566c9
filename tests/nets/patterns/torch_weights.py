"""Programs of torch in which it is hard to know which batch a pass belongs to.

Where the package cannot know it, it must raise an error; a pass is never weighted by guess.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional

import mpistrat as ms
from tests.nets.patterns import loops
from tests.nets.patterns import torch_models as zoo
from tests.nets.patterns.torch_program import Program

Tensor = torch.Tensor
NO_STATISTICS = tuple(name for name in zoo.MODELS if name not in ("batch_norm", "buffers", "spectral"))


class DrawnAhead(loops.Ahead, Program):
    """The next batch is drawn before the step with this one."""


class DrawnAtOnce(loops.AtOnce, Program):
    """All batches of an epoch are drawn before the first step."""


class ConvertedBefore(Program):
    """Tensors are made before strategy.run, and changed there."""

    def deliver(self, batch: Any, step: Any = None) -> float:
        a, b = self.arrays(batch)
        a, b = torch.from_numpy(a), torch.from_numpy(b)
        a = {0: a, 1: a.float().double(), 2: a[:, :], 3: a.reshape(-1, 2, 3).reshape(-1, zoo.FEATURES)}[
            self.config["seed"] % 4
        ].to(self.dtype)
        self.calls += 1
        run = self.env.run
        return run(self.step, args=(a, b)) if self.config["in_run"] else run(lambda: self.step(a, b))


class ZeroedBetween(Program):
    """Gradients are cleared between the forward and the backward pass, in one of three ways."""

    def step(self, a: Tensor, b: Tensor) -> float:
        loss = self.loss(a, b)
        how = self.config["seed"] % 3
        if how == 0:
            self.net.zero_grad()
        elif how == 1:
            self.zero_grad()
        else:
            for p in self.net.parameters():
                p.grad = None
        self.backward(loss)
        self.update()
        return float(loss.detach()) if len(a) else 0.0


class AdversarialZeroed(Program):
    """The loop of DCGAN: zero_grad of the module, two backward passes, outputs that are used again."""

    def step(self, a: Tensor, b: Tensor) -> float:
        self.net.zero_grad()
        real = self.net(a)
        self.cross_entropy(real, b).backward()
        fake = self.net(a.flip(1).contiguous())
        self.cross_entropy(fake.detach().requires_grad_(True) * 1.0 + fake, b * 0).backward()
        self.update()
        return 0.0


class NoGradBetween(Program):
    """A pass without gradients between the forward and the backward pass, of these rows or of others."""

    models = NO_STATISTICS

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        loss = super().loss(a, b)
        with torch.no_grad():
            self.net(a if self.config["seed"] % 2 else torch.from_numpy(self.x[:5]))
        return loss


class NoGradBefore(Program):
    models = NO_STATISTICS

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            self.net(a if self.config["seed"] % 2 else torch.from_numpy(self.x[:5]))
        return super().loss(a, b)


class EvaluatedBetween(Program):
    """A pass with gradients of other rows, which nothing differentiates, between forward and backward."""

    models = NO_STATISTICS

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        loss = super().loss(a, b)
        with self.env.batch(None):
            float(self.net(torch.from_numpy(self.x[:5])).sum())
        return loss


class ForwardAfterBackward(Program):
    """A forward pass with gradients between backward and the step."""

    models = NO_STATISTICS

    def update(self) -> None:
        self.cross_entropy(self.net(self.rows[0]), self.rows[1])
        super().update()

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        self.rows = a, b
        return super().loss(a, b)


class HeadsInTurn(Program):
    """Two heads that are trained in turn, with a look at the other one after backward."""

    models = ("two_heads",)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        self.rows = a
        return self.cross_entropy(self.net(a, head=self.calls % 2), b)

    def update(self) -> None:
        self.net(self.rows, head=1 - self.calls % 2)
        super().update()


class MethodBeside(Program):
    """A method of the module next to a call, first or second."""

    models = ("two_heads",)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        if self.config["seed"] % 2:
            penalty = self.net.encode(a).pow(2).mean()
            return self.cross_entropy(self.net(a), b) + penalty
        return self.cross_entropy(self.net(a), b) + self.net.encode(a).pow(2).mean()


class MethodOnly(Program):
    """Only methods and layers of the module are called, never itself."""

    models = ("two_heads",)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net.heads[1](self.net.encode(a)), b)


class LayerBeside(Program):
    """A layer of the module is called next to the module."""

    models = ("mlp", "batch_norm")

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return super().loss(a, b) + self.net[0](a).pow(2).mean()


class TwoModulesOneOptimizer(Program):
    models = ("two_modules",)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net["decoder"](self.net["encoder"](a)), b)


class TwoModulesApart(Program):
    """Two modules with an optimizer each in one graph."""

    def after_distribute(self) -> None:
        other = zoo.model("mlp", self.config["seed"] + 1, self.dtype)
        other[-1] = torch.nn.Linear(8, zoo.FEATURES).to(self.dtype)
        self.other, self.its_optimizer = other, torch.optim.SGD(other.parameters(), lr=0.1)
        if not self.env.plain:
            with self.env.scope():
                self.other, self.its_optimizer = ms.torch.distribute(self.other, self.its_optimizer)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net(self.other(a)), b)

    def step(self, a: Tensor, b: Tensor) -> float:
        self.its_optimizer.zero_grad()
        loss = super().step(a, b)
        self.its_optimizer.step()
        return loss

    def finish(self) -> None:
        self.keep(self.other, "other.")


class TwoDataSets(loops.Pairs, Program):
    """Two data sets of other sizes, drawn in turn; one step with both, or one with each."""

    def both(self, batch: Any, other: Any) -> None:
        a, b = (torch.as_tensor(rows) for rows in self.arrays(batch))
        u, v = (torch.as_tensor(rows) for rows in self.arrays(other))
        self.zero_grad()
        (self.cross_entropy(self.net(a), b) + 0.5 * self.cross_entropy(self.net(u), v)).backward()
        self.update()


class TwoDataSetsInRun(loops.PairsInRun, TwoDataSets):
    """Batches of two data sets as arguments of one strategy.run."""


class LeftByBreak(loops.Left, Program):
    """A loop is left by break."""


class RestOfABatch(Program):
    """Rows of the data set that were drawn by the program itself, after an epoch: all replicas have the same rows."""

    def after_epoch(self, epoch: int) -> None:
        with self.env.batch(None):
            self.step(torch.from_numpy(self.x[:6]), torch.from_numpy(self.y[:6]))


class OwnRowsUntold(Program):
    """The same without strategy.batch."""

    def after_epoch(self, epoch: int) -> None:
        self.step(torch.from_numpy(self.x[:6]), torch.from_numpy(self.y[:6]))


class RowsRepeated(Program):
    """The module gets each row three times, told by strategy.batch."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        with self.env.batch(a):
            return self.cross_entropy(self.net(a.repeat_interleave(3, 0)), b.repeat_interleave(3))


class RowsRepeatedUntold(Program):
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net(a.repeat_interleave(3, 0)), b.repeat_interleave(3))


class RowsConcatenated(Program):
    """The rows, and changed ones, in one pass."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self.cross_entropy(self.net(torch.cat([a, a + 0.1])), torch.cat([b, b]))


class Chunks(Program):
    """A batch in two passes, whose losses are divided by the rows of the batch."""

    models = tuple(name for name in NO_STATISTICS if name != "lstm")
    told = False

    def step(self, a: Tensor, b: Tensor) -> float:
        self.zero_grad()
        half = len(a) // 2
        for part in (slice(half), slice(half, None)):
            if len(a[part]) == 0:
                continue
            if self.told:
                with self.env.batch(a):
                    output = self.net(a[part])
            else:
                output = self.net(a[part])
            (functional.cross_entropy(output, b[part], reduction="sum") / len(a)).backward()
        self.update()
        return 0.0


class ChunksTold(Chunks):
    told = True


class LoaderOfWorkers(Program):
    """A DataLoader of torch with worker processes, and a sampler that knows the ranks."""

    kinds = ("equal",)
    clips = False

    def train(self) -> None:
        loader_of = torch.utils.data.DataLoader
        pairs = torch.utils.data.TensorDataset(torch.from_numpy(self.x), torch.from_numpy(self.y))
        workers = self.config["seed"] % 3
        if self.env.plain:
            loader = loader_of(pairs, batch_size=self.batch_rows)
        else:
            sampler = torch.utils.data.DistributedSampler(pairs, self.env.size, self.env.rank, shuffle=False)
            loader = loader_of(pairs, self.batch_rows // self.env.size, sampler=sampler, num_workers=workers)
        for _ in range(self.epochs):
            for a, b in loader:
                self.step(a, b)
                self.calls += 1


class DataOfWorkers(Program):
    """A distributed data set's rows, augmented by worker processes of a DataLoader that the program keeps beside it."""

    kinds = ("last", "unequal")

    def train(self) -> None:
        noise = torch.utils.data.TensorDataset(torch.arange(100.0, dtype=self.dtype))
        loader = iter(torch.utils.data.DataLoader(noise, batch_size=1, num_workers=1))
        for epoch in range(self.epochs):
            for batch in self.data(epoch):
                (number,) = next(loader)
                a, b = self.arrays(batch)
                a, b = torch.from_numpy(a), torch.from_numpy(b)
                with self.env.batch(a):
                    self.step(a + 0.01 * number, b)
                self.calls += 1


class Told(Program):
    """Each step inside strategy.batch of the batch, whose rows the program changes before."""

    def deliver(self, batch: Any, step: Any = None) -> float:
        a, b = self.arrays(batch)
        given = {0: batch, 1: a, 2: torch.from_numpy(b), 3: {"deep": [a]}}[self.config["seed"] % 4]
        self.calls += 1
        with self.env.batch(given):
            return self.step(torch.tensor(a * 1.5), torch.tensor(b))


class CopiedModule(Program):
    """A plain copy of the module is trained by itself next to the distributed one, without a word to the package."""

    def after_distribute(self) -> None:
        self.copy = copy.deepcopy(self.net)
        self.copy_optimizer = torch.optim.SGD(self.copy.parameters(), lr=0.1)

    def after_epoch(self, epoch: int) -> None:
        self.copy_optimizer.zero_grad()
        rows = torch.from_numpy(self.x[:7]), torch.from_numpy(self.y[:7])
        self.cross_entropy(self.copy(rows[0]), rows[1]).backward()
        self.copy_optimizer.step()

    def finish(self) -> None:
        self.keep(self.copy, "copy.")
