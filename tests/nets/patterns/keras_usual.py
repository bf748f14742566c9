"""Programs of Keras with inputs, losses, metrics and layers as they are seen in public code."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import mpistrat as ms
from tests.nets.patterns import keras_models as zoo
from tests.nets.patterns.keras_program import Program, cross_entropy


class Plain(Program):
    """Fit, evaluate and predict."""


class OwnData(Program):
    """A dataset of ms.data."""

    def fit(self, **options: Any) -> Any:
        arguments = self.fit_arguments(**options)
        if self.env.plain:
            return self.model.fit(self.x, self.y, sample_weight=self.weights, **arguments)
        del arguments["batch_size"], arguments["shuffle"]
        if "validation_data" in arguments:
            arguments["validation_batch_size"] = self.batch_rows
        rows = (self.x, self.y) if self.weights is None else (self.x, self.y, self.weights)
        return self.model.fit(ms.data.from_arrays(rows).batch(self.batch_rows), **arguments)


class _Weighted(Program):
    def prepare_data(self) -> None:
        self.weights = (self.rng.random(self.rows) * 3).astype(np.float32)


class SampleWeight(_Weighted):
    pass


class OwnDataWeighted(OwnData, _Weighted):
    pass


class WeightedMetrics(_Weighted):
    validates = True
    weighted_metrics = ("accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy"))

    def compile(self, **options: Any) -> None:
        entropy = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")
        super().compile(weighted_metrics=["accuracy", entropy], **options)

    def evaluated(self) -> dict[str, Any]:
        return {"sample_weight": np.linspace(0, 2, len(self.held_y)).astype(np.float32)}


class ZeroWeights(_Weighted):
    """Whole ranks whose rows weigh nothing."""

    def prepare_data(self) -> None:
        self.weights = (np.arange(self.rows) % self.batch_rows < self.batch_rows // 2).astype(np.float32)


class MeanWeightLoss(_Weighted):
    def compile(self, **options: Any) -> None:
        super().compile(loss=cross_entropy(reduction="mean_with_sample_weight"), **options)


class ClassWeight(Program):
    fit_options = {"class_weight": {0: 0.2, 1: 3.0, 2: 1.0}}  # noqa: RUF012


class TemporalWeight(Program):
    """Weights of each time step."""

    def drawn(self, rows: int) -> tuple[Any, Any]:
        x, _ = super().drawn(rows)
        return x.reshape(-1, 3, 2), self.rng.integers(0, zoo.CLASSES, (rows, 3))

    def prepare_data(self) -> None:
        self.weights = self.rng.random((self.rows, 3)).astype(np.float32)

    def build(self) -> Any:
        return self.model_of(layers.GRU(5, return_sequences=True))


class Masking(Program):
    validates = True

    def drawn(self, rows: int) -> tuple[Any, Any]:
        x, y = super().drawn(rows)
        x = x.reshape(-1, 3, 2)
        x[self.rng.random((rows, 3)) < 0.4] = 0
        return x, y

    def build(self) -> Any:
        return self.model_of(layers.Masking(), layers.LSTM(5))


class EmbedMask(Program):
    """An embedding with a mask, whose output is one vector a row: the loss has no mask."""

    tokens_too = False

    def drawn(self, rows: int) -> tuple[Any, Any]:
        x = self.rng.integers(0, 5, (rows, 4))
        x[:, 0] = 1
        return x, self.rng.integers(0, zoo.CLASSES, (rows, 4) if self.tokens_too else rows)

    def build(self) -> Any:
        last = layers.GRU(5, return_sequences=self.tokens_too)
        return keras.Sequential(
            [keras.Input((4,), dtype="int32"), layers.Embedding(5, 4, mask_zero=True), last, layers.Dense(zoo.CLASSES)]
        )


class MaskedMetric(EmbedMask):
    """Labels of each token, whose loss and metrics are masked."""

    tokens_too = True


class Sequences(EmbedMask):
    """Labels of each token, without a mask."""

    tokens_too = True

    def build(self) -> Any:
        return keras.Sequential(
            [keras.Input((4,), dtype="int32"), layers.Embedding(5, 4), layers.LSTM(5, return_sequences=True),
             layers.Dense(zoo.CLASSES)]
        )  # fmt: skip


class _Outputs(Program):
    """Two outputs with losses, weights of losses and metrics of their own."""

    as_list = False

    def prepare_data(self) -> None:
        def both(y: Any) -> Any:
            other = self.rng.normal(size=(len(y), 1)).astype(np.float32)
            return [y, other] if self.as_list else {"a": y, "b": other}

        self.y, self.held_y = both(self.y), both(self.held_y)

    def build(self) -> Any:
        inputs = keras.Input((zoo.FEATURES,))
        hidden = layers.Dense(8, "tanh")(inputs)
        outputs = {"a": layers.Dense(zoo.CLASSES, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)}
        return keras.Model(inputs, list(outputs.values()) if self.as_list else outputs)

    def compile(self, **options: Any) -> None:
        losses, weights, metrics = [cross_entropy(), "mse"], [0.3, 2.0], [["accuracy"], ["mae"]]
        if not self.as_list:
            losses, weights, metrics = (dict(zip("ab", each, strict=True)) for each in (losses, weights, metrics))
        super().compile(loss=losses, loss_weights=weights, metrics=metrics, **options)


class OutputsOfDict(_Outputs):
    validates = True


class OutputsOfList(_Outputs):
    as_list = True


class WeightsOfDict(_Outputs):
    def prepare_data(self) -> None:
        super().prepare_data()
        self.weights = {name: self.rng.random(self.rows).astype(np.float32) for name in "ab"}


class TwoInputs(Program):
    def prepare_data(self) -> None:
        def both(x: Any) -> Any:
            return {"p": x, "q": self.rng.normal(size=(len(x), 2)).astype(np.float32)}

        self.x, self.held_x = both(self.x), both(self.held_x)

    def build(self) -> Any:
        p, q = keras.Input((zoo.FEATURES,), name="p"), keras.Input((2,), name="q")
        hidden = layers.Concatenate()([layers.Dense(8, "tanh")(p), q])
        return keras.Model({"p": p, "q": q}, layers.Dense(zoo.CLASSES)(hidden))


class AddedLoss(Program):
    def build(self) -> Any:
        return self.model_of(layers.Dense(8, "tanh"), zoo.AddLoss())


class NoLabels(Program):
    """Only losses of layers."""

    metrics = None

    def prepare_data(self) -> None:
        self.y = self.held_y = None

    def build(self) -> Any:
        return self.model_of(zoo.AddLoss(), layers.Dense(8, "tanh"), zoo.AddLoss())

    def compile(self, **options: Any) -> None:
        self.model.compile(optimizer=self.optimizer(), steps_per_execution=self.steps)


class Regularized(Program):
    def build(self) -> Any:
        return self.model_of(layers.Dense(8, "tanh", kernel_regularizer="l2", bias_regularizer="l1"))


class ActivityRegularized(Program):
    def build(self) -> Any:
        return self.model_of(layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.1)))


class Constrained(Program):
    def build(self) -> Any:
        return self.model_of(layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5)))


class ManyMetrics(Program):
    validates = True

    def metric_objects(self) -> Any:
        m = keras.metrics
        return ["accuracy", m.SparseTopKCategoricalAccuracy(2), m.SparseCategoricalCrossentropy(from_logits=True),
                m.MeanIoU(zoo.CLASSES, sparse_y_pred=False), zoo.RowCount()]  # fmt: skip


class _Binary(Program):
    def prepare_data(self) -> None:
        self.y, self.held_y = ((y == 1).astype(np.float32)[:, None] for y in (self.y, self.held_y))

    def build(self) -> Any:
        return keras.Sequential([keras.Input((zoo.FEATURES,)), layers.Dense(8, "tanh"), layers.Dense(1, "sigmoid")])


class BinaryMetrics(_Binary):
    validates = True
    loss = "binary_crossentropy"

    def metric_objects(self) -> Any:
        m = keras.metrics
        return [m.AUC(), m.Precision(), m.F1Score(threshold=0.5), m.R2Score(), m.RootMeanSquaredError(),
                m.SensitivityAtSpecificity(0.5), m.CosineSimilarity(), m.PearsonCorrelation()]  # fmt: skip


class LossFunction(_Binary):
    metrics = ()

    def compile(self, **options: Any) -> None:
        def loss(y: Any, output: Any) -> Any:
            return ops.mean(ops.square(y - output) + 0.1 * ops.abs(output), -1)

        super().compile(loss=loss, **options)


class MetricFunction(Program):
    def metric_objects(self) -> Any:
        return [lambda y, output: ops.mean(ops.square(output), -1)]


class Recurrent(Program):
    def drawn(self, rows: int) -> tuple[Any, Any]:
        x, y = super().drawn(rows)
        return x.reshape(-1, 3, 2), y

    def build(self) -> Any:
        return self.model_of(layers.Bidirectional(layers.LSTM(4)))


class StatefulRecurrent(Recurrent):
    """A recurrent layer that keeps the state of each row of a batch for the same row of the next one."""

    backends = ("jax",)  # plain Keras on torch assigns a state that its gradient needs, an error
    kinds = ("equal",)
    validates = False
    evaluates = False

    def build(self) -> Any:
        rows = self.batch_rows // self.env.size
        inputs = keras.Input(batch_shape=(rows, 3, 2))
        return keras.Sequential([inputs, layers.GRU(5, stateful=True), layers.Dense(zoo.CLASSES)])


class Normalized(Program):
    def build(self) -> Any:
        return self.model_of(layers.Dense(8, "tanh"), layers.LayerNormalization(), layers.GroupNormalization(2))


class FrozenBatchNorm(Program):
    def build(self) -> Any:
        norm = layers.BatchNormalization()
        model = self.model_of(layers.Dense(8, "tanh"), norm)
        norm.trainable = False
        return model


class Nested(Program):
    def build(self) -> Any:
        return self.model_of(keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(4)]))


class Rescaled(Program):
    def build(self) -> Any:
        norm = layers.Normalization()
        norm.adapt(self.x)
        return self.model_of(norm, layers.Dense(8, "tanh"))


class Spectral(Program):
    def build(self) -> Any:
        return self.model_of(layers.SpectralNormalization(layers.Dense(8, "tanh")))


class LowRank(Program):
    def build(self) -> Any:
        model = self.model_of(layers.Dense(8, "tanh", name="adapted"))
        model.get_layer("adapted").enable_lora(2)
        return model


class NoNoise(Program):
    """Layers with seeds, whose noise is nothing."""

    def build(self) -> Any:
        return self.model_of(layers.Dense(8, "tanh"), layers.Dropout(0.0), layers.GaussianNoise(0.0))


class ComputeLoss(Program):
    def build(self) -> Any:
        model = zoo.OwnModel(own_loss=True)
        model(self.x[:1])
        return model


class ComputeMetrics(Program):
    validates = True

    def build(self) -> Any:
        model = zoo.OwnModel(own_metrics=True)
        model(self.x[:1])
        return model


class TrainStep(Program):
    def build(self) -> Any:
        model = zoo.OwnTrainStep()
        model(self.x[:1])
        return model


class TestStep(Program):
    """test_step and predict_step of the model's own."""

    validates = True

    def build(self) -> Any:
        model = zoo.OwnOtherSteps()
        model(self.x[:1])
        return model


class _Adversarial(Program):
    backends = ("torch",)
    validates = False
    evaluates = False
    where = "attributes"

    def prepare_data(self) -> None:
        self.y = None

    def build(self) -> Any:
        model = zoo.Adversarial(self.where)
        model(self.x[:1])
        return model

    def compile(self, **options: Any) -> None:
        self.model.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01, epsilon=1e-3))


class OptimizersInAttributes(_Adversarial):
    pass


class OptimizersInAList(_Adversarial):
    where = "list"


class OptimizersInADict(_Adversarial):
    where = "dict"


class MixedBfloat16(Program):
    policy = "mixed_bfloat16"
    tolerance = 0.05


class MixedFloat16(Program):
    policy = "mixed_float16"
    tolerance = 0.05
