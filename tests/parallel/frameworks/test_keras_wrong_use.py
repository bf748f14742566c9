"""What wrong use of Keras models under strategies gets: an error on every rank, with the name and the remedy."""

import functools

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402
from keras_training import BACKEND, adam, build, compiled, fit, put, rows  # noqa: E402

import mpistrat as ms  # noqa: E402
from mpistrat._util import log  # noqa: E402


@pytest.mark.ranks(1)
def test_what_cannot_be_distributed_is_refused():
    with pytest.raises(ms.errors.ContextError, match="scope"):
        ms.keras.distribute(build())
    model = compiled(build())
    with put(model) as strategy, strategy.scope():
        with pytest.raises(RuntimeError, match="second"):
            ms.keras.distribute(model)
        with pytest.raises(TypeError, match=r"keras\.Model"):
            ms.keras.distribute(keras.layers.Dense(3))
        with pytest.raises(ValueError, match="sum_over_batch_size"):
            model.compile(loss=keras.losses.MeanSquaredError(reduction="sum"))
        with pytest.raises(TypeError, match="PyDataset"):
            compiled(model).fit(keras.utils.PyDataset())
        with pytest.raises(TypeError, match="CallbackList"):
            model.fit(*rows(), callbacks=keras.callbacks.CallbackList([]))
        if BACKEND == "tensorflow":
            with pytest.raises(ValueError, match="jit_compile=False"):
                compiled(model, jit_compile=True)
        compiled(model)
    other = build()
    with put(other), pytest.raises(ms.errors.ContextError, match="another strategy"):
        compiled(other, model.optimizer)


def _fit(model, rank, **settings):
    return fit(model, *rows(), epochs=1, **settings)


def _own(model, rank):
    model.fit(((x, y) for x, y in [rows(6)] * (3 - rank)), verbose=0)


def _fails(model, rank):
    def own():
        for step in range(4):
            if rank and step == 3:
                raise OSError("no such file")
            yield rows(6)

    model.fit(own(), verbose=0)


CASES = {
    "rows": (lambda model, rank: fit(model, *rows(40 + rank), epochs=1), "arrays"),
    "values": (lambda model, rank: fit(model, rows()[0] + rank, rows()[1], epochs=1), "digest"),
    "epochs": (lambda model, rank: fit(model, *rows(), epochs=1 + rank), "epochs=1"),
    "batch": (lambda model, rank: _fit(model, rank, batch_size=8 + rank), "batches of 8 rows"),
    "batches": (_own, "2 on rank 1, and more on the others"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_different_arguments_are_told_on_all_ranks(case):
    call, match = CASES[case]
    model = compiled(build())
    with put(model) as strategy, pytest.raises(ms.errors.CollectiveMismatchError, match=match):
        call(model, strategy.rank)


@pytest.mark.ranks(2)
def test_an_input_that_fails_on_one_rank_is_told_on_all():
    model = compiled(build())
    with put(model) as strategy:
        error, match = (OSError, "no such file") if strategy.rank else (RuntimeError, "rank 1")
        with pytest.raises(error, match=match):
            _fails(model, strategy.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_different_models_are_told_on_all_ranks(what):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        model = build()
        if what == "model" and strategy.rank:
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(beta_1=0.9 + 0.01 * strategy.rank) if what == "optimizer" else adam()
        with strategy.scope():
            ms.keras.distribute(compiled(model, optimizer))
        with pytest.raises(ms.errors.CollectiveMismatchError, match="kernel" if what == "model" else "beta_1"):
            fit(model, *rows(), epochs=1)


class Weighted(keras.losses.Loss):
    """A loss whose number no configuration shows."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def call(self, y_true, y_pred):
        return self.weight * keras.losses.mean_squared_error(y_true, y_pred)


def _scaled(scale):
    return lambda y_true, y_pred: scale * keras.losses.mean_squared_error(y_true, y_pred)


def _halved(y_true, y_pred):
    return keras.losses.mean_squared_error(y_true, y_pred) / 2


def _count(y_true, y_pred, above=0.5):
    return keras.ops.mean(keras.ops.cast(y_pred > above, "float32"))


# What the last rank compiles with beside "mse", what others do, and what the error has. Made in the test: metrics have variables.
COMPILED = {
    "loss": lambda: ({"loss": "mae"}, {"loss": "mse"}, "'mae'"),
    "setting": lambda: ({"loss": keras.losses.Huber(0.01)}, {"loss": keras.losses.Huber(0.02)}, "delta: 0.01"),
    "number": lambda: ({"loss": Weighted(2.0)}, {"loss": Weighted(3.0)}, r"weight=2\.0"),
    "closure": lambda: ({"loss": _scaled(2.0)}, {"loss": _scaled(3.0)}, r"scale=2\.0"),
    "function": lambda: ({"loss": _halved}, {"loss": _scaled(0.5)}, "_halved#"),
    "weights": lambda: ({"loss_weights": [0.5]}, {"loss_weights": [1.0]}, r"\[0\.5\]"),
    "metrics": lambda: ({"metrics": ["mae"]}, {"metrics": []}, r"metrics=\['mae'\]"),
    "metric": lambda: (
        {"metrics": [keras.metrics.BinaryAccuracy(threshold=0.2)]},
        {"metrics": [keras.metrics.BinaryAccuracy()]},
        "threshold=0.2",
    ),
    "partial": lambda: (
        {"weighted_metrics": [functools.partial(_count, above=0.1)]},
        {"weighted_metrics": [_count]},
        "above: 0.1",
    ),
    "eager": lambda: ({"run_eagerly": True}, {"run_eagerly": False}, "run_eagerly=True"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", COMPILED)
@pytest.mark.parametrize("function", ["fit", "evaluate", "train_on_batch"])
def test_models_that_are_compiled_with_something_else_are_told_on_all_ranks(function, what):
    odd, others, match = COMPILED[what]()
    model = build()
    with put(model) as strategy:
        model.compile(adam(), **{"loss": "mse", **(odd if strategy.rank else others)})
        x, y = rows(16)
        y = np.zeros((16, *model.output_shape[1:]), "float32")
        with pytest.raises(
            ms.errors.CollectiveMismatchError, match=rf"{function}: .*arguments of compile.*rank 1: .*{match}"
        ):
            getattr(model, function)(x, y)
        model.compile(adam(), **{"loss": "mse", **others})
        getattr(model, function)(x, y)


@pytest.mark.ranks(2)
def test_weights_that_a_callback_of_one_rank_changes_at_the_end_are_told():
    class Restores(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([0 * weights for weights in self.model.get_weights()])

    model = compiled(build())
    with (
        put(model) as strategy,
        pytest.raises(ms.errors.CollectiveMismatchError, match=r"the same weights after fit .* on rank 1: .*kernel"),
    ):
        fit(model, *rows(), epochs=1, callbacks=[Restores()] if strategy.rank else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_train_on_the_same_rows_are_warned(same, caplog):
    log.once.cache_clear()
    model = compiled(build())
    with put(model) as strategy:
        x, y = rows(24)
        part = slice(None) if same else slice(strategy.rank, None, strategy.size)
        inputs = [lambda: ((x[part][i : i + 6], y[part][i : i + 6]) for i in (0, 6))]
        remedies = ["strategy.size-th batch"]
        if BACKEND == "torch":
            import torch

            tensors = [torch.as_tensor(each[part]) for each in (x, y)]
            inputs.append(lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), 6))
            remedies.append("DistributedSampler")
        if BACKEND == "tensorflow":
            import tensorflow as tf

            inputs.append(lambda: tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(6))
            remedies.append("dataset.shard")
        for made, remedy in zip(inputs, remedies, strict=True):
            caplog.clear()
            model.evaluate(made(), verbose=0)  # does no harm
            assert not caplog.records
            model.fit(made(), epochs=2, verbose=0)
            found = [record.getMessage() for record in caplog.records if "same first batch" in record.getMessage()]
            assert len(found) == (same and strategy.rank == 0)
            assert all(remedy in text for text in found)
        caplog.clear()
        fit(model, x, y, epochs=1)
        assert not caplog.records


@pytest.mark.ranks(2)
def test_another_learning_rate_of_one_rank_is_told_on_all_ranks():
    model = compiled(build())
    with put(model) as strategy:
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * (1 + strategy.rank))
        with pytest.raises(ms.errors.CollectiveMismatchError, match="learning rate"):
            fit(model, *rows(), epochs=1, callbacks=[rate])


@pytest.mark.ranks(2)
def test_an_error_of_a_collective_in_a_graph_keeps_its_name():
    model = compiled(build())
    with put(model) as strategy:

        class Strays(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 1 and strategy.rank:
                    strategy.reduce("SUM", np.ones(3))

        with pytest.raises(ms.errors.CollectiveMismatchError):
            fit(model, *rows(), epochs=1, callbacks=[Strays()])


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND != "jax", reason="Keras looks for each variable there")
def test_an_optimizer_of_other_variables_is_named():
    model = compiled(build())
    with put(model):
        fit(model, *rows(), epochs=1)
        model.layers[0].trainable = False
        compiled(model, model.optimizer)
        with pytest.raises(
            ValueError, match=r"fit: optimizer: expected gradients of the \d+ variables .* got those of"
        ):
            fit(model, *rows(), epochs=1)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_masked_numbers_are_refused(method):
    x, y = rows()
    masked = np.ma.masked_array(x, mask=np.zeros(x.shape, bool))
    model = build()
    with put(model) as strategy, strategy.scope():
        compiled(model)
        getattr(model, method)(masked, y, verbose=0)
        masked.mask.flat[0] = True
        with pytest.raises(TypeError, match="expected no masked numbers, got 1 masked"):
            getattr(model, method)(masked, y, verbose=0)
