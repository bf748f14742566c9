"""The scripts of docs/preemption.md in a real SLURM: the ranks are told to stop, and the job goes back into the queue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import pages

START = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=2 --time=10 --output=job.out\n"
PROGRAM = """
import os, sys, time
import mpistrat as ms
from tests.harness.whole_lines import print

ms.catch_stop_signals()
strategy = ms.MultiWorkerMirroredStrategy()
restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
print("rank", strategy.rank, "of", strategy.size, "after", restarts)
while restarts == 0 and not strategy.should_stop():
    time.sleep(0.05)
    strategy.reduce("SUM", 1.0, axis=None)
strategy.close()
sys.exit(ms.RESTART_EXIT_CODE if restarts == 0 else 0)
"""


@pytest.mark.timeout(400)
def test_preemption(slurm, slurm_mpi, tmp_path) -> None:
    """Both scripts at the same time, on a host each; they are as the page has them, behind the request for two ranks."""
    from tests.launch.slurm import mpi_type

    blocks = [block.text for block in pages.read("docs/preemption.md").blocks if block.language == "bash"]
    by_srun, by_mpiexec = blocks
    assert "\nsrun " in by_srun and "\nmpiexec " in by_mpiexec
    path = os.pathsep.join([str(Path(slurm_mpi.python).parent), os.environ["PATH"]])
    jobs = []
    for name, text in (("srun", by_srun), ("mpiexec", by_mpiexec)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(PROGRAM)
        (folder / "job.sh").write_text(START + text)
        env = {"PATH": path} | ({"SLURM_MPI_TYPE": mpi_type(slurm_mpi)} if name == "srun" else {})
        jobs.append(slurm.submit(folder / "job.sh", env=env))
    for job, where in zip(jobs, ([], ["--batch"]), strict=True):
        job.wait_until("ranks", lambda job=job: job.output().count("of 2 after 0") == 2)
        slurm.ok("scancel", *where, "--signal=USR1", job.number)
    for job in jobs:
        text = job.completed(timeout=60)
        assert int(job.fields()["Restarts"]) == 1, job.tell("restarts")
        assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
            f"rank {rank} of 2 after {restarts}" for rank in range(2) for restarts in range(2)
        ]
