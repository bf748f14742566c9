"""The command and the environment that start ranks, on simulated machines."""

import os
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.cluster.launchers import Allocation, MPILibrary
from mpistrat.errors import ClusterError
from mpistrat.launcher import plan as run
from mpistrat.launcher.plan import Start, plan
from tests.harness.simulated_machine import LAUNCHERS, MPICH, OPENMPI, Machine


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_mpich_over_ucx_under_pmi2(machine, monkeypatch):
    """Its addresses are longer than SLURM's PMI2 reads; the user's own word comes first."""
    monkeypatch.delenv("MPIR_CVAR_CH4_NETMOD", raising=False)
    machine.has(library=MPILibrary("MPICH", "5.0.2", "", device="ch4:ucx ofi"))
    assert plan(["a.py"], 2, None, None).environment == {"OMP_NUM_THREADS": "4"}
    machine.slurm(["none", "pmi2"])
    start = plan(["a.py"], 2, None, None)
    assert start.environment == {"MPIR_CVAR_CH4_NETMOD": "ofi"} and "too long for SLURM's PMI2" in start.notes[1]
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", "ucx")
    start = plan(["a.py"], 2, None, None)
    assert (start.environment, len(start.notes)) == ({}, 1)


def test_mpich(machine):
    start = plan(["a.py", "-x"], 4, None, None)
    assert start.command == ["/opt/mpich/mpiexec", "-n", "4", "a.py", "-x"]
    assert start.environment == {"OMP_NUM_THREADS": "2"}
    assert start.notes == ["MPICH 5.0.2 from /opt/lib/libmpi.so.12; 4 ranks on 8 cores"]


def test_open_mpi_is_told_what_it_wants(machine, monkeypatch, tmp_path):
    machine.has(library=OPENMPI, cores=2)
    start = plan(["a.py"], 2, None, None)
    assert start.command == ["/opt/ompi/mpiexec", "--display", "map", "--bind-to", "none", "-n", "2", "a.py"]
    assert start.environment == {"OMP_NUM_THREADS": "1", "OMPI_MCA_osc": "^ucx"}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    start = plan(["a.py"], 3, None, None)
    assert start.command[3:] == ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-n", "3", "a.py"]
    assert start.environment == {"OMP_NUM_THREADS": "1"}


def test_what_the_user_set_is_left(machine, monkeypatch):
    machine.has(library=OPENMPI)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setenv("OMPI_MCA_osc", "rdma")
    assert plan(["a.py"], 2, None, None).environment == {}


@pytest.mark.parametrize(
    ("cores", "gpus", "strategy", "servers", "ranks"),
    [
        (8, 0, None, None, 8),
        (8, 4, None, None, 4),
        (8, 0, "one_device", None, 1),
        (8, 4, "one_device", None, 1),
        (8, 0, "parameter_server", None, 8),
        (1, 0, "parameter_server", None, 2),
        (1, 0, None, 3, 4),
        (8, 0, None, 2, 8),
    ],
)
def test_the_default_number_of_ranks(machine, cores, gpus, strategy, servers, ranks):
    machine.has(cores=cores, gpus=gpus)
    assert plan(["a.py"], None, strategy, servers).command[1:3] == ["-n", str(ranks)]


def test_roles(machine):
    assert plan(["a.py"], 4, None, 1).environment == {
        "OMP_NUM_THREADS": "2", "MPISTRAT_STRATEGY": "parameter_server", "MPISTRAT_NUM_PS": "1",
    }  # fmt: skip
    assert plan(["a.py"], 8, "mirrored", None).environment == {"OMP_NUM_THREADS": "1", "MPISTRAT_STRATEGY": "mirrored"}
    with pytest.raises(ValueError, match="--ps: expected a worker besides, got 2 ranks for 2 servers"):
        plan(["a.py"], 2, None, 2)
    assert plan(["a.py"], 3, None, 1, evaluator=True).environment["MPISTRAT_EVALUATOR"] == "1"
    with pytest.raises(ValueError, match="--ps: expected a worker besides, got 2 ranks for 1 server, an evaluator"):
        plan(["a.py"], 2, None, 1, evaluator=True)
    with pytest.raises(ValueError, match="--evaluator: expected a worker besides, got 1 rank for an evaluator"):
        plan(["a.py"], 1, None, None, evaluator=True)
    with pytest.raises(ValueError, match="--ps: expected --strategy parameter_server.*got --strategy mirrored"):
        plan(["a.py"], 4, "mirrored", 1)


def test_in_a_slurm_job_srun_starts_the_tasks(machine):
    machine.slurm(["none", "pmi2", "pmix"], SLURM_NTASKS="6", SLURM_CPUS_PER_TASK="4")
    start = plan(["a.py"], None, None, None)
    assert start.command == [
        "srun", "--ntasks=6", "--mpi=pmi2", "--kill-on-bad-exit=1", "--cpus-per-task=4", "a.py",
    ]  # fmt: skip
    assert start.environment == {"OMP_NUM_THREADS": "4"}
    assert start.notes == ["MPICH 5.0.2; 6 tasks in SLURM's job 77"]
    machine.has(library=OPENMPI)
    assert plan(["a.py"], 2, None, None).command[:3] == ["srun", "--ntasks=2", "--mpi=pmix"]


def test_lost_nodes_and_their_ranks_are_left_out(machine):
    nodes = Allocation(("n1", "n3"), ("n2",))
    machine.slurm(["pmi2", "pmix"])
    start = plan(["a.py"], 12, None, None, nodes=nodes)
    assert start.command == [
        "srun", "--ntasks=8", "--mpi=pmi2", "--kill-on-bad-exit=1", "--nodes=2", "--exclude=n2", "a.py",
    ]  # fmt: skip
    machine.has(library=OPENMPI)
    command = plan(["a.py"], 12, None, None, survive=True, nodes=nodes).command
    assert command[command.index("-host") + 1] == "n1:4,n3:4"
    assert command[command.index("-n") + 1] == "8"
    assert (
        plan(["a.py"], 4, "parameter_server", 1, nodes=Allocation(("n1",), ("n2", "n3", "n4"))).command[1]
        == "--ntasks=2"
    )


def test_intel_mpi_is_told_of_its_variable(machine, monkeypatch):
    machine.slurm(["none", "pmi2"])
    machine.has(library=MPILibrary("Intel MPI", "2021.13.0", ""))
    monkeypatch.delenv("I_MPI_PMI_LIBRARY", raising=False)
    start = plan(["a.py"], 2, None, None)
    assert "--mpi=pmi2" in start.command and "export I_MPI_PMI_LIBRARY=" in start.notes[1]


def test_an_srun_that_does_not_fit_is_left_out_and_said(machine):
    machine.slurm(["none", "pmi2"], SLURM_NTASKS="6")
    machine.has(library=OPENMPI)
    start = plan(["a.py"], None, None, None)
    assert start.command[0] == "/opt/ompi/mpiexec"
    assert "--oversubscribe" not in start.command, "the slots are SLURM's"
    assert start.notes[1] == "srun offers none, pmi2: nothing for Open MPI 5.0.11, so its own mpiexec starts the ranks"


def test_a_launcher_of_the_users_that_is_not_taken_is_said(machine, monkeypatch):
    monkeypatch.setenv("MPIEXEC", "/opt/ompi/mpiexec --display map")
    said = "$MPIEXEC (/opt/ompi/mpiexec --display map) is left out: "
    start = plan(["a.py"], 2, None, None)
    assert start.command[0] == "/opt/mpich/mpiexec"
    assert start.notes[1] == said + "it belongs to Open MPI 5.0.3, and mpi4py loads MPICH 5.0.2"
    monkeypatch.setattr(run, "find_launchers", lambda library: LAUNCHERS[:1])
    assert plan(["a.py"], 2, None, None).notes[1] == said + "there is no such program"
    machine.has(library=OPENMPI)
    monkeypatch.setattr(run, "find_launchers", lambda library: LAUNCHERS)
    assert len(plan(["a.py"], 2, None, None).notes) == 1


def test_no_launcher_that_fits_is_explained(machine, monkeypatch):
    machine.has(library=OPENMPI)
    monkeypatch.setattr(run, "find_launchers", lambda library: LAUNCHERS[:1])
    expected = "Open MPI 5.0.11, got /opt/mpich/mpiexec, but it belongs to MPICH 5.0.2, and .*export MPIEXEC="
    with pytest.raises(ClusterError, match=expected):
        plan(["a.py"], 2, None, None)


def test_a_rank_starts_no_ranks(machine, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ValueError, match=r"one of 4 processes \(PMI_SIZE=4\)\. Leave `mpistrat run` out: start a.py"):
        plan(["a.py"], 2, None, None)
    monkeypatch.setenv("PMI_SIZE", "1")  # as in salloc's interactive step
    plan(["a.py"], 2, None, None)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_what_is_shown_means_the_same_to_a_shell(words):
    start = Start(["mpiexec", *words], 2, {"A": words[0]})
    assert shlex.split(str(start)) == [f"A={words[0]}", "mpiexec", *words]


def test_words_of_launchers_are_not_theirs_in_a_program(machine):
    """Launchers would start the words after ":" as a program of their own."""
    for library in (MPICH, OPENMPI):
        machine.has(library=library)
        command = plan(["a.py", "x", ":", "touch", "=y", ""], 2, None, None).command
        assert ":" not in command and command[-6:] == ["=a.py", "=x", "=:", "=touch", "==y", "="]
    machine.slurm(["pmi2"])
    machine.has(library=MPICH)
    assert plan(["a.py", ":"], 2, None, None, tag=True).command[-2:] == ["=a.py", "=:"]
    assert plan(["a.py", ":x", "a:b", "--map"], 2, None, None).command[-4:] == ["a.py", ":x", "a:b", "--map"]
