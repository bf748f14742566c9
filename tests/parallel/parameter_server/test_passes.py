"""Passes with parameter servers: how data is read, by loops of every kind, and what can be read in between."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.files import wait_for_files
from tests.harness.parameter_server_strategies import made, serve_on_rank_0, settle
from tests.harness.transports import TRANSPORTS

pytestmark = pytest.mark.ranks(2, 3, 4)
SUM = ms.VariableAggregation.SUM


def counter():
    return ms.Variable(np.zeros(1, np.int64), trainable=False, aggregation=SUM)


def all_seen(strategy, seen):
    """What all workers have seen, in order. Collective."""
    return sorted(itertools.chain(*seen_by_workers(strategy, seen)))


def seen_by_workers(strategy, seen):
    """What each worker has seen. Collective."""
    told = strategy.comm.allgather(list(seen))
    assert all(told[server] == [] for server in strategy.servers)
    return [told[worker] for worker in strategy.workers]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reading_and_writing_before_in_and_after_passes(transport, mpi_tmp_path):
    """What workers ask for is answered while the server's program only sleeps."""
    with made(transport=transport) as strategy:
        v = counter()
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(6 * strategy.num_workers)).batch(2))
        if strategy.is_server:
            wait_for_files(mpi_tmp_path, strategy.num_workers)
        else:
            for _ in range(20):
                v.assign_add([1])
                assert v.numpy()[0] >= 1
            (mpi_tmp_path / f"answered {strategy.rank}").touch()
        for _ in data:
            strategy.run(lambda: v.assign_add([100]))
        if strategy.is_server:
            time.sleep(0.5)
        else:
            v.assign_add([1])
            assert v.numpy()[0] >= 21 + 300
        for _ in data:
            strategy.run(lambda: v.assign_add([100]))
        settle(strategy, v)
        if not strategy.is_server:
            assert v.numpy().tolist() == [621 * strategy.num_workers]
        strategy.comm.Barrier()


def test_evaluating_inside_of_the_training_loop_is_one_pass():
    with made() as strategy:
        v = counter()
        workers = strategy.num_workers
        training = strategy.distribute_dataset(ms.data.from_arrays(np.arange(8 * workers)).batch(2))
        testing = strategy.distribute_dataset(ms.data.from_arrays(np.arange(4 * workers)).batch(2))
        tested = 0
        for epoch in range(2):
            for number, _ in enumerate(training):
                strategy.run(lambda: v.assign_add([1]))
                if number % 2:
                    for _ in testing:
                        tested += 1
                        assert v.numpy()[0] > 4 * epoch
                        if number == 3:
                            break
        assert tested == (0 if strategy.is_server else 2 * (2 + 1))
        settle(strategy, v)
        if not strategy.is_server:
            assert v.numpy().tolist() == [8 * workers]
        strategy.comm.Barrier()


def test_iterators_by_hand():
    """get_next_as_optional and peek; an iterator that is dropped half-way leaves the pass."""
    with made() as strategy:
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(5 * strategy.num_workers)).batch(1))
        seen, iterator = [], iter(data)
        while (element := iterator.get_next_as_optional()).has_value():
            seen.append(int(element.get_value()[0]))
        assert len(seen) == (0 if strategy.is_server else 5)
        if strategy.worker_index == 0:  # asked again, it is not another pass
            assert not iterator.get_next_as_optional().has_value()
        iterator = iter(data)
        if strategy.is_server:
            for look in (iterator.peek, iterator.get_next):
                with pytest.raises(StopIteration):
                    look()
        else:
            assert iterator.peek().tolist() == iterator.peek().tolist() == next(iterator).tolist() == [seen[0]]
        del iterator
        assert all_seen(strategy, seen) == list(range(5 * strategy.num_workers))
        strategy.comm.Barrier()


def test_a_worker_goes_on_where_its_iterator_stood():
    rows = 8

    def distributed(strategy):
        whole = ms.data.from_arrays(np.arange(rows * strategy.num_workers)).shuffle(seed=5).batch(1)
        return strategy.distribute_dataset(whole)

    with made() as strategy:
        seen, state = [], None
        iterator = iter(distributed(strategy))
        for element in iterator:
            seen.append(int(element[0]))
            if len(seen) == 3:
                state = iterator.state()
                assert state == {"epoch": 0, "next": 3}  # no length: it depends on the number of workers
                break
        iterator.close()
        told = strategy.comm.allgather(json.dumps(iterator.state() if state is None else state))
    with made() as strategy:
        again = iter(distributed(strategy))
        again.restore(json.loads(told[strategy.rank]))
        seen += [int(element[0]) for element in again]
        assert all_seen(strategy, seen) == list(range(rows * strategy.num_workers))


def test_policies(mpi_tmp_path):
    """DATA deals batches out; OFF gives every worker all; FILE gives files, HINT what the program says."""
    from mpi4py import MPI

    policies = ms.data.AutoShardPolicy
    files = max(1, MPI.COMM_WORLD.size - 1)
    rows = 6 * files
    if MPI.COMM_WORLD.rank == 0:
        ms.data.write_shards(mpi_tmp_path / "shards", {"x": np.arange(rows)}, num_shards=files)
    MPI.COMM_WORLD.Barrier()
    with made() as strategy:
        workers = strategy.num_workers

        def seen_under(policy, dataset):
            options = ms.data.Options(auto_shard_policy=policy)
            data = strategy.distribute_dataset(dataset.with_options(options))
            return seen_by_workers(strategy, [np.asarray(batch).ravel().tolist() for batch in data])

        hdf5 = ms.data.HDF5Dataset(str(mpi_tmp_path / "shards" / "*.h5"), fields="x")
        batches = np.arange(rows).reshape(-1, 2).tolist()
        assert seen_under(policies.DATA, hdf5.batch(2)) == [batches[w::workers] for w in range(workers)]
        assert seen_under(policies.OFF, hdf5.batch(2)) == [batches] * workers
        assert seen_under(policies.FILE, hdf5.batch(2)) == [batches[3 * w : 3 * w + 3] for w in range(workers)]
        hinted = hdf5.shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT).batch(2)
        each = [np.arange(rows)[w::workers].reshape(-1, 2).tolist() for w in range(workers)]
        assert seen_under(policies.HINT, hinted) == each


def test_datasets_from_a_function_are_the_workers_own():
    contexts = []

    def make(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return ms.data.from_arrays(np.arange(3 + context.input_pipeline_id)).batch(
            context.get_per_replica_batch_size(1)
        )

    with made() as strategy:
        v = counter()
        for _ in strategy.distribute_datasets_from_function(make):
            strategy.run(lambda: v.assign_add([1]))
        workers = strategy.num_workers
        assert contexts == ([] if strategy.is_server else [(workers, strategy.worker_index, 1)])
        settle(strategy, v)
        if not strategy.is_server:
            assert v.numpy().tolist() == [sum(3 + w for w in range(workers))]
        strategy.comm.Barrier()


def test_two_devices_share_a_workers_batch():
    with made(devices=["cpu:0", "cpu:1"]) as strategy:
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(8 * strategy.num_workers)).batch(4))
        sizes = [[len(part) for part in strategy.local_results(batch)] for batch in data]
        assert sizes == ([] if strategy.is_server else [[2, 2], [2, 2]])
        strategy.comm.Barrier()


def test_tf_config_says_who_serves(monkeypatch):
    """The ranks are the tasks of a cluster that begins with a server, and has a chief."""
    serve_on_rank_0(monkeypatch)
    with made() as strategy:
        assert (strategy.servers, strategy.workers) == ((0,), tuple(range(1, strategy.size)))
        v = counter()
        for _ in strategy.distribute_dataset(ms.data.from_arrays(np.arange(2 * strategy.num_workers)).batch(1)):
            strategy.run(lambda: v.assign_add([1]))
        settle(strategy, v)
        if not strategy.is_server:
            assert v.numpy().tolist() == [2 * strategy.num_workers]
        strategy.comm.Barrier()


@pytest.mark.parametrize("scope", ["node", "job"])
def test_shared_caches_are_refused_before_they_take_memory(monkeypatch, scope):
    from mpistrat.data.nodes.node import Node

    bound = []
    monkeypatch.setattr(Node, "bind", lambda self, group: bound.append(self) or self)
    with made() as strategy:
        rows = ms.data.from_arrays(np.arange(8))
        with pytest.raises(ValueError, match=r"distribute_dataset: dataset: .*no shared cache.*Use cache\(\)"):
            strategy.distribute_dataset(rows.cache(scope).map(lambda x: x).batch(2))
        assert not bound
        seen = [row for batch in strategy.distribute_dataset(rows.cache().batch(2)) for row in batch.tolist()]
        assert all_seen(strategy, seen) == list(range(8))


def test_an_iterator_that_ends_within_a_request_signs_off_after_it():
    """As the garbage collector may end one anywhere: another message would disturb the one that is under way."""
    with made() as strategy:
        v = counter()
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(6 * strategy.num_workers)).batch(2))
        batches = iter(data)
        if strategy.is_server:
            assert list(batches) == []
        else:
            next(batches)
            access, told = strategy._access, []
            leave = access._transports[0].leave
            access._transports[0].leave = lambda **settings: told.append(access.lock._is_owned()) or leave(**settings)
            with access.lock:
                batches.close()
                assert told == []
            strategy.run(lambda: v.assign_add([1]))
            assert told == [True]
            del access._transports[0].leave
        settle(strategy, v)
        if not strategy.is_server:
            assert v.numpy().tolist() == [strategy.num_workers]
        strategy.comm.Barrier()
