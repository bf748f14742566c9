"""The scripts in jobscripts/ as they are, on a real SLURM that has what they ask for: four hosts of 32 CPUs and 4 GPUs.

SLURM only counts those: the hosts share this machine's cores, and programs find no GPU. The user has an environment in .venv and
a train.py, and sets no variable. Of the site `MpiDefault` fits the MPI, as it does where users need not say `srun --mpi=`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launcher import ROOT, MpiEnv

pytestmark = pytest.mark.timeout(600)

# Each of 96 rows counts once an epoch, whoever reads it.
START = """
import argparse, os, socket, sys, time
import numpy as np
import mpistrat as ms

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", default=".")
args = parser.parse_args()
def say(text):
    sys.stdout.write(text + "\\n")

ms.catch_stop_signals()
strategy = ms.strategy_from_environment()
data = strategy.distribute_dataset(ms.data.from_arrays(np.ones((96, 2))).shuffle(seed=args.seed).batch(16))
with strategy.scope():
    w = ms.Variable(np.zeros(2), name="w")
    optimizer = ms.optimizers.SGD(1.0)

def step(x):
    optimizer.apply_gradients([(x.sum(axis=0), w)])

def train(epochs):
    for _ in range(epochs):
        for x in data:
            strategy.run(step, args=(x,))

role = "server" if getattr(strategy, "is_server", False) else "worker"
threads = os.environ["OMP_NUM_THREADS"]
say(f"{role} {strategy.rank} of {strategy.size} on {socket.gethostname()} with {threads} threads")
"""
TRAIN = """
train(args.epochs)
strategy.save(os.path.join(args.output, "w.h5"))
if strategy.rank == 0:
    say(f"seed {args.seed}: {w.numpy().tolist()}")
strategy.close()
"""
STOPPED = """
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    train(4)
    say("waits")
    while not strategy.should_stop():
        time.sleep(0.05)
    strategy.save("resume.h5", extra={"epochs": 4})
    strategy.close()
    sys.exit(ms.RESTART_EXIT_CODE)
args.epochs -= strategy.restore("resume.h5")["epochs"]
"""
# In the place of an image's `apptainer exec --nv mpistrat.sif COMMAND`: it runs the command where it is.
APPTAINER = '#!/bin/sh\n[ "$1 $2 $3" = "exec --nv mpistrat.sif" ] || exit 9\nshift 3\nexec "$@"\n'
# What a user of these hosts lacks, whom the tests are not: root asks mpirun for leave.
WITHOUT = ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "OMPI_MCA_osc", "PRTE_MCA_hwloc_default_binding_policy",
           "OMPI_MCA_mpi_yield_when_idle", "VIRTUAL_ENV")  # fmt: skip


@pytest.fixture(scope="module")
def slurm(pytestconfig: pytest.Config) -> Iterator[object]:
    """A SLURM with room for every script."""
    from tests.launch.hosts import Hosts
    from tests.launch.slurm import Slurm, why_no_slurm

    if reason := why_no_slurm():
        pytest.skip(reason)
    hosts = Hosts(4)
    try:
        large = Slurm(hosts, cpus=32, gpus=4)
        try:
            yield large
        finally:
            large.close()
    finally:
        hosts.close()


@pytest.fixture
def site(slurm, slurm_mpi) -> Iterator[MpiEnv]:
    """The site's MPI, which `srun` starts unasked."""
    from tests.launch.slurm import mpi_type

    with slurm.configured(f"MpiDefault={mpi_type(slurm_mpi)}"):
        yield slurm_mpi


def submit(slurm, mpi: MpiEnv, folder: Path, name: str, *options: str, program: str = TRAIN, **env: str):
    """Submit a script as a user does, from a folder with the program and its environment."""
    (folder / ".venv").symlink_to(Path(mpi.python).parent.parent)
    (folder / "train.py").write_text(START + program)
    shutil.copy(ROOT / "jobscripts" / name, folder)
    return slurm.submit(folder / name, *options, env=dict.fromkeys(WITHOUT) | env)


def ranks(job, role: str = "worker") -> list[list[str]]:
    """Rank, size and host of the ranks that said they are of this role."""
    lines = [line.split() for line in job.output().splitlines() if line.startswith(f"{role} ")]
    assert all(line[-2:] == ["8", "threads"] for line in lines), job.tell("threads")
    return sorted(([line[1], line[3], line[5]] for line in lines), key=lambda line: int(line[0]))


def on(hosts: int, of: int = 0, first: int = 0, each: int = 4) -> list[list[str]]:
    """What `ranks` gives for four ranks on each of so many hosts."""
    return [[str(first + i), str(of or 4 * hosts), f"h{i // each + 1}"] for i in range(each * hosts)]


@pytest.mark.parametrize("name", ["slurm-cpu.sh", "slurm-cpu-mpirun.sh", "slurm-gpu.sh"])
def test_synchronous(slurm, site, tmp_path, name: str) -> None:
    if "mpirun" in name and site.name != "openmpi":
        pytest.skip("a script for Open MPI's mpirun")
    job = submit(slurm, site, tmp_path, name)
    assert "seed 0: [-960.0, -960.0]\n" in job.completed(300)
    assert ranks(job) == on(hosts=4 if "gpu" in name else 2)
    assert (tmp_path / f"train-{job.number}.out").exists() and (tmp_path / "w.h5").exists()


def test_in_a_container(slurm, site, tmp_path) -> None:
    """Without a container: `apptainer` is a stand-in that runs the words for the image where it is."""
    if site.name != "openmpi":
        pytest.skip("the script says --mpi=pmix")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(APPTAINER)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(site.python).parent}:/usr/bin:/bin"  # the image's Python, too
    job = submit(slurm, site, tmp_path, "slurm-apptainer.sh", PATH=path)
    assert "seed 0: [-960.0, -960.0]\n" in job.completed(300)
    assert ranks(job) == on(hosts=4)


def test_parameter_servers(slurm, site, tmp_path) -> None:
    """The last two ranks of two hosts; and on a host of their own, as second component of a heterogeneous job."""
    for name in ("last", "het"):
        (tmp_path / name).mkdir()
    last = submit(slurm, site, tmp_path / "last", "slurm-parameter-servers.sh")
    assert "seed 0: [-960.0, -960.0]\n" in last.completed(300)
    assert ranks(last) == on(hosts=2)[:6]
    assert ranks(last, "server") == on(hosts=2)[6:]
    het = submit(slurm, site, tmp_path / "het", "slurm-parameter-servers-het.sh")
    assert "seed 0: [-960.0, -960.0]\n" in het.completed(300)
    assert [line[:2] for line in ranks(het)] == [[str(i), "10"] for i in range(8)]
    assert [line[:2] for line in ranks(het, "server")] == [["8", "10"], ["9", "10"]]
    workers, servers = ({line[2] for line in ranks(het, role)} for role in ("worker", "server"))
    assert len(workers) == 2 and len(servers) == 1 and not workers & servers


def test_array(slurm, site, tmp_path) -> None:
    """Two of the ten tasks: all of them take minutes on two cores. What sbatch is given goes before what the script says."""
    if site.name != "mpich":
        pytest.skip("one MPI is enough")
    job = submit(slurm, site, tmp_path, "slurm-array.sh", "--array=3,9%4")
    text = job.completed(300)
    assert len(job.states()) == 2
    for seed in (3, 9):
        assert f"seed {seed}: [-960.0, -960.0]\n" in text
        assert (tmp_path / "results" / str(seed) / "w.h5").exists()


@pytest.mark.parametrize("name", ["slurm-preemptible.sh", "slurm-preemptible-mpirun.sh"])
def test_preemptible(slurm, site, tmp_path, name: str) -> None:
    """Signalled as the script asks for two minutes before the end of its time, here by hand; its second run has the rest."""
    if "mpirun" in name and site.name != "openmpi":
        pytest.skip("a script for Open MPI's mpirun")
    job = submit(slurm, site, tmp_path, name, program=STOPPED + TRAIN)
    job.wait_until("the wait of all ranks", lambda: job.output().count("waits\n") == 8, 300)
    slurm.ok("scancel", *(["--batch"] if "mpirun" in name else []), "--signal=USR1", job.number)
    assert "seed 0: [-960.0, -960.0]\n" in job.completed(300)
    assert int(job.fields()["Restarts"]) == 1, job.tell("restarts")
    assert len(ranks(job)) == 16
