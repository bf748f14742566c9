"""Making and closing groups again and again."""

import gc
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.ranks(2)


def test_groups_leave_nothing_behind(make_group):
    def held():
        shm = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shm" in line or "osc" in line]
        return len(list(Path("/proc/self/fd").iterdir())), len(shm)

    for _ in range(3):  # what is made once
        group = make_group()
        group.close()
        group.topology.close()
    before = held()
    for _ in range(30):
        group = make_group()
        group.barrier()
        group.close()
        group.topology.close()
    after = held()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2


@pytest.mark.ranks(2, 3)
def test_strategies_that_all_ranks_have_dropped_are_freed():
    """They are freed when the next one is made, in whichever order ranks drop them, and no others."""
    kept, comms, late, view = ms.MultiWorkerMirroredStrategy(), [], None, None
    for number in range(7):
        strategy = ms.MultiWorkerMirroredStrategy()
        comms.append((strategy.extended.topology.comm, strategy.process_set(range(strategy.size))._group.topology.comm))
        with strategy.scope():
            variable = ms.Variable(np.arange(3.0))
            optimizer = ms.optimizers.SGD(0.1)
        strategy.run(lambda o=optimizer, v=variable: o.apply_gradients([(np.ones(3), v)]))
        if number == 2 and strategy.rank:
            late = variable  # through which it can be used; rank 0 has none
        if number == 4:
            view = variable.numpy()
        del strategy, variable, optimizer
        gc.collect()
    last = ms.MultiWorkerMirroredStrategy()
    assert [number for number, some in enumerate(comms) if any(some)] == [2]  # a freed communicator is false
    assert view.tolist() == (np.arange(3.0) - 0.1 * last.size).tolist()
    if late is not None:
        assert late.numpy().tolist() == view.tolist()
    del late
    gc.collect()
    with ms.MultiWorkerMirroredStrategy():
        assert not any(map(any, comms))
    assert kept.reduce("SUM", 1.0, axis=None) == last.reduce("SUM", 1.0, axis=None) == kept.size
    kept.close()
    last.close()


def test_a_dropped_group_that_failed_is_left_to_the_end(make_group):
    """Some ranks would wait in vain for the others."""
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup
    from mpistrat.errors import CollectiveTimeoutError

    group = ProcessGroup.create(Topology.create())
    comm = group.topology.comm
    if group.topology.rank == 0:
        group.monitor.refusal = CollectiveTimeoutError("an earlier collective failed")
    del group
    gc.collect()
    make_group().barrier()
    make_group().barrier()
    assert comm
