"""Scripts of `mpistrat job` under a real SLURM of two hosts: the digits job's weights are those of mpiexec."""

from __future__ import annotations

import pytest

from tests.harness import digits_jobs

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_plain(slurm, slurm_mpi, references, tmp_path, launcher: str) -> None:
    from tests.harness import slurm_jobs as jobs

    expected = references.weights(slurm_mpi)
    job = jobs.submit(slurm, slurm_mpi, launcher, tmp_path, *jobs.TWO_BY_TWO, *jobs.PROGRAM, "--output", "made")
    job.completed()
    assert digits_jobs.difference(digits_jobs.weights(tmp_path / "made"), expected) <= 1e-9


def test_submit(slurm, slurm_mpi, tmp_path) -> None:
    """`mpistrat job --submit` prints the number under which SLURM knows the job, whose --mpi= it has found out."""
    from tests.launch.slurm import Job

    words = ["--submit", "--nodes", "2", "--time", "00:05:00"]
    (tmp_path / "train.py").write_text(
        "import mpistrat as ms\nfrom tests.harness.whole_lines import print\n"
        "with ms.strategy_from_environment() as s: print(s.size)"
    )
    out = slurm.ok(slurm_mpi.python, "-m", "mpistrat", "job", *words, "train.py", cwd=tmp_path)
    job = Job(slurm, out.strip(), tmp_path)
    assert job.completed().splitlines()[-2:] == ["2", "2"]
    assert job.fields()["TimeLimit"] == "00:05:00" and job.fields()["JobName"] == "train"


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_parameter_servers_by_rank(slurm, slurm_mpi, references, tmp_path, launcher: str) -> None:
    """The last of four ranks serves, on the second host. Without staleness the weights are the same in any layout."""
    from tests.harness import slurm_jobs as jobs

    words = ("--global-batch-size", "32", "--max-staleness", "0")
    servers = ("--strategy", "parameter_server", "--num-ps", "1")
    expected = references.weights(slurm_mpi, *servers, *words, over_hosts=False)
    size = (*jobs.TWO_BY_TWO, "--ps", "1")
    job = jobs.submit(slurm, slurm_mpi, launcher, tmp_path, *size, *jobs.PROGRAM, *words, "--output", "made")
    assert '"strategy": "parameter_server", "ranks": 4' in job.completed(), job.tell("summary")
    assert digits_jobs.difference(digits_jobs.weights(tmp_path / "made"), expected) <= 1e-9


def test_parameter_servers_as_a_heterogeneous_job(slurm, slurm_mpi, references, tmp_path) -> None:
    """Two workers on one host, and a server that has the other one for itself."""
    from tests.harness import slurm_jobs as jobs

    words = ("--global-batch-size", "50", "--max-staleness", "0")
    servers = ("--strategy", "parameter_server", "--num-ps", "1")
    expected = references.weights(slurm_mpi, *servers, *words, ranks=3, over_hosts=False)
    size = ("--nodes", "1", "--ranks-per-node", "2", "--ps", "1", "--ps-nodes", "1")
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *size, *jobs.PROGRAM, *words, "--output", "made")
    assert '"strategy": "parameter_server", "ranks": 3' in job.completed(), job.tell("summary")
    assert digits_jobs.difference(digits_jobs.weights(tmp_path / "made"), expected) <= 1e-9


def test_array(slurm, slurm_mpi, references, tmp_path) -> None:
    """Each task of the array trains with its own seed into its own folder, and as one rank alone does."""
    from tests.harness import slurm_jobs as jobs

    array = ("--array", "0-1", "--index-argument", "seed", "--output-argument", "output", "--output-folder", "made")
    size = ("--nodes", "1", "--ranks-per-node", "2")
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *size, *array, *jobs.PROGRAM)
    job.completed()
    assert len(job.states()) == 2
    for seed in range(2):
        alone = references.weights(slurm_mpi, "--seed", str(seed), ranks=1, over_hosts=False)
        assert digits_jobs.difference(digits_jobs.weights(tmp_path / "made" / str(seed)), alone) <= 1e-9
    first, second = (digits_jobs.weights(tmp_path / "made" / str(seed)) for seed in range(2))
    assert digits_jobs.difference(first, second) > 1e-3


def test_the_scripts_of_a_job_that_fails_fail(slurm, slurm_mpi, tmp_path) -> None:
    """A rank that fails ends the job at once, with its own words in the log."""
    from tests.harness import slurm_jobs as jobs

    if slurm_mpi.name != "mpich":
        pytest.skip("MPICH's ranks would wait for ever without --kill-on-bad-exit=1")
    (tmp_path / "train.py").write_text(
        "import mpistrat as ms, time; s = ms.MultiWorkerMirroredStrategy()\n"
        "if s.rank == 3: raise RuntimeError('no such row')\n"
        "time.sleep(100)"
    )
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *jobs.TWO_BY_TWO, "train.py")
    assert job.wait(60) == ["FAILED"], job.tell("a rank failed")
    assert "no such row" in job.output()
