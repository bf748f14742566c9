"""From the death of a rank to the next new step: in place, restarted, restarted with ranks in reserve; beside torchrun.

    python benchmarks/recovery.py --mpi-env mpich=.venv-frameworks/bin/python --mpi-env openmpi=.venv-openmpi/bin/python \
        --torch .venv-frameworks/bin/python --output benchmarks/results/today

Two ranks train for some seconds, then rank 1 gets SIGKILL. With PyTorch, a model of 1 M parameters and Adam: ours with what
`ms.train.Checkpoints` does by default, a snapshot each second; torchrun with `--max-restarts`, DDP on gloo, and a file of the
state that rank 0 writes each second into /dev/shm. With NumPy, the same number of parameters. The time is that from the kill to
the first step behind the one at which the rank died, work that is done again included; the median of some jobs, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 60.0  # seconds that a job has
ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import os, signal, time
import numpy as np

def note(rank, generation, step):
    with open(f"steps-{rank}", "a") as file:
        file.write(f"{time.time()} {step}\\n")
    time.sleep(0.01)
    if rank == 1 and generation == 0 and step == KILL:
        open("killed", "w").write(f"{time.time()} {step}")
        os.kill(os.getpid(), signal.SIGKILL)

KILL, STEPS = 500, 900
"""
MODEL = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(4, 500)
"""
OURS_TORCH = (
    MODEL
    + """
import mpistrat as ms
strategy = ms.MirroredStrategy()
with strategy.scope():
    model, optimizer = ms.torch.distribute(model, optimizer)
checkpoints = ms.train.Checkpoints(strategy, "checkpoints")
done = (checkpoints.restore_latest() or {"step": 0})["step"]
for step in range(done + 1, STEPS + 1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    checkpoints.step(step)
    note(strategy.rank, int(os.environ["MPISTRAT_GENERATION"]), step)
"""
)
OURS_NUMPY = """
import mpistrat as ms

def train(job):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.zeros((4, 500, 500), np.float32), name="w")
        optimizer = ms.optimizers.Adam()
    checkpoints = ms.train.Checkpoints(strategy, "checkpoints")
    done = (checkpoints.restore_latest() or {"step": 0})["step"]
    for step in range(done + 1, STEPS + 1):
        strategy.run(lambda: optimizer.apply_gradients([(w.grad, w)]))
        checkpoints.step(step)
        note(strategy.rank, job.generation, step)

ms.survive(train)
"""
TORCHRUN = (
    MODEL
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, path = dist.get_rank(), os.environ["STATE"]
done = 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]
ddp, saved = DistributedDataParallel(model), time.monotonic()
for step in range(done + 1, STEPS + 1):
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    if rank == 0 and time.monotonic() - saved > 1.0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)
        saved = time.monotonic()
    note(rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), step)
dist.destroy_process_group()
"""
)


def run(command: list[str], program: str) -> float:
    """Return the seconds from the kill to the next new step; infinite where the job has not ended after a minute."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        (folder / "train.py").write_text(HEAD + program)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "STATE": f"{memory}/state"}
        job = subprocess.Popen(
            [*command, "train.py"], cwd=folder, env=env, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            if job.wait(LIMIT):
                raise RuntimeError(f"{' '.join(command)}: status {job.returncode}")
        except subprocess.TimeoutExpired:
            if not (folder / "killed").exists():
                raise
            return float("inf")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        moment, step = map(float, (folder / "killed").read_text().split())
        lines = [line.split() for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
        return min(float(at) for at, number in lines if float(number) > step and float(at) > moment) - moment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi-env", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--torch", metavar="PYTHON", help="that has PyTorch and an MPI")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ways: dict[str, tuple[list[str], str]] = {}
    for word in options.mpi_env:
        name, _, python = word.partition("=")
        start = [os.path.abspath(python), "-m", "mpistrat", "run", "-n", "2"]
        if name == "openmpi":
            ways[f"in place, {name}, NumPy"] = [*start, "--survive"], OURS_NUMPY
        ways[f"restarts, {name}, NumPy"] = [*start, "--restarts", "5"], OURS_NUMPY
        ways[f"restarts and standby, {name}, NumPy"] = [*start, "--restarts", "5", "--standby"], OURS_NUMPY
    if options.torch:
        python = os.path.abspath(options.torch)
        start = [python, "-m", "mpistrat", "run", "-n", "2", "--restarts", "5"]
        ways["restarts, PyTorch"] = start, OURS_TORCH
        ways["restarts and standby, PyTorch"] = [*start, "--standby"], OURS_TORCH
        words = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=5"]
        ways["torchrun, PyTorch"] = words, TORCHRUN
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, how in ways.items():
            found[way].append(run(*how))
            print(f"{way}: {found[way][-1]:.2f} s", flush=True)
    result = {
        "benchmark": "recovery", "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "ranks": 2,
        "seconds": {
            way: {"median": statistics.median(s), "all": [round(x, 3) if x < LIMIT else "not ended" for x in s]}
            for way, s in found.items()
        },
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "recovery-1x2.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
