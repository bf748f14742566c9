"""Models of JAX, flax and equinox, and transformations of optax that programs draw from."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

FEATURES = 6
CLASSES = 3
HIDDEN = 8
Layers = collections.namedtuple("Layers", "w1 b1 w2 b2")
Tree = Any
Forward = Callable[[Tree, Any], Any]


def drawn(seed: int) -> tuple[np.ndarray, ...]:
    """Return the weights and biases of two layers."""
    rng = np.random.default_rng(seed + 5)
    shapes = ((FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
    return tuple(rng.normal(size=shape) * 0.4 for shape in shapes)


def dict_model(seed: int) -> tuple[Tree, Forward]:
    params = dict(zip(("w1", "b1", "w2", "b2"), drawn(seed), strict=True))
    return params, lambda p, x: jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def tuple_model(seed: int) -> tuple[Tree, Forward]:
    return Layers(*drawn(seed)), lambda p, x: jnp.tanh(x @ p.w1 + p.b1) @ p.w2 + p.b2


class Linen(nn.Module):
    """A module of flax.linen."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(param_dtype=jnp.float64)(jnp.tanh(nn.Dense(HIDDEN, param_dtype=jnp.float64)(x)))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(x)


def linen_model(seed: int) -> tuple[Tree, Forward]:
    module = Linen()
    return module.init(jax.random.key(seed), np.zeros((1, FEATURES))), module.apply


def equinox_model(seed: int) -> tuple[Tree, Forward]:
    module = equinox.nn.MLP(
        FEATURES, CLASSES, HIDDEN, 1, activation=jnp.tanh, key=jax.random.key(seed), dtype=jnp.float64
    )
    arrays, rest = equinox.partition(module, equinox.is_inexact_array)
    return arrays, lambda p, x: jax.vmap(equinox.combine(p, rest))(x)


class Nnx(nnx.Module):
    """A module of flax.nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one = nnx.Linear(FEATURES, HIDDEN, rngs=rngs, param_dtype=jnp.float64)
        self.two = nnx.Linear(HIDDEN, CLASSES, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: Any) -> Any:
        return self.two(jnp.tanh(self.one(x)))


def nnx_model(seed: int) -> tuple[Tree, Forward]:
    graph, state = nnx.split(Nnx(nnx.Rngs(seed)))

    def forward(params: Tree, x: Any) -> Any:
        now = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(now, params)
        return nnx.merge(graph, now)(x)

    return nnx.to_pure_dict(state), forward


MODELS: dict[str, Callable[[int], tuple[Tree, Forward]]] = {
    "dict": dict_model, "tuple": tuple_model, "linen": linen_model, "equinox": equinox_model, "nnx": nnx_model,
}  # fmt: skip


def matrices(params: Tree) -> Tree:
    """Return a mask of the leaves that are matrices."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_shape(params: Tree) -> Tree:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def warm() -> optax.Schedule:
    """Return a schedule whose first rate is 0."""
    return optax.linear_schedule(0.0, 0.05, 400)


o, chain = optax, optax.chain
ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: o.sgd(0.1),
    "nesterov": lambda: o.sgd(0.05, 0.9, True),
    "adam": lambda: o.adam(0.02),
    "adamw": lambda: o.adamw(0.02),
    "lion": lambda: o.lion(0.005),
    "adagrad": lambda: o.adagrad(0.1),
    "rmsprop": lambda: o.rmsprop(0.01, centered=True, momentum=0.5),
    "amsgrad": lambda: o.amsgrad(0.02),
    "nadam": lambda: o.nadam(0.02),
    "adabelief": lambda: o.adabelief(0.02),
    "yogi": lambda: o.yogi(0.02),
    "radam": lambda: o.radam(0.02),
    "adan": lambda: o.adan(0.02),
    "rprop": lambda: o.rprop(0.01),
    "warm": lambda: o.adam(warm()),
    "joined": lambda: o.adam(
        o.join_schedules([o.linear_schedule(0.0, 0.05, 3), o.cosine_decay_schedule(0.05, 8)], [3])
    ),
    "frozen_later": lambda: o.adam(o.piecewise_constant_schedule(0.05, {6: 0.0})),
    "decayed": lambda: chain(o.add_decayed_weights(0.1), o.sgd(0.1)),
    "clipped_values": lambda: chain(o.clip(0.05), o.sgd(0.3)),
    "averaged": lambda: chain(o.ema(0.8), o.sgd(0.1)),
    "trace": lambda: chain(o.trace(0.9), o.scale(-0.05)),
    "nonnegative": lambda: chain(o.sgd(0.1), o.keep_params_nonnegative()),
    "zero_nans": lambda: chain(o.zero_nans(), o.sgd(0.1)),
    "injected": lambda: o.inject_hyperparams(o.adam)(learning_rate=o.linear_schedule(0.05, 0.01, 5)),
    "accumulated": lambda: o.MultiSteps(o.adam(0.02), 3).gradient_transformation(),
    "accumulated_more": lambda: o.MultiSteps(o.adam(0.02), lambda s: jnp.where(s < 2, 1, 2)).gradient_transformation(),
    "schedule_free": lambda: o.contrib.schedule_free_sgd(0.1),
    "schedule_free_adamw": lambda: o.contrib.schedule_free_adamw(0.05),
    "conditional": lambda: o.conditionally_mask(o.sgd(0.1), lambda step, **_: step % 2 == 0),
}
MASKED: dict[str, Callable[[], Any]] = {  # by the tree, its paths or ndim
    "adamw_masked": lambda: o.adamw(1e-3, weight_decay=1e-4, mask=matrices),
    "adamw_masked_much": lambda: o.adamw(0.05, weight_decay=0.5, mask=matrices),
    "language_model": lambda: chain(
        o.clip_by_global_norm(1.0),
        o.adamw(o.warmup_cosine_decay_schedule(0, 0.05, 3, 20), weight_decay=0.1, mask=matrices),
    ),
    "masked": lambda: o.masked(o.sgd(0.1), matrices),
    "frozen_leaves": lambda: o.partition({"matrix": o.adam(0.05), "vector": o.set_to_zero()}, by_shape),
    "partitioned": lambda: o.partition({"matrix": o.sgd(0.1), "vector": o.adam(0.01)}, by_shape),
    "masked_lamb": lambda: chain(o.masked(o.scale_by_trust_ratio(), matrices), o.sgd(0.1)),
}
WHOLE: dict[str, Callable[[], Any]] = {  # rules that mix elements
    "clipped": lambda: chain(o.clip_by_global_norm(0.3), o.sgd(0.1)),
    "clipped_far": lambda: chain(o.clip_by_global_norm(1e9), o.sgd(0.1)),
    "clipped_warm": lambda: chain(o.clip_by_global_norm(0.1), o.adam(warm())),
    "clipped_later": lambda: chain(o.clip_by_global_norm(0.1), o.sgd(o.piecewise_constant_schedule(1e-9, {5: 1e8}))),
    "clipped_accumulated": lambda: o.MultiSteps(
        chain(o.clip_by_global_norm(0.1), o.sgd(0.1)), 6
    ).gradient_transformation(),
    "clipped_blocks": lambda: chain(o.clip_by_block_rms(0.01), o.adam(warm())),
    "clipped_adaptive": lambda: chain(o.adaptive_grad_clip(0.01), o.adam(warm())),
    "finite": lambda: o.apply_if_finite(o.sgd(0.1), 3),
    "lamb": lambda: o.lamb(0.02),
    "lamb_warm": lambda: o.lamb(warm()),
    "lamb_accumulated": lambda: o.MultiSteps(o.lamb(0.02), 6).gradient_transformation(),
    "lars": lambda: o.lars(warm()),
    "trust_ratio": lambda: chain(o.scale_by_trust_ratio(), o.scale(-1e-5)),
    "adafactor": lambda: o.adafactor(0.05),
    "adafactor_warm": lambda: o.adafactor(warm(), min_dim_size_to_factor=2),
    "sm3": lambda: o.sm3(0.1),
    "novograd": lambda: o.novograd(0.02),
    "normalized": lambda: chain(o.normalize_by_update_norm(), o.sgd(warm())),
    "centralized": lambda: chain(o.centralize(), o.sgd(warm())),
    "muon": lambda: o.contrib.muon(0.02),
    "noisy": lambda: o.noisy_sgd(0.1),
}
TRANSFORMATIONS = ELEMENTWISE | MASKED | WHOLE
USUAL = ("sgd", "adam", "adamw", "nesterov", "lion", "accumulated")
