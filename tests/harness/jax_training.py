"""Trees of JAX, trained in one process of plain JAX and optax and under a strategy."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrat as ms

jax.config.update("jax_enable_x64", True)

ROWS, BATCH, EPOCHS = 52, 12, 10  # 50 steps; the last batch has 4 rows: with 3 replicas 2, 1, 1
TINY = 1e-30  # where epsilon stands differs between optax and Keras, whose formulas ours are
RULES = {
    "sgd": (lambda: ms.optimizers.SGD(0.1), lambda: optax.sgd(0.1)),
    "momentum": (lambda: ms.optimizers.SGD(0.1, momentum=0.9), lambda: optax.sgd(0.1, momentum=0.9)),
    "adam": (lambda: ms.optimizers.Adam(1e-2, epsilon=TINY), lambda: optax.adam(1e-2, eps=TINY)),
    "clipped": (
        lambda: ms.optimizers.SGD(0.1, global_clipnorm=0.05),
        lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1)),
    ),
    "schedule": (lambda: ms.optimizers.SGD(schedule()), lambda: optax.sgd(schedule())),
}


def schedule():
    return optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 50)


def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 10)), rng.integers(0, 3, ROWS)


def dataset(batch=BATCH):
    return ms.data.from_arrays(rows()).shuffle(seed=1).batch(batch)


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def compiled_once(build):
    """Of a function that returns a tree and its step: a new tree each time, with the first one's step, which JAX has compiled."""
    steps = {}

    @functools.wraps(build)
    def built(*args):
        tree, step = build(*args)
        return tree, steps.setdefault(args, step)

    return built


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


def _numbers(dtype=np.float64):
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape, scale=0.3).astype(dtype) for shape in ((10, 16), (16,), (16, 3), (3,))]


@compiled_once
def dict_tree(dtype=np.float64):
    """A dict of dicts, with leaves that are no parameters."""
    a, b, c, d = map(jnp.asarray, _numbers(dtype))
    tree = {"first": {"w": a, "b": b}, "second": {"w": c, "b": d, "none": None}}

    def logits(p, x):
        return jnp.tanh(x @ p["first"]["w"] + p["first"]["b"]) @ p["second"]["w"] + p["second"]["b"]

    return tree, jax.jit(jax.value_and_grad(lambda p, x, y: cross_entropy(logits(p, x), y)))


@compiled_once
def named_tuples():
    a, b, c, d = map(jnp.asarray, _numbers())

    def logits(p, x):
        return jnp.tanh(x @ p[0].w + p[0].b) @ p[1].w + p[1].b

    return (Layer(a, b), Layer(c, d)), jax.jit(jax.value_and_grad(lambda p, x, y: cross_entropy(logits(p, x), y)))


@compiled_once
def linen():
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(16, param_dtype=jnp.float64, dtype=jnp.float64)(x))
            return nn.Dense(3, param_dtype=jnp.float64, dtype=jnp.float64)(x)

    model = Model()
    tree = model.init(jax.random.key(0), rows()[0][:1])
    return tree, jax.jit(jax.value_and_grad(lambda p, x, y: cross_entropy(model.apply(p, x), y)))


@compiled_once
def nnx():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(10, 16, param_dtype=jnp.float64, rngs=rngs)
            self.second = nnx.Linear(16, 3, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    graph, tree = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    return tree, jax.jit(jax.value_and_grad(lambda p, x, y: cross_entropy(nnx.merge(graph, p)(x), y)))


@compiled_once
def equinox():
    import equinox as eqx

    module = eqx.nn.MLP(10, 3, 16, 1, activation=jnp.tanh, dtype=jnp.float64, key=jax.random.key(0))
    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x, y: cross_entropy(jax.vmap(m)(x), y)))
    return module, step


TREES = {"dict": dict_tree, "named_tuples": named_tuples, "linen": linen, "nnx": nnx, "equinox": equinox}


def arrays(tree):
    """The floating arrays of a tree, on the host."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") and leaf.dtype.kind == "f"]


def plain(params, step, tx, epochs=EPOCHS, traced=True):
    """Train in one process of plain JAX and optax; return the arrays."""
    batches = iter(dataset())
    trained = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else None, params)
    state = tx.init(trained)

    def update(grads, state, trained):
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    update = jax.jit(update) if traced else update

    for epoch in range(epochs):
        if epoch:
            batches.restore({"epoch": epoch, "next": 0})
        for x, y in batches:
            grads = step(params, np.array(x), np.array(y))[1]
            grads = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else None, grads)
            trained, state = update(grads, state, trained)
            params = _with(params, trained)
    return arrays(params)


def _with(params, trained):
    left = iter(jax.tree.leaves(trained))
    return jax.tree.map(lambda leaf: next(left) if hasattr(leaf, "dtype") else leaf, params)


def train(strategy, params, step, optimizer, epochs=EPOCHS):
    """Train in a loop as users write it."""
    data = strategy.distribute_dataset(dataset())
    for _ in range(epochs):
        for x, y in data:
            _, grads = step(params, x, y)
            params = ms.jax.apply(optimizer, grads, params, of=x)
    return params


def train_by_run(strategy, params, step, optimizer, epochs=EPOCHS):
    """Train by steps of `strategy.run`."""

    def one(params, x, y):
        _, grads = step(params, x, y)
        return ms.jax.apply(optimizer, grads, params, of=x)

    data = strategy.distribute_dataset(dataset())
    for _ in range(epochs):
        for batch in data:
            params = strategy.run(one, args=(params, *batch))
    return params


def difference(ours, theirs):
    """The largest difference, relative to the largest number of each array."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


@contextlib.contextmanager
def put(build=dict_tree, rule="sgd", strategy=None, **options):
    """A strategy, a tree in it, its step, and an optimizer of ours."""
    tree, step = build()
    with strategy or ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params = ms.jax.distribute(tree, **options)
            optimizer = RULES[rule][0]()
        yield strategy, params, step, optimizer
