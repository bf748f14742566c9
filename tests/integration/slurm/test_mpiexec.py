"""mpiexec inside a batch job: its ranks inherit the variables of mpiexec's own helpers, which say something else."""

from __future__ import annotations

import pytest

# On the last node one rank, on the others four: SLURM_PROCID is the number of the node there, or 0.
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out --nodes=2 --ntasks=5
{mpiexec} -n 5 {python} program.py
"""
PROGRAM = """
import os
from mpi4py import MPI
import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver, SlurmClusterResolver
comm = MPI.COMM_WORLD
try:
    SlurmClusterResolver()
    said = "nothing"
except ms.errors.ClusterError as error:
    said = "srun" if "srun" in str(error) and "MPIClusterResolver" in str(error) else str(error)
resolver = MPIClusterResolver()
tasks = resolver.cluster_spec().job_tasks("worker")
assert tasks[comm.rank] == MPI.Get_processor_name() and resolver.task_id == comm.rank and comm.size == 5
said += " " + " ".join(tasks)
comm.Barrier()
open(f"rank{comm.rank}", "w").write(said)
"""


@pytest.mark.timeout(300)
def test_mpiexec_within_a_job(slurm, mpi, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(SCRIPT.format(mpiexec=" ".join(mpi.mpiexec), python=mpi.python))
    job = slurm.submit(tmp_path / "job.sh")
    job.completed()
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(5)]
    assert said == ["srun h1 h1 h1 h1 h2"] * 5, job.tell("what ranks said")
