"""Models of Keras, trained in one process of plain Keras and under a strategy, with whichever backend KERAS_BACKEND names."""

import contextlib
import os

if os.environ.get("KERAS_BACKEND") == "jax":
    # Compiling is most of what a small fit takes.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")

import keras
import numpy as np

import mpistrat as ms

BACKEND = keras.backend.backend()
ROWS, BATCH, EPOCHS = 49, 12, 11  # the last of five batches has one row: of several ranks one has it
KINDS = ("sequential", "functional", "subclassed")

# Under torch some of Keras's own operations compute in float32, whatever the dtype; under JAX the activation tanh does.
EXACT = 1e-6 if BACKEND == "torch" else 1e-9


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.hidden, self.out = keras.layers.Dense(16, "sigmoid"), keras.layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


def rows(count=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 8)), rng.integers(0, 3, count)


def build(kind="sequential", seed=0):
    keras.utils.set_random_seed(seed)
    if kind == "subclassed":
        return Subclassed()
    if kind == "functional":
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(16, "sigmoid")(inputs)
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "sigmoid"), keras.layers.Dense(3)])


def adam():
    return keras.optimizers.Adam(1e-2, global_clipnorm=0.5)


def compiled(model, optimizer=None, metrics=("accuracy",), **settings):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer or adam(), loss=loss, metrics=list(metrics), **settings)
    return model


def fit(model, x, y, epochs=EPOCHS, **settings):
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, epochs=epochs, **settings).history


@contextlib.contextmanager
def put(model):
    """A strategy, and the model in it."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            assert ms.keras.distribute(model) is model
        yield strategy


def weights(model):
    return [np.array(keras.ops.convert_to_numpy(weight)) for weight in model.weights]


def slots(model):
    """What the optimizer keeps between steps, but for its counters."""
    variables = [v for v in model.optimizer.variables if v.ndim]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def difference(a, b):
    """The largest difference of two lists of arrays, relative to the largest number of each."""
    pairs = zip(a, b, strict=True)
    return max((float(np.abs(np.subtract(x, y)).max() / max(np.abs(y).max(), 1e-30)) for x, y in pairs), default=0)


def history_difference(a, b):
    assert a.keys() == b.keys()
    return max(difference([np.array(a[name])], [np.array(b[name])]) for name in a)


class Custom(Subclassed):
    """With a step of its own, which knows neither Keras's losses nor its metrics."""

    def train_step(self, *args):
        if BACKEND == "jax":
            return self._jax_step(*args)
        x, y = args[0]
        if BACKEND == "torch":
            self.zero_grad()
            loss = self._loss(y, self(x, training=True))
            loss.backward()
            gradients = [weight.value.grad for weight in self.trainable_weights]
            import torch

            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self._loss(y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"mine": loss}

    def _loss(self, y, z):
        return keras.ops.mean(keras.ops.square(z - keras.ops.one_hot(y, 3, dtype=z.dtype)))

    def _jax_step(self, state, data):
        trained, others, slots, metrics = state
        x, y = data

        def loss(trained):
            z, new = self.stateless_call(trained, others, x)
            return self._loss(y, z), new

        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
        return {"mine": value}, (trained, others, slots, metrics)
