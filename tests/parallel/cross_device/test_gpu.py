"""Arrays on GPUs through each algorithm: CuPy in, CuPy out, equal to NumPy's numbers."""

import numpy as np
import pytest

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.gpu]


@pytest.fixture(params=["auto", "mpi", "hierarchical", "nccl"])
def ops(request):
    import cupy
    from mpi4py import MPI

    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup
    from mpistrat.cross_device.auto import make_cross_device_ops

    if request.param == "nccl" and cupy.cuda.runtime.getDeviceCount() < MPI.COMM_WORLD.size:
        pytest.skip("NCCL needs a GPU for each rank")
    with Topology.create() as topology:
        group = ProcessGroup.create(topology, Environment(abort_after=60.0))
        ops = make_cross_device_ops(request.param)
        ops.bind(group)
        yield ops
        ops.close()
        group.close()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "complex64"])
def test_sum_and_mean(ops, dtype):
    import cupy

    replicas, rank = ops.group.topology.num_replicas, ops.group.topology.rank
    if ops.group.topology.num_local_replicas > 1:
        pytest.skip("written for one GPU a rank")
    for shape in [(), (0,), (5, 7), (100_003,)]:
        base = (np.arange(np.prod(shape, dtype=int)) % 50).reshape(shape)
        mine = cupy.asarray(base + rank, dtype)
        total = ops.reduce("sum", mine)
        assert isinstance(total, cupy.ndarray)
        assert total.dtype == np.dtype(dtype)
        assert np.array_equal(total.get(), (base * replicas + replicas * (replicas - 1) / 2).astype(dtype))
        mean = ops.reduce("mean", mine)
        assert np.allclose(mean.get(), base + (replicas - 1) / 2)


def test_batch_gather_and_broadcast(ops):
    import cupy

    topology = ops.group.topology
    if topology.num_local_replicas > 1:
        pytest.skip("written for one GPU a rank")
    pairs = [(cupy.full(n, topology.rank + 1.0, "f4"), None) for n in (3, 10_000)]
    for result in ops.batch_reduce("sum", pairs):
        assert (result.get() == topology.size * (topology.size + 1) / 2).all()
    assert ops.gather(cupy.full(topology.rank + 1, topology.rank)).get().tolist() == [
        rank for rank in range(topology.size) for _ in range(rank + 1)
    ]
    assert ops.broadcast(cupy.full(3, topology.rank), root=topology.size - 1).get().tolist() == [topology.size - 1] * 3
