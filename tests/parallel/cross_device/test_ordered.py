"""Sums in the order of replicas: the bits of the left fold, on whatever ranks and nodes the replicas are."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.distributed_values import PerReplica
from mpistrat.cross_device.ordered import OrderedAllReduce
from mpistrat.errors import DeviceError
from mpistrat.types import ReduceOp
from tests.harness.process_groups import Gradients, open_group

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

REPLICAS = 7
BATCHES = np.random.default_rng(3).normal(size=(4, REPLICAS * 3, 50_001)).astype(np.float32)  # of steps and rows


def left_fold(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


def parts(batch):
    """What each replica has of a batch: as many rows."""
    return [batch[3 * i : 3 * i + 3].sum(axis=0) for i in range(REPLICAS)]


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_model_has_the_bits_of_one_process(shared, monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    with ms.MultiWorkerMirroredStrategy(replicas=REPLICAS) as strategy:
        assert strategy.num_replicas_in_sync == REPLICAS
        with strategy.scope():
            w = ms.Variable(np.zeros(50_001, np.float32), name="w")
            optimizer = ms.optimizers.SGD(0.5)
        expected = np.zeros(50_001, np.float32)
        data = strategy.distribute_dataset(ms.data.from_arrays(BATCHES.reshape(-1, 50_001)).batch(3 * REPLICAS))

        def step(rows):
            gradient = rows.sum(axis=0)
            optimizer.apply_gradients([(gradient, w)])
            return gradient

        for batch, rows in zip(BATCHES, data, strict=True):
            total = strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None)
            folded = left_fold(parts(batch))
            expected = expected - np.float32(0.5) * folded
            np.testing.assert_array_equal(total, folded)
        np.testing.assert_array_equal(w.numpy(), expected)


def test_sums_of_rows_do_not_add_up_in_any_order():
    """Else the test above would prove nothing."""
    values = parts(BATCHES[0])
    assert (left_fold(values) != left_fold(values[::-1])).any()


@pytest.mark.parametrize("layout", ["nodes", "private", "devices"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_gradients_travel_along_the_nodes(layout, dtype):
    with open_group(layout) as group:
        ops = OrderedAllReduce()
        ops.bind(group)
        size, replicas = 300_007, group.topology.num_replicas
        values = [np.random.default_rng(replica).normal(size=size).astype(dtype) for replica in range(replicas)]
        first = group.topology.replica_offset
        local = values[first : first + group.topology.num_local_replicas]
        arena = Gradients(group, size, dtype)
        for target, value in zip(arena.local, local, strict=True):
            target[...] = value
        group.barrier()
        wide = np.float32 if dtype == "float16" else np.dtype(dtype)
        expected = left_fold([value.astype(wide) for value in values])
        handed = np.full(size, np.nan, wide)

        def consume(low, high, block):
            handed[low:high] = block
            block[...] = -1  # it is scratch

        ranges = [(5, 70_000), (70_016, 299_999)]
        with group.collective("test"):
            ops.call = None
            ops.reduce_arena(arena, ranges, consume)
        for low, high in arena.owned(ranges):
            np.testing.assert_array_equal(handed[low:high], expected[low:high])
        group.barrier()
        with group.collective("test"):
            total = ops.reduce_implementation(ReduceOp.MEAN, PerReplica(local))
        np.testing.assert_array_equal(total, (expected / replicas).astype(dtype))
        ops.close()


def test_wrong_arguments():
    ranks = ms.MultiWorkerMirroredStrategy().extended.topology.size
    for replicas in (ranks - 1, 0, -1, 2.0, True if ranks > 1 else "1"):
        with pytest.raises(DeviceError, match=f"replicas: expected a number of at least {ranks}, that of the ranks"):
            ms.MultiWorkerMirroredStrategy(replicas=replicas)
    with pytest.raises(DeviceError, match="replicas: expected devices or replicas"):
        ms.MirroredStrategy("cpu:0", replicas=4)
    with pytest.raises(ValueError, match="replicas: expected no other algorithm than OrderedAllReduce"):
        ms.MirroredStrategy(cross_device_ops=ms.MpiAllReduce(), replicas=4)


def test_ranks_have_as_many_replicas_as_possible_alike():
    with ms.MirroredStrategy(replicas=REPLICAS) as strategy:
        counts = strategy.extended.topology.replicas_per_rank
        assert (
            sum(counts) == REPLICAS and max(counts) - min(counts) <= 1 and list(counts) == sorted(counts, reverse=True)
        )
