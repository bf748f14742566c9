"""The loop: the same results, decisions and rows under every strategy, on every layout."""

import itertools

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.linear_trainer import dataset, rows, trainer
from tests.harness.strategies import STRATEGIES, layout_for, made


def expected(epochs):
    """The losses of each epoch, after it, and the weights, by arithmetic."""
    x, y = rows()
    w, during, after, data = np.zeros(3), [], [], iter(dataset())
    for epoch in range(epochs):
        errors = []
        data.restore({"epoch": epoch, "next": 0})
        for a, b in data:
            rest = a @ w - b
            errors.extend(rest**2)
            w = w - 0.1 * 2 * rest @ a / len(b)
        during.append(np.mean(errors))
        after.append(np.mean((x @ w - y) ** 2))
    return during, after, w


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_evaluate_and_predict_are_those_of_all_rows(name):
    from mpi4py import MPI

    devices = layout_for(name, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    during, after, weights = expected(3)
    with made(name, devices) as strategy:
        work, w = trainer(strategy)
        data, held_out = (strategy.distribute_dataset(dataset(shuffle)) for shuffle in (True, False))
        history = work.fit(data, 3, validation_data=held_out)
        assert history == {"loss": pytest.approx(during, rel=1e-12), "val_loss": pytest.approx(after, rel=1e-12)}
        np.testing.assert_allclose(w.numpy(), weights, rtol=1e-12)
        assert work.evaluate(held_out) == {"loss": pytest.approx(after[-1], rel=1e-12)}
        np.testing.assert_allclose(work.predict(held_out), rows()[0] @ weights, rtol=1e-12)
        assert work.loop.step == 3 * 5


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_predictions_may_be_a_nest(devices):
    with ms.MirroredStrategy(devices) as strategy:
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(11.0)).batch(4))

        def predict(x):
            return {"same": x, "powers": (x**2, np.stack([x, x**3], 1))}

        found = ms.train.Trainer(strategy, None, None, predict).predict(data)
        x = np.arange(11.0)
        assert list(found) == ["same", "powers"]
        np.testing.assert_array_equal(found["same"], x)
        np.testing.assert_array_equal(found["powers"][0], x**2)
        np.testing.assert_array_equal(found["powers"][1], np.stack([x, x**3], 1))


@pytest.mark.ranks(2)
def test_all_ranks_stop_with_the_first_one_which_alone_writes(mpi_tmp_path):
    path = mpi_tmp_path / "log.csv"

    class Clock(ms.train.Callback):
        def on_epoch_end(self, loop, logs):
            loop.stop_training = loop.strategy.rank == 0 and loop.epoch == 1
            loop.optimizer.learning_rate = 0.1 / (loop.strategy.rank + 2)

    with ms.MultiWorkerMirroredStrategy() as strategy:
        work, _ = trainer(strategy, callbacks=[Clock(), ms.train.CSVLogger(path), ms.train.Progress()])
        history = work.fit(strategy.distribute_dataset(dataset()), 5)
        assert len(history["loss"]) == 2
        assert strategy.all_gather_object(work.loop.optimizer.learning_rate) == [0.05, 0.05]
        assert len(path.read_text().split()) == 3


@pytest.mark.ranks(2, 3)
def test_workers_of_servers_train_and_stop_together():
    with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
        work, _ = trainer(strategy, 0.05, callbacks=[ms.train.EarlyStopping("loss", min_delta=0.01)])
        history = work.fit(strategy.distribute_dataset(dataset()), 50)
        assert 1 < len(history["loss"]) < 50
        assert len(set(strategy.all_gather_object(repr(history)))) == 1
        with pytest.raises(ms.errors.ContextError, match="predict"):
            work.predict([])


@pytest.mark.ranks(1, 2)
def test_steps_of_an_epoch_may_be_counted():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        work, _ = trainer(strategy)
        work.fit(strategy.distribute_dataset(dataset().repeat()), 3, steps_per_epoch=4)
        assert work.loop.step == 12
        with pytest.raises(ValueError, match=r"steps_per_epoch=4 batches in each epoch, got 1 in epoch 1"):
            work.fit(strategy.distribute_dataset(dataset()), 3, steps_per_epoch=4)


@pytest.mark.ranks(1, 2)
def test_training_ends_with_the_step_that_is_told(mpi_tmp_path):
    def run(folder, ends):
        for end in ends:
            with ms.MultiWorkerMirroredStrategy() as strategy:
                checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / folder)
                work, w = trainer(strategy, checkpoints=checkpoints)
                work.fit(strategy.distribute_dataset(dataset().repeat()), 100, steps_per_epoch=4, max_steps=end)
                assert work.loop.step == end and checkpoints.steps()[-1] == end
                last = w.numpy()
        return last

    np.testing.assert_array_equal(run("parts", [2, 4, 11]), run("whole", [11]))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        work, _ = trainer(strategy)
        with pytest.raises(ValueError, match=r"steps_per_epoch: expected a number of steps, got None, and max_steps"):
            work.fit(strategy.distribute_dataset(dataset()), max_steps=3)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ends", [[8, 12], [6, 12], [4, 11]])
def test_data_without_an_end_or_a_position_go_on_behind_what_was_taken(mpi_tmp_path, ends):
    seen = []
    for end in ends:
        with ms.MultiWorkerMirroredStrategy() as strategy:
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path)
            work = ms.train.Trainer(strategy, seen.append, checkpoints=checkpoints)
            work.fit(itertools.count(), 100, steps_per_epoch=4, max_steps=end)
    assert seen == list(range(ends[-1]))


@pytest.mark.ranks(2, 3)
def test_workers_of_servers_read_on_in_the_next_epoch(mpi_tmp_path):
    def run(folder, ends):
        for end in ends:
            with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
                checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / folder)
                work, w = trainer(strategy, 0.05, checkpoints=checkpoints)
                data, held_out = strategy.distribute_dataset(dataset().repeat()), strategy.distribute_dataset(dataset())
                history = work.fit(data, 100, steps_per_epoch=4, max_steps=end, validation_data=held_out)
                assert len(history["loss"]) == -(-end // 4) and checkpoints.steps()[-1] == end
                last = strategy.broadcast_object(w.numpy() if strategy.rank == 0 else None)
        return last

    np.testing.assert_array_equal(run("parts", [4, 10]), run("whole", [10]))


@pytest.mark.ranks(3)
def test_workers_of_servers_stop_between_saves(mpi_tmp_path, monkeypatch):
    """One worker is told within its steps; the other one hears of it where all meet, in the middle of a counted epoch."""
    with ms.ParameterServerStrategy(num_ps=1) as strategy:
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, every_steps=2)
        work, _ = trainer(strategy, 0.05, checkpoints=checkpoints)
        told = strategy.rank == 0
        monkeypatch.setattr(type(strategy._stop_request), "__bool__", lambda self: told and work.loop.step >= 1)
        work.fit(strategy.distribute_dataset(dataset().repeat()), 2, steps_per_epoch=8)
        assert strategy.should_stop()
        assert checkpoints.steps() == [1]


@pytest.mark.ranks(1)
def test_what_is_missing_is_named():
    with ms.OneDeviceStrategy() as strategy:
        work = ms.train.Trainer(strategy, lambda x: None)
        data = strategy.distribute_dataset(ms.data.from_arrays(np.zeros(4)).batch(2))
        with pytest.raises(ValueError, match=r"Trainer.evaluate: test_step: expected a function, got None"):
            work.evaluate(data)
        with pytest.raises(ValueError, match=r"Trainer.predict: predict_step"):
            work.predict(data)
