"""The contenders of `frameworks.py` for Keras: the fit of a distributed model, and a fit on each rank by itself, with as many
numbers summed besides and without.

KERAS_BACKEND chooses torch, jax or tensorflow.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import harness
import keras
import numpy as np

import mpistrat as ms

BACKEND = keras.backend.backend()
PACKAGES = ("keras", {"tensorflow": "tensorflow-cpu"}.get(BACKEND, BACKEND))
STEPS = 100  # of one call of an operation: one fit
ROWS = 8
SUMS = "fit on each rank by itself, and sums"
MODELS: dict[str, tuple[int, ...]] = {"MLP, 1 M": (512,) * 5, "MLP, 24 K": (64, 128, 96, 32, 10)}


def start(comm: Any) -> Callable[[], None]:
    """Begin, with one thread a rank; return what is called at the end."""
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    return lambda: None


def contenders(strategy: Any, model: str) -> dict[str, Callable[[], harness.Operation]]:
    """Return what makes each contender's fit, by name: ours, and those of the same rows a rank. Making one is collective."""
    widths = MODELS[model]
    return {
        harness.OURS: lambda: fit(strategy, widths, strategy.size),
        SUMS: lambda: fit_and_sums(strategy, widths),
        harness.ALONE: lambda: fit(None, widths, 1),
    }


def parameters(strategy: Any, model: str) -> dict[str, Callable[[], Any]]:
    """Return what makes the parameters alone; none: Keras has them in each process."""
    return {}


def fit(strategy: Any, widths: tuple[int, ...], ranks: int) -> harness.Operation:
    """Return an epoch of so many steps; of all ranks together, with a strategy."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "tanh") for width in widths[1:]]
    model = keras.Sequential([keras.Input(widths[:1]), *layers])
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False if BACKEND == "tensorflow" else "auto")
    if strategy is not None:
        with strategy.scope():
            ms.keras.distribute(model)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(STEPS * ROWS * ranks, widths[0])).astype(np.float32)
    y = numbers.normal(size=(STEPS * ROWS * ranks, widths[-1])).astype(np.float32)
    return lambda: model.fit(x, y, batch_size=ROWS * ranks, epochs=1, shuffle=False, verbose=0)


def fit_and_sums(strategy: Any, widths: tuple[int, ...]) -> harness.Operation:
    """Return a fit of each rank alone, and for each step a sum of as many numbers over all: what ours cannot do without."""
    alone = fit(None, widths, 1)
    gradient = np.zeros(sum((before + 1) * after for before, after in itertools.pairwise(widths)), np.float32)

    def both() -> None:
        alone()
        for _ in range(STEPS):
            strategy.reduce("SUM", gradient)

    return both
