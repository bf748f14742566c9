"""Keras under a MeshStrategy: the numbers of one process; replicas divide batches, and the ranks of one compute alike."""

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from mpistrat.errors import CollectiveMismatchError  # noqa: E402
from tests.harness.keras_training import (  # noqa: E402
    BATCH,
    EXACT,
    Custom,
    build,
    compiled,
    difference,
    fit,
    history_difference,
    rows,
    slots,
    weights,
)

pytestmark = pytest.mark.usefixtures("float64")


def meshes():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    return [{"data": size // model, "model": model} for model in (1, 2, 4) if size % model == 0]


def distributed(strategy, model):
    with strategy.scope():
        return ms.keras.distribute(model)


@pytest.mark.ranks(2, 4, timeout=240)
def test_fit_evaluate_and_predict_equal_one_process(mpi_tmp_path):
    """With weights that differ between ranks before, a batch that not all replicas have a row of, and files."""
    x, y = rows()
    metrics = ("accuracy", "sparse_categorical_crossentropy")
    reference = compiled(build(), metrics=metrics)
    expected = fit(reference, x, y, epochs=3, validation_data=rows(7))
    numbers = reference.evaluate(x, y, batch_size=BATCH, verbose=0)
    for axes in meshes():
        with ms.MeshStrategy(axes=axes) as strategy:
            model = distributed(strategy, build(seed=strategy.rank))
            compiled(model, metrics=metrics)
            history = fit(model, x, y, epochs=3, validation_data=rows(7))
            assert difference(weights(model), weights(reference)) < EXACT
            assert difference(slots(model), slots(reference)) < 10 * EXACT
            assert history_difference(history, expected) < EXACT
            assert difference([model.evaluate(x, y, batch_size=BATCH, verbose=0)], [numbers]) < EXACT
            outputs = model.predict(x, batch_size=BATCH, verbose=0)
            assert difference([outputs], [reference.predict(x, verbose=0)]) < EXACT
            assert len(set(strategy.all_gather_object(repr((history, np.sum(outputs)))))) == 1
            model.save(mpi_tmp_path / "model.keras")
            strategy.barrier()
            loaded = keras.models.load_model(mpi_tmp_path / "model.keras")
            assert difference(weights(loaded), weights(reference)) < EXACT
            strategy.barrier()


@pytest.mark.ranks(4, timeout=240)
def test_datasets_and_a_step_of_its_own():
    x, y = rows(48)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(Custom())
        models[-1].compile(optimizer=keras.optimizers.SGD(0.1))
    fit(models[0], x, y, epochs=2)
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        model = distributed(strategy, models[1])
        model.fit(strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(BATCH)), epochs=2, verbose=0)
        assert difference(weights(model), weights(models[0])) < EXACT


@pytest.mark.ranks(4)
def test_random_numbers_are_those_of_replicas():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        keras.utils.set_random_seed(strategy.rank)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model = compiled(distributed(strategy, model), keras.optimizers.SGD(0.0), metrics=())
        fit(model, np.ones((8, 64)), np.zeros(8, int), epochs=1)
        drawn = np.array(keras.ops.convert_to_numpy(model.layers[0](np.ones((1, 64)), training=True))).tobytes()
        drawn = strategy.all_gather_object(drawn)
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


class StopsOn(keras.callbacks.Callback):
    """Stops on one rank only, after a batch."""

    def __init__(self, strategy, rank):
        super().__init__()
        self.chosen, self.steps = strategy.rank == rank, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.chosen and self.steps == 2:
            self.model.stop_training = True


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"model": 4}])
def test_a_wish_to_stop_on_one_rank_stops_all_at_the_same_step(axes):
    x, y = rows(12 * 20)
    with ms.MeshStrategy(axes=axes) as strategy:
        model = compiled(distributed(strategy, build()))
        stops = StopsOn(strategy, 3)
        fit(model, x, y, epochs=3, callbacks=[stops])
        taken = strategy.all_gather_object((stops.steps, int(model.optimizer.iterations)))
        assert len(set(taken)) == 1
        assert taken[0][0] < 10


@pytest.mark.ranks(4)
def test_batches_of_their_own_must_be_alike_in_a_replica():
    x, y = rows(48)
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        model = compiled(distributed(strategy, build()))
        part = slice(24 * strategy.mesh.at["data"], 24 * strategy.mesh.at["data"] + 24)
        model.train_on_batch(x[part], y[part])
        model.fit(((x[part], y[part]) for _ in range(2)), verbose=0)
        assert len(set(strategy.all_gather_object(repr(weights(model))))) == 1
        part = slice(12 * strategy.rank, 12 * strategy.rank + 12)
        with pytest.raises(
            CollectiveMismatchError, match=r"the same batches on the ranks of a replica.*strategy.mesh.at"
        ):
            model.train_on_batch(x[part], y[part])
        with pytest.raises(CollectiveMismatchError, match="the same batch 0 on the ranks of a replica"):
            model.fit(((x[part], y[part]) for _ in range(2)), verbose=0)


@pytest.mark.ranks(4)
def test_weights_that_differ_in_a_replica_are_told():
    class Drifts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weight = self.model.trainable_weights[0]
            weight.assign(weight + self.drift)

    x, y = rows(24)
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        model = compiled(distributed(strategy, build()), run_eagerly=True)
        drifts = Drifts()
        drifts.drift = strategy.rank % 2
        with pytest.raises(CollectiveMismatchError, match="the same weights after an epoch"):
            fit(model, x, y, epochs=1, callbacks=[drifts])
