"""How much memory variables take, and what happens where there is too little."""

import gc
from pathlib import Path

import numpy as np
import pytest

from mpistrat.comm import shared_memory
from mpistrat.errors import SharedMemoryError
from mpistrat.variables import Variable
from tests.harness.variable_harness import VariableHarness

MIB = 1 << 20

pytestmark = pytest.mark.big(gib=1)


def proportional_set_size(kind=""):
    """What this process takes, its part of shared pages counted by the number of their users."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        pytest.skip("the system does not tell the proportional set size")
    lines = rollup.read_text().splitlines()
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"Pss{kind}:")), None)
    if found is None:
        pytest.skip(f"the system does not tell Pss{kind}: Linux 5.9 and later do")
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trainable", [False, True])
def test_a_node_holds_a_variable_once(trainable):
    from mpi4py import MPI

    with VariableHarness() as harness:
        # Not the sum of all kinds: the share of libraries changes with the processes beside, and malloc gives pages back late.
        value = np.ones(64 * MIB // 8)
        harness.group.barrier("before")
        before = {kind: proportional_set_size(kind) for kind in ("_Shmem", "_Anon")}
        with harness.scope():
            v = Variable(value, trainable=trainable)
        assert float(v.array[::1000].sum()) == len(value[::1000])  # read by every rank
        gc.collect()
        harness.group.barrier("after")
        grown = {kind: MPI.COMM_WORLD.allreduce(proportional_set_size(kind) - before[kind]) for kind in before}
        expected = 64 * MIB + (2 * 64 * MIB if trainable else 0)  # the gradients are each rank's own
        assert 0.95 * expected < grown["_Shmem"] < 1.1 * expected
        assert grown["_Anon"] < 0.2 * 64 * MIB


@pytest.mark.ranks(1, 2)
def test_a_small_variable_costs_little():
    with VariableHarness() as harness, harness.scope():
        before = proportional_set_size()
        v = Variable(1.0)
        assert v.arena.size * 4 >= 1 * MIB  # a slab, of which most is not there
        assert proportional_set_size() - before < 4 * MIB


@pytest.mark.ranks(2, 3)
def test_too_little_shared_memory_is_an_error_on_every_rank(monkeypatch):
    with VariableHarness() as harness, harness.scope():
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "free_space", lambda: 1 * MIB)
            with pytest.raises(SharedMemoryError, match=r"'big'.*--shm-size"):
                Variable(np.zeros(MIB), name="big")
        assert Variable(np.ones(3)).numpy().tolist() == [1, 1, 1]


@pytest.mark.ranks(2, 3)
def test_pages_that_one_rank_does_not_get_are_an_error_on_every_rank(monkeypatch):
    with VariableHarness() as harness, harness.scope():
        Variable(np.ones(3))
        with monkeypatch.context() as patch:
            if harness.topology.rank == 1:
                patch.setattr(shared_memory.SharedBlock, "populate", lambda self, index, low, high: False)
            with pytest.raises(SharedMemoryError, match=r"rank 1.*'big'"):
                Variable(np.zeros(1000), name="big")
        v = Variable(np.full(5, 7.0))
        assert v.numpy().tolist() == [7.0] * 5


@pytest.mark.ranks(2)
def test_slabs_double_and_no_variable_spans_two():
    with VariableHarness() as harness, harness.scope():
        large = Variable(np.zeros(48 * MIB, np.int8), trainable=False)
        other = Variable(np.zeros(48 * MIB, np.int8), trainable=False)
        small = Variable(np.zeros(5 * MIB, np.int8), trainable=False)
        assert small.arena is other.arena is not large.arena
        assert small.offset == 48 * MIB
        sizes = [arena.size for arena in harness.placement.arenas.arenas]
        assert sizes == [64 * MIB, 128 * MIB]


@pytest.mark.ranks(2)
def test_close_gives_the_memory_back():
    import mpistrat as ms

    with VariableHarness() as harness:
        before = proportional_set_size()
        optimizer = ms.optimizers.SGD(0.1)
        with harness.scope():
            v = Variable(np.zeros(48 * MIB // 4, np.float32), aggregation=ms.VariableAggregation.SUM)
        harness.run(lambda: optimizer.apply_gradients([(v.grad, v)]))
        harness.group.barrier("used")
        assert proportional_set_size() - before > 48 * MIB
    assert proportional_set_size() - before < 24 * MIB
    assert optimizer.iterations == 1  # although the optimizer and the variable live on
