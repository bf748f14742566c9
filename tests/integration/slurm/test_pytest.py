"""The tests on ranks inside a batch job: `srun python -m pytest --with-mpi`."""

from __future__ import annotations

from tests.launch.launcher import ROOT, MpiEnv

TESTS = ROOT / "tests"
PYTEST = (
    "-m",
    "pytest",
    "--with-mpi",
    "-q",
    "-p",
    "no:cacheprovider",
    f"--rootdir={ROOT}",
    "-c",
    str(ROOT / "pyproject.toml"),
)


def run(slurm, mpi: MpiEnv, options: tuple[str, ...], *files: str) -> str:
    out = slurm.tasks([*PYTEST, *(str(TESTS / name) for name in files)], *options, mpi=mpi)
    assert len(out) == 1  # the other ranks are silent
    assert " passed" in out[0]
    assert "failed" not in out[0]
    return out[0]


def test_the_ranks_of_a_step_run_the_tests(slurm, slurm_mpi) -> None:
    said = run(slurm, slurm_mpi, ("-N1", "-n4"), "parallel/tests/test_ranks.py", "parallel/comm/test_shared_memory.py")
    assert "for other ranks than 4 of a job" in said


def test_two_nodes_run_the_tests_over_two_hosts(slurm, slurm_mpi) -> None:
    """And not those of four ranks on one node: of these some hang, as not all ranks share the memory they are about."""
    files = ("integration/hosts/test_process_group.py", "parallel/comm/test_shared_memory.py")
    said = run(slurm, slurm_mpi, ("-N2", "--ntasks-per-node=2"), *files)
    assert "for 1 host with 4 ranks each" in said
