"""Programs of JAX in which it is hard to know which batch a gradient belongs to.

Where the package cannot know it, it must raise an error; a gradient is never weighted by guess.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.nets.patterns import jax_models as zoo
from tests.nets.patterns import loops
from tests.nets.patterns.jax_program import Program

Tree = Any


class DrawnAhead(loops.Ahead, Program):
    """The next batch is drawn before the step with this one."""


class DrawnAtOnce(loops.AtOnce, Program):
    """All batches of an epoch are drawn before the first step."""


class ConvertedBefore(Program):
    """Arrays of JAX are made before strategy.run, and changed there."""

    def deliver(self, batch: Any, step: Any = None) -> None:
        a, b = (jnp.asarray(rows) for rows in batch)
        a = {0: a, 1: a * 1.0, 2: a[:, :], 3: a.reshape(-1, 2, 3).reshape(-1, zoo.FEATURES)}[self.config["seed"] % 4]
        self.calls += 1
        run = self.env.run
        if self.config["in_run"]:
            run(self.step, args=(a, b))
        else:
            run(lambda: self.step(a, b))


class TwoLosses(Program):
    """Gradients of two losses, added up by hand."""

    def after_distribute(self) -> None:
        self.others = self.differentiated(lambda p, a, b: self.loss(p, a * 2, b))

    def step(self, a: Any, b: Any) -> None:
        _, first = self.gradients(self.params, a, b)
        _, second = self.others(self.params, a, b)
        self.update(jax.tree.map(lambda u, v: u + 0.5 * v, first, second))


class OwnAccumulation(Program):
    """Gradients of three batches, added up by hand."""

    fronts = ("own", "package", "package")

    def step(self, a: Any, b: Any) -> None:
        _, gradients = self.gradients(self.params, a, b)
        if self.calls % 3:
            gradients = jax.tree.map(jnp.add, gradients, self.sum)
        self.sum = gradients
        if self.calls % 3 == 2:
            self.update(jax.tree.map(lambda leaf: leaf / 3, gradients))


class OwnAccumulationTold(OwnAccumulation):
    """The same with the package's value_and_grad."""

    @classmethod
    def draw(cls, rng: Any) -> dict[str, Any]:
        return super().draw(rng) | {"front": "package"}


class Microbatches(Program):
    """Passes over parts of a batch in a scan."""

    kinds = ("equal",)
    models = ("dict", "tuple", "linen")

    def after_distribute(self) -> None:
        def scanned(params: Tree, a: Any, b: Any) -> Any:
            parts = a.reshape(2, -1, zoo.FEATURES), b.reshape(2, -1)

            def one(total: Tree, rows: Any) -> tuple[Tree, Any]:
                return jax.tree.map(lambda u, v: u + v / 2, total, jax.grad(self.loss)(params, *rows)), 0.0

            return 0.0, jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)[0]

        self.gradients = self.jit(scanned)


class MicrobatchesOfTwo(Program):
    """A loop over halves of a batch, each a gradient of its own, weighted by their rows by hand."""

    def step(self, a: Any, b: Any) -> None:
        half, total = len(a) // 2, None
        for part in (slice(half), slice(half, None)):
            if len(a[part]) == 0 and len(a):
                continue
            _, gradients = self.gradients(self.params, a[part], b[part])
            share = len(a[part]) / max(len(a), 1) if len(a) else 0.5
            gradients = jax.tree.map(lambda leaf, share=share: leaf * share, gradients)
            total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
        self.update(total)


class TwoDataSets(loops.Pairs, Program):
    """Two data sets of other sizes in one loop; a step with each, or one with both."""

    fronts = ("own", "package", "package")

    def both(self, batch: Any, other: Any) -> None:
        _, first = self.gradients(self.params, *batch)
        _, second = self.gradients(self.params, *other)
        self.update(jax.tree.map(jnp.add, first, second))


class TwoDataSetsInRun(loops.PairsInRun, TwoDataSets):
    """Batches of two data sets as arguments of one strategy.run."""


class LeftByBreak(loops.Left, Program):
    """A loop is left by break."""


class Told(Program):
    """Each step inside strategy.batch of the batch, whose rows the program copies before."""

    def deliver(self, batch: Any, step: Any = None) -> None:
        a, b = batch
        given = {0: batch, 1: a, 2: b, 3: {"deep": [a]}}[self.config["seed"] % 4]
        self.calls += 1
        with self.env.batch(given):
            self.step(jnp.array(a) * 1.5, jnp.array(b))


class RestOfABatch(Program):
    """Rows that all replicas have after an epoch, told as no batch."""

    fronts = ("own", "package", "package")

    def after_epoch(self, epoch: int) -> None:
        with self.env.batch(None):
            self.step(self.x[:6], self.y[:6])


class OwnRowsUntold(Program):
    """The same without strategy.batch."""

    fronts = ("own", "package", "package")

    def after_epoch(self, epoch: int) -> None:
        self.step(self.x[:6], self.y[:6])


class RowsRepeated(Program):
    """The gradient of each row three times."""

    def step(self, a: Any, b: Any) -> None:
        _, gradients = self.gradients(self.params, jnp.repeat(jnp.asarray(a), 3, 0), jnp.repeat(jnp.asarray(b), 3, 0))
        self.update(gradients)


class RowsRepeatedTold(RowsRepeated):
    def step(self, a: Any, b: Any) -> None:
        with self.env.batch(a):
            super().step(a, b)
