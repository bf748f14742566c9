"""What a distributed Keras model reads: the inputs that Keras takes, and how many steps a call does."""

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.keras_training import BACKEND, BATCH, EXACT, build, compiled, difference, fit, put, rows, weights  # noqa: E402

COUNT = 48  # rows: four batches, half of each of which is a rank's


pytestmark = pytest.mark.usefixtures("float64")


def own_rows(strategy):
    """The rows of this one of two ranks, in the order in which its batches have them."""
    x, y = rows(COUNT)
    half = BATCH // 2
    mine = [i for i in range(COUNT) if i % BATCH // half == strategy.rank]
    return x[mine], y[mine]


def loader(strategy):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.from_numpy, own_rows(strategy))), batch_size=BATCH // 2
    )


def tf_dataset(strategy):
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    return tf.data.Dataset.from_tensor_slices(own_rows(strategy)).batch(BATCH // 2)


@pytest.mark.ranks(2, 3)
def test_datasets_of_this_package_equal_one_process():
    dataset = ms.data.from_arrays(rows()).shuffle(seed=1).batch(BATCH)
    reference = compiled(build())
    batches = iter(dataset)
    for epoch in range(3):
        batches.restore({"epoch": epoch, "next": 0})
        parts = [(np.array(a), np.array(b)) for a, b in batches]
        fit(reference, np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts]), epochs=1)
    model = compiled(build())
    with put(model):
        history = model.fit(dataset, epochs=3, verbose=0, validation_data=dataset).history
        assert len(history["val_loss"]) == 3
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2)
def test_batches_of_each_ranks_own_count_alike():
    x, y = rows(48)
    reference = compiled(build())
    fit(reference, x, y, epochs=2)
    model = compiled(build())
    with put(model) as strategy:
        half = slice(6 * strategy.rank, 6 * strategy.rank + 6)

        def own():
            while True:
                for start in range(0, 48, BATCH):
                    yield x[start:][half], y[start:][half]

        model.fit(own(), epochs=2, steps_per_epoch=4, verbose=0)
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2)
def test_shuffled_rows_are_in_one_order_on_all_ranks():
    x, y = rows()
    found = []
    for shuffle in (True, True, "batch", False):
        model = compiled(build(), keras.optimizers.SGD(0.5))
        with put(model) as strategy:
            fit(model, x, y, epochs=1, shuffle=shuffle)
            found.append(weights(model))
            assert len(set(strategy.all_gather_object(repr(weights(model))))) == 1
    assert difference(found[0], found[1]) == 0  # by the seed of build
    assert difference(found[0], found[3]) > 1e-4
    assert difference(found[2], found[3]) < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [loader, tf_dataset])
def test_batches_of_a_loader_count_alike(make):
    x, y = rows(COUNT)
    reference = compiled(build())
    expected = fit(reference, x, y, epochs=2, validation_data=(x, y))
    model = compiled(build())
    with put(model) as strategy:
        data = make(strategy)
        history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
        assert history["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
        numbers = model.evaluate(data, verbose=0)
        assert numbers == pytest.approx(reference.evaluate(x, y, batch_size=BATCH, verbose=0), rel=1e-6)
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "torch", reason="Keras does one step in a call under torch")
def test_several_steps_in_a_call_equal_one_process():
    x, y = rows(60)
    reference = compiled(build())
    fit(reference, x, y, epochs=2)
    model = compiled(build(), steps_per_execution=2)  # of five steps: the last call does one
    with put(model):
        fit(model, x, y, epochs=2)
    assert difference(weights(model), weights(reference)) < EXACT


@pytest.mark.ranks(2)
def test_a_loader_that_is_shorter_on_one_rank_is_told_on_all():
    model = compiled(build())
    with put(model) as strategy:

        def own():
            for start in range(0, COUNT, BATCH * (1 + strategy.rank)):
                yield tuple(array[start : start + BATCH] for array in rows(COUNT))

        with pytest.raises(
            (ms.errors.CollectiveMismatchError, ms.errors.CollectiveTimeoutError, ms.errors.PeerExitError)
        ):
            model.fit(own(), epochs=1, verbose=0)


@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras's TensorBoard and its SavedModel are written by TensorFlow")
def test_what_tensorflow_writes_is_rank_0s(mpi_tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    model = compiled(build())
    with put(model) as strategy:
        mine = mpi_tmp_path / f"rank {strategy.rank}"
        fit(model, *rows(COUNT), epochs=1, callbacks=[keras.callbacks.TensorBoard(mine / "board")])
        model.export(mine / "exported", verbose=False)
        found = sorted(path.name for path in mine.iterdir()) if mine.exists() else []
        assert found == ([] if strategy.rank else ["board", "exported"])
        if not strategy.rank:
            import tensorflow as tf

            x, _ = rows(3)
            exported = tf.saved_model.load(mine / "exported")
            assert np.allclose(exported.serve(x), model(x), rtol=1e-9)
        strategy.barrier()
