"""Sharded variables on several servers: one array to who reads, writes, trains, saves and restores it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.partitioners import FixedShardsPartitioner, MinSizePartitioner
from tests.harness.parameter_server_strategies import alone, made, settle
from tests.harness.transports import TRANSPORTS

pytestmark = pytest.mark.ranks(3, 4)
SUM = ms.VariableAggregation.SUM
PARTITIONERS = {
    "fixed": FixedShardsPartitioner(3),
    "by size": MinSizePartitioner(min_shard_bytes=48, max_shards=2),
    "none": None,
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("partitioner", ["fixed", "by size"])
def test_it_is_read_and_written_as_one(partitioner, transport):
    with made(num_ps=2, variable_partitioner=PARTITIONERS[partitioner], transport=transport) as strategy:
        expected = np.arange(14.0).reshape(7, 2)
        v = ms.Variable(expected, name="v", aggregation=SUM)
        assert [part.shape[0] for part in v.variables] == ([3, 2, 2] if partitioner == "fixed" else [4, 3])
        assert [part.server for part in v.variables] == [0, 1, 0][: len(v.variables)]
        if strategy.worker_index == 0:
            assert v.numpy().tolist() == expected.tolist()
            assert v[5:1:-2].tolist() == expected[5:1:-2].tolist()
            assert v[v.numpy()[:, 0] > 5].tolist() == expected[expected[:, 0] > 5].tolist()
            assert v.sparse_read([[6, 0], [3, 6]]).tolist() == expected[[[6, 0], [3, 6]]].tolist()
            assert v.embedding_lookup([5, 4, 5]).tolist() == expected[[5, 4, 5]].tolist()
            v.scatter_add(([6, 0, 6], np.ones((3, 2))))
            v.scatter_update(([2, 3], np.full((2, 2), -1.0)))
            np.add.at(expected, [6, 0, 6], 1)
            expected[[2, 3]] = -1
            strategy.run(lambda: v.scatter_sub(([1], [[5.0, 5.0]])))
            expected[1] -= 5
            assert v.numpy().tolist() == expected.tolist()
            v.assign(expected * 2)
            v.assign_add(np.ones((7, 2)))
            assert v.numpy().tolist() == (expected * 2 + 1).tolist()
        strategy.comm.Barrier()


def step_of(strategy, table, bias, optimizer):
    def step(number):
        random = np.random.default_rng(number)
        rows = random.integers(0, 7, 3)
        slices = ms.IndexedSlices(random.integers(-9, 9, (3, 2)) / 8, rows)
        dense = table.sparse_read(rows).sum() + random.integers(-9, 9, 5) / 8
        optimizer.apply_gradients([(slices if number % 2 else np.asarray(table) / 4, table), (dense, bias)])

    return step


def made_model(optimizer=lambda: ms.optimizers.Adagrad(0.1)):
    table = ms.Variable(np.linspace(-1, 1, 14).reshape(7, 2), name="table")
    return table, ms.Variable(np.zeros(5), name="bias"), optimizer()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_one_worker_trains_it_as_alone_bit_for_bit(partitioner):
    """Adagrad, which leaves rows without a gradient alone, as servers do with rows that nobody pushes."""
    from mpi4py import MPI

    def program(strategy):
        table, bias, optimizer = made_model()
        step = step_of(strategy, table, bias, optimizer)
        for number in range(8) if not getattr(strategy, "is_server", False) else ():
            strategy.run(step, args=(number,))
        return table, bias

    expected = alone(lambda strategy: [v.numpy() for v in program(strategy)])
    with made(num_ps=MPI.COMM_WORLD.size - 1, variable_partitioner=PARTITIONERS[partitioner]) as strategy:
        found = program(strategy)
        if not strategy.is_server:
            assert [v.numpy().tobytes() for v in found] == [value.tobytes() for value in expected]
            assert found[0].numpy().tobytes() != np.linspace(-1, 1, 14).tobytes()
        strategy.comm.Barrier()


@pytest.mark.parametrize("to", ["1 server", "2 servers, other shards", "unsharded", "no servers"])
def test_it_is_saved_and_restored_as_one(mpi_tmp_path, to):
    path = mpi_tmp_path / "state.h5"

    def program(strategy, steps, restored):
        table, bias, optimizer = made_model()
        if restored:
            strategy.restore(path)
        step = step_of(strategy, table, bias, optimizer)
        if getattr(strategy, "worker_index", 0) == 0:
            for number in steps:
                strategy.run(step, args=(number,))
        return table, bias, optimizer

    expected = alone(lambda strategy: [v.numpy() for v in program(strategy, range(6), False)[:2]])
    with made(num_ps=2, variable_partitioner=FixedShardsPartitioner(3)) as strategy:
        program(strategy, range(4), restored=False)
        strategy.save(path)
    if to == "no servers":
        found = alone(lambda strategy: [v.numpy() for v in program(strategy, (4, 5), restored=True)[:2]])
        assert [value.tobytes() for value in found] == [value.tobytes() for value in expected]
        return
    settings = {
        "1 server": {"num_ps": 1, "variable_partitioner": FixedShardsPartitioner(2)},
        "2 servers, other shards": {
            "num_ps": 2,
            "variable_partitioner": FixedShardsPartitioner(4),
            "placement": "bytes",
        },
        "unsharded": {"num_ps": 1},
    }[to]
    with made(**settings) as strategy:
        table, bias, _ = program(strategy, (4, 5), restored=True)
        settle(strategy, table, bias)
        if not strategy.is_server:
            assert [v.numpy().tobytes() for v in (table, bias)] == [value.tobytes() for value in expected]
        strategy.comm.Barrier()


@pytest.mark.big(gib=2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ten_million_rows(transport, record_property):
    """160 MB on two servers: a step moves its rows alone, and does not take as long as reading the table."""
    rows, width, batch, steps = 10_000_000, 4, 512, 20
    settings = {"num_ps": 2, "variable_partitioner": FixedShardsPartitioner(2), "transport": transport}
    with made(**settings) as strategy:
        table = ms.Variable(np.zeros((rows, width), np.float32), name="table")
        optimizer = ms.optimizers.SGD(1.0)
        seconds, random = [], np.random.default_rng(strategy.rank)
        touched = []

        def step(numbers):
            found = table.sparse_read(numbers)
            assert found.shape == (batch, width)
            optimizer.apply_gradients([(ms.IndexedSlices(-np.ones_like(found), numbers), table)])

        if not strategy.is_server:
            touched = [random.integers(0, rows, batch) for _ in range(steps)]
            touched[0][:2] = 0, rows - 1
            for numbers in touched:
                start = time.perf_counter()
                strategy.run(step, args=(numbers,))  # its read comes behind the pushes of the one before
                seconds.append(time.perf_counter() - start)
            table.sparse_read([0, rows - 1])  # behind all pushes
        strategy.comm.Barrier()
        every = np.concatenate([np.ravel(part) for part in strategy.comm.allgather(touched) if len(part)])
        numbers, times = np.unique(every, return_counts=True)
        if not strategy.is_server:
            assert (table.sparse_read(numbers) == times[:, None]).all()
        told = strategy.stats()
        for exchange in told.exchanges:  # of one worker about one shard
            assert exchange.pushed_bytes <= steps * batch * (width * 4 + 8)
            assert exchange.pulled_bytes <= (steps * batch + 2 + numbers.size) * width * 4
        assert sum(exchange.pushed_bytes for exchange in told.exchanges) > 0
        if not strategy.is_server:
            start = time.perf_counter()
            table.numpy()
            reading, step_took = time.perf_counter() - start, min(seconds[1:])
            assert step_took < reading
            record_property("milliseconds per step", round(1e3 * step_took, 2))
        if strategy.rank == 0:
            print(
                f"ten million rows, {transport}: {1e3 * step_took:.2f} ms for a step, {1e3 * reading:.0f} ms to read all"
            )
