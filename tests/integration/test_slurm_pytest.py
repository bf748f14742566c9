"""The tests on ranks inside a batch job: `srun python -m pytest --with-mpi`."""

from __future__ import annotations

from launcher import ROOT


def test_the_ranks_of_a_step_run_the_tests(slurm, slurm_mpi) -> None:
    tests = [str(ROOT / "tests" / "parallel" / name) for name in ("test_ranks.py", "comm/test_shared_memory.py")]
    command = [
        "-m",
        "pytest",
        "--with-mpi",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={ROOT}",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    out = slurm.tasks([*command, *tests], "-N1", "-n4", mpi=slurm_mpi)
    assert " passed" in out[0]
    assert "failed" not in out[0]
    assert "for other ranks than 4 of a job" in out[0]
    assert len(out) == 1  # the other ranks are silent
