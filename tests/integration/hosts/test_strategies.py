"""Strategies over two isolated hosts: TCP between them, shared memory inside."""

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
        strategy.save(path)  # rank 0 alone touches the file: the hosts need not share a disk
        strategy.run(step)
        assert w.numpy()[0] == -0.5 * total + 0.5 * -0.5 * total - 0.5 * total
        strategy.restore(path)
        assert optimizer.iterations == 1
        assert w.numpy().tolist() == [-0.5 * total] * 1000
        strategy.run(step)
        assert w.numpy()[0] == -0.5 * total + 0.5 * -0.5 * total - 0.5 * total
