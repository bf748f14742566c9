"""`mpistrat job --stage`: ranks run out of a copy of their environment that each node has, and loses when the job ends."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(400)

TRAIN = """
import socket, sys, time
import mpi4py, numpy
import mpistrat as ms
from tests.harness.whole_lines import print

strategy = ms.strategy_from_environment()
total = strategy.reduce("sum", 1)
print("rank", strategy.rank, socket.gethostname(), sys.prefix, mpi4py.__file__, numpy.__file__, total)
time.sleep(float(sys.argv[1]))
strategy.close()
"""
LEFT = "import os; print([name for name in os.listdir('/dev/shm') if name.startswith('mpistrat-{}')])"


@pytest.fixture
def usual_kill_wait(slurm):
    """What SLURM waits before SIGKILL if it isn't told: 16,000 files may take longer to remove than the 5 s of other tests."""
    with slurm.configured("KillWait=30"):
        yield


@pytest.mark.parametrize("end", ["done", "cancelled"])
@pytest.mark.usefixtures("usual_kill_wait")
def test_ranks_run_out_of_a_copy_that_goes_with_the_job(slurm, slurm_mpi, tmp_path, end: str) -> None:
    from tests.harness import slurm_jobs as jobs

    (tmp_path / "train.py").write_text(TRAIN)
    seconds = "0" if end == "done" else "300"
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *jobs.TWO_BY_TWO, "--stage", "/dev/shm", "train.py", seconds)
    if end == "done":
        job.completed()
    else:
        job.wait_until("the ranks", lambda: job.output().count("rank ") == 4, 120)
        slurm.ok("scancel", job.number)
    said = [line.split()[1:] for line in job.output().splitlines() if line.startswith("rank ")]
    assert [line[1] for line in sorted(said)] == ["h1", "h1", "h2", "h2"]
    (staged,) = {line[2] for line in said}
    assert staged.startswith(f"/dev/shm/mpistrat-{job.number}-0-")
    for _, _, _, mpi4py, numpy, total in said:
        assert mpi4py.startswith(staged) and numpy.startswith(staged) and float(total) == 4

    def left() -> list[str]:
        return slurm.tasks(LEFT.format(job.number), "-N2", "-n2", "--mpi=none")

    job.wait_until("the removal", lambda: left() == ["[]\n", "[]\n"], 60)
