"""Strategies beside an MPI that the program started itself, at a level below THREAD_MULTIPLE, and ends itself."""

import pytest

PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_{level})
import threading
import numpy as np
import mpistrat as ms

calls = set()
class Spy(ms.MpiAllReduce):
    def reduce_implementation(self, *args, **kwargs):
        calls.add(threading.current_thread())
        return super().reduce_implementation(*args, **kwargs)

half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)
alone = ms.MirroredStrategy(comm=half)
strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], Spy(), comm=MPI.COMM_WORLD)
with strategy.scope():
    w = ms.Variable(np.zeros(3))
    optimizer = ms.optimizers.SGD(1.0)

def step():
    w.grad[...] = 1.0
    optimizer.apply_gradients([(w.grad, w)])
    return ms.get_replica_context().all_reduce("SUM", 1.0)

assert strategy.local_results(strategy.run(step)) == (4.0, 4.0)
assert w.numpy().tolist() == [-4.0] * 3
assert alone.reduce("SUM", 1.0) == 1.0
assert calls == {{threading.main_thread()}}
strategy.close()
alone.close()
assert half.size == 1
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
"""


@pytest.mark.parametrize("level", ["FUNNELED", "SERIALIZED"])
def test_lower_levels(mpi_run, level):
    result = mpi_run(PROGRAM.format(level=level), 2)
    assert result.returncode == 0, result
    assert result.stderr.count("no watchdog runs") == 1, result
    assert "no watchdog runs" in result.err[0], result


def test_mistakes_are_noticed_without_the_watchdog(mpi_run):
    program = PROGRAM.format(level="FUNNELED").partition("def step")[0]
    result = mpi_run(program + "strategy.reduce('SUM', ms.PerReplica([np.ones(2 + strategy.rank)] * 2))", 2)
    assert result.returncode == 1, result
    for text in result.err:
        assert "CollectiveMismatchError" in text and "(2,)" in text and "(3,)" in text, result
