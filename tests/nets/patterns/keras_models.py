"""Layers, metrics and models of Keras with training steps of their own."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

FEATURES = 6
CLASSES = 3
BACKEND = keras.backend.backend()


class AddLoss(layers.Layer):
    """A layer with a loss of its inputs."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class RowCount(keras.metrics.Metric):
    """A metric that counts rows. Its result is a copy: logs of plain Keras would be the variable itself."""

    def __init__(self, name: str = "rows") -> None:
        super().__init__(name=name)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(ops.cast(ops.shape(y_pred)[0], self.count.dtype))

    def result(self) -> Any:
        return self.count * 1.0


class OwnModel(keras.Model):
    """A subclassed model, which may compute its loss or its metrics itself."""

    def __init__(self, own_loss: bool = False, own_metrics: bool = False) -> None:
        super().__init__()
        self.own_loss, self.own_metrics = own_loss, own_metrics
        self.first, self.last = layers.Dense(8, "relu"), layers.Dense(CLASSES)
        self.extra = keras.metrics.Mean(name="extra")

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        return loss + 0.1 * ops.mean(ops.square(y_pred)) if self.own_loss else loss

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        if self.own_metrics:
            self.extra.update_state(ops.square(y_pred))
            logs["extra"] = self.extra.result()
        return logs


class OwnTrainStep(OwnModel):
    """train_step as the guides of Keras write it for each backend."""

    def train_step(self, *arguments: Any) -> Any:
        return self.torch_step(*arguments) if BACKEND == "torch" else self.jax_step(*arguments)

    def torch_step(self, data: Any) -> dict[str, Any]:
        import torch

        x, y = data[:2]
        self.zero_grad()
        output = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=output) + 0.1 * ops.mean(ops.square(output))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        self._loss_tracker.update_state(loss.detach(), sample_weight=ops.shape(x)[0])
        return self.compute_metrics(x, y, output)

    def jax_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data[:2]

        def loss_of(trainable: Any, others: Any) -> Any:
            output, others = self.stateless_call(trainable, others, x, training=True)
            return self.compute_loss(x, y, output) + 0.1 * ops.mean(ops.square(output)), (output, others)

        (loss, (output, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        kept, logs = [], {}
        for metric in self.metrics:
            mine = metrics[len(kept) : len(kept) + len(metric.variables)]
            if metric.name == "loss":
                mine = metric.stateless_update_state(mine, loss, sample_weight=x.shape[0])
            elif metric.name != "extra":
                mine = metric.stateless_update_state(mine, y, output)
            kept += mine
            logs[metric.name] = metric.stateless_result(mine)
        return logs, (trainable, others, optimizer, kept)


class OwnOtherSteps(OwnModel):
    """test_step and predict_step of one's own."""

    def test_step(self, *arguments: Any) -> Any:
        if BACKEND == "jax":
            return super().test_step(*arguments)
        x, y = arguments[0][:2]
        output = self(x, training=False) * 2.0
        self._loss_tracker.update_state(self.compute_loss(x=x, y=y, y_pred=output), sample_weight=ops.shape(x)[0])
        return self.compute_metrics(x, y, output)

    def predict_step(self, *arguments: Any) -> Any:
        if BACKEND == "jax":
            outputs, others = super().predict_step(*arguments)
            return outputs * 3.0, others
        return super().predict_step(*arguments) * 3.0


class Adversarial(keras.Model):
    """Two networks with an optimizer each, in attributes, a list or a dict. For torch as the backend."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        inputs = keras.Input((FEATURES,))
        self.judge = keras.Sequential([inputs, layers.Dense(8, "relu"), layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "relu"), layers.Dense(FEATURES)])
        self.judged, self.made = keras.metrics.Mean(name="judged"), keras.metrics.Mean(name="made")

    def call(self, x: Any) -> Any:
        return self.judge(self.maker(x))

    @property
    def metrics(self) -> list[Any]:
        return [self.judged, self.made]

    def compile(self, judge: Any, maker: Any) -> None:
        super().compile()
        if self.where == "attributes":
            self.judge_optimizer, self.maker_optimizer = judge, maker
        else:
            self.optimizers = [judge, maker] if self.where == "list" else {"judge": judge, "maker": maker}
        judge.build(self.judge.trainable_variables)
        maker.build(self.maker.trainable_variables)

    def both(self) -> tuple[Any, Any]:
        if self.where == "attributes":
            return self.judge_optimizer, self.maker_optimizer
        return tuple(self.optimizers) if self.where == "list" else tuple(self.optimizers.values())

    def train_step(self, data: Any) -> dict[str, Any]:
        import torch

        x = data[0] if isinstance(data, (tuple, list)) else data
        judge, maker = self.both()
        self.zero_grad()
        judged = ops.mean(ops.softplus(-self.judge(x))) + ops.mean(ops.softplus(self.judge(self.maker(x).detach())))
        judged.backward()
        weights = self.judge.trainable_variables
        with torch.no_grad():
            judge.apply([v.value.grad for v in weights], weights)
        self.zero_grad()
        made = ops.mean(ops.softplus(-self.judge(self.maker(x))))
        made.backward()
        weights = self.maker.trainable_variables
        with torch.no_grad():
            maker.apply([v.value.grad for v in weights], weights)
        rows = ops.shape(x)[0]
        self.judged.update_state(judged.detach(), sample_weight=rows)
        self.made.update_state(made.detach(), sample_weight=rows)
        return {"judged": self.judged.result(), "made": self.made.result()}


class Batches(keras.utils.PyDataset):
    """Batches of arrays as a PyDataset."""

    def __init__(self, x: Any, y: Any, rows: int) -> None:
        super().__init__()
        self.x, self.y, self.rows = x, y, rows

    def __len__(self) -> int:
        return -(-len(self.x) // self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        part = slice(index * self.rows, (index + 1) * self.rows)
        return self.x[part], self.y[part]


OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.1, **k),
    "momentum": lambda **k: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.01, epsilon=1e-3, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(0.01, epsilon=1e-3, **k),
    "rmsprop": lambda **k: keras.optimizers.RMSprop(0.01, epsilon=1e-2, **k),
    "nadam": lambda **k: keras.optimizers.Nadam(0.01, epsilon=1e-3, **k),
    "ftrl": lambda **k: keras.optimizers.Ftrl(0.05, **k),
    "adagrad": lambda **k: keras.optimizers.Adagrad(0.1, epsilon=1e-3, **k),
    "adafactor": lambda **k: keras.optimizers.Adafactor(0.02, **k),
    "muon": lambda **k: keras.optimizers.Muon(0.02, **k),
    "lamb": lambda **k: keras.optimizers.Lamb(0.02, epsilon=1e-3, **k),
}
USUAL = ("sgd", "momentum", "adam", "adamw", "rmsprop", "nadam", "ftrl", "adagrad")


class StepCount(layers.Layer):
    """A layer that counts its training passes in a float variable which is not trained."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign(self.count + 1.0)
        return x
