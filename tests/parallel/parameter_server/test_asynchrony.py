"""How asynchronous workers may be: bounds on staleness, groups that step together, and what a worker may push."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ClusterError
from tests.harness.files import wait_for_files
from tests.harness.parameter_server_strategies import made


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("transport", "bound", "servers", "pushes"),  # of the first three each two together
    [
        ("shared_window", 2, 1, "gradients"),
        ("shared_window", 1, 2, "two optimizers"),
        ("one_sided", 1, 1, "gradients"),
        ("one_sided", 2, 2, "writes"),
        ("messages", 2, 1, "writes"),
        ("messages", 1, 2, "gradients"),
    ],
)
def test_no_worker_gets_further_ahead_than_the_bound(transport, bound, servers, pushes, mpi_tmp_path):
    """And they use it: in its first step the slowest waits until the others are so far."""
    steps = 12
    with made(num_ps=servers, max_staleness=bound, transport=transport) as strategy:
        variables = [ms.Variable(np.zeros(3), aggregation=ms.VariableAggregation.SUM) for _ in range(servers)]
        optimizer, other = ms.optimizers.SGD(1.0), ms.optimizers.SGD(0.0)
        begun, finishing = [], []

        def step(batch):
            begun.append(time.monotonic())
            if len(begun) == bound + 1:
                (mpi_tmp_path / f"as far ahead as it may {strategy.rank}").touch()
            if strategy.worker_index == 0:
                if len(begun) == 1:
                    wait_for_files(mpi_tmp_path, strategy.num_workers - 1)
                time.sleep(0.02)
            finishing.append(time.monotonic())
            for v in variables:
                v.grad[...] = 1
                if pushes == "writes":
                    v.assign_sub(np.ones(3))
            if pushes != "writes":
                optimizer.apply_gradients([(v.grad, v) for v in variables])
            if pushes == "two optimizers":
                other.apply_gradients([(v.grad, v) for v in variables])

        batches = ms.data.from_arrays(np.arange(steps * strategy.num_workers)).batch(1)
        for _ in range(2):  # the bound holds in a second pass as well
            for batch in strategy.distribute_dataset(batches):
                strategy.run(step, args=(batch,))
        told = [log for log in strategy.comm.allgather((begun, finishing)) if log[0]]
        ahead = []
        for begun_here, _ in told:
            for number, moment in enumerate(begun_here):
                # A step is finished somewhat after this moment, so that others count too many, never too few.
                slowest = min(sum(end <= moment for end in finished) for _, finished in told)
                ahead.append(number - slowest)
        assert max(ahead) <= bound
        assert max(ahead) == bound
        if not strategy.is_server:
            assert [v.numpy().tolist() for v in variables] == [[-2.0 * steps * strategy.num_workers] * 3] * servers
        strategy.comm.Barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("transport", "bound"), [("shared_window", 0), ("shared_window", 1), ("one_sided", 1), ("messages", 0)]
)
def test_a_worker_that_waits_for_a_slow_one_sleeps(transport, bound):
    """That takes a few hundredths of a core; one that spins takes all of it, or half where two share it."""
    with made(max_staleness=bound, transport=transport) as strategy:
        v = ms.Variable(np.zeros(3))
        optimizer = ms.optimizers.SGD(1.0)

        def step():
            if strategy.worker_index == 0:
                time.sleep(0.2)
            optimizer.apply_gradients([(np.ones(3), v)])

        if strategy.is_server:
            strategy.serve()
        else:
            start, used = time.monotonic(), time.process_time()
            for _ in range(
                6
            ):  # the last begins when the slow worker has made four, of which two may have been before `start`
                strategy.run(step)
            waited, used = time.monotonic() - start, time.process_time() - used
            strategy.leave()
            assert waited > 0.3
            assert used < 0.25 * waited
        strategy.comm.Barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", ["", "messages"])
def test_in_step_servers_wait_for_workers_that_have_no_gradient_there(transport):
    """The first worker's first step concerns one server only, the other's both."""
    with ms.ParameterServerStrategy(num_ps=2, max_staleness=0, transport=transport) as strategy, strategy.scope():
        v, w = ms.Variable(np.zeros(2), name="v"), ms.Variable(np.zeros(2), name="w")
        optimizer = ms.optimizers.SGD(1.0)
        for number in range(1, 4) if not strategy.is_server else ():
            only_one = number == 1 and strategy.worker_index == 0

            def step(number=number, only_one=only_one):
                share = 10.0**number * (1 + strategy.worker_index)
                optimizer.apply_gradients([(np.full(2, share), v), (None if only_one else np.full(2, share), w)])

            strategy.run(step)
            if number == 2:
                assert v.numpy().tolist() == [-30 - 300] * 2
                assert w.numpy().tolist() == [-20 - 300] * 2
        if not strategy.is_server:
            strategy.flush()
            assert w.numpy().tolist() == [-20 - 300 - 3000] * 2
        strategy.comm.Barrier()
        assert optimizer._core.all_iterations() == 3


@pytest.mark.ranks(3, 4)
def test_without_a_bound_a_fast_worker_runs_ahead():
    with ms.ParameterServerStrategy() as strategy, strategy.scope():
        v = ms.Variable(np.zeros(3))
        optimizer = ms.optimizers.SGD(1.0)
        ends = []

        def step():
            if strategy.worker_index == 0:
                time.sleep(0.05)
            v.grad[...] = 1
            optimizer.apply_gradients([(v.grad, v)])
            ends.append(time.monotonic())

        if strategy.is_server:
            strategy.serve()
        else:
            for _ in range(10):
                strategy.run(step)
            strategy.leave()
        told = [log for log in strategy.comm.allgather(ends) if log]
        assert sum(end <= told[1][-1] for end in told[0]) < 8


@pytest.mark.ranks(3)
def test_a_worker_that_has_ended_holds_nobody_up():
    with ms.ParameterServerStrategy(max_staleness=1) as strategy, strategy.scope():
        v = ms.Variable(np.zeros(3))
        optimizer = ms.optimizers.SGD(1.0)
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(20)).batch(1))
        for number, _ in enumerate(data):
            if strategy.worker_index == 1 and number == 2:
                break
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
        strategy.comm.Barrier()
        if not strategy.is_server:
            assert v.numpy().tolist() == [-12.0] * 3
        strategy.comm.Barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_workers_in_sync_are_one_worker(devices):
    """One ps and three workers that step together train like the synchronous strategy of the three."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    replicas = 3 * len(devices)
    rows = np.random.default_rng(0).normal(size=(60, 4))

    def train(strategy):
        with strategy.scope():
            v = ms.Variable(np.linspace(-1, 1, 4))
            optimizer = ms.optimizers.Adam(0.1)

            def step(x):
                optimizer.apply_gradients([(v.array * len(x) + x.sum(axis=0), v)])

            for batch in strategy.distribute_dataset(ms.data.from_arrays(rows).shuffle(seed=1).batch(12)):
                strategy.run(step, args=(batch,))
            return v

    together = comm.Split(int(comm.rank < 3))
    expected = None
    if comm.rank < 3:
        with ms.MultiWorkerMirroredStrategy(comm=together, devices=devices) as strategy:
            expected = train(strategy).numpy()
    together.Free()
    with ms.ParameterServerStrategy(workers_in_sync=3, devices=devices) as strategy:
        assert strategy.is_server or strategy.num_replicas_in_sync == replicas
        v = train(strategy)
        if not strategy.is_server:
            np.testing.assert_allclose(v.numpy(), expected, rtol=1e-12)
        strategy.comm.Barrier()


@pytest.mark.ranks(3, 4)
def test_groups_write_once():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    workers = size - 1 if size % 2 else size - 2
    with ms.ParameterServerStrategy(num_ps=size - workers, workers_in_sync=2) as strategy, strategy.scope():
        v = ms.Variable(np.zeros(2), aggregation=ms.VariableAggregation.SUM)
        if strategy.is_server:
            strategy.serve()
        else:
            v.assign_add(np.ones(2))
            assert v.numpy().tolist() == [1, 1]
            strategy.run(lambda: v.assign_add(np.ones(2)))
            assert v.numpy().tolist() == [3, 3]
            strategy.run(lambda: v.array)
            strategy.leave()
        strategy.comm.Barrier()


@pytest.mark.ranks(2, 4)
def test_what_the_settings_refuse():
    from mpi4py import MPI

    with pytest.raises(ClusterError, match="a divisor of the number of workers"):
        ms.ParameterServerStrategy(workers_in_sync=MPI.COMM_WORLD.size)
    with pytest.raises(ValueError, match="workers_in_sync"):
        ms.ParameterServerStrategy(workers_in_sync=0)
    with pytest.raises(ValueError, match="workers_in_sync"):
        ms.ParameterServerStrategy(workers_in_sync=2, max_staleness=0)


@pytest.mark.ranks(4)
def test_backup_workers_are_not_waited_for(mpi_tmp_path):
    """Of three workers one is in its first step until the others have made all of theirs: nobody waits for it."""
    with ms.ParameterServerStrategy(max_staleness=0, backup_workers=1) as strategy, strategy.scope():
        v = ms.Variable(np.zeros(1))
        optimizer = ms.optimizers.SGD(1.0)
        steps = 6
        if strategy.is_server:
            strategy.serve()
        else:
            for number in range(2 if strategy.worker_index == 2 else steps):

                def step(number=number):
                    gradient = np.ones(1) + 0 * v.array
                    if strategy.worker_index == 2 and number == 0:
                        wait_for_files(mpi_tmp_path, 2)
                    optimizer.apply_gradients([(gradient, v)])

                strategy.run(step)
            (mpi_tmp_path / f"done {strategy.rank}").touch()
            strategy.leave()
        strategy.comm.Barrier()
        if not strategy.is_server:
            assert v.numpy().tolist() == [-2.0 * steps - 1]  # two at a time; the slow one's second came alone
        strategy.comm.Barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("wrong", "strategys"), [(np.nan, True), (np.inf, False)])
def test_numbers_that_are_none_are_not_pushed(wrong, strategys):
    with ms.ParameterServerStrategy(check_numerics=strategys) as strategy, strategy.scope():
        v = ms.Variable(np.zeros(3), name="weights")
        optimizer = ms.optimizers.SGD(1.0, check_numerics=not strategys, global_clipnorm=1.0)
        if strategy.is_server:
            strategy.serve()
        else:
            with pytest.raises(FloatingPointError, match=r"weights.*1 that are not, of 3, on rank 0, in step 1"):
                strategy.run(lambda: optimizer.apply_gradients([(np.array([0, wrong, 1.0]), v)]))
            assert v.numpy().tolist() == [0, 0, 0]
            strategy.leave()
        strategy.comm.Barrier()


@pytest.mark.ranks(3)
def test_what_is_exchanged_is_counted():
    with ms.ParameterServerStrategy() as strategy, strategy.scope():
        v = ms.Variable(np.zeros(1000, np.float32), name="v")
        optimizer = ms.optimizers.SGD(1.0)
        if strategy.is_server:
            strategy.serve()
        else:
            for _ in range(5 + strategy.worker_index):
                strategy.run(lambda: optimizer.apply_gradients([(v.array + v.array, v)]))  # one read a step
            assert strategy.traffic() == ((5 + strategy.worker_index) * 4000,) * 2
            strategy.leave()
        stats = strategy.stats()
        found = [(e.worker, e.pulls, e.pulled_bytes, e.pushes, e.pushed_bytes) for e in stats.exchanges]
        assert found == [(0, 5, 20_000, 5, 20_000), (1, 6, 24_000, 6, 24_000)]
        assert [sum(e.staleness.values()) for e in stats.exchanges] == [5, 6]
        assert len(stats.servers) == 1
