"""BLAS threads under a SLURM that binds nothing (task/none): --cpus-per-task, although the whole machine is in reach."""

from __future__ import annotations

import pytest

PROGRAM = """
import os
import numpy as np
import mpistrat as ms
from mpistrat.base.cores import count_cores
from threadpoolctl import threadpool_info
with ms.MultiWorkerMirroredStrategy() as strategy:
    threads = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    print(strategy.size, threads == {min(THREADS, count_cores(sorted(os.sched_getaffinity(0))))}, threads)
"""


@pytest.mark.parametrize(
    ("options", "ranks", "threads"),
    [("-N2 -n4 --ntasks-per-node=2", 4, 1), ("-N1 -n1 --cpus-per-task=2", 1, 2), ("-N1 -n1", 1, 1)],
)
def test_threads(slurm, slurm_mpi, options: str, ranks: int, threads: int) -> None:
    from tests.launch.slurm import by_task, exported, mpi_type

    command = ["srun", "--label", f"--mpi={mpi_type(slurm_mpi)}", "--kill-on-bad-exit=1", *options.split()]
    program = PROGRAM.replace("THREADS", str(threads))
    out = slurm.ok(*command, slurm_mpi.python, "-c", program, env={"OMP_NUM_THREADS": None, **exported(slurm_mpi)})
    assert [text.split()[:2] for text in by_task(out)] == [[str(ranks), "True"]] * ranks, out
