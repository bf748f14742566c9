"""SlurmClusterResolver under a real SLURM: task k is the process with SLURM_PROCID k, where SLURM put it."""

from __future__ import annotations

import itertools
import json

import pytest

from mpistrat.cluster.resolvers.slurm import expand_hostlist

PROGRAM = """
import json, os
from mpistrat.cluster_resolver import SlurmClusterResolver
resolver = SlurmClusterResolver(port_base=0)
addresses = resolver.cluster_spec().job_tasks("worker")
me = resolver.task_type, resolver.task_id, resolver.master()
print(json.dumps([addresses, me, int(os.environ["SLURM_PROCID"]), os.uname().nodename, os.environ["SLURM_STEP_NODELIST"]]))
"""
RANKS = """
import os
from mpi4py import MPI
from mpistrat.cluster_resolver import MPIClusterResolver, SlurmClusterResolver
comm = MPI.COMM_WORLD
by_mpi, by_slurm = MPIClusterResolver(jobs={"worker": 3, "ps": 2}), SlurmClusterResolver({"worker": 3, "ps": 2})
hosts = {job: [task.split(":")[0] for task in tasks] for job, tasks in by_slurm.cluster_spec().as_dict().items()}
assert hosts == by_mpi.cluster_spec().as_dict(), (hosts, by_mpi.cluster_spec())
assert (by_slurm.task_type, by_slurm.task_id) == (by_mpi.task_type, by_mpi.task_id)
assert comm.rank == int(os.environ["SLURM_PROCID"]) and comm.size == 5
print(comm.rank, MPI.Get_processor_name())
"""

SERVERS = """
import numpy as np
import mpistrat as ms
with ms.ParameterServerStrategy(ms.cluster_resolver.SlurmClusterResolver({"ps": 1, "worker": 3})) as strategy:
    with strategy.scope():
        v = ms.Variable(np.zeros(2), aggregation=ms.VariableAggregation.SUM)
    if strategy.is_server:
        strategy.serve()
    else:
        strategy.run(lambda: v.assign_add(np.ones(2)))
        v.numpy()        # behind its own write
        strategy.leave()
    strategy.comm.Barrier()
    print(strategy.servers, strategy.workers, strategy.worker_index, v.numpy())
"""


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ("-N2 -n4 -m block --ntasks-per-node=2", "h1 h1 h2 h2"),
        ("-N2 -n5 -m block", "h1 h1 h1 h1 h2"),
        ("-N2 -n5 -m cyclic", "h1 h2 h1 h1 h1"),
        ("-N2 -n5 -m cyclic --exclusive", "h1 h2 h1 h2 h1"),
        ("-N2 -n5 -m plane=2 --exclusive", "h1 h1 h2 h2 h1"),
        ("-N2 -n2", "h1 h2"),
        ("-N1 -n3 -w h2", "h2 h2 h2"),
        ("-n1", "h1"),
    ],
)
def test_tasks_are_where_the_resolver_says(slurm, options: str, hosts: str) -> None:
    told = [json.loads(text) for text in slurm.tasks(PROGRAM, *options.split())]
    used = itertools.count
    ports = {"h1": used(), "h2": used()}
    expected = [f"{host}:{next(ports[host])}" for host in hosts.split()]
    for task, (addresses, me, procid, host, _) in enumerate(told):
        assert procid == task
        assert addresses == expected
        assert me == ["worker", task, expected[task]]
        assert host == hosts.split()[task]
    assert len(told) == len(expected)
    assert {line[4] for line in told} == {"h[1-2]" if len(set(hosts.split())) == 2 else hosts.split()[0]}


@pytest.mark.parametrize(
    "names",
    ["h1,h2", "a9,a10,a11,b3", "rack0n08,rack0n09,rack1n08,rack1n09", "n001,n003,n2", "gpu-a1-3,gpu-a1-4,login", "x"],
)
def test_host_lists_as_slurm_writes_them(slurm, names: str) -> None:
    """SLURM folds the names, and both unfold them."""
    folded = slurm.ok("scontrol", "show", "hostlist", names).strip()
    assert expand_hostlist(folded) == slurm.ok("scontrol", "show", "hostnames", folded).split() == names.split(",")


@pytest.mark.parametrize(("distribution", "hosts"), [("cyclic", "h1 h2 h1 h2 h1"), ("block", "h1 h1 h1 h2 h2")])
def test_ranks_are_procids(slurm, slurm_mpi, distribution: str, hosts: str) -> None:
    told = slurm.tasks(RANKS, "-N2", "-n5", "-m", distribution, "--exclusive", mpi=slurm_mpi)
    assert [text.split() for text in told] == [[str(rank), host] for rank, host in enumerate(hosts.split())]


def test_parameter_servers(slurm, slurm_mpi) -> None:
    """The first task serves, and not the last, as it would without a resolver."""
    told = slurm.tasks(SERVERS, "-N2", "-n4", "--ntasks-per-node=2", mpi=slurm_mpi)
    assert told == [f"(0,) (1, 2, 3) {index} [3. 3.]\n" for index in (None, 0, 1, 2)]


def test_one_task_is_legal(slurm, slurm_mpi) -> None:
    program = (
        "import mpistrat as ms; s = ms.MultiWorkerMirroredStrategy(); print(s.size, s.num_replicas_in_sync); s.close()"
    )
    assert slurm.tasks(program, "-n1", mpi=slurm_mpi) == ["1 1\n"]
    assert slurm.ok("srun", "-n1", slurm_mpi.python, "-c", program) == "1 1\n"  # without PMI, too
