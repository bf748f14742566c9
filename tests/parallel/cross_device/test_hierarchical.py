"""What HierarchicalAllReduce does beyond the contract: sums in place, packs, and wrong use on real ranks."""

import time

import numpy as np
import pytest

from mpistrat.base.options import CommunicationOptions
from mpistrat.cross_device.hierarchical import HierarchicalAllReduce
from mpistrat.errors import CollectiveMismatchError, CollectiveTimeoutError
from mpistrat.types import ReduceOp
from tests.harness.process_groups import Gradients, Variable, local, open_group

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(params=["shared", "private", "nodes", "devices"], scope="module")
def group(request):
    with open_group(request.param) as group:
        yield group


@pytest.fixture
def ops(group):
    ops = HierarchicalAllReduce()
    ops.bind(group)
    return ops


def _fill(group, variable, scale=1):
    for index in range(group.topology.num_local_replicas):
        variable.grad(index)[...] = (np.arange(variable.size) % 50 + group.topology.replica_offset + index) * scale


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_are_reduced_where_they_lie(group, ops, op, dtype):
    replicas = group.topology.num_replicas
    arena = Gradients(group, 300_000, dtype)
    first, second = Variable(arena, 0, 100_000), Variable(arena, 100_016, 199_000)
    for variable in (first, second):
        _fill(group, variable)
    group.barrier()
    times, offset = {
        "SUM": (replicas, replicas * (replicas - 1) / 2),
        "MEAN": (1, (replicas - 1) / 2),
        "MIN": (1, 0),
        "MAX": (1, replicas - 1),
    }[op]

    def expected(variable):
        return (np.arange(variable.size) % 50 * times + offset).astype(dtype)

    def value(variable):
        return local(group, lambda replica: variable.grad(replica - group.topology.replica_offset))

    total = ops.reduce(op, value(first), first)
    assert np.shares_memory(total, (arena.node or arena.local)[0])
    assert not total.flags.writeable
    assert np.array_equal(total, expected(first))
    group.barrier()
    _fill(group, first)
    group.barrier()
    results = ops.batch_reduce(op, [(value(first), first), (value(second), second)])
    for variable, result in zip((first, second), results, strict=True):
        assert np.shares_memory(result, (arena.node or arena.local)[0])
        assert np.array_equal(result, expected(variable))
    group.barrier()


def test_another_array_than_the_gradient_is_not_reduced_in_place(group, ops):
    variable = Variable(Gradients(group, 100_000, np.float32), 0, 100_000)
    _fill(group, variable)
    mine = local(group, lambda replica: np.ones(100_000, np.float32))
    total = ops.reduce(ReduceOp.SUM, mine, variable)
    assert (total == group.topology.num_replicas).all()
    assert variable.grad(0)[0] == group.topology.replica_offset


@pytest.mark.parametrize("num_packs", [0, 1, 3])
def test_packs(group, num_packs):
    ops = HierarchicalAllReduce(num_packs)
    ops.bind(group)
    sizes = (0, 1, 7, 50_000)
    values = [local(group, lambda replica, n=n: np.full(n, replica + 1.0)) for n in sizes]
    replicas = group.topology.num_replicas
    for result, size in zip(ops.batch_reduce("sum", [(v, None) for v in values]), sizes, strict=True):
        assert result.tolist() == [replicas * (replicas + 1) / 2] * size


@pytest.mark.parametrize("size", [2, 100_000])
def test_other_shapes_on_one_rank_are_an_error_on_every_rank(size):
    with open_group("shared") as group:
        ops = HierarchicalAllReduce()
        ops.bind(group)
        if group.topology.size == 1:
            pytest.skip("needs another rank")
        mine = np.ones(size + group.topology.rank)
        with pytest.raises(CollectiveMismatchError) as caught:
            ops.reduce(ReduceOp.SUM, mine)
        for rank in range(group.topology.size):
            assert f"({size + rank},)" in str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    with open_group("shared") as group:
        ops = HierarchicalAllReduce()
        ops.bind(group)
        size, rank = group.topology.size, group.topology.rank
        if size == 1:
            pytest.skip("needs another rank")
        options = CommunicationOptions(timeout_seconds=0.3)
        if rank == size - 1:
            time.sleep(1.0)
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError):
            ops.reduce(ReduceOp.SUM, np.ones(3), None, options)
        assert time.monotonic() - begin < 5
