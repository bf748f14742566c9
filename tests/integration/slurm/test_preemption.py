"""Preemptible jobs under a real SLURM: signalled, saved, requeued, and at the end the weights of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.harness import digits_jobs

pytestmark = pytest.mark.timeout(400)

# The digits job, so slow before its first restart that it is signalled in the middle.
PROGRAM = """
import os, sys, time
from mpistrat.examples import digits
from mpistrat.train import Monitor
slow = 0.0 if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else float(sys.argv[1])
step = Monitor.on_step_end
def slow_step(*args):
    step(*args)
    print("stepped", flush=True)
    time.sleep(slow)
Monitor.on_step_end = slow_step
digits.main(sys.argv[2:])
"""
URGENT = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=2 --exclusive --time=1 --output=/dev/null\nsrun hostname\n"


class Interrupted:
    """A preemptible job of two ranks on each host, that is training."""

    def __init__(self, slurm, mpi, folder, launcher, slow, *options) -> None:
        from tests.harness import slurm_jobs as jobs

        self.slurm, self.folder = slurm, folder
        (folder / "train.py").write_text(PROGRAM)
        words = (
            *jobs.TWO_BY_TWO,
            "--preemptible",
            *options,
            "train.py",
            str(slow),
            *digits_jobs.COMMON,
            "--output",
            "made",
        )
        self.job = jobs.submit(slurm, mpi, launcher, folder, *words)
        self.job.wait_until("steps", lambda: self.job.output().count("stepped") >= 8)

    def wait_for_restart(self, timeout: float = 90.0) -> None:
        def restarted() -> bool:
            return int(self.job.fields()["Restarts"]) == 1 or self.job.states() == ["FAILED"]

        self.job.wait_until("restart", restarted, timeout)
        assert "made/checkpoints" in self.job.output(), self.job.tell("the job did not save")

    def completed(self, most: int = 1) -> dict:
        """The end of the job, restarted once or at most so often; its weights."""
        text = self.job.completed()
        assert 1 <= int(self.job.fields()["Restarts"]) <= most, self.job.tell("restarts")
        assert text.count("stepped") < 4 * (30 + 30), "it began anew and did not go on"
        return digits_jobs.weights(self.folder / "made")


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_preempted_by_an_urgent_job(slurm, slurm_mpi, references, tmp_path, launcher: str) -> None:
    """SLURM sends SIGTERM to the ranks, and to mpiexec's helpers. Open MPI's leave no time to save: there the site must let
    SLURM send the script's own signal."""
    from tests.harness.slurm_jobs import same_bits

    undisturbed = references.weights(slurm_mpi)
    helped = launcher == "mpiexec" and slurm_mpi.name == "openmpi"
    settings = ["SlurmctldParameters=preempt_send_user_signal"] if helped else []
    with slurm.configured(*settings):
        run = Interrupted(slurm, slurm_mpi, tmp_path, launcher, 0.5)
        (tmp_path / "urgent.sh").write_text(URGENT)
        urgent = slurm.submit(tmp_path / "urgent.sh")
        run.wait_for_restart()
        urgent.completed()
    made = run.completed()
    assert digits_jobs.difference(made, undisturbed) <= 1e-9
    assert same_bits(made, undisturbed)


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_told_by_scancel(slurm, slurm_mpi, references, tmp_path, launcher: str) -> None:
    from tests.harness.slurm_jobs import same_bits

    if slurm_mpi.name != "mpich":
        pytest.skip("the signal's ways are those of the other tests here")
    undisturbed = references.weights(slurm_mpi)
    run = Interrupted(slurm, slurm_mpi, tmp_path, launcher, 0.5)
    where = [] if launcher == "srun" else ["--batch"]  # the script hands it on
    slurm.ok("scancel", *where, "--signal=USR1", run.job.number)
    run.wait_for_restart()
    assert same_bits(run.completed(), undisturbed)


def test_told_before_the_time_limit(slurm, slurm_mpi, references, tmp_path) -> None:
    """SLURM looks at time limits every half minute, so the notice of a limit of one minute comes in its first half,
    and on a slow machine a second time."""
    from tests.harness.slurm_jobs import same_bits

    if slurm_mpi.name != "openmpi":
        pytest.skip("one MPI is enough")
    undisturbed = references.weights(slurm_mpi)
    run = Interrupted(slurm, slurm_mpi, tmp_path, "srun", 2.5, "--time", "00:01:00", "--notice", "45")
    run.wait_for_restart()
    assert same_bits(run.completed(most=3), undisturbed)
