"""Programs of torch.distributed as they are, in a job of a real SLURM: srun starts them, and torchrun's command line does."""

import re
import subprocess

import pytest

PROGRAM = """
import os, sys
numbers = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
import torch
import torch.distributed as dist
dist.init_process_group(sys.argv[1])
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
host = os.uname().nodename
sys.stdout.write(f"{dist.get_rank()} {dist.get_world_size()} {host} {os.environ['LOCAL_RANK']} {value.item():g} {numbers}\\n")
dist.destroy_process_group()
"""
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out --nodes=2 --ntasks-per-node=2
export MPIR_CVAR_CH4_NETMOD=ofi
srun --mpi={pmi} {python} train.py {backend}
{python} -m mpistrat run --torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint h1:29500 train.py {backend}
"""


@pytest.fixture(autouse=True)
def with_torch(mpi):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([mpi.python, "-c", code], check=False).returncode:
        pytest.skip("PyTorch is not installed: make test-frameworks")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_job(slurm, slurm_mpi, tmp_path, backend):
    from tests.launch.slurm import mpi_type

    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=slurm_mpi.python, pmi=mpi_type(slurm_mpi), backend=backend))
    lines = slurm.submit(tmp_path / "job.sh").completed().splitlines()
    found = sorted(line for line in lines if line[:1].isdigit())
    plain = [f"{rank} 4 h{1 + rank // 2} {rank % 2} 10 [None, None, None, None]" for rank in range(4)]
    before = [f"{rank} 4 h{1 + rank // 2} {rank % 2} 10 ['{rank}', '4', '{rank % 2}', '2']" for rank in range(4)]
    assert found == sorted(plain + before), lines
    assert "mpistrat run: not used, as MPI connects the ranks: --rdzv-backend, --rdzv-endpoint" in lines


def test_a_job_of_ours_sets_the_numbers(slurm, slurm_mpi, tmp_path):
    from tests.launch.slurm import Job, mpi_type

    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--nodes", "2", "--ranks-per-node", "2", "--numbers", "--mpi", mpi_type(slurm_mpi)]
    options += ["--env", "MPIR_CVAR_CH4_NETMOD=ofi", "--submit", "train.py", "gloo"]
    number = slurm.ok(slurm_mpi.python, "-m", "mpistrat", "job", *options, cwd=tmp_path)
    lines = Job(slurm, number.strip(), tmp_path).completed().splitlines()
    found = sorted(line for line in lines if re.match(r"\d 4 ", line))
    assert found == [f"{rank} 4 h{1 + rank // 2} {rank % 2} 10 ['{rank}', '4', '{rank % 2}', '2']" for rank in range(4)]
