"""ParameterServerStrategy: what one worker computes, what several do together, passes, roles, files and wrong use."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ClosedError, ClusterError, ContextError

pytestmark = pytest.mark.ranks(2, 3, 4)
TRANSPORTS = ("shared_window", "one_sided", "messages")
RULES = {
    "sgd": lambda: ms.optimizers.SGD(0.1),
    "momentum": lambda: ms.optimizers.SGD(0.1, 0.9, nesterov=True),
    "adam": lambda: ms.optimizers.Adam(0.01),
}
LARGE = 1.0  # a learning rate with which the last bit of a gradient's sum reaches the weights


@contextlib.contextmanager
def made(**settings):
    strategy = ms.ParameterServerStrategy(**settings)
    yield strategy
    strategy.close()


def serial(rule, gradients, dtype=np.float64):
    """The weights after steps of one replica alone."""
    from mpi4py import MPI

    with ms.OneDeviceStrategy("cpu:0", comm=MPI.COMM_SELF) as strategy, strategy.scope():
        v = ms.Variable(np.linspace(-1, 1, 12).astype(dtype).reshape(4, 3))
        optimizer = RULES[rule]()
        for gradient in gradients:
            strategy.run(lambda g=gradient: optimizer.apply_gradients([(g(v.numpy()), v)]))
        return v.numpy()


def quadratic(scale):
    return lambda w: (w * scale).astype(w.dtype)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_worker_is_serial_training_bit_for_bit(rule, dtype, transport):
    from mpi4py import MPI

    gradients = [quadratic(scale) for scale in (1.0, 0.5, -2.0, 3.0)]
    expected = serial(rule, gradients, dtype)
    comm = MPI.COMM_WORLD
    with made(num_ps=comm.size - 1, transport=transport) as strategy, strategy.scope():
        v = ms.Variable(np.linspace(-1, 1, 12).astype(dtype).reshape(4, 3))
        optimizer = RULES[rule]()
        if strategy.is_server:
            strategy.serve()
        else:
            for number, gradient in enumerate(gradients, 1):
                assert strategy.run(lambda g=gradient: optimizer.apply_gradients([(g(v.array), v)])) == number
            assert v.numpy().tobytes() == expected.tobytes()


def test_every_increment_of_every_worker_counts():
    with made() as strategy, strategy.scope():
        v = ms.Variable(np.zeros(5, np.int64), aggregation=ms.VariableAggregation.SUM)
        if strategy.is_server:
            strategy.serve()
        else:
            for _ in range(100):
                strategy.run(lambda: v.assign_add(np.ones(5, np.int64)))
            strategy.leave()
        strategy.comm.Barrier()  # every worker has handed its increments over
        if not strategy.is_server:
            v.assign_sub(np.zeros(5, np.int64))
            v.numpy()  # behind all that this worker sent
        strategy.comm.Barrier()
        if not strategy.is_server:
            assert v.numpy().tolist() == [100 * strategy.num_workers] * 5
        strategy.comm.Barrier()


def test_a_step_sees_one_version_and_its_own_writes():
    with made() as strategy, strategy.scope():
        v = ms.Variable(np.zeros(3), aggregation=ms.VariableAggregation.SUM)
        if strategy.is_server:
            strategy.serve()
        else:

            def step():
                first, version = v.array, v.version
                again = v.array
                assert again is first
                assert v.version == version
                v.assign_add(np.ones(3))
                assert (v.array >= 1).all()

            strategy.run(step)
            strategy.leave()
        strategy.comm.Barrier()


@pytest.mark.parametrize("how", ["to the end", "break", "exception", "zip"])
def test_passes_end_with_the_loop(how):
    rows = np.arange(40).reshape(40, 1)
    with made() as strategy, strategy.scope():
        v = ms.Variable(np.zeros(1), aggregation=ms.VariableAggregation.SUM)
        data = strategy.distribute_dataset(ms.data.from_arrays(rows).batch(4))
        other = strategy.distribute_dataset(ms.data.from_arrays(rows).batch(4))
        seen = []

        def step(x):
            v.assign_add(np.array([float(x.sum())]))

        for _ in range(3):
            try:
                for batch in zip(data, other, strict=False) if how == "zip" else data:
                    x = batch[0] if how == "zip" else batch
                    seen += x.ravel().tolist()
                    strategy.run(step, args=(x,))
                    if how == "break":
                        break
                    if how == "exception":
                        raise RuntimeError("of the user's")
            except RuntimeError:
                pass
        assert strategy.is_server == (not seen)
        every = strategy.comm.allgather(seen)
        total = float(sum(map(sum, every)))
        if how in ("to the end", "zip"):
            assert sorted(row for rows_of in every for row in rows_of) == sorted(3 * rows.ravel().tolist())
        if not strategy.is_server:
            v.assign_add(np.zeros(1))
            v.numpy()
        strategy.comm.Barrier()
        if not strategy.is_server:
            assert v.numpy().tolist() == [total]
        strategy.comm.Barrier()


def test_batches_are_dealt_out_in_turn():
    with made() as strategy:
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(22)).shuffle(seed=3).batch(4))
        batches = [batch.tolist() for batch in data]
        plain = [batch.tolist() for batch in ms.data.from_arrays(np.arange(22)).shuffle(seed=3).batch(4)]
        if strategy.is_server:
            assert batches == []
        else:
            assert batches == plain[strategy.worker_index :: strategy.num_workers]


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_all_ranks_say_one_number_of_replicas(devices):
    """By which programs multiply the size of their batches. A server said 1, and the ranks' datasets differed."""
    for workers_in_sync in (1, 2):
        size = 2 if devices else 1
        with made(devices=devices) as strategy:
            workers = strategy.num_workers
        if workers % workers_in_sync:
            continue
        with made(devices=devices, workers_in_sync=workers_in_sync) as strategy:
            assert strategy.num_replicas_in_sync == size * workers_in_sync
            batches = ms.data.from_arrays(np.arange(32)).batch(4 * strategy.num_replicas_in_sync)
            data = strategy.distribute_dataset(batches)
            read = sum(len(np.ravel(part)) for batch in data for part in strategy.local_results(batch))
            total = strategy.comm.allreduce(read)
            assert total == 32


def test_two_devices_sum_and_push_once():
    with made(devices=["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        v = ms.Variable(np.zeros(2))
        optimizer = ms.optimizers.SGD(1.0)
        if strategy.is_server:
            strategy.serve()
        else:
            assert strategy.num_replicas_in_sync == 2

            def step():
                v.grad[...] = ms.get_replica_context().replica_id_in_sync_group + 1
                optimizer.apply_gradients([(v.grad, v)])
                return ms.get_replica_context().all_reduce("SUM", 1)

            assert strategy.local_results(strategy.run(step)) == (2, 2)
            v.numpy()
            strategy.leave()
        strategy.comm.Barrier()
        if not strategy.is_server:
            assert v.numpy().tolist() == [-3.0 * strategy.num_workers] * 2
        strategy.comm.Barrier()


def test_sparse_rows():
    with made() as strategy, strategy.scope():
        table = ms.Variable(np.zeros((1000, 4), np.float32))
        optimizer = ms.optimizers.SGD(1.0)
        if strategy.is_server:
            strategy.serve()
        else:
            mine = strategy.worker_index * 10 + np.array([1, 5, 1])

            def step():
                slices = ms.IndexedSlices(np.ones((3, 4), np.float32), mine)
                optimizer.apply_gradients([(slices, table)])

            strategy.run(step)
            rows = table.sparse_read([[mine[0], mine[1]], [999, mine[2]]])
            assert rows[..., 0].tolist() == [[-2, -1], [0, -2]]
            table.scatter_add(ms.IndexedSlices(np.full((2, 4), 5, np.float32), mine[:2]))
            table.scatter_max(ms.IndexedSlices(np.full((1, 4), 4, np.float32), mine[1:2]))
            assert table.sparse_read(mine[:2])[:, 0].tolist() == [3, 4]
            strategy.leave()
        strategy.comm.Barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_coordinates_of_any_depth(transport):
    with made(transport=transport) as strategy, strategy.scope():
        v = ms.Variable(np.zeros((4, 3, 2)))
        expected = np.zeros((4, 3, 2))
        if strategy.is_server:
            strategy.serve()
        else:
            if strategy.worker_index == 0:
                v.scatter_nd_add([[1, 2], [1, 2], [3, 0]], np.arange(6.0).reshape(3, 2))
                np.add.at(expected, ([1, 1, 3], [2, 2, 0]), np.arange(6.0).reshape(3, 2))
                v.scatter_nd_update([[0, 1, 1]], [7.0])
                expected[0, 1, 1] = 7
                v.scatter_update(ms.IndexedSlices(np.full((1, 3, 2), 2.0), np.array([2])))
                expected[2] = 2
                assert v.numpy().tolist() == expected.tolist()
                assert v.gather_nd([[1, 2], [2, 0]]).tolist() == expected[[1, 2], [2, 0]].tolist()
            strategy.leave()
        strategy.comm.Barrier()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_synchronous_steps_are_those_of_the_synchronous_strategy(transport, servers):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    servers = min(servers, comm.size - 1)
    workers = comm.size - servers
    grads = np.random.default_rng(0).normal(size=(6, workers, servers, 4, 3)).astype(np.float32)

    def train(strategy, variables, optimizer, number):
        """Let the worker so numbered give each variable a gradient; return the variables' bytes."""
        for step in grads:
            strategy.run(lambda g=step[number]: optimizer.apply_gradients(zip(g, variables, strict=True)))
        return [v.numpy().tobytes() for v in variables]

    def make():
        """One variable for each server."""
        return [ms.Variable(np.linspace(-1, 1 + i, 12).astype(np.float32).reshape(4, 3)) for i in range(servers)]

    together = comm.Split(int(comm.rank < workers))
    expected = None
    if comm.rank < workers:
        with ms.MultiWorkerMirroredStrategy(comm=together) as strategy, strategy.scope():
            expected = train(strategy, make(), ms.optimizers.Adam(LARGE), strategy.rank)
    together.Free()
    with made(num_ps=servers, max_staleness=0, transport=transport) as strategy, strategy.scope():
        variables, optimizer = make(), ms.optimizers.Adam(LARGE)
        if strategy.is_server:
            strategy.serve()
        else:
            assert train(strategy, variables, optimizer, strategy.worker_index) == expected
            strategy.leave()
        strategy.comm.Barrier()


@pytest.mark.parametrize("ps", [1, 2])
def test_what_is_saved_is_restored(mpi_tmp_path, ps):
    from mpi4py import MPI

    if MPI.COMM_WORLD.size <= ps:
        pytest.skip("no worker is left")
    path = mpi_tmp_path / "state.h5"
    gradients = [quadratic(s) for s in (1.0, 2.0, -1.0, 0.5)]
    expected = serial("adam", gradients)

    def train(strategy, v, optimizer, some):
        """Worker 0 takes all steps, in a pass of everybody's."""
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(4)).batch(1))
        for number, _ in enumerate(data):
            if strategy.worker_index == 0 and number == 0:
                for gradient in some:
                    strategy.run(lambda g=gradient: optimizer.apply_gradients([(g(v.array), v)]))

    with made(num_ps=ps) as strategy, strategy.scope():
        v = ms.Variable(np.linspace(-1, 1, 12).reshape(4, 3), name="v")
        optimizer = RULES["adam"]()
        train(strategy, v, optimizer, gradients[:2])
        strategy.save(path)
    with made() as strategy, strategy.scope():
        v = ms.Variable(np.zeros((4, 3)), name="v")
        optimizer = RULES["adam"]()
        strategy.restore(path)
        train(strategy, v, optimizer, gradients[2:])
        if strategy.worker_index == 0:
            assert v.numpy().tobytes() == expected.tobytes()
        strategy.comm.Barrier()


def test_roles():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    with made() as strategy:
        assert (strategy.workers, strategy.servers) == (tuple(range(size - 1)), (size - 1,))
        assert strategy.cluster_resolver.cluster_spec().num_tasks("ps") == 1
    resolver = ms.cluster_resolver.MPIClusterResolver(jobs={"ps": 1, "chief": 1, "worker": size - 2})
    with made(cluster_resolver=resolver) as strategy:
        assert (strategy.workers, strategy.servers) == (tuple(range(1, size)), (0,))
        assert strategy.is_server == (strategy.rank == 0)


def test_wrong_use():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    with pytest.raises(ClusterError, match="num_ps"):
        ms.ParameterServerStrategy(num_ps=size)
    with pytest.raises(ClusterError, match="num_ps"):
        ms.ParameterServerStrategy(num_ps=0)
    with pytest.raises(ValueError, match="max_staleness"):
        ms.ParameterServerStrategy(max_staleness=-1)
    with pytest.raises(ValueError, match="max_staleness=0 with backup workers"):
        ms.ParameterServerStrategy(backup_workers=1)
    with pytest.raises(ValueError, match="placement"):
        ms.ParameterServerStrategy(placement="nearest")
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        v = ms.Variable(np.zeros(3))
    if strategy.is_server:
        with pytest.raises(ContextError, match="parameter server"):
            strategy.run(lambda: None)
    else:
        with pytest.raises(ContextError, match="a worker"):
            strategy.serve()
        with pytest.raises(ValueError, match="aggregation"):
            strategy.run(lambda: v.assign(np.ones(3)))
    strategy.close()
    with pytest.raises(ClosedError):
        v.numpy()
