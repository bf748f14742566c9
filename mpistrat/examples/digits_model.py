"""A network with two hidden layers whose gradients are written in NumPy, straight into the variables' gradient memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import mpistrat as ms

__all__ = ["Digits"]

PIXELS, HIDDEN, CLASSES = 64, 512, 10


class Digits:
    """The network's variables and its two functions of a batch. Creating it is collective; do it in a strategy's scope.

    Args:
        seed: of the initial weights.
        dtype: float32 or float64.
    """

    def __init__(self, seed: int, dtype: Any) -> None:
        sizes = (PIXELS, HIDDEN, HIDDEN, CLASSES)
        self.layers = []
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            weights = np.random.default_rng([seed, index]).normal(0, np.sqrt(2 / inputs), (inputs, outputs))
            self.layers.append(
                (
                    ms.Variable(weights.astype(dtype), name=f"weights_{index}"),
                    ms.Variable(np.zeros(outputs, dtype), name=f"bias_{index}"),
                )
            )

    @property
    def variables(self) -> list[ms.Variable]:
        """All variables, layer by layer."""
        return [variable for layer in self.layers for variable in layer]

    def forward(self, images: np.ndarray) -> list[np.ndarray]:
        """Return the images and each layer's output; the last is the scores of the classes."""
        values = [images]
        for index, (weights, bias) in enumerate(self.layers):
            value = values[-1] @ weights.array
            value += bias.array
            if index + 1 < len(self.layers):
                np.maximum(value, 0, out=value)
            values.append(value)
        return values

    def scores_and_gradients(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the scores of the classes; set `v.grad` for this replica's share of the mean cross entropy.

        Args:
            images: (examples, 64), labels: (examples,) integers. Zero examples give zero gradients.
        """
        values = self.forward(images)
        scores = values[-1]
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        probabilities[np.arange(len(labels)), labels] -= 1
        error = probabilities / ms.context.global_batch_size()
        for index in reversed(range(len(self.layers))):
            weights, bias = self.layers[index]
            np.matmul(values[index].T, error, out=weights.grad)
            np.sum(error, axis=0, out=bias.grad)
            if index:
                error = error @ weights.array.T
                error *= values[index] > 0
        return scores
