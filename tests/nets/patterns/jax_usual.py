"""Programs of JAX with losses, ways to differentiate and trees as they are seen in public code."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrat as ms
from tests.nets.patterns import jax_models as zoo
from tests.nets.patterns.environments import Environment
from tests.nets.patterns.jax_program import KerasAdam, Program

Tree = Any


class Plain(Program):
    """The usual loop itself."""


class Transformations(Program):
    """The usual loop with every transformation of optax."""

    transformations = tuple(zoo.TRANSFORMATIONS)
    clips = False
    epochs = 3


class Auxiliary(Program):
    """has_aux."""

    def after_distribute(self) -> None:
        def loss(params: Tree, a: Any, b: Any) -> Any:
            output = self.forward(params, a)
            return self.cross_entropy(output, b), {"right": (output.argmax(1) == b).sum()}

        self.gradients = self.differentiated(loss, has_aux=True)


class PerSample(Program):
    """Gradients of each row, which the program averages."""

    def after_distribute(self) -> None:
        def of_row(params: Tree, row: Any, label: Any) -> Any:
            return self.loss(params, row[None], label[None])

        def mean(params: Tree, a: Any, b: Any) -> Tree:
            each = jax.vmap(jax.grad(of_row), (None, 0, 0))(params, a, b)
            return 0.0, jax.tree.map(lambda leaf: leaf.mean(0), each)

        self.gradients = self.jit(mean)


class Jacobian(Program):
    """The mean of a Jacobian of all rows' losses."""

    def after_distribute(self) -> None:
        def mean(params: Tree, a: Any, b: Any) -> Tree:
            each = jax.jacrev(lambda p: optax.softmax_cross_entropy_with_integer_labels(self.forward(p, a), b))(params)
            return 0.0, jax.tree.map(lambda leaf: leaf.mean(0), each)

        self.gradients = self.jit(mean)


class ByHand(Program):
    """jax.vjp with a cotangent of one."""

    def step(self, a: Any, b: Any) -> None:
        value, pull = jax.vjp(lambda params: self.loss(params, a, b), self.params)
        (gradients,) = pull(jnp.ones_like(value))
        self.update(gradients)


class CustomVjp(Program):
    """A loss with a derivative of its own."""

    def after_distribute(self) -> None:
        @jax.custom_vjp
        def clipped(x: Any) -> Any:
            return x

        # A mean over fewer rows has larger gradients: none may reach the limit, also of one row.
        clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0) * 2.0,))

        def loss(params: Tree, a: Any, b: Any) -> Any:
            return self.cross_entropy(clipped(self.forward(params, a)), b)

        self.gradients = self.differentiated(loss)


class Remat(Program):
    def after_distribute(self) -> None:
        self.gradients = self.differentiated(jax.checkpoint(self.loss))


class PenaltyInLoss(Program):
    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        return super().loss(params, a, b) + 0.01 * sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


class Penalty(Program):
    """A gradient penalty: second derivatives."""

    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        slopes = jax.vmap(jax.grad(lambda row: self.forward(params, row[None]).sum()))(jnp.asarray(a))
        return super().loss(params, a, b) + 0.01 * (slopes**2).sum(1).mean()  # a larger one may diverge


class Teacher(Program):
    """A copy of the parameters gives targets."""

    def after_distribute(self) -> None:
        self.teacher = jax.tree.map(jnp.array, self.params)

    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        target = jax.lax.stop_gradient(self.forward(self.teacher, a)) if hasattr(self, "teacher") else 0.0
        return super().loss(params, a, b) + ((self.forward(params, a) - target) ** 2).mean()


class MovingAverage(Program):
    def after_distribute(self) -> None:
        self.average = jax.tree.map(jnp.array, self.params)

    def update(self, gradients: Tree) -> None:
        super().update(gradients)
        self.average = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, self.average, self.params)

    def finish(self) -> None:
        self.keep(self.average, "average")


class EvaluateMiddle(Program):
    """A loss over rows of another data set between epochs."""

    def after_epoch(self, epoch: int) -> None:
        held = ms.data.from_arrays((self.x[: 2 * self.ranks + 1], self.y[: 2 * self.ranks + 1])).batch(self.ranks + 1)
        total = count = 0.0
        for a, b in self.env.data(held):
            if len(a):
                total += float(self.loss(self.params, a, b)) * len(a)
                count += len(a)
        self.results[f"evaluated {epoch}"] = np.array(self.env.mean(total / count if count else 0.0, int(count)))


class Adversarial(Program):
    """Two trees with an optimizer each."""

    def after_distribute(self) -> None:
        maker = {"w": self.rng.normal(size=(4, zoo.FEATURES))}
        self.maker, self.its_optimizer = self.distribute(maker, optax.adam(0.02), clip=False)
        self.fooled = self.jit(jax.grad(lambda maker, p, a, b: self.loss(p, a[:, :4] @ maker["w"], b * 0)))

    def step(self, a: Any, b: Any) -> None:
        gradients = self.fooled(self.maker, self.params, a, b)
        self.maker = self.apply(self.its_optimizer, gradients, self.maker)
        super().step(a, b)

    def finish(self) -> None:
        self.keep(self.maker, "maker")


class TwoApplies(Program):
    def step(self, a: Any, b: Any) -> None:
        super().step(a, b)
        super().step(a, b)


class ScaledGradients(Program):
    def update(self, gradients: Tree) -> None:
        super().update(jax.tree.map(lambda leaf: leaf * 0.5, gradients))


class NumpyGradients(Program):
    def update(self, gradients: Tree) -> None:
        super().update(jax.tree.map(np.asarray, gradients))


class NoneGradients(Program):
    """A leaf without a gradient."""

    models = ("dict",)
    clips = False
    transformations = ("sgd",)  # plain optax has no None: zeros are the same for SGD

    def update(self, gradients: Tree) -> None:
        zero = jnp.zeros_like(gradients["b1"])
        super().update({**gradients, "b1": zero if self.env.plain else None})


class PartsOfATree(Program):
    """Parts of the tree with optimizers of their own."""

    models = ("dict",)
    clips = False
    halves = (("w1", "b1"), ("w2", "b2"))

    def distribute(self, params: Tree, transformation: Any, clip: bool = True) -> tuple[Tree, Any]:
        made = [
            super(PartsOfATree, self).distribute({key: params[key] for key in half}, rule)
            for half, rule in zip(self.halves, (transformation, optax.sgd(0.1)), strict=True)
        ]
        return made[0][0] | made[1][0], [optimizer for _, optimizer in made]

    def update(self, gradients: Tree) -> None:
        parts = [
            self.apply(optimizer, {key: gradients[key] for key in half}, {key: self.params[key] for key in half})
            for half, optimizer in zip(self.halves, self.optimizer, strict=True)
        ]
        self.params = parts[0] | parts[1]


class StoppedLeaf(Program):
    models = ("dict",)

    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        return super().loss(params | {"b1": jax.lax.stop_gradient(params["b1"])}, a, b)


class IntegerLeaf(Program):
    """A tree with a leaf of integers, which stays as it is."""

    fronts = ("own", "of")

    models = ("dict",)

    def prepare(self, params: Tree) -> Tree:
        return params if self.env.plain else params | {"count": np.arange(3)}

    def differentiated(self, loss: Any, **options: Any) -> Any:
        return super().differentiated(loss, allow_int=True, **options)

    def finish(self) -> None:
        count = self.params.pop("count") if not self.env.plain else np.arange(3)
        self.keep(count, "count")


class EmptyLeaf(Program):
    """A leaf without elements."""

    models = ("dict",)
    transformations = ("sgd", "adam", "adamw", "nesterov", "lion")

    def prepare(self, params: Tree) -> Tree:
        return params | {"none": np.zeros((0, 3))}


class DeepTree(Program):
    """Lists, tuples, None and a scalar in one tree."""

    models = ("dict",)

    def prepare(self, params: Tree) -> Tree:
        return {"a": [params, {"extra": (np.ones(2), None)}], "b": np.float64(0.5)}

    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        output = self.forward(params["a"][0], a) * params["b"] + params["a"][1]["extra"][0].sum()
        return self.cross_entropy(output, b)


class TiedWeights(Program):
    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        return self.cross_entropy(self.forward(params, a) + self.forward(params, a[:, ::-1]), b)


class NewLeaf(Program):
    """A leaf that the program adds later, and hands to apply: an error in optax, too."""

    models = ("dict",)
    clips = False

    def step(self, a: Any, b: Any) -> None:
        _, gradients = self.gradients(self.params, a, b)
        if self.calls == 2:
            raise_for_plain(self.env)
            self.params = self.params | {"new": jnp.ones(2)}
            gradients = gradients | {"new": jnp.ones(2)}
        self.update(gradients)


def raise_for_plain(env: Environment) -> None:
    """Plain optax raises an error of the tree's structure, which differs by version: any is as good here."""
    if env.plain:
        raise ValueError("another tree")


class Restored(Program):
    """strategy.save, steps that are lost, strategy.restore."""

    transformations = ("adam", "adamw", "nesterov", "accumulated", "warm")

    def after_epoch(self, epoch: int) -> None:
        if epoch != 1:
            return
        path = os.path.join(self.env.folder, "state.h5")
        if self.env.plain:
            kept = jax.tree.map(jnp.array, (self.params, self.optimizer.state))
        else:
            self.env.strategy.save(path)
        for batch in self.data(5):
            self.deliver(batch)
        jax.block_until_ready(self.params)
        if self.env.plain:
            self.params, self.optimizer.state = kept
        else:
            self.env.strategy.restore(path)
            self.params = ms.jax.current(self.params)


class RestoredAnew(Restored):
    """strategy.restore into a tree and an optimizer that are made anew."""

    def after_epoch(self, epoch: int) -> None:
        if epoch != 1:
            return
        path = os.path.join(self.env.folder, "state.h5")
        if self.env.plain:
            return
        self.env.strategy.save(path)
        jax.block_until_ready(self.params)
        self.env.close()
        type(self.env).__init__(self.env, self.env.folder)
        params, _ = zoo.MODELS[self.config["model"]](self.config["seed"] + 1)
        self.params, self.optimizer = self.distribute(params, self.transformation())
        self.env.strategy.restore(path)
        self.params = ms.jax.current(self.params)

    def train(self) -> None:
        for epoch in range(self.epochs):
            for batch in self.data(epoch):
                self.deliver(batch)
            self.after_epoch(epoch)


class OwnOptimizer(Program):
    """ms.optimizers.Adam in place of optax, with a number or a schedule of optax as its rate."""

    clips = False
    epsilon = 1e-8

    def rate(self) -> Any:
        return optax.cosine_decay_schedule(0.05, 20) if self.config["seed"] % 2 else 0.02

    def distribute(self, params: Tree, transformation: Any, clip: bool = True) -> tuple[Tree, Any]:
        if self.env.plain:
            params = jax.tree.map(jnp.array, params)
            return params, KerasAdam(self.rate(), params, self.epsilon)
        with self.env.scope():
            return ms.jax.distribute(params), ms.optimizers.Adam(self.rate(), epsilon=self.epsilon)


class Single(Program):
    """float32."""

    dtype = np.float32
    tolerance = 2e-5
    transformations = ("sgd", "adamw", "nesterov")


class Half(Program):
    """bfloat16 parameters."""

    dtype = jnp.bfloat16
    tolerance = 0.05
    transformations = ("sgd", "nesterov")
    models = ("dict", "tuple")
