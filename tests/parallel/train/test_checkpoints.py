"""A run that is interrupted and started again is the run that was not, on other ranks and under other strategies too."""

import json
import logging
import os
import random
import tracemalloc

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.interruptions import Interrupt, Stop
from tests.harness.linear_trainer import dataset, trainer
from tests.harness.strategies import STRATEGIES, layout_for, made


def run(strategy, folder, stop=None, epochs=4, callbacks=(), endless=False, **every):
    """History, weights and steps of a run with checkpoints in a folder, None without."""
    checkpoints = None if folder is None else ms.train.Checkpoints(strategy, folder, **every)
    ends = [] if stop is None else [Stop(stop)]
    work, w = trainer(strategy, callbacks=[*callbacks, *ends], checkpoints=checkpoints)
    data = strategy.distribute_dataset(dataset().repeat() if endless else dataset())
    history = work.fit(data, epochs, steps_per_epoch=5 if endless else None)
    return history, w.numpy(), work.loop.step


EVERY = {"epochs": {}, "steps": {"every_steps": 3}}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("every", EVERY)
def test_a_run_goes_on_where_it_was_saved(name, every, mpi_tmp_path):
    from mpi4py import MPI

    devices = layout_for(name, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    with made(name, devices) as strategy:
        expected = run(strategy, None)
    for stop in (8, 13):
        with made(name, devices) as strategy, pytest.raises(Interrupt):
            run(strategy, mpi_tmp_path, stop, **EVERY[every])
    with made(name, devices) as strategy:
        history, weights, steps = run(strategy, mpi_tmp_path, **EVERY[every])
        assert history == {"loss": pytest.approx(expected[0]["loss"], rel=1e-12)}
        np.testing.assert_array_equal(weights, expected[1])
        assert steps == expected[2] == 20
    with made(name, devices) as strategy:
        assert run(strategy, mpi_tmp_path, **EVERY[every])[2] == 20  # there is nothing left to do


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("endless", [False, True])
def test_decisions_go_on_too(mpi_tmp_path, endless):
    def callbacks():
        plateau = ms.train.ReduceLROnPlateau("loss", patience=1, min_delta=0.3, factor=0.5)
        return [plateau, ms.train.EarlyStopping("loss", min_delta=1e-2, patience=2), ms.train.CSVLogger(log)]

    def table():
        lines = [line.split(",") for line in log.read_text().split()]
        return [(int(epoch), pytest.approx(float(loss), rel=1e-12)) for epoch, loss in lines[1:]]

    log = mpi_tmp_path / "whole.csv"
    with ms.MultiWorkerMirroredStrategy() as strategy:
        expected = run(strategy, None, None, 30, callbacks(), endless)
    whole, log = table(), mpi_tmp_path / "log.csv"
    for stop in (3, 11, 22):
        with ms.MultiWorkerMirroredStrategy() as strategy, pytest.raises(Interrupt):
            run(strategy, mpi_tmp_path / "run", stop, 30, callbacks(), endless, every_steps=2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        found = run(strategy, mpi_tmp_path / "run", None, 30, callbacks(), endless, every_steps=2)
    assert 22 < found[2] == expected[2] < 150
    assert found[0] == {"loss": pytest.approx(expected[0]["loss"], rel=1e-12)}
    np.testing.assert_array_equal(found[1], expected[1])
    assert [(epoch, loss.expected) for epoch, loss in table()] == whole


@pytest.mark.ranks(2)
def test_the_rate_goes_on(mpi_tmp_path):
    def falling():
        return [ms.train.ReduceLROnPlateau("loss", patience=1, min_delta=1e9, factor=0.5)]

    with ms.MultiWorkerMirroredStrategy() as strategy:
        expected = run(strategy, None, None, 4, falling())
    with ms.MultiWorkerMirroredStrategy() as strategy, pytest.raises(Interrupt):
        run(strategy, mpi_tmp_path, 12, 4, falling())
    with ms.MultiWorkerMirroredStrategy() as strategy:
        np.testing.assert_array_equal(run(strategy, mpi_tmp_path, None, 4, falling())[1], expected[1])


@pytest.mark.ranks(2)
def test_another_strategy_goes_on(mpi_tmp_path):
    from mpi4py import MPI

    with ms.MultiWorkerMirroredStrategy() as strategy:
        expected = run(strategy, None)
    with ms.MultiWorkerMirroredStrategy() as strategy, pytest.raises(Interrupt):
        run(strategy, mpi_tmp_path, 8, every_steps=4)
    if not MPI.COMM_WORLD.rank:
        with ms.OneDeviceStrategy(comm=MPI.COMM_SELF) as strategy:
            history, weights, _ = run(strategy, mpi_tmp_path, epochs=3, every_steps=4)
        assert history["loss"] == pytest.approx(expected[0]["loss"][:3], rel=1e-12)
    MPI.COMM_WORLD.Barrier()
    with ms.CentralStorageStrategy() as strategy:
        history, weights, _ = run(strategy, mpi_tmp_path, every_steps=4)
    assert history["loss"] == pytest.approx(expected[0]["loss"], rel=1e-12)
    np.testing.assert_allclose(weights, expected[1], rtol=1e-12)


@pytest.mark.ranks(2, 3)
def test_servers_and_workers_go_on_after_an_epoch(mpi_tmp_path):
    def fit(epochs, folder):
        with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
            checkpoints = ms.train.Checkpoints(strategy, folder) if folder else None
            work, w = trainer(strategy, 0.02, checkpoints=checkpoints)
            history = work.fit(strategy.distribute_dataset(dataset()), epochs)
            return history, None if strategy.is_server else w.numpy()

    whole, weights = fit(4, None)
    fit(2, mpi_tmp_path)
    history, found = fit(4, mpi_tmp_path)
    assert history == {"loss": pytest.approx(whole["loss"], rel=1e-12)}
    if found is not None:
        np.testing.assert_allclose(found, weights, rtol=1e-12)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("period", [{"every_steps": 3}, {"every_seconds": 1e-6}])
def test_servers_and_workers_go_on_within_an_epoch(mpi_tmp_path, counted, period):
    def fit():
        with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, keep=0, **period)
            work, w = trainer(strategy, 0.02, checkpoints=checkpoints)
            data = dataset().repeat() if counted else dataset()
            history = work.fit(strategy.distribute_dataset(data), 3, steps_per_epoch=4 if counted else None)
            steps = strategy.broadcast_object(checkpoints.steps())
            strategy.barrier()
            return history, steps, None if strategy.is_server else w.numpy()

    history, steps, weights = fit()
    assert any(step % 4 for step in steps[:-1])
    for last in steps[1:-1]:
        for path in mpi_tmp_path.iterdir():
            if path.name > f"step-{last:010}.h5":
                path.unlink(missing_ok=True)
        found, again, w = fit()
        assert again == steps or "every_seconds" in period
        assert found == {"loss": pytest.approx(history["loss"], rel=1e-12)}
        if w is not None:
            np.testing.assert_allclose(w, weights, rtol=1e-12)


@pytest.mark.ranks(2)
def test_results_that_are_arrays_are_kept(mpi_tmp_path):
    def fit(epochs):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                found = ms.train.Recall([0.2, 0.6], name="found")
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path)
            work = ms.train.Trainer(
                strategy, lambda x: found.update_state(x > 4, x / 10), metrics=[found], checkpoints=checkpoints
            )
            return work.fit(strategy.distribute_dataset(ms.data.from_arrays(np.arange(10.0)).batch(4)), epochs)

    fit(1)
    assert np.asarray(fit(2)["found"]).tolist() == [[1.0, 0.6]] * 2


@pytest.mark.ranks(1, 2)
def test_where_workers_had_batches_of_their_own_others_take_equal_shares(mpi_tmp_path):
    readers = [
        {"taken": taken, "position": {"epoch": 0, "next": taken}} for taken in (3, 1, 0)
    ]  # two workers, a server
    notes = {
        "epoch": 0,
        "alone": True,
        "readers": readers,
        "history": {},
        "rate": 0.1,
        "stopped": False,
        "callbacks": [],
    }
    with ms.MultiWorkerMirroredStrategy() as strategy:
        trainer(strategy)
        ms.train.Checkpoints(strategy, mpi_tmp_path).save(3, notes)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        history, _, steps = run(strategy, mpi_tmp_path, epochs=2)
    assert len(history["loss"]) == 2
    assert steps == 3 + 1 + 5  # four of five batches were taken


@pytest.mark.ranks(1, 2)
def test_a_damaged_file_is_passed_over(mpi_tmp_path, caplog):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(0.0, name="w")
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, keep=2)
        assert checkpoints.restore_latest() is None
        for step in (1, 2, 3):
            w.assign(float(step))
            checkpoints.save(step, {"note": step})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        strategy.barrier()
        if not strategy.rank:
            path = checkpoints.path(3)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        strategy.barrier()
        with caplog.at_level(logging.WARNING):
            assert checkpoints.restore_latest() == {"note": 2, "step": 2}
        assert float(w.numpy()) == 2
        assert ("step 3 is skipped" in caplog.text) == (not strategy.rank)
        strategy.barrier()
        if not strategy.rank:
            checkpoints.path(2).write_text("")
        strategy.barrier()
        with pytest.raises(OSError, match="expected a file that can be read, got 2 that cannot"):
            checkpoints.restore_latest()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_file_that_cannot_be_written_does_not_end_training(mpi_tmp_path, caplog, asynchronous):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.Variable(0.0, name="w")
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / "run", every_steps=1, asynchronous=asynchronous)
        first = checkpoints.step(1)
        checkpoints.wait()
        if not strategy.rank:
            checkpoints.path(2).mkdir()  # a folder where the file would be
        strategy.barrier()
        with caplog.at_level(logging.WARNING):
            assert (checkpoints.step(2) is None) != asynchronous
            assert checkpoints.step(3) is not None
        told = [text for text in caplog.messages if "step-0000000002.h5: IsADirectoryError" in text]
        assert len(told) == (not strategy.rank)
        assert first.exists()
        if asynchronous:
            checkpoints.wait()
        strategy.barrier()
        if not strategy.rank:
            checkpoints.path(4).mkdir()
        strategy.barrier()
        if asynchronous:
            checkpoints.step(4)
            with pytest.raises(OSError, match="step-0000000004"):
                checkpoints.wait()


@pytest.mark.ranks(1, 2, 3, 4)
def test_what_is_saved_is_of_the_moment_of_the_call(mpi_tmp_path):
    """Training goes on beside, in memory that all ranks of a node share."""
    size = 1 << 18
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(size), name="w")
            optimizer = ms.optimizers.SGD(1.0, momentum=0.5)
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, keep=0)

        def step():
            w.grad[...] = 1.0 / strategy.num_replicas_in_sync
            optimizer.apply_gradients([(w.grad, w)])

        expected = {}
        for number in range(1, 7):
            strategy.run(step)
            expected[number] = float(w.numpy()[0]), float(optimizer.slots(w)["momentum"][-1])
            checkpoints.save(number)
        checkpoints.wait()
        for number, (value, slot) in expected.items():
            strategy.restore(checkpoints.path(number))
            assert np.array_equal(w.numpy(), np.full(size, value))
            assert np.array_equal(optimizer.slots(w)["momentum"], np.full(size, slot))


@pytest.mark.ranks(2, 3)
def test_an_error_of_one_rank_is_told_on_all(mpi_tmp_path, monkeypatch):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.arange(1 << 14, dtype=float), name="w")
        path = mpi_tmp_path / "x.h5"
        strategy.save(path, {"old": 1})
        last, pwrite, calls = strategy.size - 1, os.pwrite, []

        def full(descriptor, data, at):
            calls.append(at)
            if strategy.rank == last and len(calls) <= broken[0]:
                raise OSError(28, "No space left on device")
            return pwrite(descriptor, data, at)

        monkeypatch.setattr(os, "pwrite", full)
        broken = [0]
        for broken[0] in (1, 2):  # its part; its report, too
            calls.clear()
            with pytest.raises(OSError, match=f"rank {last}: OSError: .*No space left"):
                strategy.save(path)
            calls.clear()
            with pytest.raises(OSError, match=f"rank {last}: OSError: .*No space left"):
                strategy.begin_save(path).wait()
        monkeypatch.undo()
        assert strategy.restore(path) == {"old": 1}
        strategy.barrier()
        assert sorted(entry.name for entry in mpi_tmp_path.iterdir()) == ["x.h5"]
        w.assign(np.zeros(1 << 14))
        strategy.save(path)
        assert strategy.restore(path) == {}


@pytest.mark.ranks(1, 2, 3)
def test_files_are_as_far_apart_as_was_asked(mpi_tmp_path, monkeypatch):
    from mpistrat.train import checkpoints as module

    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, keep=0, every_seconds=10.0)
        told = 0
        broadcast = strategy.broadcast_object

        def counted(thing):
            nonlocal told
            told += 1
            return broadcast(thing)

        monkeypatch.setattr(strategy, "broadcast_object", counted)
        for step in range(1, 401):
            now += 0.1 if step < 200 else 0.5 + 0.1 * strategy.rank  # rank 0's clock counts
            checkpoints.step(step)
        checkpoints.wait()
        steps = checkpoints.steps()
        times = [0.1 * min(step, 199) + 0.5 * max(step - 199, 0) for step in [1, *steps]]
        assert all(9 <= gap <= 16 for gap in np.diff(times)), np.diff(times)
        assert len(steps) > 6
        assert told < 100
        assert json.loads(json.dumps(steps)) == sorted(set(steps))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("settings", [{"keep": -1}, {"every_steps": 0}, {"every_seconds": 0}])
def test_wrong_settings_are_named(settings, mpi_tmp_path):
    with pytest.raises(ValueError, match=f"Checkpoints: {next(iter(settings))}: expected"):
        ms.train.Checkpoints(ms.get_strategy(), mpi_tmp_path, **settings)


@pytest.mark.ranks(1, 2, 3)
def test_the_best_epochs_have_files(mpi_tmp_path):
    class Given(ms.train.Callback):
        """Puts results in the place of those that were measured."""

        def on_epoch_end(self, loop, logs):
            logs["score"] = [0.1, 0.5, 0.3, 0.7][loop.epoch]

    with ms.MultiWorkerMirroredStrategy() as strategy:
        best = ms.train.ModelCheckpoint(mpi_tmp_path / "{epoch}-{score:.1f}.h5", "score", True, "max")
        every = ms.train.ModelCheckpoint(mpi_tmp_path / "every-{epoch:02d}.h5")
        work, w = trainer(strategy, callbacks=[Given(), best, every])
        work.fit(strategy.distribute_dataset(dataset()), 4)
        last = w.numpy()
        strategy.barrier()
        names = sorted(entry.name for entry in mpi_tmp_path.iterdir())
        assert names == ["1-0.1.h5", "2-0.5.h5", "4-0.7.h5", *(f"every-0{epoch}.h5" for epoch in (1, 2, 3, 4))]
        assert best.best == 0.7
        notes = strategy.restore(mpi_tmp_path / "2-0.5.h5")
        assert notes["epoch"] == 1
        assert notes["logs"]["score"] == 0.5
        assert not np.array_equal(w.numpy(), last)
        strategy.restore(mpi_tmp_path / "4-0.7.h5")
        assert np.array_equal(w.numpy(), last)
        again = ms.train.ModelCheckpoint(mpi_tmp_path / "no.h5", "score", True, "max")
        again.load(best.state())
        again.on_epoch_end(work.loop, {"score": 0.6})
        with pytest.raises(ValueError, match="ModelCheckpoint: monitor: expected one of score, got 'val_loss'"):
            ms.train.ModelCheckpoint(mpi_tmp_path / "no.h5", save_best_only=True).on_epoch_end(
                work.loop, {"score": 1.0}
            )
        strategy.barrier()
        assert not (mpi_tmp_path / "no.h5").exists()


@pytest.mark.ranks(1, 2, 3)
def test_random_generators_go_on(mpi_tmp_path):
    """What each rank draws from the generators of Python and NumPy after a restart is what it had drawn without one."""
    import random

    def fit(epochs, folder):
        drawn = []

        def step(x):
            drawn.append((random.random(), random.gauss(0, 1), np.random.standard_normal()))  # noqa: NPY002

        with ms.MultiWorkerMirroredStrategy() as strategy:
            random.seed(strategy.rank)
            np.random.seed(strategy.rank)  # noqa: NPY002
            with strategy.scope():
                ms.Variable(0.0, name="w")
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / folder)
            work = ms.train.Trainer(strategy, step, checkpoints=checkpoints)
            work.fit(strategy.distribute_dataset(ms.data.from_arrays(np.arange(12.0)).batch(4)), epochs)
        return drawn

    whole = fit(3, "whole")
    assert len(whole) == 9
    assert fit(1, "parts") + fit(3, "parts") == whole


@pytest.mark.ranks(1, 2)
def test_the_first_save_takes_memory_that_is_there(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(1 << 20), name="w")  # 8 MiB
            optimizer = ms.optimizers.Adam(0.1)
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, every_steps=2)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(1 << 20), w)]))
        checkpoints.step(1)
        tracemalloc.start()
        checkpoints.step(2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        checkpoints.wait()
        assert checkpoints.steps() == [2]
        assert peak < (3 << 23) / strategy.size / 4  # modules that are imported late are in it


@pytest.mark.ranks(1, 2)
def test_a_loop_of_ones_own_goes_on(mpi_tmp_path):
    """Stopped within an epoch, and between two: the same sums, weights and random numbers as without a stop."""

    def run(folder, stops=(), epochs=3):
        taken = 0
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                w = ms.Variable(np.zeros(3), name="w", aggregation=ms.VariableAggregation.SUM)
            random.seed(7)
            losses = []
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / folder, every_steps=2)
            data = strategy.distribute_dataset(dataset())
            for x, _ in checkpoints.batches(data, epochs, losses=losses):
                number = strategy.broadcast_object(random.random())
                strategy.run(lambda x=x, number=number: w.assign_add(x.sum(0) * number))
                losses.append(float(w.numpy().sum()))
                taken += 1
                if len(losses) in stops:
                    checkpoints.wait()
                    break
            return losses, w.numpy(), taken

    whole = run("whole")
    run("parts", stops=[3])
    run("parts", epochs=2)
    losses, weights, taken = run("parts")
    assert (losses, taken) == (whole[0], len(losses) // 3)
    np.testing.assert_array_equal(weights, whole[1])
    assert run("parts")[2] == 0


@pytest.mark.ranks(2)
def test_batches_of_workers_are_refused(mpi_tmp_path):
    with ms.ParameterServerStrategy(num_ps=1) as strategy:
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path)
        with pytest.raises(ms.errors.ContextError, match="Checkpoints.batches: strategy: expected"):
            next(checkpoints.batches([], 1))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_ranks_in_different_folders_use_that_of_rank_0(mpi_tmp_path, monkeypatch, asynchronous):
    """Also when they go there in between. A relative path was another one on each rank."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    own = mpi_tmp_path / f"of-{rank}"
    own.mkdir()
    monkeypatch.chdir(mpi_tmp_path)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(5), name="w")
        checkpoints = ms.train.Checkpoints(strategy, "run", asynchronous=asynchronous, keep=0)
        loop, best = ms.train.Loop(strategy), ms.train.ModelCheckpoint("best.h5")
        monkeypatch.chdir(own)
        w.assign(np.full(5, 1.0))
        assert checkpoints.save(1) == mpi_tmp_path / "run" / "step-0000000001.h5"
        best.on_epoch_end(loop, {})
        elsewhere = ms.train.Checkpoints(strategy, "run", asynchronous=asynchronous, every_steps=1)
        w.assign(np.full(5, 2.0))
        assert elsewhere.step(2) == mpi_tmp_path / "of-0" / "run" / "step-0000000002.h5"
        elsewhere.wait()
        for one, step in ((checkpoints, 1), (elsewhere, 2), (ms.train.Checkpoints(strategy, "run"), 2)):
            w.assign(np.zeros(5))
            assert one.restore_latest()["step"] == step
            assert w.numpy().tolist() == [step] * 5
        assert sorted(path.name for path in mpi_tmp_path.iterdir() if path.name[:3] != "of-") == ["best.h5", "run"]
        assert [path.name for path in own.iterdir()] == ["run"] * (rank == 0)


class Position:
    """The position of a rank in its own data."""

    def __init__(self, rank):
        self.state = {"next": rank, "words": np.arange(rank + 1, dtype=np.int16), "kind": (rank, b"x")}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.ranks(1, 2, 3)
def test_objects_whose_states_differ_by_rank(mpi_tmp_path, caplog):
    from mpi4py import MPI

    def opened(strategy, name="data"):
        position = Position(strategy.rank)
        return position, ms.train.Checkpoints(strategy, mpi_tmp_path, objects_by_rank={name: position})

    with ms.MultiWorkerMirroredStrategy() as strategy:
        position, checkpoints = opened(strategy)
        checkpoints.save(3, {"epoch": 1})
        checkpoints.wait()
        rank, size = strategy.rank, strategy.size
    with ms.MultiWorkerMirroredStrategy() as strategy:
        position, checkpoints = opened(strategy)
        position.state = {}
        assert checkpoints.restore_latest() == {"epoch": 1, "step": 3}
        assert position.state["next"] == rank and position.state["kind"] == (rank, b"x")
        assert position.state["words"].dtype == np.int16 and position.state["words"].tolist() == list(range(rank + 1))
        other, checkpoints = opened(strategy, "other")
        checkpoints.restore_latest()
        assert other.state["next"] == rank
        assert rank or "step 3 has no state of object 'other'" in caplog.text
    if size > 1:
        comm = MPI.COMM_WORLD.Split(int(rank == size - 1), rank)
        if comm.size == size - 1 and rank < size - 1:
            with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
                position, checkpoints = opened(strategy)
                text = rf"expected states of {size} ranks, as in the file of step 3, got {size - 1} ranks. Start {size} ranks"
                with pytest.raises(ValueError, match=text):
                    checkpoints.restore_latest()
        comm.Free()


@pytest.mark.ranks(2)
def test_states_by_rank_that_cannot_be_saved_are_an_error_on_every_rank(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        position = Position(0)
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, objects_by_rank={"data": position})
        position.state = {"file": object()} if strategy.rank else {}
        with pytest.raises(Exception, match=r"objects_by_rank\['data'\]\.state_dict\(\)\['file'\].*got a object"):
            checkpoints.save(1)
        names = {f"data{strategy.rank}": position}
        position.state = {}
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, objects_by_rank=names)
        text = "expected objects of the same names on every rank, got rank 0: data0; rank 1: data1"
        with pytest.raises(ms.errors.CollectiveMismatchError, match=text):
            checkpoints.save(1)
