"""Keras under strategies: the numbers of one process of plain Keras, whatever the ranks and the backend."""

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

from tests.harness.keras_training import (  # noqa: E402
    BACKEND,
    BATCH,
    EXACT,
    KINDS,
    Custom,
    adam,
    build,
    compiled,
    difference,
    fit,
    history_difference,
    put,
    rows,
    slots,
    weights,
)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_fit_evaluate_and_predict_equal_one_process(kind):
    x, y = rows()
    held_out = rows(7)
    reference = compiled(build(kind))
    expected = fit(reference, x, y, validation_data=held_out)
    model = build(kind)
    with put(model) as strategy:
        if strategy.rank and kind != "subclassed":  # rank 0's count
            model.set_weights([weight + 1 for weight in weights(model)])
        compiled(model)
        history = fit(model, x, y, validation_data=held_out)
        assert difference(weights(model), weights(reference)) < EXACT
        assert history_difference(history, expected) < EXACT
        numbers = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        assert difference([numbers], [reference.evaluate(x, y, batch_size=BATCH, verbose=0)]) < EXACT
        outputs = model.predict(x, batch_size=BATCH, verbose=0)
        assert difference([outputs], [reference.predict(x, verbose=0)]) < EXACT
        assert len(set(strategy.all_gather_object(repr((history, numbers, np.sum(outputs)))))) == 1


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
    "amsgrad": lambda: keras.optimizers.Adam(1e-2, amsgrad=True, clipvalue=0.05, weight_decay=0.1),
    "decay": lambda: excluding(keras.optimizers.AdamW(1e-2, weight_decay=0.1)),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1),
    "lion": lambda: keras.optimizers.Lion(1e-2, weight_decay=0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0, clipnorm=0.1),
    "adamax": lambda: keras.optimizers.Adamax(1e-2),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.1, l1_regularization_strength=0.01, l2_shrinkage_regularization_strength=0.01
    ),
    "nadam": lambda: keras.optimizers.Nadam(1e-2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "average": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, clipnorm=0.1),
    "schedule": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "scale": lambda: keras.optimizers.LossScaleOptimizer(adam(), initial_scale=1024.0, dynamic_growth_steps=4),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_optimizers_act_on_the_sum(name):
    x, y = rows(48)
    reference = compiled(build(), OPTIMIZERS[name]())
    fit(reference, x, y, epochs=2)
    model = compiled(build(), OPTIMIZERS[name]())
    with put(model) as strategy:  # compiled before
        fit(model, x, y, epochs=2)
        assert len(set(strategy.all_gather_object(repr(slots(model))))) == 1
    assert difference(weights(model), weights(reference)) < EXACT
    assert difference(slots(model), slots(reference)) < 10 * EXACT
    ours, theirs = model.optimizer.get_config(), reference.optimizer.get_config()
    assert ours.keys() == theirs.keys()


@pytest.mark.ranks(2, 3)
def test_settings_and_weights_may_change_between_steps():
    x, y = rows()

    class Changes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.01 / (1 + epoch)
            self.model.optimizer.weight_decay = 0.1 if epoch % 2 else None
            self.model.optimizer.loss_scale_factor = 1.0 if epoch == 3 else None  # Keras updates then, on torch too

        def on_train_batch_end(self, batch, logs=None):  # on every rank
            for weight in self.model.trainable_weights:
                weight.assign(weight * 0.99)

    reference = compiled(build(), keras.optimizers.Adam())
    fit(reference, x, y, epochs=5, callbacks=[Changes()])
    model = compiled(build(), keras.optimizers.Adam())
    with put(model):
        fit(model, x, y, epochs=5, callbacks=[Changes()])
    if BACKEND == "torch":  # elsewhere a compiled step has the settings of its first call
        assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2, 3)
def test_a_frozen_layer_stays():
    x, y = rows()
    models = [build(), build()]
    for model in models:
        model.layers[0].trainable = False
        compiled(model)
    fit(models[0], x, y, epochs=2)
    with put(models[1]):
        fit(models[1], x, y, epochs=2)
    assert difference(weights(models[1]), weights(models[0])) < EXACT
    assert np.array_equal(weights(models[1])[0], weights(build())[0])


@pytest.mark.ranks(2)
def test_a_variable_without_a_gradient_stays():
    class Unused(Custom):
        def build(self, shape):
            self.extra = self.add_weight(shape=(3,), initializer="ones")
            super().build(shape)

    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(Unused())
    models[0].compile(optimizer=keras.optimizers.Adam(0.01, weight_decay=0.1))
    fit(models[0], *rows(), epochs=2)
    with put(models[1]):
        models[1].compile(optimizer=keras.optimizers.Adam(0.01, weight_decay=0.1))
        fit(models[1], *rows(), epochs=2)
    assert difference(weights(models[1]), weights(models[0])) < EXACT
    if BACKEND != "jax":  # where a gradient is zero, not missing
        assert keras.ops.convert_to_numpy(models[1].extra).tolist() == [1.0] * 3


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "tensorflow", reason="whose variables have memory of TensorFlow's")
def test_what_an_optimizer_keeps_lies_once_on_a_node_and_weights_do_not():
    model = compiled(build(), keras.optimizers.Adam())
    with put(model) as strategy:
        node = strategy.extended.process_group.node

        def is_shared(variable):
            value = variable.value
            return node.locate(np.asarray(value.detach() if BACKEND == "torch" else value)) is not None

        for _ in range(2):  # the second time with what is there already
            fit(model, *rows(), epochs=1)
            assert all(map(is_shared, model.optimizer._momentums))
            assert not any(map(is_shared, model.trainable_weights))


@pytest.mark.ranks(2, 3)
def test_callbacks_of_all_ranks_see_the_same_logs_and_decide_alike():
    x, y = rows(48)

    def callbacks():
        seen = []
        spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
        stop = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.02, restore_best_weights=True)
        return seen, [keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0), stop, spy]

    reference, (expected, plain) = compiled(build()), callbacks()
    fit(reference, x, y, validation_data=rows(12), callbacks=plain)
    model, (seen, ours) = compiled(build()), callbacks()
    with put(model) as strategy:
        fit(model, x, y, validation_data=rows(12), callbacks=ours)
        assert len(set(strategy.all_gather_object(repr(seen)))) == 1
    assert 1 < len(seen) == len(expected) < 11
    assert seen[-1]["learning_rate"] == expected[-1]["learning_rate"] < 0.01
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2, 3)
def test_metrics_are_those_of_all_rows():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(31, 8)), rng.integers(0, 2, (31, 1))
    names = [
        keras.metrics.AUC(num_thresholds=20),
        keras.metrics.F1Score(threshold=0.5),
        keras.metrics.RootMeanSquaredError(),
    ]

    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(loss="binary_crossentropy", metrics=[type(m).from_config(m.get_config()) for m in names])
        return model

    expected = make().evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
    model = make()
    with put(model):
        numbers = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
        for found in (numbers, model.get_metrics_result()):  # which sums anew
            assert history_difference(found, expected) < 1e-6


class Tracking(keras.Model):
    """Tracks a number of each batch, as models with a step of their own do."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, "sigmoid")
        self.tracker, self.constant = keras.metrics.Mean("exponential"), keras.metrics.Mean("constant")

    def call(self, x):
        return self.layer(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.tracker.update_state(keras.ops.mean(keras.ops.exp(y_pred)))
        self.constant.update_state(0.5)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def distance(y, z):
    return keras.ops.mean(keras.ops.abs(keras.ops.cast(y, z.dtype) - z))  # a number for the batch


@pytest.mark.ranks(2, 3)
def test_numbers_of_batches_count_by_their_rows():
    """What a function of `metrics`, or a model's own `Mean`, gives for a batch, is the mean of its rows."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(31, 8)), rng.integers(0, 2, (31, 1))

    def logs(model):
        model.compile(optimizer=adam(), loss="mse", metrics=[distance])
        trained = model.fit(x, y, batch_size=10, epochs=2, validation_data=(x[:23], y[:23]), verbose=0, shuffle=False)
        return trained.history | model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)

    keras.utils.set_random_seed(0)
    expected = logs(Tracking())
    assert {"exponential", "constant", "distance", "val_exponential", "val_distance"} <= set(expected)
    keras.utils.set_random_seed(0)
    model = Tracking()
    with put(model):
        assert history_difference(logs(model), expected) < 1e-6


@pytest.mark.ranks(2, 3)
def test_predict_returns_the_rows_in_order_on_every_rank():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {"same": inputs * 1.0, "sum": keras.ops.sum(inputs, axis=1)})
    x, _ = rows(11)
    with put(model):
        outputs = model.predict(x, batch_size=5, verbose=0)
    assert np.array_equal(outputs["same"], x)
    assert np.allclose(outputs["sum"], x.sum(1), rtol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", ["sample", "class"])
def test_weights_and_a_validation_split_equal_one_process(given):
    x, y = rows(48)
    weight = np.random.default_rng(3).uniform(size=len(y))
    more = {"sample_weight": weight} if given == "sample" else {"class_weight": {0: 0.5, 2: 2.0}}
    reference = compiled(build())
    expected = fit(reference, x, y, epochs=2, validation_split=0.2, **more)
    model = compiled(build())
    with put(model):
        history = fit(model, x, y, epochs=2, validation_split=0.2, **more)
    assert history_difference(history, expected) < EXACT
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2)
def test_masks_of_dropout_differ_between_ranks_and_repeat():
    def mask():
        keras.utils.set_random_seed(5)
        model = compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]))
        with put(model) as strategy:
            fit(model, *rows(12), epochs=1)
            own = keras.ops.convert_to_numpy(model.layers[0](np.ones((4, 8)), training=True)) > 0
            return strategy.all_gather_object(own.tolist())

    first = mask()
    assert first[0] != first[1]
    assert first == mask()


@pytest.mark.ranks(2, 3)
def test_running_statistics_become_means_over_the_ranks():
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(3)])
    compiled(model, keras.optimizers.SGD(0.0))
    x, y = rows(12)
    with put(model) as strategy:
        fit(model, x, y, epochs=1)
        parts = np.array_split(x, strategy.size)
        expected = 0.5 * np.mean([part.mean(0) for part in parts], axis=0)
        assert difference([layer.moving_mean], [expected]) < 1e-6  # Keras takes moments in float32
        assert len(set(strategy.all_gather_object(repr(weights(model))))) == 1


@pytest.mark.ranks(2)
def test_a_step_of_the_users_own_equals_one_process():
    x, y = rows()
    keras.utils.set_random_seed(0)
    reference = Custom()
    reference.compile(optimizer=adam())
    fit(reference, x, y, epochs=2)
    keras.utils.set_random_seed(0)
    model = Custom()
    with put(model) as strategy:
        model.compile(optimizer=adam())
        history = fit(model, x, y, epochs=2)
        assert len(set(strategy.all_gather_object(repr(history)))) == 1
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(1, 2)
def test_rows_of_a_table_that_occur_twice_count_once():
    """TensorFlow's gradients of tables are sparse, of which Keras squares each occurrence of a row."""
    x, y = np.random.default_rng(0).integers(0, 4, (49, 5)), rows()[1]
    keras.utils.set_random_seed(0)
    pooled = [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), keras.layers.Embedding(4, 6), *pooled])
    layers = [keras.layers.Dense(6, use_bias=False), keras.layers.Dense(3)]
    reference = keras.Sequential([keras.Input((4,)), *layers])  # of how often each row occurs
    reference.set_weights(weights(model))
    fit(compiled(reference), np.eye(4)[x].mean(axis=1), y)
    with put(model):
        fit(compiled(model), x, y)
    assert difference(weights(model), weights(reference)) < 1e-6


@pytest.mark.ranks(2)
def test_single_steps_equal_one_process():
    x, y = rows(12)
    reference, model = compiled(build()), compiled(build())
    with put(model) as strategy:
        mine = slice(6 * strategy.rank, 6 * strategy.rank + 6)
        for _ in range(2):
            expected = reference.train_on_batch(x, y, return_dict=True)
            assert model.train_on_batch(x[mine], y[mine], return_dict=True) == pytest.approx(expected, rel=EXACT)
        assert model.test_on_batch(x[mine], y[mine]) == pytest.approx(reference.test_on_batch(x, y), rel=EXACT)
    assert difference(weights(model), weights(reference)) < EXACT
