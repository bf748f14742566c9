"""An MPI of one rank among several processes is found out by the launcher's variables."""

import re
import sys
import types

import pytest

from mpistrat.cluster import launcher_variables
from mpistrat.cluster.launcher_variables import check_size, launched_rank, launched_size, lone_rank
from mpistrat.errors import ClusterError


@pytest.fixture
def environment(monkeypatch):
    for name in [
        *launcher_variables._SIZE_VARIABLES,
        *launcher_variables.RANK_VARIABLES.values(),
        "SLURM_NTASKS",
        "SLURM_NPROCS",
    ]:
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE"])
def test_each_launcher(environment, name):
    environment(**{name: "4"})
    assert launched_size() == (4, name)
    check_size(4)
    with pytest.raises(ClusterError, match=f"expected 4 ranks.*{name}=4.*got 1"):
        check_size(1)


def test_mpiexec_of_another_mpi_has_its_remedy(environment):
    environment(PMI_SIZE="2")
    with pytest.raises(ValueError, match=r"another MPI.*mpiexec of the same MPI"):
        check_size(1)


def test_srun_has_its_remedy(environment, monkeypatch):
    environment(SLURM_STEP_NUM_TASKS="2")
    monkeypatch.delenv("I_MPI_PMI_LIBRARY", raising=False)
    remedy = "srun --mpi=pmi2, or mpistrat job --mpi pmi2; srun --mpi=list shows what this SLURM has. For one process: srun -n 1"
    every = "use srun --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH) or --mpi=cray_shasta (Cray MPICH)"
    for vendor, version, expected in [
        ("MPICH", "MPICH Version:      5.0.2\nmore", remedy),
        ("Open MPI", "Open MPI v5.0.11, package", remedy.replace("pmi2", "pmix")),
        ("Cray MPICH", "MPI VERSION    : CRAY MPICH version 8.1", "use srun --mpi=cray_shasta, or mpistrat job"),
        ("Intel MPI", "Intel(R) MPI Library", "job --mpi pmi2; export I_MPI_PMI_LIBRARY=/path/to/libpmi2.so"),
        ("Microsoft MPI", "Microsoft MPI 10.1", every),
    ]:
        module = types.SimpleNamespace(get_vendor=lambda v=vendor: (v, (1,)), Get_library_version=lambda t=version: t)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
        with pytest.raises(ValueError) as caught:
            check_size(1)
        assert expected in str(caught.value) and "  " not in str(caught.value)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    with pytest.raises(ValueError, match=re.escape(every)):
        check_size(1)


def test_one_process_is_legal(environment):
    assert launched_size() is None
    check_size(1)
    environment(SLURM_STEP_NUM_TASKS="1")
    check_size(1)


def test_a_batch_script_without_a_step_is_legal(environment):
    environment(SLURM_NTASKS="8", SLURM_NPROCS="8")
    assert launched_size() is None
    check_size(1)


def test_an_mpiexec_within_a_step_of_several_tasks_has_the_word(environment):
    environment(SLURM_STEP_NUM_TASKS="4", OMPI_COMM_WORLD_SIZE="1")
    assert launched_size() == (1, "OMPI_COMM_WORLD_SIZE")
    check_size(1)


@pytest.mark.parametrize("text", ["", "x", "-2", "0", "٣", "9" * 30, "2.0"])
def test_what_is_no_count_says_nothing(environment, text):
    environment(PMI_SIZE=text)
    assert launched_size() is None
    check_size(1)


def test_the_one_task_that_helps_mpiexec_hides_nothing(environment):
    """MPICH's mpiexec in a job of one node starts its helper by srun; the ranks inherit its variables."""
    environment(PMI_SIZE="2", SLURM_STEP_NUM_TASKS="1")
    with pytest.raises(ClusterError, match=r"PMI_SIZE=2.*mpiexec of the same MPI"):
        check_size(1)


def test_srun_by_another_mpis_protocol_has_sruns_remedy(environment):
    environment(PMI_SIZE="2", SLURM_STEP_NUM_TASKS="2")
    with pytest.raises(ClusterError, match=r"SLURM_STEP_NUM_TASKS=2.*use srun --mpi=pm"):
        check_size(1)


@pytest.mark.parametrize("name", launcher_variables._SIZE_VARIABLES)
def test_which_process_this_is(environment, name):
    assert launched_rank() is None
    environment(**{name: "4"})
    assert launched_rank() is None
    environment(**{launcher_variables.RANK_VARIABLES[name]: "3"})
    assert launched_rank() == 3


def test_the_number_is_of_the_launcher_that_has_the_word(environment):
    environment(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="2", PMI_SIZE="1", PMI_RANK="0")
    assert launched_rank() == 0 and lone_rank(1) is None


def test_a_lone_rank_in_parts(environment):
    environment(SLURM_STEP_NUM_TASKS="4")
    lone = lone_rank(1)
    assert "SLURM_STEP_NUM_TASKS=4" in lone.expected and "rank 0 of 1" in lone.got and "--mpi=pm" in lone.remedy
    assert lone_rank(4) is None


@pytest.mark.parametrize(
    ("variables", "found", "rank", "ends"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, ("mpich", False), 0, ClusterError),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, ("mpich", False), 1, SystemExit),
        (
            {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"},
            ("mpich", True),
            0,
            None,
        ),  # an MPICH that speaks PMIx
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, ("openmpi", True), 0, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}, ("openmpi", True), 0, ClusterError),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, ("openmpi", True), 0, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}, ("mpich", False), 0, None),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"},
            ("openmpi", True),
            0,
            None,
        ),  # srun --mpi=pmi2
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}, None, 0, None),  # mpi4py does not tell
    ],
)
def test_the_launcher_of_another_mpi_is_found_before_mpi_starts(environment, monkeypatch, variables, found, rank, ends):
    monkeypatch.delenv("MPI_LOCALNRANKS", raising=False)
    environment(**variables)
    monkeypatch.setattr(launcher_variables, "family_to_load", lambda: found)
    monkeypatch.setattr(launcher_variables, "_OTHERS", 0.0)
    if ends is None:
        launcher_variables.check_launcher("f")
        return
    with pytest.raises(ends) as caught:
        launcher_variables.check_launcher("f")
    if ends is ClusterError:
        assert "expected the mpiexec of" in str(caught.value) and "use mpistrat run instead" in str(caught.value)
