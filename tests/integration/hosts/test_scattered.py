"""reduce_scatter and all_to_all between hosts, where MPI moves the parts."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm import exchange
from mpistrat.errors import CollectiveMismatchError


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("piece", [exchange._PIECE, 24])  # all at once, or bit by bit
def test_parts_of_replicas(piece, monkeypatch):
    monkeypatch.setattr(exchange, "_PIECE", piece)
    from mpi4py import MPI

    devices = ["cpu:0", "cpu:1"][: 1 + MPI.COMM_WORLD.rank % 2]
    with ms.MultiWorkerMirroredStrategy(devices=devices) as strategy:
        n = strategy.num_replicas_in_sync
        table = np.array([[(i + 2 * j) % 3 for j in range(n)] for i in range(n)])
        rows = [100 * r + np.arange(table[r].sum()) for r in range(n)]
        numbers = [np.arange(2 * n + 1) * (r + 1) for r in range(n)]

        def step():
            ctx = ms.get_replica_context()
            r = ctx.replica_id_in_sync_group
            found, received = ctx.all_to_all(rows[r], splits=table[r])
            return {"of": r, "found": found, "from": received, "sums": ctx.reduce_scatter("SUM", numbers[r])}

        results = {key: strategy.local_results(value) for key, value in strategy.run(step).items()}
        for r, found, received, sums in zip(*results.values(), strict=True):
            assert found.tolist() == [x for s in range(n) for x in np.split(rows[s], np.cumsum(table[s])[:-1])[r]]
            assert received.tolist() == table[:, r].tolist()
            assert np.array_equal(sums, np.array_split(sum(numbers), n)[r])


@pytest.mark.hosts(2, ranks_per_host=2)
def test_hosts_that_differ_are_told():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        odd = strategy.extended.topology.node_index == 1

        def told(act):
            with pytest.raises(CollectiveMismatchError, match="rank"):
                strategy.run(lambda: act(ms.get_replica_context()))
            strategy.barrier()

        told(lambda c: c.reduce_scatter("SUM", np.zeros(4, "float32" if odd else "float64")))
        told(lambda c: c.all_to_all(np.zeros((4, 3 if odd else 2))))
        with pytest.raises(ValueError, match="Give splits"):
            strategy.run(lambda: ms.get_replica_context().all_to_all(np.zeros(5 if odd else 4)))
        assert strategy.all_gather_object(strategy.rank) == [0, 1, 2, 3]
