"""The launcher gives a test the ranks it asked for."""

import sys
from collections import defaultdict

import numpy as np
import pytest

from tests.launch.launcher import ROOT


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_runs_the_test(request):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    total = np.zeros(1, np.int64)
    comm.Allreduce(np.array([comm.rank + 1], np.int64), total)
    assert comm.size == request.node.callspec.params["_layout"].ranks
    assert total[0] == comm.size * (comm.size + 1) // 2


@pytest.mark.ranks(1, 2)
def test_no_file_is_imported_under_two_names():
    """A second copy of a module would have a state of its own; "__mp_main__" is multiprocessing's alias of the first."""
    names = defaultdict(list)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith((f"{ROOT}/tests/", f"{ROOT}/mpistrat/")) and name != "__mp_main__":
            names[file].append(name)
    twice = {file: found for file, found in names.items() if len(found) > 1}
    assert names and not twice, twice
