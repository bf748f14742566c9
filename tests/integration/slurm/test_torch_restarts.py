"""Jobs of a real SLURM over two hosts that train by torch.distributed without a strategy: killed ranks, a lost host,
a preemption, a requeued job."""

import subprocess
from pathlib import Path

import pytest

from tests.harness.slurm_jobs import TWO_BY_TWO, launcher_words, lost_host, render

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def with_torch(mpi):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([mpi.python, "-c", code], check=False).returncode:
        pytest.skip("PyTorch is not installed: make test-frameworks")


KILLED = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import mpistrat as ms

VICTIMS = [[2, 3], [0]]  # of each generation
kind, kill = sys.argv[1:]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = ms.torch.TrainingState(model, optimizer)
    checkpoints = ms.train.Checkpoints(state, f"checkpoints-{kill}", snapshot_seconds=0.001)
    notes = checkpoints.restore_latest() or {"step": 0}
    generation, rank = int(os.environ["MPISTRAT_GENERATION"]), dist.get_rank()
    if rank == 0:
        print("from", kill, generation, notes["step"], flush=True)
    for step in range(notes["step"] + 1, 31):
        rows = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=rows)).square().mean().backward()
        if kill == "kill" and generation < len(VICTIMS) and step == 12 + 8 * generation and rank in VICTIMS[generation]:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        checkpoints.step(step)
    state.save(f"end-{kill}.h5")


dist.init_process_group("mpi")
main()
dist.destroy_process_group()
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
{python} -m mpistrat run --restarts 5 train.py {kind} none
{python} -m mpistrat run --restarts 5 train.py {kind} kill
echo status $?
srun --ntasks=2 --ntasks-per-node=1 ls /dev/shm | grep -c mpistrat-job
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_killed_ranks_leave_the_bits_of_an_undisturbed_run(slurm, slurm_mpi, tmp_path, kind):
    """All ranks of the second host, then one rank of the first."""
    import h5py

    (tmp_path / "train.py").write_text(KILLED)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=slurm_mpi.python, kind=kind))
    job = slurm.submit(tmp_path / "job.sh")
    job.wait(240)
    out = job.output()
    starts = [line.split()[1:] for line in out.splitlines() if line.startswith("from")]
    assert [words[:2] for words in starts] == [["none", "0"], *(["kill", str(n)] for n in range(3))], job.tell("starts")
    steps = [int(step) for _, _, step in starts]
    assert steps[:2] == [0, 0] and 0 < steps[2] <= 11 and 0 < steps[3] <= 19, job.tell("steps")
    assert out.count("started again from step") == 2 and "status 0" in out, job.tell("how it ended")
    with h5py.File(tmp_path / "end-none.h5") as wanted, h5py.File(tmp_path / "end-kill.h5") as found:
        assert found.attrs["digest"] == wanted.attrs["digest"], "of all arrays"
    assert out.splitlines()[-1] == "0", job.tell("files are left")


LOST = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import mpistrat as ms

kind = sys.argv[1]


def rows_of(step):
    return torch.arange(20.0).reshape(4, 5).add(7 * step).remainder(16)  # four rows: each number has few bits


class Files:
    # PyTorch's own checkpoints, of which those with .metadata are complete.

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def restore_latest(self):
        paths = sorted(Path("dcp").glob("*/.metadata"))
        if not paths:
            return None
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=paths[-1].parent)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return {"step": int(paths[-1].parent.name)}

    def step(self, step):
        if step % 8 == 0:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"dcp/{step:03}")


def main():
    torch.set_num_threads(1)
    model = nn.Linear(5, 3, bias=False)
    nn.init.zeros_(model.weight)
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5 if kind == "dcp" else 0)
    if kind == "dcp":
        checkpoints = Files(model, optimizer)
    else:
        state = ms.torch.TrainingState(model, optimizer)
        checkpoints = ms.train.Checkpoints(state, "checkpoints", snapshot_seconds=0.001)
    notes = checkpoints.restore_latest() or {"step": 0}
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(notes["step"] + 1, 31):
        optimizer.zero_grad()
        model(rows_of(step)[rank::size]).sum(1).mean().backward()
        optimizer.step()
        checkpoints.step(step)
        if step == 20 and os.environ["MPISTRAT_GENERATION"] == "0":
            if rank == 0:
                open("lose a host", "w").close()
            time.sleep(120)
    weight = next(iter(model.parameters()))
    weight = weight.full_tensor() if kind != "ddp" else weight
    if rank == 0:
        print("ended", notes["step"], size, len(os.environ["SLURM_STEP_NODELIST"].split(",")), flush=True)
        print("weights", *weight[0].tolist(), "of", len(set(map(tuple, weight.tolist()))), flush=True)


dist.init_process_group("mpi")
main()
dist.destroy_process_group()
"""


def weights(momentum):
    """The weights of each output: the gradient is the mean of four rows, whatever the weights are."""
    total, velocity = [0.0] * 5, [0.0] * 5
    for step in range(1, 31):
        mean = [sum((5 * row + column + 7 * step) % 16 for row in range(4)) / 4 for column in range(5)]
        velocity = [momentum * old + new for old, new in zip(velocity, mean, strict=True)]
        total = [old - 0.125 * new for old, new in zip(total, velocity, strict=True)]
    return total


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "dcp"])
def test_fewer_ranks_continue_without_a_lost_host(slurm, slurm_mpi, tmp_path, kind):
    """SLURM takes a host from the job. Two of four ranks continue, from memory or from files of PyTorch."""
    (tmp_path / "train.py").write_text(LOST)
    environment = str(Path(slurm_mpi.python).parent.parent)
    words = ["--venv", environment, *TWO_BY_TWO, "--cpus-per-rank", "1", "--restarts", "5"]
    script = render(slurm_mpi, tmp_path, *words, "train.py", kind)
    assert "#SBATCH --no-kill" in script.read_text()
    job = slurm.submit(script)
    job.wait_until("the twentieth step", (tmp_path / "lose a host").exists, 90)
    with lost_host(slurm) as lost:
        job.wait(150)
    out = job.output()
    (ended,) = [line.split()[1:] for line in out.splitlines() if line.startswith("ended")] or [job.tell("not ended")]
    assert ended[1:] == ["2", "1"], job.tell("ranks, nodes")
    assert int(ended[0]) == 16 if kind == "dcp" else 0 < int(ended[0]) <= 20, job.tell("from which step")
    (found,) = [line.split()[1:] for line in out.splitlines() if line.startswith("weights")]
    wanted = weights(0.5 if kind == "dcp" else 0)
    if kind == "dcp":
        assert list(map(float, found[:5])) == pytest.approx(wanted, rel=1e-6)
    else:
        assert list(map(float, found[:5])) == wanted, "each sum is exact"
    assert found[5:] == ["of", "1"]
    assert f"node {lost} lost" in out and job.fields()["JobState"] == "COMPLETED", job.tell("what was said")


STOPPED = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import mpistrat as ms


def main():
    torch.set_num_threads(1)
    model = nn.Linear(5, 3, bias=False)
    nn.init.zeros_(model.weight)
    model = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    state = ms.torch.TrainingState(model, optimizer)
    checkpoints = ms.train.Checkpoints(state, "checkpoints", every_steps=4)
    notes = checkpoints.restore_latest() or {"step": 0}
    rank, size, first = dist.get_rank(), dist.get_world_size(), os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    for step in range(notes["step"] + 1, 31):
        rows = torch.arange(20.0).reshape(4, 5).add(7 * step).remainder(16)
        optimizer.zero_grad()
        model(rows[rank::size]).sum(1).mean().backward()
        optimizer.step()
        if rank == 0:
            print("stepped", step, flush=True)
        if state.should_stop():
            checkpoints.save(step)
            checkpoints.wait()
            sys.exit(ms.RESTART_EXIT_CODE)
        time.sleep(1 if first else 0)
    weight = model.weight.full_tensor()
    if rank == 0:
        print("weights", *weight[0].tolist(), "of", len(set(map(tuple, weight.tolist()))), flush=True)


ms.catch_stop_signals()
dist.init_process_group("mpi")
main()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("event", ["signal", "lost host"])
def test_a_requeued_job_continues(slurm, slurm_mpi, tmp_path, event):
    """`mpistrat job --preemptible`: after a signal all ranks save at one step, after a lost host the files are left."""
    (tmp_path / "train.py").write_text(STOPPED)
    words = [*launcher_words(slurm_mpi, "srun"), *TWO_BY_TWO, "--cpus-per-rank", "1", "--preemptible"]
    job = slurm.submit(render(slurm_mpi, tmp_path, *words, "train.py"))
    job.wait_until("steps", lambda: "stepped 7" in job.output())
    if event == "signal":
        slurm.ok("scancel", "--signal=USR1", job.number)
    else:
        with lost_host(slurm):
            job.wait_until("the queue", lambda: job.fields()["JobState"] == "PENDING")
    out = job.completed(200)
    assert job.fields()["Restarts"] == "1", job.tell("restarts")
    steps = [int(line.split()[1]) for line in out.splitlines() if line.startswith("stepped")]
    again = next(number for number in range(1, 31) if steps[number:] == list(range(steps[number], 31)))
    assert steps[:again] == list(range(1, again + 1)), job.tell("the steps before")
    # After a lost host SLURM sends SIGTERM to the ranks, which may have the time to save.
    assert again == 1 or (event == "lost host" and steps[again] % 4 == 1), job.tell("the first step then")
    (found,) = [line.split()[1:] for line in out.splitlines() if line.startswith("weights")]
    assert list(map(float, found[:5])) == weights(0), "each sum is exact"
    assert found[5:] == ["of", "1"]
