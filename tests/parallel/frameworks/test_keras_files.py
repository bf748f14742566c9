"""What a distributed Keras model writes: by rank 0, and as plain Keras writes it; and how a fit is stopped and resumed."""

import pickle

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

from tests.harness.keras_training import Subclassed, build, compiled, difference, fit, put, rows, weights  # noqa: E402


@pytest.mark.ranks(2)
def test_files_are_written_by_rank_0_and_are_plain(mpi_tmp_path):
    model = compiled(build())
    with put(model) as strategy:
        mine = mpi_tmp_path / f"rank {strategy.rank}"
        mine.mkdir()
        log = keras.callbacks.CSVLogger(mine / "log.csv")
        fit(model, *rows(), epochs=2, callbacks=[keras.callbacks.ModelCheckpoint(mine / "best.keras"), log])
        model.save_weights(mine / "own.weights.h5")
        names = sorted(path.name for path in mine.iterdir())
        assert names == ([] if strategy.rank else ["best.keras", "log.csv", "own.weights.h5"])
        if not strategy.rank:
            loaded = keras.models.load_model(mine / "best.keras")
            assert type(loaded) is keras.Sequential
            assert type(loaded.optimizer).__mro__[1].__name__ != "DistributedOptimizer"
            assert difference(weights(loaded), weights(model)) == 0
            assert loaded.optimizer.iterations == model.optimizer.iterations
            assert b"mpistrat" not in (mine / "best.keras").read_bytes()
        strategy.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["functional", "subclassed"])
def test_configurations_copies_and_pickles_are_of_a_plain_model(kind):
    plain, model = compiled(build(kind)), compiled(build(kind))
    for each in (plain, model):
        each(rows(1)[0])
        each.optimizer.build(each.trainable_variables)
    with put(model):
        assert keras.saving.serialize_keras_object(model)["class_name"] == type(plain).__name__
        registered = keras.saving.serialize_keras_object(model)["registered_name"]
        assert registered == keras.saving.serialize_keras_object(plain)["registered_name"]
        ours, theirs = (keras.optimizers.serialize(each.optimizer) for each in (model, plain))
        assert {**ours, "config": 0} == {**theirs, "config": 0}
        for copy in (pickle.loads(pickle.dumps(model)), type(model).from_config(model.get_config())):
            assert type(copy) is type(plain)
        if kind == "functional":
            assert type(keras.models.clone_model(model)) is type(plain)
        assert isinstance(model, Subclassed) == (kind == "subclassed")


@pytest.mark.ranks(2)
def test_a_backup_that_rank_0_has_is_resumed_on_all_ranks(mpi_tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    x, y = rows()
    reference = compiled(build())
    fit(reference, x, y, epochs=4)
    for last in (False, True):
        model = compiled(build(seed=int(last)))
        with put(model) as strategy:
            folder = mpi_tmp_path / f"rank {strategy.rank}"
            callbacks = [keras.callbacks.BackupAndRestore(folder)]
            if last:
                fitted = model.fit(x, y, batch_size=12, shuffle=False, epochs=4, verbose=0, callbacks=callbacks)
                assert fitted.epoch == [2, 3]
                assert (
                    difference(weights(model), weights(reference)) < 1e-4
                )  # of small biases; a lost epoch changes them by 1e-1
                assert not strategy.rank or not folder.exists()
            else:
                with pytest.raises(InterruptedError):
                    fit(model, x, y, epochs=4, callbacks=[*callbacks, Fails()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["batch", "epoch"])
def test_a_stop_of_one_rank_is_one_of_all(when):
    class Clock(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if when == "batch" and batch == 1 and strategy.rank == 1:
                self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            if when == "epoch" and epoch == 1 and strategy.rank == 1:
                self.model.stop_training = True

    model = compiled(build())
    with put(model) as strategy:
        clock = Clock()
        history = fit(model, *rows(), epochs=4, callbacks=[clock])
        assert (len(history["loss"]), clock.steps) == ((1, 3) if when == "batch" else (2, 10))
        assert len(set(strategy.all_gather_object(repr((history, weights(model)))))) == 1


@pytest.mark.ranks(2)
def test_only_rank_0_shows(capsys):
    model = compiled(build())
    with put(model) as strategy:
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0, verbose=1)
        fit(model, *rows(), epochs=3, verbose=2, callbacks=[plateau])
        out = capsys.readouterr().out
        assert ("Epoch 3/3" in out, "reducing" in out) == (strategy.rank == 0, strategy.rank == 0)
