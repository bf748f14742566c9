"""What wrong use of Keras models under strategies gets: an error on every rank, with the name and the remedy."""

import functools
import types

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from mpistrat.base import log  # noqa: E402
from tests.harness.keras_training import BACKEND, adam, build, compiled, fit, put, rows  # noqa: E402


@pytest.mark.ranks(1)
def test_what_cannot_be_distributed_is_refused():
    with pytest.raises(ms.errors.ContextError, match="scope"):
        ms.keras.distribute(build())
    model = compiled(build())
    with put(model) as strategy, strategy.scope():
        with pytest.raises(RuntimeError, match="distributed already"):
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
@pytest.mark.parametrize(
    "option", [{"local_steps": 3}, {"sharded_gradients": True}], ids=lambda option: next(iter(option))
)
def test_an_option_of_steps_that_models_cannot_have_is_named(option, monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")  # each rank is a node
    (name,) = option
    refused = pytest.raises(ms.errors.LayoutError, match=rf"got one with {name}=.*Leave {name} out")
    with ms.MultiWorkerMirroredStrategy(**option) as strategy, strategy.scope(), refused:
        ms.keras.distribute(build())


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


def _scaled_by_first(scale):
    def scaled(y_true, y_pred):
        return scale[0] * keras.losses.mean_squared_error(y_true, y_pred)

    return scaled


def _halved(y_true, y_pred):
    return keras.losses.mean_squared_error(y_true, y_pred) / 2


def _count(y_true, y_pred, above=0.5):
    return keras.ops.mean(keras.ops.cast(y_pred > above, "float32"))


SCALE, ARGS = 1.0, types.SimpleNamespace(scale=1.0)


def _by_global(y_true, y_pred):
    return SCALE * keras.losses.mean_squared_error(y_true, y_pred)


def _by_attribute(y_true, y_pred):
    return ARGS.scale * keras.losses.mean_squared_error(y_true, y_pred)


def _by_called(y_true, y_pred):
    return sum(_by_global(y_true, y_pred) for _ in range(1))  # a global of code inside


def _by_called_of_called(y_true, y_pred):
    return _by_called(y_true, y_pred)


def _by_first(y_true, y_pred):
    return keras.losses.mean_squared_error(y_true, y_pred) * SCALE[0]


def _reads(function, **values):
    """A function whose module has other values."""
    return types.FunctionType(function.__code__, {**function.__globals__, **values}, function.__name__)


def _pair(function, name, odd, others):
    """What ranks compile with that read different values under one name."""
    return tuple({"loss": _reads(function, **{name: value})} for value in (odd, others))


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
    "global": lambda: (*_pair(_by_global, "SCALE", 2.0, 3.0), r"SCALE=2\.0"),
    "global tuple": lambda: (*_pair(_by_first, "SCALE", (2.0, "a"), (3.0, "a")), r"SCALE=\[2\.0"),
    "global array": lambda: (*_pair(_by_first, "SCALE", np.full(2, 2.0), np.full(2, 3.0)), r"SCALE=array\(2,\)#"),
    "global tensor": lambda: (
        *_pair(_by_first, "SCALE", keras.ops.full((2,), 2.0), keras.ops.full((2,), 3.0)),
        r"SCALE=array\(2,\)#",
    ),
    "attribute": lambda: (
        *_pair(_by_attribute, "ARGS", types.SimpleNamespace(scale=2.0), types.SimpleNamespace(scale=3.0)),
        r"ARGS\.scale=2\.0",
    ),
    "called": lambda: (
        *_pair(_by_called, "_by_global", _reads(_by_global, SCALE=2.0), _reads(_by_global, SCALE=3.0)),
        r"SCALE=2\.0",
    ),
    "called of called": lambda: (
        *_pair(
            _by_called_of_called,
            "_by_called",
            *(_reads(_by_called, _by_global=_reads(_by_global, SCALE=scale)) for scale in (2.0, 3.0)),
        ),
        r"SCALE=2\.0",
    ),
    "closure of a tuple": lambda: (
        {"loss": _scaled_by_first((2.0,))},
        {"loss": _scaled_by_first((3.0,))},
        r"scale=\[2\.0",
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


RANK, QUIET, LINES = 0, True, []


def _prints(y_true, y_pred):
    if RANK == 0 or not QUIET:
        LINES.append("a step")
    return keras.losses.mean_squared_error(y_true, y_pred)


@pytest.mark.ranks(2)
def test_a_loss_may_read_the_rank_for_what_it_prints():
    model = build()
    with put(model) as strategy:
        rank = strategy.rank
        model.compile(adam(), loss=_reads(_prints, RANK=rank, QUIET=rank > 0, LINES=["a"] * rank))
        fit(model, rows(16)[0], np.zeros((16, *model.output_shape[1:]), "float32"), epochs=1)


class Own(keras.layers.Layer):
    """A layer without a configuration, as an argument of it is an object."""

    def __init__(self, scale, what):
        super().__init__()
        self.scale, self.what = scale, what

    def call(self, x):
        return self.scale * x


class Pull(keras.regularizers.Regularizer):
    """A regularizer without a configuration."""

    def __init__(self, strength):
        self.strength = strength

    def __call__(self, weights):
        return self.strength * keras.ops.sum(weights**2)


def _times(number):
    return keras.layers.Lambda(lambda x: number * x)


def _joined(first, second):
    """Layers with two ways to connect them."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(3)(inputs)
    both = hidden, keras.layers.Dense(3)(hidden)
    return keras.Model(inputs, keras.layers.Subtract()([both[first], both[second]]))


def _scaled_inside(number):
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.ops.clip(inputs, -number, number) * number))


L = keras.layers
# What a layer is on the last rank and on others, and what the error has.
LAYERS = {
    "rate": (lambda: L.Dropout(0.1), lambda: L.Dropout(0.4), "Dropout rate=0.1"),
    "activation": (lambda: L.Dense(3, "relu"), lambda: L.Dense(3, "tanh"), "Dense activation='relu'"),
    "momentum": (lambda: L.BatchNormalization(momentum=0.5), L.BatchNormalization, r"momentum=0\.5"),
    "regularizer": (lambda: L.Dense(3, kernel_regularizer="l1"), lambda: L.Dense(3, kernel_regularizer="l2"), "L1"),
    "own regularizer": (
        lambda: L.Dense(3, kernel_regularizer=Pull(0.1)),
        lambda: L.Dense(3, kernel_regularizer=Pull(0.2)),
        r"strength=0\.1",
    ),
    "constraint": (lambda: L.Dense(3, bias_constraint=keras.constraints.MaxNorm(5)), lambda: L.Dense(3), "max_value"),
    "dtype": (lambda: L.Dense(3, dtype="mixed_bfloat16"), lambda: L.Dense(3), "mixed_bfloat16"),
    "lambda": (lambda: _times(2.0), lambda: _times(3.0), r"number=2\.0"),
    "own": (lambda: Own(2.0, object()), lambda: Own(3.0, object()), r"Own scale=2\.0"),
    "inside": (
        lambda: keras.Sequential([L.Dense(3), L.Dropout(0.1)]),
        lambda: keras.Sequential([L.Dense(3), L.Dropout(0.4)]),
        "Dropout rate=0.1",
    ),
    "connections": (lambda: _joined(0, 1), lambda: _joined(1, 0), r"#1:0:0, \[?#2:0:0"),
    "operation": (lambda: _scaled_inside(2.0), lambda: _scaled_inside(3.0), r"2\.0"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", LAYERS)
@pytest.mark.parametrize("function", ["fit", "evaluate", "train_on_batch"])
def test_layers_with_other_settings_are_told_on_all_ranks(function, what):
    odd, others, match = LAYERS[what]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        last = strategy.rank == strategy.size - 1
        model = keras.Sequential([keras.Input((8,)), odd() if last else others(), L.Dense(3)])
        with strategy.scope():
            compiled(ms.keras.distribute(model))
        with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"{function}: .*same model.*rank 1: .*{match}"):
            getattr(model, function)(*rows(16))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["functional", "lazy", "subclassed"])
def test_layers_may_have_names_seeds_and_first_numbers_of_their_own(kind):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        rank = strategy.rank
        for _ in range(rank):
            build()  # Keras counts its layers
        layers = [L.Dense(16, kernel_initializer=keras.initializers.RandomNormal(seed=rank)), L.Dropout(0.1, seed=rank)]
        layers += [Own(2.0, object()), _times(2.0), L.Dense(3, name=f"out{rank}", activation=lambda x: x)]
        model = keras.Sequential(layers)
        if kind == "functional":
            inputs = keras.Input((8,))
            outputs = layers[0](inputs)
            for layer in layers[1:]:
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
        if kind == "subclassed":

            class Net(keras.Model):
                def __init__(self, model, talks):
                    super().__init__()
                    self.inner, self.talks = model, talks

                def call(self, x):
                    return self.inner(x)

            model = Net(model, talks=rank == 0)
        model(np.zeros((4 + rank, 8)))
        with strategy.scope():
            compiled(ms.keras.distribute(model))
        fit(model, *rows(), epochs=1)
        model.evaluate(*rows(), verbose=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("excluded", [{"var_names": ["bias"]}, {"var_list": [0]}])
def test_other_variables_without_weight_decay_are_told_on_all_ranks(excluded):
    model = build()
    with put(model) as strategy:
        optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.1)
        if strategy.rank:
            given = {name: [model.variables[x] if x == 0 else x for x in each] for name, each in excluded.items()}
            optimizer.exclude_from_weight_decay(**given)
        compiled(model, optimizer)
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"rank 1: .*no weight decay of variable [01]"):
            fit(model, *rows(), epochs=1)


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


@pytest.mark.ranks(2)
def test_a_metric_whose_variables_cannot_be_combined():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", aggregation="none", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return self.value + 0

    model = compiled(build(), metrics=[Largest()])
    with (
        put(model),
        pytest.raises(
            ValueError, match="largest/value: expected variables with an aggregation, got 'none'. Give add_var"
        ),
    ):
        fit(model, *rows(), epochs=1)
