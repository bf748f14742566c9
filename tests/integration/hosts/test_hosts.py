"""Isolated hosts are hosts to MPI: other names, no shared memory between them, and collectives over TCP are right."""

from __future__ import annotations

import time
import uuid

import numpy as np
import pytest

from tests.launch.hosts import Hosts
from tests.launch.launcher import launch, with_variable


@pytest.mark.hosts(2, ranks_per_host=2)
def test_two_hosts_are_two_nodes_to_mpi():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    names = comm.allgather(MPI.Get_processor_name())
    assert sorted(names) == ["h1", "h1", "h2", "h2"]
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = comm.allreduce(int(node.rank == 0))
    assert (node.size, leaders) == (2, 2)
    node.Free()
    total = np.zeros(100_000)
    comm.Allreduce(np.full(100_000, comm.rank + 1.0), total)
    assert (total == 1 + 2 + 3 + 4).all()


def test_a_program_runs_on_the_hosts_and_leaves_nothing_there(mpi_run, hosts):
    program = "from mpi4py import MPI\nprint(MPI.Get_processor_name(), MPI.COMM_WORLD.rank)"
    result = mpi_run(program, 2, hosts=hosts)
    assert result.out == ["h1 0\n", "h2 1\n"]


def test_a_hang_on_two_hosts_is_ended_with_all_stacks(mpi, hosts):
    result = launch("from mpi4py import MPI\nimport time\ntime.sleep(100)", 2, mpi, timeout=5, hosts=hosts)
    assert result.timed_out
    assert all("line 3 in <module>" in err for err in result.err)
    for host in hosts.names:
        assert "python" not in hosts.inside(host, "sh", "-c", "cat /proc/[0-9]*/cmdline")


def test_runs_do_not_disturb_each_other_and_leave_nothing(hosts, monkeypatch):
    monkeypatch.setenv("MPISTRAT_TEST_RUN", token := uuid.uuid4().hex)
    second = Hosts(2)
    assert with_variable(f"MPISTRAT_TEST_RUN={token}")
    try:
        assert second.inside("h1", "hostname").strip() == "h1"
        assert second.folder != hosts.folder
    finally:
        second.close()
    assert hosts.inside("h1", "hostname").strip() == "h1"
    with pytest.raises((RuntimeError, FileNotFoundError)):
        second.inside("h1", "hostname")
    until = time.monotonic() + 5
    while with_variable(f"MPISTRAT_TEST_RUN={token}"):
        assert time.monotonic() < until, "a process of the hosts is left"
        time.sleep(0.02)
