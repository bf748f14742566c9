"""Calls while another GPU is current than that of their arrays, on the stand-in for CuPy, which reports work on the wrong GPU."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.environment import Environment
from mpistrat.cluster.topology import Topology
from mpistrat.comm.arrays import all_reduce_gpu, to_host
from mpistrat.comm.gpu import DeviceCopy, NcclCommunicator
from mpistrat.comm.process_group import ProcessGroup
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy

pytestmark = pytest.mark.ranks(1)

ROWS = np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, with two GPUs."""
    yield from stand_in(monkeypatch)


@pytest.fixture
def one(cupy):
    """A strategy on GPU 1, while GPU 0 is current."""
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:1"]) as strategy:
        with cupy.cuda.Device(0):
            yield strategy
        assert honest_cupy.report()[0] == {}


@pytest.fixture
def two(cupy):
    """A strategy with both GPUs on one rank: one of them is not current."""
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        yield strategy
        assert honest_cupy.report()[0] == {}


def on_gpu(cupy, number, array):
    with cupy.cuda.Device(number):
        return cupy.asarray(array)


def of_both(cupy, array):
    """An array on GPU 0, and twice the array on GPU 1, as the value of a distributed one."""
    return ms.PerReplica([on_gpu(cupy, number, array * (number + 1)) for number in range(2)])


def read(value):
    return value.get() if hasattr(value, "get") else np.asarray(value)


@pytest.mark.parametrize("op, total", [("SUM", 21), ("MEAN", 3.5), ("MIN", 1), ("MAX", 6), ("PROD", 720)])
def test_reduce_over_axes(cupy, one, op, total):
    assert read(one.reduce(op, on_gpu(cupy, 1, ROWS), axis=(0, 1))) == total


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("how", ["AUTO", "MPI", "NCCL"])
def test_reduce_arrays_of_both(cupy, how, current):
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0", "gpu:1"], cross_device_ops=how) as strategy:
        assert cupy.cuda.Device().id == 0
        with cupy.cuda.Device(current):
            for op, factor in (("SUM", 3), ("MEAN", 1.5), ("MIN", 1), ("MAX", 2)):
                for number, member in enumerate(strategy.reduce(op, of_both(cupy, ROWS), axis=None).values):
                    assert member.device.id == number
                    np.testing.assert_allclose(read(member), ROWS * factor)
            pairs = [(of_both(cupy, ROWS), None), (of_both(cupy, ROWS.T), None), (of_both(cupy, np.arange(3)), None)]
            for (value, _), found in zip(pairs, strategy.extended.batch_reduce_to("SUM", pairs), strict=True):
                for number, member in enumerate(found.values):
                    assert member.device.id == number
                    assert read(member).tolist() == (3 * read(value.values[0])).tolist()
    assert honest_cupy.report()[0] == {}


@pytest.mark.parametrize("current", [0, 1])
def test_gather_and_reduce_to_a_destination(cupy, two, current):
    with cupy.cuda.Device(current):
        found = two.extended.reduce_to("SUM", of_both(cupy, ROWS), "gpu:1")
        assert found.device.id == 1 and read(found).tolist() == (3 * ROWS).tolist()
        assert read(two.gather(of_both(cupy, ROWS), axis=0)).tolist() == np.concatenate([ROWS, 2 * ROWS]).tolist()
        rows = [
            ms.IndexedSlices(on_gpu(cupy, n, ROWS[:1]), on_gpu(cupy, n, np.array([n])), ROWS.shape) for n in range(2)
        ]
        found = two.reduce("MEAN", ms.PerReplica(rows), axis=None)
        assert read(found.values).tolist() == (ROWS[[0, 0]] / 2).tolist() and read(found.indices).tolist() == [0, 1]


def test_the_gpus_are_idle_when_a_sum_returns(cupy):
    """No call of MPI may be made while NCCL is in flight."""
    with Topology.create(devices=["gpu:0", "gpu:1"]) as topology:
        group = ProcessGroup.create(topology, Environment(abort_after=20.0))
        with NcclCommunicator(group, [0, 1]) as communicator:
            arrays = of_both(cupy, ROWS).values
            communicator.all_reduce(arrays)
            assert all(stream.finished for stream in honest_cupy.M.streams)
            assert [array.host.tolist() for array in arrays] == [(3 * ROWS).tolist()] * 2
        group.close()
    assert honest_cupy.report()[0] == {}


class OfGpus:
    """A communicator that takes memory of GPUs, at once."""

    def Allreduce(self, in_place, buffer, op):
        buffer[0].memory.host_touch(buffer[0], "MPI")


def test_mpi_gets_memory_that_is_written(cupy):
    array = on_gpu(cupy, 1, ROWS)
    with cupy.cuda.Device(1):
        array *= 2
    all_reduce_gpu(OfGpus(), array)
    assert read(array).tolist() == (2 * ROWS).tolist() and honest_cupy.report()[0] == {}


def test_to_host(cupy):
    assert to_host(on_gpu(cupy, 1, ROWS).T).tolist() == ROWS.T.tolist()
    assert honest_cupy.report()[0] == {}


def test_copies_to_the_gpu(cupy):
    """Three arrays one after the other in memory that is used again."""
    copier = DeviceCopy(1)
    for number in range(3):
        found = copier.finish(copier.start(ROWS + number))
        with cupy.cuda.Device(1):
            total = found + found
        assert read(total).tolist() == (2 * (ROWS + number)).tolist()
        del found, total
        copier.reclaim()
    assert honest_cupy.report()[0] == {}


def test_variables(cupy, two):
    with two.scope():
        v = ms.Variable(ROWS)
    v.assign_add(ROWS)
    v.scatter_update(ms.IndexedSlices(np.float32([[7, 8]]), np.array([1])))
    expected = [[2, 4], [7, 8], [10, 12]]
    assert v.numpy().tolist() == expected and read(v.storage(1)).tolist() == expected
    assert read(v.sparse_read([2, 0])).tolist() == [expected[2], expected[0]]


def test_a_variable_in_parts(cupy, one):
    with one.scope():
        one.extended.placement.partitioner = ms.partitioners.FixedShardsPartitioner(3)
        v, optimizer = ms.Variable(ROWS), ms.optimizers.SGD(0.5, momentum=0.5)
    assert read(v[::2]).tolist() == ROWS[::2].tolist()
    assert read(v.sparse_read([2, 0])).tolist() == ROWS[[2, 0]].tolist()
    gradient = v.gradient(0)
    with cupy.cuda.Device(1):
        gradient[...] = 1
    one.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    assert v.numpy().tolist() == (ROWS - 0.5).tolist()


def trained(devices, array, rule, sparse):
    """Weights after three steps of two replicas, with gradients that the program has made."""
    with ms.MultiWorkerMirroredStrategy(devices=devices) as strategy:
        with strategy.scope():
            v, optimizer = ms.Variable(ROWS), rule()

        def step():
            replica = ms.get_replica_context().replica_id_in_sync_group
            rows = array(replica, ROWS * (replica + 1))
            gradient = ms.IndexedSlices(rows[:2], array(replica, np.array([2, 0])), ROWS.shape) if sparse else rows
            optimizer.apply_gradients([(gradient, v)])

        for _ in range(3):
            strategy.run(step)
        return v.numpy()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", [lambda: ms.optimizers.SGD(0.5, momentum=0.5), lambda: ms.optimizers.Lamb(0.5)])
def test_gradients_of_the_programs_own(cupy, rule, sparse):
    found = trained(["gpu:0", "gpu:1"], lambda number, array: on_gpu(cupy, number, array), rule, sparse)
    expected = trained(["cpu:0", "cpu:1"], lambda number, array: array, rule, sparse)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert honest_cupy.report()[0] == {}


def test_average_loss(cupy, one):
    def step():
        with cupy.cuda.Device(0):
            return ms.nn.compute_average_loss(on_gpu(cupy, 1, ROWS[:, 0]), sample_weight=on_gpu(cupy, 1, ROWS[:, 1]))

    assert float(read(one.run(step))) == pytest.approx((1 * 2 + 3 * 4 + 5 * 6) / 3)
