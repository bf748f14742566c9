"""Variables with a copy on each local device, as on GPUs; here the devices' memory is NumPy's."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena import arena
from mpistrat.variables import kinds


@pytest.fixture
def strategy(monkeypatch):
    def zeros(shape, dtype, device):
        assert device in ("gpu:0", "gpu:1")
        return np.zeros(shape, dtype)

    with ms.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        arenas = made.extended.placement.arenas
        arenas.on_gpu, arenas.devices = True, ("gpu:0", "gpu:1")
        monkeypatch.setattr(arena, "zeros", zeros)
        monkeypatch.setattr(kinds, "zeros", zeros)
        monkeypatch.setattr(arena.ArenaAllocator, "_free_bytes", lambda self: 16 << 20)
        yield made


def test_every_copy_is_written(strategy):
    with strategy.scope():
        v = ms.Variable(np.arange(3.0), aggregation=ms.VariableAggregation.MEAN)
    assert v.num_copies == 2 and not np.shares_memory(*v.values)
    assert v.arena.size * 8 == (16 << 20) // 4 // 3 // 65536 * 65536 + 65536  # a quarter for a copy and two gradients
    with strategy.scope():
        v.assign_add(np.ones(3))
        v.scatter_add(([0], [5.0]))
    strategy.run(lambda: v.assign_add(np.full(3, float(ms.get_replica_context().replica_id_in_sync_group))))
    assert [copy.tolist() for copy in v.values] == [[6.5, 2.5, 3.5]] * 2
    assert v.arena.owned([(0, 3)]) == [(0, 3)]
    with pytest.raises(TypeError, match=r"v\.numpy\(\)"):
        np.asarray(v)
    assert v.numpy().tolist() == [6.5, 2.5, 3.5]


def test_update_writes_its_own_copy(strategy):
    with strategy.scope():
        v = ms.Variable(np.zeros(2))
    strategy.extended.update(v, lambda w: w.assign_add(np.full(2, 1.0 + ms.context.get_update_replica_id())))
    assert [copy.tolist() for copy in v.values] == [[1, 1], [2, 2]]
    seen = strategy.run(lambda: v.array)
    assert seen.values[0] is v.values[0] and seen.values[1] is v.values[1]


def test_each_replica_has_its_gradient_and_its_own_on_read_copy(strategy):
    with strategy.scope():
        v = ms.Variable(np.zeros(2))
        total = ms.Variable(
            1.0, synchronization=ms.VariableSynchronization.ON_READ, aggregation=ms.VariableAggregation.SUM
        )

    def step():
        v.grad[...] = ms.get_replica_context().replica_id_in_sync_group
        total.assign_add(10.0)

    strategy.run(step)
    assert [v.gradient(k).tolist() for k in (0, 1)] == [[0, 0], [1, 1]]
    with strategy.scope():
        assert total.numpy() == 22.0
