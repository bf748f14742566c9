"""communication_options, cross_device_ops and replicas: every strategy takes them, and the log says what has no effect."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cross_device.ordered import OrderedAllReduce

OPTIONS = ms.CommunicationOptions(bytes_per_pack=64, timeout_seconds=30.0)
WORDS = ("communication_options", "cross_device_ops", "replicas", "comm")
KINDS = {
    "one_device": lambda **more: ms.OneDeviceStrategy("cpu:0", **more),
    "mirrored": ms.MirroredStrategy,
    "multi_worker_mirrored": ms.MultiWorkerMirroredStrategy,
    "central_storage": ms.CentralStorageStrategy,
    "mesh": lambda **more: ms.MeshStrategy({"data": -1}, **more),
    "parameter_server": lambda **more: ms.ParameterServerStrategy(num_ps=1, **more),
}
pytestmark = pytest.mark.ranks(1, 2, 3)


def fits(kind):
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.size
    return {"one_device": ranks == 1, "parameter_server": ranks > 1}.get(kind, True)


def trained(strategy):
    """Two steps, and a sum of three numbers over all replicas."""
    with strategy.scope():
        w = ms.Variable(np.zeros(3), name="w")
        optimizer = ms.optimizers.SGD(1.0)
    if getattr(strategy, "is_server", False):
        strategy.serve()
        return None

    def step():
        replica = ms.get_replica_context().replica_id_in_sync_group
        optimizer.apply_gradients([(np.full(3, replica + 1.0), w)])
        return ms.get_replica_context().all_reduce("SUM", np.full(3, replica + 1.0))

    total = strategy.local_results(strategy.run(step))[0]
    if isinstance(strategy, ms.ParameterServerStrategy):
        strategy.flush()
        strategy.leave()
    return w.numpy(), total


def same_on_all(strategy):
    """A barrier of all ranks, of servers, too."""
    strategy.barrier()


def test_every_strategy_names_them():
    for name in ("OneDevice", "Mirrored", "MultiWorkerMirrored", "CentralStorage", "Mesh", "ParameterServer"):
        names = inspect.signature(getattr(ms, f"{name}Strategy")).parameters
        assert set(WORDS) <= set(names), name


@pytest.mark.parametrize("kind", KINDS)
def test_algorithm_and_options_are_used(kind, caplog):
    if not fits(kind):
        pytest.skip("another number of ranks")
    KINDS[kind]().close()  # the first strategy of a process sets the level of the log
    caplog.set_level("INFO", "mpistrat")
    ops = ms.MpiAllReduce()
    with KINDS[kind](communication_options=OPTIONS, cross_device_ops=ops) as strategy:
        assert strategy.extended.placement.ops is ops
        found, alone = trained(strategy), 1 + (kind == "parameter_server")
        lines = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
        assert lines == [
            f"OneDeviceStrategy: {name} has no effect: one replica has nothing to reduce"
            for name in ("communication_options", "cross_device_ops")
            if kind == "one_device"
        ]
        same_on_all(strategy)
        if found is not None and strategy.size == alone:
            assert found[1].tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_replicas(kind):
    if not fits(kind):
        pytest.skip("another number of ranks")
    count = {"one_device": 1, "mesh": None}.get(kind, 6)
    if count is None:
        from mpi4py import MPI

        count = MPI.COMM_WORLD.size
    with KINDS[kind](replicas=count) as strategy:
        found = trained(strategy)
        same_on_all(strategy)
        if found is not None:
            assert strategy.num_replicas_in_sync == count
            total = count * (count + 1) / 2
            workers = getattr(strategy, "num_workers", 1)
            assert found[1].tolist() == [total] * 3
            if workers == 1:
                assert found[0].tolist() == [-total] * 3
            assert kind == "one_device" or isinstance(strategy.extended.placement.ops, OrderedAllReduce)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_cannot_be(kind):
    if not fits(kind):
        pytest.skip("another number of ranks")
    with pytest.raises((ValueError, ms.errors.LayoutError), match="replicas"):
        KINDS[kind](replicas=0)
    if kind in ("mesh", "one_device"):
        with pytest.raises(ValueError, match=r"replicas: expected None( or|,)"):
            KINDS[kind](replicas=7)


def test_a_form_of_sums_on_one_node_is_said_to_have_no_effect(caplog):
    ms.MirroredStrategy().close()
    caplog.set_level("INFO", "mpistrat")
    with ms.MirroredStrategy(communication_options=ms.CommunicationOptions(wire="bfloat16")) as strategy:
        assert trained(strategy)[1].tolist() == [sum(range(1, strategy.size + 1))] * 3
    lines = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert lines == ["MirroredStrategy: wire='bfloat16' has no effect: all ranks are on one node"]


def test_workers_in_sync_share_replicas():
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != 3:
        pytest.skip("two workers")
    with ms.ParameterServerStrategy(num_ps=1, workers_in_sync=2, replicas=4) as strategy:
        found = trained(strategy)
        same_on_all(strategy)
        if found is not None:
            assert (strategy.num_replicas_in_sync, len(strategy.extended.worker_devices)) == (4, 2)
            assert found[0].tolist() == [-10.0] * 3
    with pytest.raises(ValueError, match="a multiple of workers_in_sync, 2, got 3"):
        ms.ParameterServerStrategy(num_ps=1, workers_in_sync=2, replicas=3)
