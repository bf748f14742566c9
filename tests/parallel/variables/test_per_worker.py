"""Per-worker variables: each rank reads and writes its own copy, `read_all` has those of all workers in their order."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ClosedError, CollectiveMismatchError, ContextError
from tests.harness.parameter_server_strategies import made


def of_worker(index):
    """What worker `index` has after `write`: 5 + its number, then one row more."""
    return [[5.0 + index, 5.0 + index], [5.0 + index, 25.0 + index]]


def write(own, index):
    own.assign(np.full((2, 2), 3.0))
    own.assign_add(np.full((2, 2), 4.0 + index))
    own.assign_sub(np.full((2, 2), 2.0))
    own.scatter_nd_add([[1, 1]], [20.0])
    return own.numpy().tolist()


@pytest.mark.ranks(1, 2, 3, 4)
def test_of_a_synchronous_strategy_each_rank_is_a_worker(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        own = ms.Variable(np.full((2, 2), 1.5), name="own", per_worker_variable=True)
        weights = ms.Variable(np.zeros(2), name="weights")
        assert not own.trainable
        assert [copy.tolist() for copy in own.read_all()] == [[[1.5] * 2] * 2] * strategy.size
        if strategy.rank != 1:  # not collective
            assert write(own, strategy.rank) == of_worker(strategy.rank)
        strategy.run(lambda: own.assign_add(np.full((2, 2), 1.0)))
        expected = [np.add(of_worker(r) if r != 1 else np.full((2, 2), 1.5), 1).tolist() for r in range(strategy.size)]
        assert [copy.tolist() for copy in own.read_all()] == expected
        assert (own + 1).tolist() == np.add(expected[strategy.rank], 1).tolist()
        strategy.save(mpi_tmp_path / "all.h5")
        own.assign(np.zeros((2, 2)))
        strategy.restore(mpi_tmp_path / "all.h5")
        assert [copy.tolist() for copy in own.read_all()] == [expected[0]] * strategy.size
        assert weights.numpy().tolist() == [0, 0]
    with pytest.raises(ClosedError):
        own.numpy()


@pytest.mark.ranks(2, 3, 4)
def test_servers_have_none(mpi_tmp_path):
    with made() as strategy:
        own = ms.Variable(np.zeros((2, 2)), name="own", per_worker_variable=True)
        if not strategy.is_server:
            assert write(own, strategy.worker_index) == of_worker(strategy.worker_index)
        expected = [of_worker(index) for index in range(strategy.num_workers)]
        assert [copy.tolist() for copy in own.read_all()] == expected  # on a server, too
        strategy.save(mpi_tmp_path / "all.h5")
        own.assign(np.zeros((2, 2)))
        strategy.restore(mpi_tmp_path / "all.h5")
        assert [copy.tolist() for copy in own.read_all()] == [expected[0]] * strategy.num_workers


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_replicas_of_a_worker_share_its_copy():
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        own = ms.Variable(0, per_worker_variable=True)
        strategy.run(lambda: own.assign_add(1 + ms.get_replica_context().replica_id_in_sync_group))
        assert [int(copy) for copy in own.read_all()] == [1 + 2 * rank + 2 + 2 * rank for rank in range(strategy.size)]
        assert len(own.values) == 2
        with pytest.raises(ContextError, match="cross-replica"):
            strategy.run(own.read_all)


@pytest.mark.ranks(1, 2, 3, 4)
def test_empty_scalar_and_whole_number_copies():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        empty = ms.Variable(np.zeros((0, 3), np.float32), per_worker_variable=True)
        flag = ms.Variable(False, per_worker_variable=True)
        flag.assign(strategy.rank == 0)
        assert [copy.shape for copy in empty.read_all()] == [(0, 3)] * strategy.size
        assert [bool(copy) for copy in flag.read_all()] == [rank == 0 for rank in range(strategy.size)]
        flag.read_all()[0][...] = True  # a copy


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("synchronization", {"synchronization": ms.VariableSynchronization.ON_WRITE}),
        ("aggregation", {"aggregation": ms.VariableAggregation.SUM}),
        ("trainable", {"trainable": True}),
        ("layout", {"layout": [None]}),
    ],
)
def test_settings_without_a_meaning_are_refused(argument, settings):
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(ValueError, match=argument):
            ms.Variable([1.0], per_worker_variable=True, **settings)
        with pytest.raises(ValueError, match="shape"):
            ms.Variable([1.0], per_worker_variable=True).assign([1.0, 2.0])


@pytest.mark.ranks(2, 3)
def test_ranks_that_make_different_kinds_are_told():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        how = (
            {"per_worker_variable": True}
            if strategy.rank == 0
            else {"synchronization": ms.VariableSynchronization.ON_READ}
        )
        with pytest.raises(CollectiveMismatchError, match="per worker"):
            ms.Variable(0.0, **how)


@pytest.mark.ranks(2, 4)
def test_under_a_mesh_each_rank_has_a_copy():
    with ms.MeshStrategy(axes={"data": -1, "model": 2}) as strategy, strategy.scope():
        own = ms.Variable([0.0], per_worker_variable=True)
        own.assign([strategy.rank])
        assert [copy.tolist() for copy in own.read_all()] == [[rank] for rank in range(strategy.size)]
