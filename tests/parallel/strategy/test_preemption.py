"""All ranks stop at the same step, whichever rank was told, and whenever."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.strategy import preemption
from tests.harness.strategies import STRATEGIES, devices_of, layout_for

LONGEST = 400
ROWS = 150


def agreed(strategy, number: int) -> list[int]:
    """Every rank's number."""
    everybody = np.empty(strategy.size, np.int64)
    strategy.comm.Allgather(np.array([number], np.int64), everybody)
    return everybody.tolist()


def steps_until_told(strategy, tell) -> int:
    """Train until told to stop; return at which step this rank was."""
    with strategy.scope():
        variable = ms.Variable(np.zeros(8), name="v")
        optimizer = ms.optimizers.SGD(0.1)

    def step():
        variable.grad[...] = 1.0
        optimizer.apply_gradients([(variable.grad, variable)])

    for number in range(1, LONGEST):
        strategy.run(step)
        tell(number)
        if strategy.should_stop():
            return number
    return LONGEST


@pytest.fixture(autouse=True)
def _signals():
    yield
    preemption.release_signals()  # nobody is to remember


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_at_the_step_after_the_one_that_was_told(name):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    devices = layout_for(name, comm.size)
    if devices is None:
        return
    chance = np.random.default_rng(comm.size)
    for _ in range(3):
        victim, moment = int(chance.integers(comm.size)), int(chance.integers(1, 30))
        with STRATEGIES[name](devices_of(devices, comm.rank)) as strategy:

            def tell(number, victim=victim, moment=moment):
                if number == moment and comm.rank == victim:
                    os.kill(os.getpid(), signal.SIGUSR1)

            alone = comm.size == 1
            assert agreed(strategy, steps_until_told(strategy, tell)) == [moment if alone else moment + 1] * comm.size
        preemption.release_signals()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts(2, ranks_per_host=1)
def test_in_a_loop_that_does_nothing_together():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with ms.MultiWorkerMirroredStrategy() if comm.size > 1 else ms.OneDeviceStrategy("cpu:0") as strategy:
        for number in range(1, 50):
            if number == 5 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if strategy.should_stop():
                break
        assert agreed(strategy, number) == [5 if comm.size == 1 else 6] * comm.size


def by_timer(comm, trials: int, seed: int, make=ms.MultiWorkerMirroredStrategy) -> None:
    """A signal from outside, at any moment of a step, to one rank or several."""
    chance = np.random.default_rng([seed, comm.size])
    for trial in range(trials):
        victims = chance.permutation(comm.size)[: int(chance.integers(1, comm.size + 1))]
        delay, number = float(chance.uniform(0, 0.02)), preemption.SIGNALS[trial % 2]
        with make() as strategy:
            ms.catch_stop_signals()
            comm.Barrier()
            timer = threading.Timer(delay, os.kill, (os.getpid(), number))
            if comm.rank in victims:
                timer.start()
            stopped = steps_until_told(strategy, lambda _: time.sleep(1e-4))
            everybody = agreed(strategy, stopped)
            assert len(set(everybody)) == 1 and stopped < LONGEST, (trial, victims, delay, everybody)
            if comm.rank in victims:
                timer.join()
        comm.Barrier()
        preemption.release_signals()


@pytest.mark.ranks(2, 3, 4)
def test_at_any_moment():
    from mpi4py import MPI

    by_timer(MPI.COMM_WORLD, 8, seed=1)


@pytest.mark.ranks(3)
def test_without_shared_memory(monkeypatch):
    from mpi4py import MPI

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    by_timer(MPI.COMM_WORLD, 4, seed=2)


@pytest.mark.hosts(2, ranks_per_host=2)
def test_on_two_hosts():
    from mpi4py import MPI

    by_timer(MPI.COMM_WORLD, 6, seed=3)


@pytest.mark.ranks(2)
@pytest.mark.hosts(2, ranks_per_host=1)
def test_the_time_limit_of_one_rank_stops_all(monkeypatch):
    """As their clocks differ, one sees it first."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    end = np.array([time.time() + 0.3])
    comm.Bcast(end)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end[0] + 1000 * (comm.rank == 0)))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        stopped = steps_until_told(strategy, lambda _: time.sleep(0.005))
        assert time.time() >= end[0] - 0.3
        assert set(agreed(strategy, stopped)) == {stopped}
        assert stopped < LONGEST


@pytest.mark.ranks(2, 3)
def test_strategies_may_be_closed_with_an_open_question(monkeypatch):
    for shared in ("1", "0"):
        monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
        with ms.MultiWorkerMirroredStrategy() as strategy:
            assert not strategy.should_stop()


# parameter servers


def serve(strategy, tell, staleness=None) -> tuple[list[int], bool]:
    """Two passes; return the worker's steps of each, and whether it was told to stop."""

    data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(ROWS)).batch(1))
    with strategy.scope():
        variable = ms.Variable(np.zeros(4), name="v")
        optimizer = ms.optimizers.SGD(0.1)

    def step(rows):
        time.sleep(1e-3)
        optimizer.apply_gradients([(np.ones(4), variable)])

    steps = []
    for turn in range(2):
        steps.append(0)
        batches = iter(data)
        for rows in batches:
            strategy.run(step, args=(rows,))
            steps[-1] += 1
            tell(turn, steps[-1])
            if strategy.should_stop():
                break
        batches.close()
        told = strategy.should_stop()
        assert set(agreed(strategy, told)) == {told}
        if told:
            return steps, True
    return steps, False


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("victim", ["first worker", "last worker", "server", "all"])
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 0}, {"max_staleness": 2, "transport": "messages"}], ids=str)
def test_parameter_servers_agree_when_all_have_left_the_pass(victim, settings):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ms.catch_stop_signals()
    strategy = ms.ParameterServerStrategy(num_ps=1, **settings)
    with strategy:
        who = {"first worker": [0], "last worker": [comm.size - 2], "server": [comm.size - 1], "all": range(comm.size)}
        timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGUSR1))
        if comm.rank in who[victim]:
            timer.start()
        steps, told = serve(strategy, lambda turn, number: None)
        assert told
        assert sum(agreed(strategy, sum(steps))) < 2 * ROWS
        if timer.is_alive():
            timer.join()
    comm.Barrier()


@pytest.mark.ranks(3)
def test_parameter_servers_go_on_untold():

    with ms.ParameterServerStrategy(num_ps=1) as strategy:
        steps, told = serve(strategy, lambda turn, number: None)
        assert not told
        assert sum(agreed(strategy, sum(steps))) == 2 * ROWS


@pytest.mark.ranks(4)
def test_workers_in_sync_stop_at_the_same_step():
    from mpi4py import MPI

    def tell(turn, number):
        if number == 7 and MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    ms.catch_stop_signals()
    with ms.ParameterServerStrategy(num_ps=2, workers_in_sync=2) as strategy:
        steps, told = serve(strategy, tell)
        assert told
        assert agreed(strategy, steps[0]) == [8, 8, 0, 0]
