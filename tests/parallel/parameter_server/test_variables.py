"""Variables on parameter servers: who writes what in which context, of which kind, and what is saved and restored."""

from __future__ import annotations

import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError
from tests.harness.parameter_server_strategies import alone, made, settle
from tests.harness.transports import TRANSPORTS

pytestmark = pytest.mark.ranks(2, 3, 4)
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN
FIRST, NONE = ms.VariableAggregation.ONLY_FIRST_REPLICA, ms.VariableAggregation.NONE
TWO = ["cpu:0", "cpu:1"]


def replica():
    return ms.get_replica_context().replica_id_in_sync_group


def servers():
    """Two where a worker is left."""
    from mpi4py import MPI

    return min(2, MPI.COMM_WORLD.size - 1)


@pytest.mark.parametrize("placement", ["round_robin", "bytes"])
def test_a_colocated_variable_lies_on_the_same_server_and_device_says_where(placement):
    halves = ms.partitioners.FixedShardsPartitioner(2)
    with made(num_ps=servers(), placement=placement, variable_partitioner=halves) as strategy:
        a = ms.Variable(0.0, name="a")
        with strategy.extended.colocate_vars_with(a):
            b = ms.Variable(np.zeros(7), name="b")
        c = ms.Variable(1.0, name="c")
        assert (a.server, b.server, c.server) == (0, 0, servers() - 1)  # b takes nobody's turn, and is not cut
        assert [v.device for v in (a, b, c)] == [f"/job:ps/replica:0/task:{v.server}/device:CPU:0" for v in (a, b, c)]
        sharded = ms.Variable(np.zeros((4, 2)), name="sharded")
        with strategy.extended.colocate_vars_with(sharded):
            assert ms.Variable(0.0).server == sharded.variables[0].server
        assert strategy.extended.should_checkpoint == (strategy.worker_index == 0)
        settle(strategy, b)


# writes: the replicas of one worker are aggregated, then each worker's count


@pytest.mark.parametrize(("aggregation", "one_worker"), [(SUM, 30.0), (MEAN, 15.0), (FIRST, 10.0)], ids=str)
def test_replicas_of_a_worker_are_aggregated_and_workers_add_up(aggregation, one_worker):
    with made(devices=TWO) as strategy:
        whole, rows = (
            ms.Variable(np.zeros(3), aggregation=aggregation),
            ms.Variable(np.zeros((4, 2)), aggregation=aggregation),
        )

        def step():
            value = 10.0 * (replica() + 1)
            whole.assign_add(np.full(3, value))
            whole.assign_sub(np.full(3, value / 10))
            rows.scatter_add(([1, 3, 1], np.full((3, 2), value)))
            rows.scatter_sub(([3], np.full((1, 2), value / 10)))

        if not strategy.is_server:
            strategy.run(step)
        settle(strategy, whole, rows)
        if not strategy.is_server:
            workers = strategy.num_workers
            assert whole.numpy().tolist() == [(one_worker - one_worker / 10) * workers] * 3
            assert rows.numpy()[:, 0].tolist() == [
                0,
                2 * one_worker * workers,
                0,
                (one_worker - one_worker / 10) * workers,
            ]
        strategy.comm.Barrier()


def test_values_are_assigned_as_aggregated():
    with made(devices=TWO) as strategy:
        kinds = [ms.Variable(np.zeros(2, np.float32), aggregation=kind) for kind in (SUM, MEAN, FIRST)]
        if not strategy.is_server:
            strategy.run(lambda: [v.assign(np.full(2, replica() + 1.0, np.float32)) for v in kinds])
            assert [v.numpy().tolist() for v in kinds] == [[3, 3], [1.5, 1.5], [1, 1]]
        strategy.comm.Barrier()  # no worker writes rows before all have seen this
        if not strategy.is_server:
            # Rows that only the first replica may set; the last of several stays.
            strategy.run(lambda: kinds[2].scatter_update(([1, 1], np.array([7.0, 8.0 + replica()], np.float32))))
            assert kinds[2].numpy().tolist() == [1, 8]
        strategy.comm.Barrier()


def test_cross_replica_writes_are_one_for_each_worker():
    with made(devices=TWO) as strategy:
        v, table = ms.Variable(np.zeros(2, np.int32)), ms.Variable(np.ones((5, 1)))
        if not strategy.is_server:
            v.assign_add(np.array([1, 10], np.int32))
            v.assign_sub(np.array([0, 3], np.int32))
            v.assign_add([1, 1])
            table.scatter_mul(([4, 4], [[2.0], [3.0]]))
            table.scatter_div(([0], [[4.0]]))
            table.scatter_min(([1], [[-1.0]]))
            table.scatter_max(([2], [[9.0]]))
            table.scatter_update(([3], [[5.0]]))
        settle(strategy, v, table)
        if not strategy.is_server:
            workers = strategy.num_workers
            assert v.numpy().tolist() == [2 * workers, 8 * workers]
            assert table.numpy()[:, 0].tolist() == [0.25**workers, -1, 9, 5, 6**workers]
        strategy.comm.Barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_of_any_dimension_are_written(transport):
    """Elements of a vector, rows of rows, single elements, the whole: all are rows of some shape."""
    with made(transport=transport) as strategy:
        line, cube = ms.Variable(np.zeros(6, np.float32)), ms.Variable(np.zeros((2, 3, 4)))
        scalar = ms.Variable(1.0)
        if strategy.worker_index == 0:
            line.scatter_add(([5, 0, 5], [1.0, 2.0, 3.0]))
            assert line.numpy().tolist() == [2, 0, 0, 0, 0, 4]
            expected = np.zeros((2, 3, 4))
            cube.scatter_update(([1], np.full((1, 3, 4), 7.0)))
            expected[1] = 7
            cube.scatter_nd_add([[1, 2], [0, 0], [1, 2]], np.arange(12.0).reshape(3, 4))
            np.add.at(expected, ([1, 0, 1], [2, 0, 2]), np.arange(12.0).reshape(3, 4))
            cube.scatter_nd_max([[0, 1, 3], [1, 1, 1]], [5.0, 6.0])
            expected[0, 1, 3] = 5
            cube.batch_scatter_update(([[0, 1], [2, 2]], np.arange(16.0).reshape(2, 2, 4)))
            expected[0, :2], expected[1, 2] = np.arange(8.0).reshape(2, 4), np.arange(12.0, 16.0)
            cube.scatter_nd_sub(np.zeros((2, 0), int), np.ones((2, 2, 3, 4)))  # no coordinates: all of it, twice
            expected -= 2
            scalar.scatter_nd_add(np.zeros((3, 0), int), [1.0, 2.0, 3.0])
            cube.scatter_add((np.zeros(0, int), np.zeros((0, 3, 4))))
            assert cube.numpy().tolist() == expected.tolist()
            assert float(scalar) == 7
            assert cube.gather_nd([[0, 1, 3], [1, 2, 0]]).tolist() == [expected[0, 1, 3], expected[1, 2, 0]]
        strategy.comm.Barrier()


def test_what_cannot_be_written_in_replica_context():
    with made() as strategy:
        none = ms.Variable(np.zeros(2))
        mean = ms.Variable(np.zeros(2), aggregation=MEAN)
        if not strategy.is_server:
            for write in (lambda: none.assign_add(np.ones(2)), lambda: none.scatter_add(([0], [1.0]))):
                with pytest.raises(ValueError, match="aggregation"):
                    strategy.run(write)
            with pytest.raises(NotImplementedError, match="scatter_max"):
                strategy.run(lambda: mean.scatter_max(([0], [1.0])))
            with pytest.raises(ValueError, match=r"\(2,\)"):
                mean.assign(np.ones(3))
            with pytest.raises((ValueError, IndexError), match="2"):
                mean.scatter_add(([2], [1.0]))
            with pytest.raises((ValueError, IndexError), match="2"):
                mean.sparse_read([2])
            assert none.numpy().tolist() == mean.numpy().tolist() == [0, 0]
        strategy.comm.Barrier()


def test_a_server_reads_and_writes_its_own_variables_only():
    with made(num_ps=servers()) as strategy:
        made_here = [ms.Variable(np.full(3, float(i)), name=f"v{i}") for i in range(2)]
        if strategy.is_server:
            index = strategy.servers.index(strategy.rank)
            mine = made_here[index]
            assert mine.numpy().tolist() == [index] * 3
            assert mine.sparse_read([2, 0]).tolist() == [index] * 2
            mine.assign_add(np.ones(3))
            mine.scatter_add(([1], [5.0]))
            for other in made_here[1 - index :][:1] if len(strategy.servers) > 1 else ():
                for use in (other.numpy, lambda v=other: v.assign(np.ones(3)), lambda v=other: v.sparse_read([0])):
                    with pytest.raises(ContextError, match=rf"{other.name}.*server {1 - index}, which holds it"):
                        use()
        strategy.comm.Barrier()
        if not strategy.is_server:
            assert made_here[0].numpy().tolist() == [1, 6, 1]
            assert made_here[1].numpy().tolist() == ([2, 7, 2] if len(strategy.servers) > 1 else [1, 1, 1])
        strategy.comm.Barrier()


# kinds


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_dtype_and_shape(transport):
    dtypes = [
        "float16", "float32", "float64", ml_dtypes.bfloat16, "int8", "uint8", "int16", "uint16", "int32", "uint32",
        "int64", "uint64", "bool",
    ]  # fmt: skip
    shapes = [(), (0,), (3,), (2, 0, 3), (2, 3)]
    with made(num_ps=servers(), transport=transport) as strategy:
        made_all = []
        for dtype in dtypes:
            for shape in shapes:
                value = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
                made_all.append((ms.Variable(value, trainable=False, aggregation=FIRST), value))
        if not strategy.is_server:
            for v, value in made_all:
                assert (v.dtype, v.shape) == (value.dtype, value.shape)
                assert v.numpy().tobytes() == value.tobytes()
        strategy.comm.Barrier()
        if strategy.worker_index == 0:
            for v, value in made_all:
                changed = np.ones_like(value)
                strategy.run(v.assign, args=(changed,))
                assert v.numpy().tobytes() == changed.tobytes()
                if v.shape and v.dtype != bool:
                    v.scatter_update((np.arange(v.shape[0])[:1], value[:1]))
                    changed[:1] = value[:1]
                    assert v.numpy().tobytes() == changed.tobytes()
                    assert v.sparse_read(np.arange(v.shape[0])).tobytes() == changed.tobytes()
        strategy.comm.Barrier()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_scalars_and_narrow_numbers_train_as_alone(dtype):
    def program(strategy, steps=5):
        s = ms.Variable(np.array(1.0), dtype=dtype)
        w = ms.Variable(np.linspace(-1, 1, 7), dtype=dtype)
        empty = ms.Variable(np.zeros((0, 3)), dtype=dtype)
        optimizer = ms.optimizers.Adam(0.05)

        def step(number):
            pairs = [(np.asarray(v.array * number, dtype=v.dtype), v) for v in (s, w, empty)]
            optimizer.apply_gradients(pairs)

        for number in range(1, steps + 1) if not getattr(strategy, "is_server", False) else ():
            strategy.run(step, args=(number,))
        return s, w, empty

    from mpi4py import MPI

    expected = alone(lambda strategy: [v.numpy() for v in program(strategy)])
    with made(num_ps=MPI.COMM_WORLD.size - 1) as strategy:
        found = program(strategy)
        if not strategy.is_server:
            assert [v.numpy().tobytes() for v in found] == [value.tobytes() for value in expected]
            assert found[1].numpy().tobytes() != np.linspace(-1, 1, 7).astype(found[1].dtype).tobytes()
        strategy.comm.Barrier()


def test_each_worker_has_copies_of_an_on_read_variable():
    with made(devices=TWO) as strategy:
        loss = ms.Variable(
            0.0, trainable=False, synchronization=ms.VariableSynchronization.ON_READ, aggregation=SUM, name="loss"
        )
        if not strategy.is_server:
            strategy.run(lambda: loss.assign_add(10.0 * strategy.worker_index + replica()))
            assert float(loss) == 20.0 * strategy.worker_index + 1
            loss.assign(6.0)
            assert [float(copy) for copy in loss.values] == [3, 3]
        strategy.comm.Barrier()


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_a_file_has_the_sum_of_all_workers(mpi_tmp_path, dtype):
    def program(strategy):
        return ms.Variable(
            np.zeros(2, dtype),
            trainable=False,
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=SUM,
            name="n",
        )

    path = mpi_tmp_path / "state.h5"
    with made(devices=TWO) as strategy:
        n = program(strategy)
        if not strategy.is_server:
            strategy.run(lambda: n.assign_add(np.array([1 + strategy.worker_index, 10 * replica()]).astype(dtype)))
        strategy.save(path)
        workers = strategy.num_workers
    total = [workers * (workers + 1), 10 * workers]  # two replicas each
    with made() as strategy:
        n = program(strategy)
        strategy.restore(path)
        found = strategy.all_gather_object(n.numpy().tolist())
        assert found[strategy.workers[0]] == total
        assert np.sum(found, axis=0).tolist() == total
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        n = program(strategy)
        strategy.restore(path)
        assert n.numpy().tolist() == total


def test_a_constraint_is_applied_by_the_server():
    calls = []

    def positive(w):
        calls.append(1)
        return np.maximum(w, 0)

    with made() as strategy:
        v = ms.Variable(np.ones(3), constraint=positive)
        table = ms.Variable(np.ones((4, 2)), constraint=positive)
        optimizer = ms.optimizers.SGD(1.0)
        if not strategy.is_server:

            def step():
                slices = ms.IndexedSlices(np.full((1, 2), 5.0), np.array([2]))
                optimizer.apply_gradients([(np.array([0.0, 0.5, 3.0]), v), (slices, table)])

            strategy.run(step)
        settle(strategy, v, table)
        if not strategy.is_server:
            assert v.numpy().tolist() == [1, max(0, 1 - 0.5 * strategy.num_workers), 0]
            assert table.numpy()[:, 1].tolist() == [1, 1, 0, 1]
        assert len(calls) == (2 * strategy.num_workers if strategy.is_server else 0)
        strategy.comm.Barrier()


@pytest.mark.big(gib=1)
def test_gradients_that_the_program_brings_take_no_memory_for_others():
    """IndexedSlices, and arrays of its own: the memory in which `v.grad` lies is not there until somebody asks for it."""
    from mpi4py import MPI

    size = 64 << 20  # a worker's mailbox takes 4 MiB of its own, as far as it runs ahead of the server
    shared_memory()  # where it is not told, the test is skipped here
    with made() as strategy:
        table, dense = (ms.Variable(np.zeros((size // 64, 16), np.float32), name=name) for name in ("table", "dense"))
        optimizer = ms.optimizers.SGD(1.0)
        strategy.comm.Barrier()
        before = shared_memory()
        if not strategy.is_server:
            slices = ms.IndexedSlices(np.ones((2, 16), np.float32), np.array([2, 5]))
            own = np.ones(dense.shape, np.float32)
            for _ in range(2):
                strategy.run(lambda: optimizer.apply_gradients([(slices, table), (own, dense)]))
            strategy.flush()
        strategy.comm.Barrier()
        grown = MPI.COMM_WORLD.allreduce(shared_memory() - before)
        assert grown < 0.2 * size, "of one gradient"
        if not strategy.is_server:
            dense.grad[...] = 1
            assert dense.grad[-1, -1] == 1  # it is there when it is asked for
        strategy.comm.Barrier()


def shared_memory():
    """Bytes of shared memory that this process takes, its part of pages that several use."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Shmem:")]
    if not found:
        pytest.skip("the system does not tell Pss_Shmem: Linux 5.9 and later do")
    return found[0]


def test_slots_have_in_them_what_was_pushed_before(monkeypatch):
    """However slow a server is: to read them is collective, and each worker waits for its own pushes."""
    from mpistrat.parameter_server.server.local_updates import LocalUpdates

    at_once = LocalUpdates.dense

    def slowly(self, *args):
        time.sleep(0.2)
        at_once(self, *args)

    monkeypatch.setattr(LocalUpdates, "dense", slowly)
    with made() as strategy:
        v, optimizer = ms.Variable(np.zeros(3)), ms.optimizers.Momentum(1.0, 1.0)  # the sum of all gradients
        for number in (1, 2, 3):
            if not strategy.is_server:
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
            total = number * strategy.num_workers
            if number == 1:
                assert np.abs(optimizer.slots(v)["momentum"]).tolist() == [total] * 3
            elif number == 2:
                assert np.abs(optimizer.get_state()["slots"][v.name]["momentum"]).tolist() == [total] * 3
            else:
                assert optimizer._core.all_iterations() == total
        strategy.comm.Barrier()


def test_variables_made_after_training_began():
    with made(num_ps=servers()) as strategy:
        first = ms.Variable(np.ones(3), name="first")
        optimizer = ms.optimizers.SGD(0.5)

        def step(variables):
            optimizer.apply_gradients([(np.ones(3), v) for v in variables])

        if not strategy.is_server:
            strategy.run(step, args=([first],))
        later = [ms.Variable(np.full(3, 10.0), name=f"later{i}") for i in range(3)]
        if not strategy.is_server:
            assert later[2].numpy().tolist() == [10] * 3
        strategy.comm.Barrier()  # before any worker's step
        if not strategy.is_server:
            strategy.run(step, args=([first, *later],))
        settle(strategy, first, *later)
        if not strategy.is_server:
            assert first.numpy().tolist() == [1 - strategy.num_workers] * 3
            assert all(v.numpy().tolist() == [10 - strategy.num_workers / 2] * 3 for v in later)
        strategy.comm.Barrier()


# where who is


def test_servers_may_come_first(mpi_tmp_path):
    """Rank 0, which alone touches the file, holds some of the variables itself and reaches no others."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    path = mpi_tmp_path / "state.h5"
    jobs = {"ps": servers(), "worker": size - servers()}
    values = [np.arange(4.0) + i for i in range(3)]

    def program(strategy, restored):
        variables = [ms.Variable(value * (not restored), name=f"v{i}") for i, value in enumerate(values)]
        on_read = ms.Variable(
            np.zeros(2), trainable=False, synchronization=ms.VariableSynchronization.ON_READ, aggregation=MEAN, name="r"
        )
        optimizer = ms.optimizers.Adam(0.1)
        if restored:
            strategy.restore(path)
        if strategy.worker_index == 0:
            strategy.run(lambda: optimizer.apply_gradients([(v.array, v) for v in variables]))
            if not restored:
                strategy.run(lambda: on_read.assign(np.array([1.0, 2.0])))
        return variables, optimizer, on_read

    def twice(strategy):
        variables = [ms.Variable(value) for value in values]
        optimizer = ms.optimizers.Adam(0.1)
        for _ in range(2):
            strategy.run(lambda: optimizer.apply_gradients([(v.array, v) for v in variables]))
        return [v.numpy() for v in variables], [optimizer.slots(v)["velocity"] for v in variables]

    resolver = ms.cluster_resolver.MPIClusterResolver(jobs=jobs)
    with made(cluster_resolver=resolver) as strategy:
        assert strategy.servers == tuple(range(servers()))
        assert strategy.workers == tuple(range(servers(), size))
        program(strategy, restored=False)
        settle(strategy)
        strategy.save(path)
    expected, slots = alone(twice)
    with made(num_ps=1) as strategy:
        variables, optimizer, on_read = program(strategy, restored=True)
        settle(strategy, *variables)
        if not strategy.is_server:
            assert [v.numpy().tobytes() for v in variables] == [value.tobytes() for value in expected]
            assert on_read.numpy().tolist() == [1, 2]
        found = [optimizer.slots(v)["velocity"] for v in variables]
        assert [slot.tobytes() for slot in found] == [slot.tobytes() for slot in slots]


# large variables


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_variables_are_read_and_pushed_whole(transport):
    """What a step has read stays as it was, and the gradient may be written anew when the step has been taken."""
    shape, steps = (3, 200_000), 20
    with made(transport=transport) as strategy:
        v, w = (ms.Variable(np.zeros(shape, np.float32), aggregation=SUM) for _ in range(2))
        sgd, kept = ms.optimizers.SGD(1.0), []

        def step(number):
            before, first = v.array, float(v.array[0, 0])
            v.grad[...] = w.grad[...] = -number
            sgd.apply_gradients([(v.grad, v), (w.grad, w)])
            v.grad[...] = w.grad[...] = 1e9
            assert (before == first).all()
            assert not before.flags.writeable
            if number % 7 == 0:
                kept.append((before, first))

        for number in range(1, steps + 1) if not strategy.is_server else ():
            strategy.run(step, args=(number,))
            assert all((array == value).all() for array, value in kept)
        settle(strategy, v, w)
        total = strategy.num_workers * steps * (steps + 1) / 2
        if not strategy.is_server:
            assert (v.array == total).all()
            assert (w.array == total).all()
        strategy.comm.Barrier()  # before any worker writes again
        if not strategy.is_server:
            strategy.run(lambda: v.scatter_add(([2], np.ones((1, 200_000), np.float32))))
        settle(strategy, v, w)
        if not strategy.is_server:
            assert v.array[:, -1].tolist() == [total, total, total + strategy.num_workers]
            assert all((array == value).all() for array, value in kept)
        kept.clear()
        strategy.comm.Barrier()
