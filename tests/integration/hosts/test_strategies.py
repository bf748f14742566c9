"""Strategies over two isolated hosts: TCP between them, shared memory inside."""

import json
import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import LayoutError


@pytest.mark.hosts(2, ranks_per_host=2)
def test_strategies_of_one_node_are_refused():
    for make in (ms.MirroredStrategy, ms.CentralStorageStrategy):
        with pytest.raises(LayoutError, match="4 ranks on 2 nodes. What fits: MultiWorkerMirroredStrategy"):
            make()


@pytest.mark.hosts(2, ranks_per_host=2)
def test_training_and_checkpoints(tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        n = strategy.num_replicas_in_sync
        assert strategy.extended.topology.num_nodes == 2
        with strategy.scope():
            w = ms.Variable(lambda: np.zeros(1000) + strategy.rank, name="w")
            optimizer = ms.optimizers.SGD(0.5, momentum=0.5)

        def step():
            r = ms.get_replica_context().replica_id_in_sync_group
            optimizer.apply_gradients([(np.full(1000, r + 1.0), w)])
            return ms.get_replica_context().all_reduce("SUM", r)

        total = n * (n + 1) / 2
        assert strategy.run(step) == n * (n - 1) // 2
        assert w.numpy().tolist() == [-0.5 * total] * 1000
        assert strategy.reduce("MEAN", np.arange(strategy.rank), axis=0) == pytest.approx((0 + 0 + 1 + 0 + 1 + 2) / 6)
        assert strategy.gather(np.array([strategy.rank]), axis=0).tolist() == list(range(n))

        path = strategy.comm.bcast(str(tmp_path / "x.h5") if strategy.rank == 0 else None)
        strategy.save(path)  # the hosts need not share a disk
        strategy.run(step)
        assert w.numpy()[0] == -0.5 * total + 0.5 * -0.5 * total - 0.5 * total
        strategy.restore(path)
        assert optimizer.iterations == 1
        assert w.numpy().tolist() == [-0.5 * total] * 1000
        strategy.run(step)
        assert w.numpy()[0] == -0.5 * total + 0.5 * -0.5 * total - 0.5 * total


@pytest.mark.hosts(2, ranks_per_host=2)
def test_all_hosts_write_a_checkpoint(tmp_path):
    """Where they share the folder each writes whole pages of the variables and of the slots."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        path = strategy.broadcast_object(str(tmp_path / "x.h5"))
        with strategy.scope():
            w = ms.Variable(np.zeros(100_000), name="w")
            optimizer = ms.optimizers.SGD(1.0, momentum=0.5)
        gradient = np.random.default_rng(0).normal(size=100_000) / strategy.num_replicas_in_sync
        strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))
        saving = strategy.begin_save(path)
        value, slot = w.numpy(), optimizer.slots(w)["momentum"]
        w.assign(np.ones(100_000))
        saving.wait()
        strategy.restore(path)
        assert np.array_equal(w.numpy(), value)
        assert np.array_equal(optimizer.slots(w)["momentum"], slot)
        shared = all(strategy.all_gather_object(os.path.exists(path)))
        if strategy.rank == 0:
            with h5py.File(path) as file:
                pieces = json.loads(file["digests"][()].tobytes())["arrays"]
            borders = [start for start, _, _ in pieces["variables/w"]]
            assert len(borders) == (4 if shared else 2)
            assert len(pieces["optimizers/0/slots/w/momentum"]) >= 2
            assert all(start % 512 == 0 for start in borders)
        assert shared, "the hosts of this test share no folder"
