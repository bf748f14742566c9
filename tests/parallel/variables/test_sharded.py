"""Sharded variables on several ranks: all ranks cut alike, write together, and save what any other cut restores."""

import os

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from mpistrat.types import IndexedSlices
from tests.harness.strategies import made

SUM = ms.VariableAggregation.SUM


def same_everywhere(array):
    from mpi4py import MPI

    return len(set(MPI.COMM_WORLD.allgather(np.asarray(array).tobytes()))) == 1


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("devices", ["1", "uneven"])
def test_it_is_made_read_and_written_as_one(devices):
    with made("multi_worker_mirrored", devices) as strategy, strategy.scope():
        strategy.extended.placement.partitioner = ms.partitioners.FixedShardsPartitioner(3)
        v = ms.Variable(lambda: np.random.default_rng().normal(size=(7, 2)), name="random", aggregation=SUM)
        assert [len(part) for part in v.variables] == [3, 2, 2]
        assert same_everywhere(v)  # rank 0's numbers
        v.assign(np.arange(14.0).reshape(7, 2))
        assert v[6:0:-3].tolist() == [[12, 13], [6, 7]] and v.embedding_lookup([5, 0]).tolist() == [[10, 11], [0, 1]]
        replicas = strategy.num_replicas_in_sync

        def step():
            row = ms.get_replica_context().replica_id_in_sync_group % 7
            v.scatter_add(([row], [[1.0, 0.0]]))  # each replica to its own part
            v.assign_add(np.ones((7, 2)))

        strategy.run(step)
        expected = np.arange(14.0).reshape(7, 2) + replicas
        np.add.at(expected[:, 0], np.arange(replicas) % 7, 1)
        np.testing.assert_array_equal(v, expected)


@pytest.mark.ranks(1, 2, 4)
def test_it_is_trained_and_saved_as_one(tmp_path_factory):
    from mpi4py import MPI

    folder = tmp_path_factory.mktemp("sharded") if MPI.COMM_WORLD.rank == 0 else None
    path = os.path.join(MPI.COMM_WORLD.bcast(str(folder)), "x.h5")

    def trained(shards, steps, restored=False):
        with made("multi_worker_mirrored", "uneven") as strategy, strategy.scope():
            strategy.extended.placement.partitioner = ms.partitioners.FixedShardsPartitioner(shards)
            v, optimizer = ms.Variable(np.ones((5, 2)), name="v"), ms.optimizers.Adam(0.1)
            if restored:
                strategy.restore(path)

            def step(number):
                replica = ms.get_replica_context().replica_id_in_sync_group
                rows = np.array([replica % 5, 4])  # of other parts on other replicas
                values = np.random.default_rng([number, replica]).integers(-9, 9, (2, 2)) / 8
                optimizer.apply_gradients([(IndexedSlices(values, rows), v)])

            for number in steps:
                strategy.run(step, args=(number,))
            if not restored:
                strategy.save(path)
            return v.numpy()

    expected = trained(1, range(5))
    assert same_everywhere(expected)
    trained(2, range(3))
    np.testing.assert_array_equal(trained(4, range(3, 5), restored=True), expected)
    np.testing.assert_array_equal(trained(1, range(3, 5), restored=True), expected)


@pytest.mark.ranks(2, 3)
def test_ranks_that_cut_otherwise_hear_of_it():
    with made("mirrored") as strategy, strategy.scope():
        strategy.extended.placement.partitioner = ms.partitioners.FixedShardsPartitioner(2 + strategy.rank)
        with pytest.raises(CollectiveMismatchError, match="w/part_0"):
            ms.Variable(np.zeros((6, 1)), name="w")
