"""Models on which forms of the wire are compared: the digits, and a transformer of one block that learns to copy a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat.examples import digits_data
from mpistrat.examples.digits_model import Digits

__all__ = ["CopyTransformer", "digits_curve", "transformer_curve"]

SYMBOLS, LENGTH, WIDTH = 16, 8, 160


class CopyTransformer:
    """Causal attention and a two-layer network, each beside its input; gradients by hand. Creating it is collective."""

    def __init__(self, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(5)
        d, places = WIDTH, 2 * LENGTH
        shapes = {
            "token": (SYMBOLS + 1, d), "place": (places, d), "query": (d, d), "key": (d, d), "value": (d, d), "out": (d, d),
            "up": (d, 4 * d), "down": (4 * d, d), "head": (d, SYMBOLS),
        }  # fmt: skip
        self.by_name = {
            name: ms.Variable(
                (rng.normal(size=shape) / np.sqrt(shape[0] if name not in ("token", "place") else d)).astype(dtype),
                name=name,
            )
            for name, shape in shapes.items()
        }
        self._mask = np.triu(np.full((places, places), -1e9, dtype), 1)

    @property
    def variables(self) -> list[Any]:
        return list(self.by_name.values())

    def loss_and_gradients(self, symbols: np.ndarray, examples: int) -> float:
        """Return this rank's part of the mean loss per symbol of all `examples`; leave that of the gradients in `v.grad`.

        Symbols, (rows, LENGTH), are read, then a separator, then the same symbols but the last: each is to be predicted.
        """
        w = {name: v.array for name, v in self.by_name.items()}
        rows, d = len(symbols), WIDTH
        read = np.concatenate([symbols, np.full((rows, 1), SYMBOLS), symbols[:, :-1]], axis=1)
        x = w["token"][read] + w["place"]
        q, k, v = (x @ w[name] for name in ("query", "key", "value"))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(d).astype(x.dtype) + self._mask
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        mixed = attention @ v
        y = x + mixed @ w["out"]
        hidden = np.maximum(y @ w["up"], 0)
        z = (y + hidden @ w["down"])[:, LENGTH:]
        logits = z @ w["head"]
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        taken = np.take_along_axis(p, symbols[..., None], -1)
        loss = -np.log(np.maximum(taken, 1e-30)).sum() / (examples * LENGTH)
        np.put_along_axis(p, symbols[..., None], taken - 1, -1)
        error = p / (examples * LENGTH)
        dz = np.zeros_like(x)
        dz[:, LENGTH:] = error @ w["head"].T
        dhidden = (dz @ w["down"].T) * (hidden > 0)
        dy = dz + dhidden @ w["up"].T
        dmixed = dy @ w["out"].T
        dattention = dmixed @ v.transpose(0, 2, 1)
        dscores = (
            attention * (dattention - (dattention * attention).sum(-1, keepdims=True)) / np.sqrt(d).astype(x.dtype)
        )
        dq, dk, dv = dscores @ k, dscores.transpose(0, 2, 1) @ q, attention.transpose(0, 2, 1) @ dmixed
        dx = dy + dq @ w["query"].T + dk @ w["key"].T + dv @ w["value"].T
        self._write(x, {"query": dq, "key": dk, "value": dv, "up": dhidden}, y)
        self._set("out", mixed, dy)
        self._set("down", hidden, dz)
        self._set("head", z, error)
        token = np.zeros_like(w["token"])
        np.add.at(token, read, dx)
        self.by_name["token"].grad[...] = token
        self.by_name["place"].grad[...] = dx.sum(0)
        return float(loss)

    def _write(self, x: Any, errors: dict[str, Any], y: Any) -> None:
        for name, error in errors.items():
            self._set(name, y if name == "up" else x, error)

    def _set(self, name: str, inputs: Any, error: Any) -> None:
        flat = inputs.reshape(-1, inputs.shape[-1])
        np.matmul(flat.T, error.reshape(-1, error.shape[-1]), out=self.by_name[name].grad)


def transformer_curve(strategy: Any, steps: int, rows: int = 64) -> list[float]:
    """Return the loss of each step. Collective."""
    with strategy.scope():
        model, optimizer = CopyTransformer(), ms.optimizers.Adam(1e-3)
    mine = rows // strategy.size
    losses = []

    def step(number: int) -> np.float64:
        symbols = np.random.default_rng((3, number)).integers(0, SYMBOLS, (rows, LENGTH))
        part = symbols[strategy.rank * mine : (strategy.rank + 1) * mine]
        loss = model.loss_and_gradients(part, mine * strategy.size)
        optimizer.apply_gradients([(v.grad, v) for v in model.variables])
        return np.float64(loss)

    for number in range(steps):
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(number,)), axis=None)))
    return losses


def digits_curve(strategy: Any, epochs: int, seed: int, batch: int = 64) -> list[float]:
    """Return the accuracy on the test rows after each epoch. Collective."""
    pixels, labels = digits_data.load()
    order = np.random.default_rng(2024).permutation(len(labels))
    images, labels = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    test, train = slice(0, digits_data.TEST_ROWS), slice(digits_data.TEST_ROWS, None)
    rows = ms.data.from_arrays((images[train], labels[train])).shuffle(seed=seed).batch(batch, drop_remainder=True)
    data = strategy.distribute_dataset(rows)
    with strategy.scope():
        model, optimizer = Digits(seed, np.float32), ms.optimizers.Adam(1e-3)
    found = []

    def step(rows: Any) -> None:
        model.scores_and_gradients(*rows)
        optimizer.apply_gradients([(v.grad, v) for v in model.variables])

    for _ in range(epochs):
        for rows in data:
            strategy.run(step, args=(rows,))
        scores = model.forward(images[test])[-1]
        found.append(float((scores.argmax(1) == labels[test]).mean()))
    return found
