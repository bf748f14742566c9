"""The usual loop of JAX, and the base of all programs that differ from it in one place."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.nets.patterns import jax_models as zoo  # noqa: E402
from tests.nets.patterns.environments import KINDS, Environment, sizes  # noqa: E402
from tests.nets.patterns.loops import Loop  # noqa: E402

Config = dict[str, Any]
Tree = Any
Rows = collections.namedtuple("Rows", "x y")
MAX_NORM = 0.3

# How a batch gets to the step in strategy.run: (run, step, a, b, the parameters)
DELIVERIES: dict[str, Callable[..., Any]] = {
    "arguments": lambda run, step, a, b, p: run(step, args=(a, b)),
    "tuple": lambda run, step, a, b, p: run(lambda rows: step(*rows), args=((a, b),)),
    "keywords": lambda run, step, a, b, p: run(step, kwargs={"a": a, "b": b}),
    "beside_parameters": lambda run, step, a, b, p: run(lambda p, a, b: step(a, b), args=(p, a, b)),
    "named_tuple": lambda run, step, a, b, p: run(lambda rows: step(rows.x, rows.y), args=(Rows(a, b),)),
    "jax_arrays": lambda run, step, a, b, p: run(step, args=(jnp.asarray(a), jnp.asarray(b))),
    "closure": lambda run, step, a, b, p: run(lambda: step(a, b)),
    "views": lambda run, step, a, b, p: run(step, args=(a[:, :], b[:])),
}


class PlainOptimizer:
    """An optimizer of one process: optax as its documentation uses it."""

    def __init__(self, transformation: Any, params: Tree, max_norm: float | None = None) -> None:
        self.transformation, self.max_norm = transformation, max_norm
        self.state = transformation.init(params)
        self.step = jax.jit(self._step)

    def apply(self, gradients: Tree, params: Tree) -> Tree:
        params, self.state = self.step(gradients, self.state, params)
        return params

    def _step(self, gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        if self.max_norm:
            norm = jnp.sqrt(sum((leaf.astype(float) ** 2).sum() for leaf in jax.tree.leaves(gradients)))
            factor = jnp.minimum(1, self.max_norm / norm)
            gradients = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), gradients)
        updates, state = self.transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state


class KerasAdam(PlainOptimizer):
    """Adam with Keras's epsilon, which is added before the bias is corrected, as ms.optimizers.Adam has it."""

    def __init__(self, rate: Any, params: Tree, epsilon: float) -> None:
        def init(params: Tree) -> Tree:
            return jnp.zeros((), int), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

        def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            count, m, v = state
            step = rate(count) if callable(rate) else rate
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
            v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
            step = step * jnp.sqrt(1 - 0.999 ** (count + 1)) / (1 - 0.9 ** (count + 1))
            return jax.tree.map(lambda m, v: -step * m / (jnp.sqrt(v) + epsilon), m, v), (count + 1, m, v)

        super().__init__(optax.GradientTransformation(init, update), params)


class Program(Loop):
    """The usual loop. A subclass is a program of the name of its class, and changes one of the methods."""

    programs: ClassVar[dict[str, type[Program]]] = {}
    models: ClassVar[tuple[str, ...]] = tuple(zoo.MODELS)
    transformations: ClassVar[tuple[str, ...]] = zoo.USUAL
    kinds: ClassVar[tuple[str, ...]] = KINDS
    clips = True
    #: How gradients get their weight: jax.value_and_grad, whose gradients apply weights; that of the package; apply's of=.
    fronts: ClassVar[tuple[str, ...]] = ("own", "package", "package", "of", "of")
    dtype: ClassVar[Any] = None  # None: float64
    tolerance: ClassVar[float | None] = None
    epochs = 4

    def __init_subclass__(cls) -> None:
        Program.programs[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Config:
        """Draw what the program leaves open."""

        def choose(options: Iterable[str]) -> str:
            return str(rng.choice(list(options)))

        config = {
            "kind": choose(cls.kinds), "model": choose(cls.models), "transformation": choose(cls.transformations),
            "delivery": choose(DELIVERIES), "seed": int(rng.integers(1000)), "in_run": bool(rng.random() < 0.6),
            "clip": bool(cls.clips and rng.random() < 0.2), "jit": bool(rng.random() < 0.9),
            "front": choose(cls.fronts), "layout": choose(("shared", "shared", "private", "made up")),
        }  # fmt: skip
        exact = config["transformation"] in ("sgd", "nesterov", "lion")
        return config | {"tolerance": cls.tolerance or (1e-9 if exact else 1e-6)}

    def __init__(self, env: Environment, config: Config, ranks: int) -> None:
        self.env, self.config, self.ranks = env, config, ranks
        rng = self.rng = np.random.default_rng(config["seed"])
        rows, self.batch_rows = sizes(config["kind"], ranks)
        self.x, self.y = rng.normal(size=(rows, zoo.FEATURES)), rng.integers(0, zoo.CLASSES, rows)
        self.calls, self.results, self.of = 0, {}, None
        params, self.forward = zoo.MODELS[config["model"]](config["seed"])
        params = self.prepare(params)
        if self.dtype is not None:
            params = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.dtype), params)
            self.x = self.x.astype(np.float32)
        self.params, self.optimizer = self.distribute(params, self.transformation())
        self.gradients = self.differentiated(self.loss)
        self.after_distribute()

    # what subclasses change

    def prepare(self, params: Tree) -> Tree:
        """Change the tree of parameters before it is distributed."""
        return params

    def transformation(self) -> Any:
        return zoo.TRANSFORMATIONS[self.config["transformation"]]()

    def after_distribute(self) -> None:
        """Do something with the distributed parameters."""

    def loss(self, params: Tree, a: Any, b: Any) -> Any:
        return self.cross_entropy(self.forward(params, a), b)

    def step(self, a: Any, b: Any) -> None:
        """Take a step of one batch."""
        _, gradients = self.gradients(self.params, a, b)
        self.update(gradients)

    # what they share

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function) if self.config["jit"] else function

    def differentiated(self, loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return the function of value and gradients, by JAX itself or by the package's front."""
        if self.env.plain or self.config["front"] != "package":
            return self.jit(jax.value_and_grad(loss, **options))
        return ms.jax.value_and_grad(self.jit(loss), **options)

    def distribute(self, params: Tree, transformation: Any, clip: bool = True) -> tuple[Tree, Any]:
        """Distribute parameters with their optimizer."""
        norm = MAX_NORM if self.config["clip"] and clip else None
        if self.env.plain:
            params = jax.tree.map(jnp.array, params)
            return params, PlainOptimizer(transformation, params, norm)
        with self.env.scope():
            return ms.jax.distribute(params, transformation, max_norm=norm)

    def apply(self, optimizer: Any, gradients: Tree, params: Tree) -> Tree:
        if self.env.plain:
            return optimizer.apply(gradients, params)
        of = {"of": self.of} if self.config["front"] == "of" else {}
        return ms.jax.apply(optimizer, gradients, params, **of)

    def update(self, gradients: Tree) -> None:
        self.params = self.apply(self.optimizer, gradients, self.params)

    def data(self, seed: int = 0, batch: int | None = None) -> Iterable[Any]:
        """Return batches of the rows, in an order of its own for each seed."""
        dataset = ms.data.from_arrays((self.x, self.y)).shuffle(seed=self.config["seed"] + seed)
        return self.env.data(dataset.batch(batch or self.batch_rows))

    def deliver(self, batch: Any, step: Callable[..., None] | None = None) -> None:
        """Take a step with a batch, in the loop or by strategy.run."""
        a, b = batch
        self.of = a
        step = step or self.step
        if self.config["in_run"]:
            DELIVERIES[self.config["delivery"]](self.env.run, step, a, b, self.params)
        else:
            step(a, b)
        self.calls += 1

    def told(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        return self.env.batch(batch)

    @staticmethod
    def cross_entropy(output: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(output, labels).mean()

    def keep(self, tree: Tree, prefix: str = "p") -> None:
        """Add a tree to the results."""
        leaves = jax.tree.leaves(tree)
        self.results |= {f"{prefix}{i}": np.array(np.asarray(leaf, np.float64)) for i, leaf in enumerate(leaves)}


def run(env: Environment, config: Config, ranks: int) -> dict[str, np.ndarray]:
    """Run a program; return its numbers."""
    program = Program.programs[config["program"]](env, config, ranks)
    program.train()
    program.finish()
    program.keep(program.params)
    return program.results


def config(rng: np.random.Generator, number: int, name: str | None = None) -> Config:
    """Draw the configuration of a program: each program in turn, every second one a sweep over optax, or always one."""
    names = [name for name in Program.programs if name != "transformations"]
    name = name or ("transformations" if number % 2 else names[number // 2 % len(names)])
    drawn = {"program": name} | Program.programs[name].draw(rng)
    if name == "transformations":
        transformations = list(zoo.TRANSFORMATIONS)
        drawn["transformation"] = transformations[number // 2 % len(transformations)]
    return drawn
