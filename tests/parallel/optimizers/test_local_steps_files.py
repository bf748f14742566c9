"""Files of training by local steps: what each node keeps is in them, and what saves by itself waits for outer steps."""

import secrets

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm import job_files
from mpistrat.strategy.checkpoint.checkpoint import Checkpoint
from tests.harness.local_steps import BUILDS, LAYOUTS, assert_same, gradient_of, make, opened, state_of, train
from tests.harness.process_groups import set_layout

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    set_layout(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize("writers", ["all", "rank 0"])
@pytest.mark.parametrize("build", BUILDS)
def test_a_run_from_a_file_goes_on_bit_for_bit(layout, build, writers, mpi_tmp_path, monkeypatch):
    """A file has the slots of each node, and the momentum of outer steps; it may be restored before or after the first step."""
    if writers != "all":
        monkeypatch.setattr(Checkpoint, "_writers", lambda self, beside: [0])
    calls = 2 if build == "accumulates" else 1
    ends = []
    path, again = mpi_tmp_path / "saved.h5", mpi_tmp_path / "again.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS[build])
        train(strategy, variables, optimizer, range(4 * calls))
        strategy.save(path)
        middle = state_of(variables)
        train(strategy, variables, optimizer, range(4 * calls, 7 * calls))
        ends.append(state_of(variables))
        strategy.restore(path)  # from within a round
        assert not strategy.nodes_differ
        assert_same(state_of(variables), middle)
        train(strategy, variables, optimizer, range(4 * calls, 7 * calls))
        ends.append(state_of(variables))
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS[build])
        strategy.restore(path)
        strategy.save(again)  # what waits for the first step is in it
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS[build])
        strategy.restore(again)
        assert optimizer.slots(variables[0]).keys() == set(optimizer.slot_names)
        train(strategy, variables, optimizer, range(4 * calls, 7 * calls))
        ends.append(state_of(variables))
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


@pytest.mark.parametrize("writers", ["all", "rank 0"])
def test_a_file_of_what_waits_for_an_optimizer_has_the_slots_of_each_node(layout, writers, mpi_tmp_path, monkeypatch):
    """Restored and saved by a program that makes its optimizer later."""
    if writers != "all":
        monkeypatch.setattr(Checkpoint, "_writers", lambda self, beside: [0])
    ends, path, again = [], mpi_tmp_path / "saved.h5", mpi_tmp_path / "again.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(4))
        strategy.save(path)
        train(strategy, variables, optimizer, range(4, 7))
        ends.append(state_of(variables))
    with opened(2) as strategy:
        rng = np.random.default_rng(0)
        with strategy.scope():
            alone = [ms.Variable(rng.normal(size=v.shape), name=v.name, dtype="float64") for v in variables]
        strategy.restore(path)
        strategy.save(again)
        assert len(alone) == len(variables)
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(again)
        train(strategy, variables, optimizer, range(4, 7))
        ends.append(state_of(variables))
    assert_same(ends[1], ends[0])


def test_files_go_to_any_strategy_and_back(layout, mpi_tmp_path):
    local, synchronous = mpi_tmp_path / "local.h5", mpi_tmp_path / "synchronous.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(2))
        strategy.save(local)
        weights, slots = state_of(variables), [optimizer.slots(v) for v in variables]
        train(strategy, variables, optimizer, range(2, 4))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(local)
        assert_same(state_of(variables), weights)
        for variable, expected in zip(variables, slots, strict=True):
            found = optimizer.slots(variable)
            assert found.keys() == {"momentum", "velocity"}
            assert_same(found.values(), expected.values())  # the first node's
        train(strategy, variables, optimizer, range(2))
        strategy.save(synchronous)
        weights = state_of(variables)
    with opened(2) as strategy:  # without momentum of outer steps, as at the first one
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(2))
        strategy.restore(synchronous)
        train(strategy, variables, optimizer, range(2, 4))
        found = state_of(variables)
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(synchronous)
        assert_same(state_of(variables), weights)
        train(strategy, variables, optimizer, range(2, 4))
        assert_same(state_of(variables), found)


def test_a_file_goes_to_other_numbers_of_nodes(layout, mpi_tmp_path):
    """More nodes than then take their slots in turn."""
    from mpi4py import MPI

    path = mpi_tmp_path / "saved.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(2))
        strategy.save(path)
        weights = state_of(variables)
    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == 0)
    with ms.MultiWorkerMirroredStrategy(comm=half, local_steps=2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(path)
        assert_same(state_of(variables), weights)
        train(strategy, variables, optimizer, range(2, 4))
        assert not strategy.nodes_differ
        assert np.isfinite(variables[0].numpy()).all()
    half.Free()


@pytest.mark.parametrize("build", ["sgd", "adam"])
def test_snapshots_are_taken_after_outer_steps(layout, build, monkeypatch):
    """They have the slots of each node, of nodes that are made up on one machine, too."""
    from mpi4py import MPI

    key = MPI.COMM_WORLD.bcast(secrets.token_hex(8))
    monkeypatch.setenv("MPISTRAT_JOB", key)
    try:
        with opened(2) as strategy:
            variables, optimizer = make(strategy, BUILDS[build])
            train(strategy, variables, optimizer, range(2))
            expected = state_of(variables)
            strategy.take_snapshot(2, {})
            train(strategy, variables, optimizer, range(2, 4))
            end = state_of(variables)
            snapshot = strategy.newest_snapshot()
            assert snapshot is not None
            strategy.restore_snapshot(snapshot)
            assert_same(state_of(variables), expected)
            train(strategy, variables, optimizer, range(2, 4))
            assert_same(state_of(variables), end)
            train(strategy, variables, optimizer, range(1))
            with pytest.raises(ms.errors.ContextError, match="take_snapshot"):
                strategy.take_snapshot(5, {})
            strategy.outer_step()
    finally:
        MPI.COMM_WORLD.Barrier()
        job_files.remove(key)


def test_checkpoints_wait_for_the_next_outer_step(layout, mpi_tmp_path):
    with opened(4) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, every_steps=3, keep=0)
        for number in range(10):
            train(strategy, variables, optimizer, [number])
            checkpoints.step(number + 1)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8]


def test_a_replay_ends_at_the_step_of_its_file_with_an_outer_step(layout, mpi_tmp_path, monkeypatch):
    with opened(4) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(6))
        strategy.outer_step()
        expected = state_of(variables)
    monkeypatch.setenv("MPISTRAT_UNTIL", "6")
    with opened(4) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path)
        with pytest.raises(SystemExit, match="42"):
            for number in range(8):
                train(strategy, variables, optimizer, [number])
                checkpoints.step(number + 1)
        assert checkpoints.steps() == [6]
        assert_same(state_of(variables), expected)


def test_the_trainer_ends_with_an_outer_step(layout, mpi_tmp_path):
    with opened(4) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        rows = ms.data.from_arrays(np.arange(3 * strategy.size)).batch(strategy.size)

        def step(x):
            gradients = [gradient_of(v.array, int(x[0]), 0, strategy.rank, strategy.size) for v in variables]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, keep=0)  # after each epoch of three steps
        data = strategy.distribute_dataset(rows)
        ms.train.Trainer(strategy, step, checkpoints=checkpoints).fit(data, epochs=3)
        assert not strategy.nodes_differ
        assert checkpoints.steps() == [4, 8, 9]


@pytest.mark.parametrize("every", [4, 5, 100])
def test_model_checkpoints_wait_for_the_next_outer_step(layout, every, mpi_tmp_path):
    """Epochs of three steps, of which few end at one: a file has the weights that all nodes had first after its epoch."""
    with opened(every) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        rows = ms.data.from_arrays(np.arange(3 * strategy.size)).batch(strategy.size)
        alike = {}  # by step

        def step(x):
            gradients = [gradient_of(v.array, int(x[0]), 0, strategy.rank, strategy.size) for v in variables]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        class Weights(ms.train.Callback):
            def on_step_end(self, loop):
                if not strategy.nodes_differ:
                    alike[loop.step] = state_of(variables)

        saves = ms.train.ModelCheckpoint(mpi_tmp_path / "{epoch}.h5")
        trainer = ms.train.Trainer(strategy, step, callbacks=[Weights(), saves])
        trainer.fit(strategy.distribute_dataset(rows), epochs=3)
        alike[9] = state_of(variables)
        for epoch in (1, 2, 3):
            assert strategy.restore(mpi_tmp_path / f"{epoch}.h5")["epoch"] == epoch - 1
            assert_same(state_of(variables), alike[min(at for at in alike if at >= 3 * epoch)])


def test_a_run_that_is_told_to_stop_ends_at_an_outer_step(layout, mpi_tmp_path, monkeypatch):
    """And goes on from there as if nobody had stopped it."""
    ends = []
    for told in (False, True):
        for _ in range(1 + told):
            with opened(4) as strategy:
                variables, optimizer = make(strategy, BUILDS["adam"])
                rows = ms.data.from_arrays(np.arange(3 * strategy.size)).batch(strategy.size)

                def step(x):
                    gradients = [gradient_of(v.array, int(x[0]), 0, strategy.rank, strategy.size) for v in variables]  # noqa: B023
                    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))  # noqa: B023

                checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / str(told))
                trainer = ms.train.Trainer(strategy, step, checkpoints=checkpoints)
                with monkeypatch.context() as patched:
                    if told and not checkpoints.steps():
                        patched.setattr(type(strategy), "should_stop", lambda self: trainer.loop.step >= 2)  # noqa: B023
                    trainer.fit(strategy.distribute_dataset(rows), epochs=4)
                ends.append((trainer.loop.step, state_of(variables)))
    whole, stopped, went_on = ends
    assert (whole[0], stopped[0], went_on[0]) == (12, 4, 12)
    assert_same(went_on[1], whole[1])
