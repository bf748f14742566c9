"""A linear model, its rows, and a trainer of it."""

import numpy as np

import mpistrat as ms

ROWS, BATCH = 50, 12  # the last batch has 2 rows: some replicas none


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3))
    return x, x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=ROWS)


def dataset(shuffle=True):
    every = ms.data.from_arrays(rows())
    return (every.shuffle(seed=2) if shuffle else every).batch(BATCH)


def trainer(strategy, rate=0.1, **settings):
    """Of a linear model: its trainer and its weights."""
    with strategy.scope():
        w = ms.Variable(np.zeros(3), name="w")
        optimizer = ms.optimizers.SGD(rate)
        loss = ms.train.MeanSquaredError("loss")

    def test_step(x, y):
        loss.update_state(y, x @ w.array)

    def train_step(x, y):
        test_step(x, y)
        gradient = 2 * (x @ w.array - y) @ x / max(ms.global_batch_size(), 1)
        optimizer.apply_gradients([(gradient, w)])

    made = ms.train.Trainer(
        strategy, train_step, test_step, lambda x, y: x @ w.array, optimizer=optimizer, metrics=[loss], **settings
    )
    return made, w


def model_fn(features, labels, mode, params):
    """The same model, for an Estimator."""
    assert features.shape[1:] == (3,) and labels.shape[1:] == ()
    w = ms.Variable(np.zeros(3), name="w")
    optimizer = ms.optimizers.SGD(params.get("rate", 0.1))
    loss = ms.train.MeanSquaredError("loss")

    def test_step(x, y):
        loss.update_state(y, x @ w.array)

    def train_step(x, y):
        test_step(x, y)
        optimizer.apply_gradients([(2 * (x @ w.array - y) @ x / max(ms.global_batch_size(), 1), w)])

    return ms.estimator.EstimatorSpec(
        mode, train_step, test_step, lambda x, y: x @ w.array, optimizer=optimizer, metrics=[loss]
    )


def held_out():
    """An input function: all rows in their order."""
    return dataset(shuffle=False)
