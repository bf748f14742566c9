"""Keras under parameter servers, and with several devices of one rank."""

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import contextlib  # noqa: E402

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.keras_training import (  # noqa: E402
    BATCH,
    EXACT,
    build,
    compiled,
    difference,
    fit,
    history_difference,
    rows,
    slots,
    weights,
)

# TensorFlow's Adam has its betas in float32.
CLOSE = 3e-5 if keras.backend.backend() == "tensorflow" else EXACT


pytestmark = pytest.mark.usefixtures("float64")


@contextlib.contextmanager
def put(model, **settings):
    with ms.ParameterServerStrategy(**settings) as strategy:
        with strategy.scope():
            ms.keras.distribute(model)
        yield strategy


def adam(**settings):
    return keras.optimizers.Adam(1e-2, **settings)


# 49 rows in batches of 12 of all workers. One worker of 3 ranks' two has a batch more.


@pytest.mark.ranks(2, 3, 4)
def test_workers_that_wait_equal_one_process():
    x, y = rows()
    reference = compiled(build(), adam())
    expected = fit(reference, x, y, validation_data=rows(7), epochs=4)
    model = build()
    with put(model, max_staleness=0) as strategy:
        compiled(model, adam())
        history = fit(model, x, y, validation_data=rows(7), epochs=4, batch_size=BATCH // strategy.num_workers)
        assert difference(weights(model), weights(reference)) < CLOSE
        assert difference(slots(model), slots(reference)) < 10 * CLOSE
        assert history_difference(history, expected) < CLOSE
        numbers = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        assert difference([numbers], [reference.evaluate(x, y, batch_size=BATCH, verbose=0)]) < CLOSE
        outputs = model.predict(x, batch_size=BATCH, verbose=0)
        assert difference([outputs], [reference.predict(x, verbose=0)]) < CLOSE
        assert len(set(strategy.all_gather_object(repr((history, numbers, np.sum(outputs)))))) == 1


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: ms.MirroredStrategy(["cpu:0", "cpu:1"]),
        lambda: ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]),
        lambda: ms.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    ],
    ids=["mirrored", "multi_worker", "central"],
)
def test_several_devices_of_a_rank_equal_one_process(make):
    """A rank computes the rows of all its replicas at once."""
    x, y = rows()
    reference = compiled(build(), adam())
    expected = fit(reference, x, y, epochs=3)
    model, data = build(), ms.data.from_arrays((x, y)).batch(BATCH)
    with make() as strategy:
        with strategy.scope():
            ms.keras.distribute(compiled(model, adam()))
        history = model.fit(data, epochs=3, verbose=0).history
        assert difference(weights(model), weights(reference)) < EXACT
        assert history_difference(history, expected) < EXACT
        assert difference([model.predict(x, batch_size=BATCH, verbose=0)], [reference.predict(x, verbose=0)]) < EXACT


def recording(seen, strategy):
    def note(epoch, logs):
        seen.append((epoch, sorted(logs), strategy.all_gather_object(float(logs["loss"]))))

    return keras.callbacks.LambdaCallback(on_epoch_end=note)


@pytest.mark.ranks(3, 4)
def test_workers_that_do_not_wait_learn_and_meet_after_each_epoch():
    x, _ = rows(96)
    y = x[:, :3].argmax(1)
    model, seen = build(), []
    with put(model) as strategy:
        compiled(model, adam(global_clipnorm=1.0))
        stop = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.05, restore_best_weights=True)
        fit(model, x, y, epochs=40, validation_split=0.25, callbacks=[stop, recording(seen, strategy)], shuffle=True)
        assert len({len(losses) for _, _, losses in seen}) == 1
        assert all(len(set(losses)) == 1 for _, _, losses in seen)
        assert len(set(strategy.all_gather_object(len(seen)))) == 1
        assert seen[-1][2][0] < 0.7 * seen[0][2][0]
        assert seen[0][1] == ["accuracy", "loss", "val_accuracy", "val_loss"]
        assert len(set(strategy.all_gather_object(repr(weights(model))))) == 1
        steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        assert steps == len(seen) * 72 // BATCH  # of all workers


@pytest.mark.ranks(3)
def test_epochs_of_so_many_steps_go_on_in_the_dataset():
    x, y = rows(48)
    model = build()
    with put(model) as strategy:
        compiled(model, keras.optimizers.SGD(0.01))
        data = ms.data.from_arrays((x, y)).repeat().batch(BATCH)
        model.fit(data, epochs=3, steps_per_epoch=3, verbose=0)
        model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 5 * 3 * strategy.num_workers
        with strategy.scope():
            count = ms.Variable(0, name="count", aggregation=ms.VariableAggregation.SUM)
        for _ in strategy.distribute_dataset(ms.data.from_arrays(x).batch(8)):
            strategy.run(lambda: count.assign_add(1))
        strategy.barrier()
        assert strategy.is_server or count.numpy() == 6  # its pass is not mistaken for one of fit


@pytest.mark.ranks(2, 3)
def test_each_workers_own_batches():
    x, y = rows(48)
    model = build()
    with put(model) as strategy:
        compiled(model, keras.optimizers.RMSprop(0.01))

        def batches():
            for start in range(0, 12 * (1 + (strategy.worker_index or 0)), 6):  # unequally many
                yield x[start : start + 6], y[start : start + 6]

        for _ in range(2):
            model.fit(batches(), epochs=1, verbose=0)
        workers = strategy.num_workers
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2 * workers * (workers + 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("roles", [{"worker": 2, "ps": 1}, {"ps": [0], "worker": [1, 2]}])
def test_files_have_what_servers_keep_and_go_on_elsewhere(roles, mpi_tmp_path):
    x, y = rows(48)
    reference = compiled(build(), adam())
    fit(reference, x, y, epochs=4)
    path = str(mpi_tmp_path / "model.keras")
    model = compiled(build(), adam())
    with put(model, cluster_resolver=ms.cluster_resolver.MPIClusterResolver(jobs=roles), max_staleness=0) as strategy:
        fit(model, x, y, epochs=2, batch_size=BATCH // 2)
        model.save(path)
        strategy.barrier()
        plain = keras.models.load_model(path)
        fit(plain, x, y, epochs=2)
        assert difference(weights(plain), weights(reference)) < CLOSE
        resumed = keras.models.load_model(path)
        with strategy.scope():
            ms.keras.distribute(resumed)
        fit(resumed, x, y, epochs=2, batch_size=BATCH // 2)
        assert difference(weights(resumed), weights(reference)) < CLOSE
        assert difference(slots(resumed), slots(reference)) < 10 * CLOSE


@pytest.mark.ranks(3)
def test_what_callbacks_change_after_an_epoch_reaches_the_servers():
    x, y = rows(48)

    class Changes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.01 / (1 + epoch)
            for weight in self.model.trainable_weights:
                weight.assign(weight * 0.5)

    reference = compiled(build(), adam())
    fit(reference, x, y, epochs=3, callbacks=[Changes()])
    model = compiled(build(), adam())
    with put(model, max_staleness=0):
        fit(model, x, y, epochs=3, callbacks=[Changes()], batch_size=BATCH // 2)
    assert difference(weights(model), weights(reference)) < CLOSE


@pytest.mark.ranks(3)
def test_what_servers_cannot_do_is_refused_by_name():
    x, y = rows(24)
    for optimizer, match in [
        (keras.optimizers.Nadam(), "optimizer: expected SGD, Adam, .* or Lion .* got Nadam"),
        (keras.optimizers.Adam(use_ema=True), "without use_ema|Without use_ema"),
        (keras.optimizers.Adam(clipnorm=1.0), "no clipping, where servers sum .* got clipnorm"),
    ]:
        model = compiled(build(), optimizer)
        with put(model, max_staleness=0), pytest.raises(ValueError, match=match):
            fit(model, x, y, epochs=1)
    model = compiled(build(), adam())
    with put(model) as strategy:
        with pytest.raises(ms.errors.LayoutError, match="train_on_batch: expected a step of fit"):
            model.train_on_batch(x, y)
        fit(model, x, y, epochs=1)
        with pytest.raises(ms.errors.LayoutError, match="Optimizer.apply: expected a step of fit"):
            model.optimizer.apply([np.ones(weight.shape) for weight in model.trainable_weights])
        distributed = strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(6))
        with pytest.raises(ValueError, match="evaluate: x: expected the dataset itself"):
            model.evaluate(distributed, verbose=0)
        model.evaluate(ms.data.from_arrays((x, y)).batch(6), verbose=0)
    with ms.ParameterServerStrategy(devices=["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        if not strategy.is_server:
            with pytest.raises(ms.errors.LayoutError, match="Start one process for each device"):
                ms.keras.distribute(build())
