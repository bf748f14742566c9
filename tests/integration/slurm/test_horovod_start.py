"""A program of Horovod as it is, in a job of a real SLURM over two hosts: its numbers, a step, and a killed rank."""

import subprocess

import pytest

from tests.harness.horovod_programs import elastic, ends

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import os, sys
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.constant_(model.weight, hvd.rank())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
for _ in range(2):
    optimizer.zero_grad()
    (model(torch.ones(1, 2)) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
numbers = hvd.rank(), hvd.size(), os.uname().nodename, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
sys.stdout.write(f"plain {numbers} {total} {model.weight.tolist()}\\n")
"""
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out --nodes=2 --ntasks-per-node=2
{python} -m mpistrat run --horovod train.py
{python} -m mpistrat run --horovod --restarts 2 elastic.py
"""


@pytest.fixture(autouse=True)
def with_torch(mpi):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([mpi.python, "-c", code], check=False).returncode:
        pytest.skip("PyTorch is not installed: make test-frameworks")


def test_the_job(slurm, slurm_mpi, tmp_path):
    """The average gradient of a step is 2.5. Rank 3 is killed in the fourth step, and all ranks start again."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "elastic.py").write_text(elastic(victim=3))
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=slurm_mpi.python))
    lines = slurm.submit(tmp_path / "job.sh").completed().splitlines()
    numbers = [(rank, 4, f"h{1 + rank // 2}", rank % 2, 2, rank // 2, 2) for rank in range(4)]
    assert sorted(line for line in lines if line.startswith("plain")) == [
        f"plain {each} 10.0 [[-5.0, -5.0]]" for each in numbers
    ], lines
    found = sorted(line for line in lines if line.startswith("elastic"))
    assert found in [ends(4, step, -15.0) for step in (3, 4)], (
        lines
    )  # others may have committed the fourth step, or not
