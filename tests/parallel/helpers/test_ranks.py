"""The launcher gives a test the ranks it asked for."""

import numpy as np
import pytest


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_runs_the_test(request):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    total = np.zeros(1, np.int64)
    comm.Allreduce(np.array([comm.rank + 1], np.int64), total)
    assert comm.size == request.node.callspec.params["_layout"].ranks
    assert total[0] == comm.size * (comm.size + 1) // 2
