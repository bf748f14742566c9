"""What a batch weighs in updates of Keras models, and which optimizers are distributed: beside plain Keras in one process."""

import contextlib

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.keras_training import BACKEND, compiled, difference, fit, put, rows, weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")

CLOSE = 1e-6  # some of Keras's own operations compute in float32, whatever the dtype
ROWS, BATCH = 17, 5  # the parts of two ranks are 3 and 2 rows, then 1 and 1


def data():
    x, y = rows(ROWS)
    return x, np.eye(3)[y]


def build(kind=keras.Sequential):
    keras.utils.set_random_seed(0)
    return kind([keras.Input((8,)), keras.layers.Dense(4, "sigmoid"), keras.layers.Dense(3)])


def square(model, y, z):
    return keras.ops.mean(keras.ops.square(z - keras.ops.convert_to_tensor(np.array(y) if BACKEND == "jax" else y)))


def gradients(model, x, y):
    """The gradients of the mean over these rows, and the mean, outside of compiled functions."""
    if BACKEND == "torch":
        model.zero_grad()
        loss = square(model, y, model(keras.ops.convert_to_tensor(x), training=True))
        loss.backward()
        return [weight.value.grad for weight in model.trainable_weights], loss.detach()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = square(model, y, model(x, training=True))
        return tape.gradient(loss, model.trainable_weights), loss
    import jax

    def function(trained):
        z, _ = model.stateless_call(trained, [v.value for v in model.non_trainable_variables], np.array(x))
        return square(model, y, z)

    loss, found = jax.value_and_grad(function)([weight.value for weight in model.trainable_weights])
    return found, loss


def update(model, optimizer, x, y):
    found, loss = gradients(model, x, y)
    optimizer.apply(found, model.trainable_weights)
    return loss


def plain_batches(size=BATCH):
    x, y = data()
    return [(x[low : low + size], y[low : low + size]) for low in range(0, ROWS, size)]


def batches(strategy, size=BATCH):
    return strategy.distribute_dataset(ms.data.from_arrays(data()).batch(size))


def sgd():
    return keras.optimizers.SGD(0.3, momentum=0.9)


def reference(size=BATCH):
    model, optimizer = build(), sgd()
    for x, y in plain_batches(size):
        update(model, optimizer, x, y)
    return model


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("how", ["named", "run", "keywords", "train_on_batch"])
def test_a_loop_of_the_programs_own_weighs_a_batch_by_its_rows(how):
    model, optimizer = build(), sgd()
    with put(model) as strategy:
        model.compile(optimizer, "mse")
        model.fit(*data(), batch_size=ROWS, epochs=1, verbose=0)  # which gives it a weight of its own
        model.set_weights(weights(build()))
        for slot in optimizer.momentums:
            slot.assign(np.zeros(slot.shape))
        for x, y in batches(strategy):
            if how == "named":
                with strategy.batch(x):
                    update(model, optimizer, np.array(x), np.array(y))
            elif how == "run":
                strategy.run(lambda x, y: float(update(model, optimizer, np.array(x), np.array(y))), args=(x, y))
            elif how == "keywords":
                kwargs = {"batch": (x, y)}
                strategy.run(lambda batch: float(update(model, optimizer, *map(np.array, batch))), kwargs=kwargs)
            else:
                model.train_on_batch(x, y)
        assert len(set(strategy.all_gather_object(repr(weights(model))))) == 1
    assert difference(weights(model), weights(reference())) < CLOSE


@pytest.mark.ranks(3)
def test_a_rank_without_a_row_counts_nothing_in_single_steps():
    model = build()
    with put(model) as strategy:
        model.compile(sgd(), "mse")
        for x, y in batches(strategy, 2):
            model.train_on_batch(x, y)
        found = model.test_on_batch(x, y)
    expected = reference(2)
    expected.compile(sgd(), "mse")
    assert difference(weights(model), weights(expected)) < CLOSE
    assert found == pytest.approx(expected.test_on_batch(*plain_batches(2)[-1]), rel=CLOSE)


@pytest.mark.ranks(2)
def test_what_does_not_show_its_batch_is_an_error():
    model, optimizer = build(), sgd()
    with put(model) as strategy:
        model.compile(optimizer, "mse")
        update(model, optimizer, *plain_batches()[0])  # parts are equal as yet
        list(batches(strategy))
        for _ in range(2):
            with pytest.raises(ms.errors.BatchError, match=r"(?s)own.*strategy\.run.*strategy\.batch"):
                update(model, optimizer, *plain_batches()[0])
        with pytest.raises(ms.errors.BatchError, match="train_on_batch"):
            model.train_on_batch(*rows(9))
        with strategy.batch(None):  # whose rows are of no dataset
            update(model, optimizer, *plain_batches()[0])


class Model(keras.Model):
    """Whose train_step is a function of (model, batch)."""

    def __init__(self, step):
        super().__init__()
        self.net, self.step, self.count = build(), step, 0

    def call(self, x):
        return self.net(x)

    def train_step(self, *args):
        x, y = args[-1]
        loss = self.step(self, x, y)
        return {"mine": loss} if BACKEND != "jax" else ({"mine": loss}, args[0])


def trained(model, optimizer, **settings):
    model.compile(optimizer, run_eagerly=True, **settings)
    model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)


def plain_loop(step, epochs=2):
    model = build()
    for _ in range(epochs):
        for x, y in plain_batches():
            step(model, x, y)
    return model


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "jax", reason="whose train_step has the state of one optimizer")
@pytest.mark.parametrize(
    "how", ["attribute", "list", "tuple", "nested", "layer", "closure", "built", "scaled", "several"]
)
def test_an_optimizer_is_distributed_however_the_program_holds_it(how):
    def make():
        inner = keras.optimizers.Adam(0.01)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if how == "scaled" else inner

    optimizer, second = make(), keras.optimizers.SGD(0.1)

    def step(model, x, y):
        loss = update(model, optimizer, x, y)
        return update(model, second, x, y) if how == "several" else loss

    model = Model(step)
    model(data()[0])
    if how == "built":
        optimizer.build(model.trainable_weights)
    with put(model) as strategy:
        if how == "attribute":
            model.own = optimizer
        elif how == "list":
            model.own = [optimizer]
        elif how == "tuple":
            model.own = (optimizer,)
        elif how == "nested":
            model.own = {"a": [{"b": optimizer}]}
        elif how == "layer":
            model.net.own = optimizer
        trained(model, sgd())
        assert len(set(strategy.all_gather_object(repr(weights(model))))) == 1
    plain, other = make(), keras.optimizers.SGD(0.1)

    def plain_step(model, x, y):
        update(model, plain, x, y)
        if how == "several":
            update(model, other, x, y)

    assert difference(weights(model), weights(plain_loop(plain_step))) < CLOSE


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND != "jax", reason="others compile nothing, or all")
def test_an_optimizer_that_is_found_in_a_compiled_step_is_an_error():
    hidden = sgd()

    class Hides(Model):
        def train_step(self, state, data):
            trained = state[0]
            hidden.stateless_apply([variable.value for variable in hidden.variables], trained, trained)
            return {}, state

    model = Hides(None)
    model(data()[0])
    hidden.build(model.trainable_weights)
    with put(model):
        model.compile(sgd())
        with pytest.raises(ms.errors.ContextError, match="list, tuple or dict"):
            model.fit(*data(), batch_size=BATCH, verbose=0)


@pytest.mark.ranks(2)
def test_an_optimizer_of_another_model_stays_as_it_is():
    mine, other = build(), build()
    with put(mine) as strategy:
        mine.compile(sgd(), "mse")
        optimizer = sgd()
        x, y = plain_batches()[strategy.rank]
        update(other, optimizer, x, y)
        assert type(optimizer).__module__.startswith("keras.")
        assert len(set(strategy.all_gather_object(repr(weights(other))))) == 2


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "jax", reason="whose gradients are in no memory of the model")
def test_gradients_of_batches_of_different_weights_are_an_error():
    def adds(model, x, y):
        found, loss = gradients(model, x, y)
        before = getattr(model, "found", None)
        model.count += 1
        if before is not None:
            found = [a + b for a, b in zip(found, before, strict=True)]
        model.__dict__["found"] = found
        if model.count % 2 == 0:
            model.optimizer.apply(found, model.trainable_weights)
            model.__dict__["found"] = None
        return loss

    model = Model(adds)
    with put(model), pytest.raises(ms.errors.BatchError, match=r"gradients of 2 batches.*gradient_accumulation_steps"):
        trained(model, sgd())


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "jax", reason="whose train_step is a function of its batch")
@pytest.mark.parametrize("named", [False, True])
def test_another_batch_that_a_step_draws_must_be_named(named):
    others = {}

    def step(model, x, y):
        x, y = next(others[model])
        found, loss = gradients(model, np.array(x), np.array(y))
        with model.strategy.batch(x) if named else contextlib.nullcontext():
            model.optimizer.apply(found, model.trainable_weights)
        return loss

    model = Model(step)
    with put(model) as strategy:
        model.__dict__["strategy"] = strategy
        others[model] = (batch for _ in range(9) for batch in batches(strategy, 3))
        if not named:
            with pytest.raises(ms.errors.BatchError, match="drawn another batch"):
                trained(model, sgd())
            return
        trained(model, sgd())
    plain, optimizer = build(), sgd()
    for x, y in [*plain_batches(3), *plain_batches(3)][:8]:
        update(plain, optimizer, x, y)
    assert difference(weights(model), weights(plain)) < CLOSE


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "tensorflow", reason="its variables are of no other library")
def test_weights_that_part_are_an_error():
    class Assigns(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weight = self.model.trainable_weights[0]
            weight.assign(weight + 0.1 * strategy.rank)

    model = compiled(build())
    with (
        put(model) as strategy,
        pytest.raises(ms.errors.CollectiveMismatchError, match=r"same weights.*rank 1: .*kernel"),
    ):
        fit(model, *rows(), epochs=1, callbacks=[Assigns()])


class Counter(keras.layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
        return x


@pytest.mark.ranks(2, 3)
def test_state_that_depends_on_no_row_is_that_of_one_process():
    def make():
        keras.utils.set_random_seed(0)
        layers = [Counter(), keras.layers.SpectralNormalization(keras.layers.Dense(3))]
        return keras.Sequential([keras.Input((8,)), *layers])

    x, y = rows(9)
    expected = compiled(make(), keras.optimizers.SGD(0.1))
    fit(expected, x, y, batch_size=8, epochs=3)
    model = compiled(make(), keras.optimizers.SGD(0.1))
    with put(model):
        fit(model, x, y, batch_size=8, epochs=3)
    assert float(model.layers[0].steps) == float(expected.layers[0].steps) == 6
    assert difference(weights(model), weights(expected)) < CLOSE


@pytest.mark.ranks(2)
def test_state_that_depends_on_rows_is_put_back_without_a_row():
    """Rank 1 has no row of the last batch: its mean stays that of the batch before."""
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = compiled(keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(3)]), keras.optimizers.SGD(0.0))
    x, y = rows(9)
    with put(model):
        fit(model, x, y, batch_size=8, epochs=1)
    first, second = 0.5 * x[:4].mean(0), 0.5 * x[4:8].mean(0)
    expected = ((0.5 * first + 0.5 * x[8]) + second) / 2
    assert difference([keras.ops.convert_to_numpy(layer.moving_mean)], [expected]) < CLOSE


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("how", ["mask", "two", "weights"])
def test_losses_that_divide_by_masks_and_weights_equal_one_process(how):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, (21, 5))
    x[:, 0], x[5:9, 2:] = 1, 0
    y, weight = rng.integers(0, 3, (21, 5)), rng.random((21, 5)) if how == "weights" else None

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,), dtype="int32")
        hidden = keras.layers.Embedding(4, 4, mask_zero=True)(inputs)
        outputs = [keras.layers.Dense(3)(hidden) for _ in range(2 if how == "two" else 1)]
        reduction = "mean_with_sample_weight" if how == "weights" else "sum_over_batch_size"
        losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction) for _ in outputs]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5), losses)
        return model

    y = [y, y] if how == "two" else y
    expected, model = make(), make()
    history = fit(expected, x, y, epochs=2, batch_size=10, sample_weight=weight)
    with put(model):
        found = fit(model, x, y, epochs=2, batch_size=10, sample_weight=weight)
    assert difference(weights(model), weights(expected)) < CLOSE
    assert difference([found["loss"]], [history["loss"]]) < CLOSE


@pytest.mark.ranks(2)
def test_averages_of_weights_are_no_arrays_of_weights():
    model = compiled(build(), keras.optimizers.SGD(0.1, use_ema=True))
    with put(model):
        fit(model, *rows(12), epochs=1)
        x, y = rows(12)
        model.predict_on_batch(x)
        for _ in range(2):
            model.evaluate(x, y, verbose=0)
            model.predict(x, verbose=0)
        fit(model, x, y, epochs=1)
        model.train_on_batch(x, y)
        model.test_on_batch(x, y)


def stateful(rows_of_batch):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.LSTM(5, stateful=True), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input(batch_shape=(rows_of_batch, 4, 2)), *layers]))


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "torch", reason="where Keras changes the state in place, and backward fails")
def test_states_of_rows_stay_with_their_rows():
    x, y = rows(24)
    x = x.reshape(-1, 4, 2)
    expected = stateful(8)
    history = fit(expected, x, y, batch_size=8, epochs=3)
    model = stateful(4)
    with put(model):
        found = fit(model, x, y, batch_size=8, epochs=3)
        outputs = model.predict(x, batch_size=8, verbose=0)
    assert difference([found["loss"]], [history["loss"]]) < CLOSE
    assert difference([outputs], [expected.predict(x, batch_size=8, verbose=0)]) < CLOSE


@pytest.mark.ranks(2, 3)
def test_a_generator_of_handed_out_batches_weighs_them_by_their_rows():
    model = build()
    with put(model) as strategy:
        model.compile(sgd(), "mse")
        model.fit(((np.asarray(x), np.asarray(y)) for x, y in batches(strategy, 4)), verbose=0)  # 4, 4, 4, 4 and 1 rows
    assert difference(weights(model), weights(reference(4))) < CLOSE


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="older versions of Keras have none")
def test_an_optimizer_of_several_is_one():
    def make():
        model = build()
        of_kernels, of_biases = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
        optimizer = keras.optimizers.MultiOptimizer(lambda v: of_kernels if "kernel" in v.path else of_biases)
        model.compile(optimizer, "mse")
        return model

    x, y = data()
    expected, model = make(), make()
    fit(expected, x, y, epochs=2)
    with put(model):
        fit(model, x, y, epochs=2)
    assert difference(weights(model), weights(expected)) < CLOSE
