"""A process without other ranks, which forks workers that have strategies of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from mpistrat.comm.shared_memory import allocate_private

PROGRAM = """
import os
import numpy as np
from mpi4py import MPI
import mpistrat as ms
with ms.OneDeviceStrategy() as outer:
    child = os.fork()
    if child == 0:
        with ms.MirroredStrategy(["cpu:0"]) as inner, inner.scope():
            v = ms.Variable(np.zeros(3))
            v.assign_add(np.ones(3))
            good = v.numpy().tolist() == [1, 1, 1]
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_worker_of_one_process_may_have_a_strategy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done


def test_a_process_with_much_memory_that_nothing_touched_may_fork():
    """As one that made many models, with NumPy before 2.2: a fork had no memory, as Linux took their blocks for one."""
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    blocks = [allocate_private(1 << 30, "a test") for _ in range(2 * gigabytes + 2)]
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(blocks) == 2 * gigabytes + 2  # which live until here
