"""ms.jax.initialize in a job of a real SLURM: srun starts the ranks, on two hosts and on one."""

import subprocess

import pytest

PROGRAM = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
import mpistrat as ms
from jax.sharding import NamedSharding, PartitionSpec as P
ms.jax.initialize()
rank, ranks = jax.process_index(), jax.process_count()
sharding = NamedSharding(jax.make_mesh((ranks,), ("ranks",)), P("ranks"))
total = jax.jit(jnp.sum)(jax.make_array_from_process_local_data(sharding, np.float32([rank + 1]), (ranks,)))
sys.stdout.write(f"sum {rank} {ranks} {os.uname().nodename} {float(total):g}\\n")
"""
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out --nodes=2 --ntasks-per-node=2
export MPIR_CVAR_CH4_NETMOD=ofi
srun --mpi={pmi} {python} train.py
srun --nodes 1 --ntasks 2 --mpi={pmi} {python} train.py
"""


@pytest.fixture(autouse=True)
def with_jax(mpi):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('jax') is None)"
    if subprocess.run([mpi.python, "-c", code], check=False).returncode:
        pytest.skip("JAX is not installed: make test-frameworks")


def test_the_job(slurm, slurm_mpi, tmp_path):
    from tests.launch.slurm import mpi_type

    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=slurm_mpi.python, pmi=mpi_type(slurm_mpi)))
    lines = slurm.submit(tmp_path / "job.sh").completed().splitlines()
    found = sorted(line for line in lines if line.startswith("sum"))
    two = [f"sum {rank} 4 h{1 + rank // 2} 10" for rank in range(4)]
    one = [f"sum {rank} 2 h1 3" for rank in range(2)]
    assert found == sorted(two + one), lines
