"""A handler of preemptions saves and ends at one step of all ranks, once or, with a grace period, twice."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.strategy import preemption
from mpistrat.train import preemption as handlers

MOMENT = 5


@pytest.fixture(autouse=True)
def _signals():
    yield
    preemption.release_signals()


def made():
    from mpi4py import MPI

    return ms.OneDeviceStrategy("cpu:0") if MPI.COMM_WORLD.size == 1 else ms.MultiWorkerMirroredStrategy()


def train(strategy, folder, config=None, until=1000, each_step=lambda step: None, use_run=True):
    """Count steps in a variable until it has so many; return the handler and the exit status."""
    with strategy.scope():
        counter = ms.Variable(0, name="counter", dtype=np.int64)
    handler = ms.train.PreemptionCheckpointHandler(ms.train.Checkpoints(strategy, folder, keep=0), config)
    assert int(counter.numpy()) == handler.total_run_calls

    def step(by):
        each_step(handler.total_run_calls + 1)
        counter.assign_add(by)
        return "result"

    try:
        with handler.watch_preemption_scope():
            while int(counter.numpy()) < until:
                if use_run:
                    assert handler.run(step, by=1) == "result"
                else:
                    step(1)
                    handler.save_checkpoint_if_preempted()
    except SystemExit as end:
        return handler, end.code
    return handler, None


def signal_the_last(step):
    from mpi4py import MPI

    if step == MOMENT and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)


def stop_step():
    """The step of all ranks at which one that is told in step 5 makes them stop."""
    from mpi4py import MPI

    return MOMENT if MPI.COMM_WORLD.size == 1 else MOMENT + 1


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("use_run", [True, False])
def test_saves_and_ends_and_goes_on(mpi_tmp_path, use_run):
    with made() as strategy:
        handler, status = train(strategy, mpi_tmp_path, each_step=signal_the_last, use_run=use_run)
        assert (handler.notes, status, handler.total_run_calls) == (None, 42, stop_step())
        assert ms.train.Checkpoints(strategy, mpi_tmp_path).steps() == [stop_step()]
    preemption.release_signals()
    with made() as strategy:
        handler, status = train(strategy, mpi_tmp_path, until=10, use_run=use_run)
        assert (handler.notes, status, handler.total_run_calls) == ({"step": stop_step()}, None, 10)


@pytest.mark.ranks(1, 2, 3)
def test_grace_period_by_the_clock_of_any_rank(mpi_tmp_path, monkeypatch):
    """Steps of a second on the last rank; the others' clocks stand still.

    Told at second n, with 20 to go, a step takes c / (c + 1) seconds after c steps: six of them before the end is the first c
    with c >= n + 20 - 6 c / (c + 1), c = n + 15 for n = 5 and 6.
    """
    from mpi4py import MPI

    clock = [0.0]
    monkeypatch.setattr(handlers, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def each_step(step):
        clock[0] += MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
        signal_the_last(step)

    ended = []
    config = ms.train.TerminationConfig(grace_period=20, exit_fn=lambda: ended.append(1))
    with made() as strategy:
        handler, status = train(strategy, mpi_tmp_path, config, until=40, each_step=each_step)
        assert ms.train.Checkpoints(strategy, mpi_tmp_path).steps() == [stop_step(), stop_step() + 15]
    assert (status, handler.total_run_calls, ended) == (None, 40, [1])  # an exit_fn that returns lets it go on


@pytest.mark.ranks(1, 2)
def test_functions_of_the_program(mpi_tmp_path):
    from mpi4py import MPI

    comm, saved = MPI.COMM_WORLD, []
    begun, last = time.monotonic(), comm.rank == comm.size - 1
    config = ms.train.TerminationConfig(
        termination_watcher_fn=lambda: last and time.monotonic() > begun + 0.5,
        exit_fn=lambda: saved.append("end"),
        save_fn=lambda *args, **kwargs: saved.append((args, kwargs)),
    )
    with made() as strategy:
        handler = ms.train.PreemptionCheckpointHandler(ms.train.Checkpoints(strategy, mpi_tmp_path), config)
        for _ in range(3000):
            time.sleep(0.01)
            handler.save_checkpoint_if_preempted({"a": 1}, b=2)
            if saved:
                break
        assert saved == [(({"a": 1},), {"b": 2}), "end"]
        assert len(set(comm.allgather(handler.total_run_calls))) == 1
        handler.save_checkpoint_if_preempted()
        assert len(saved) == 2
        assert ms.train.PreemptionWatcher().preemption_message == ("termination_watcher_fn" if last else None)


@pytest.mark.ranks(1)
def test_a_watcher_that_fails_is_told_at_the_next_step(tmp_path):
    config = ms.train.TerminationConfig(termination_watcher_fn=lambda: 1 / 0)
    with made() as strategy:
        handler = ms.train.PreemptionCheckpointHandler(ms.train.Checkpoints(strategy, tmp_path), config)
        with pytest.raises(ZeroDivisionError):
            for _ in range(1000):
                handler.run(time.sleep, 0.01)


@pytest.mark.ranks(2)
def test_not_under_parameter_servers(mpi_tmp_path):
    with ms.ParameterServerStrategy(num_ps=1) as strategy:
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path)
        with pytest.raises(ms.errors.ContextError, match="parameter servers"):
            ms.train.PreemptionCheckpointHandler(checkpoints)


@pytest.mark.ranks(1)
def test_takes_checkpoints(tmp_path):
    with pytest.raises(TypeError, match="TensorFlow's resolver"):
        ms.train.PreemptionCheckpointHandler(tmp_path)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "arguments", [{"termination_watcher_fn": 1}, {"exit_fn": 1}, {"save_fn": 1}, {"grace_period": -1}]
)
def test_config_arguments(arguments):
    with pytest.raises(ValueError, match=f"TerminationConfig: {next(iter(arguments))}"):
        ms.train.TerminationConfig(**arguments)


@pytest.mark.ranks(1)
def test_a_watcher_knows_the_signal():
    watcher = ms.train.PreemptionWatcher()
    assert watcher.preemption_message is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert watcher.preemption_message == "signal SIGTERM"
    watcher.block_until_worker_exit()
