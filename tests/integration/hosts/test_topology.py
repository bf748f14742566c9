"""The topology across two isolated hosts, with as many ranks on each and with uneven ones."""

import pytest

PROGRAM = """
import sys
from mpi4py import MPI
from mpistrat.cluster import Topology
from mpistrat.cluster_resolver import MPIClusterResolver
ranks = SIZE
comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < ranks else MPI.UNDEFINED)
if comm == MPI.COMM_NULL:
    sys.exit()
with Topology.create(comm, devices=["cpu:0", "cpu:1"]) as t:
    names = MPIClusterResolver(comm).cluster_spec().job_tasks("worker")
    assert names[t.rank] == t.hostname
    assert t.node_of == tuple(sorted(set(names), key=names.index).index(name) for name in names), (t.node_of, names)
    assert t.num_nodes == 2 and t.size == ranks
    assert t.slices == min(t.ranks_per_node) == ranks // 2
    assert t.intra.size == t.local_size == t.ranks_per_node[t.node_index]
    assert (t.inter is not None) == (t.local_rank < t.slices)
    assert t.inter is None or (t.inter.rank, t.inter.size) == (t.node_index, 2)
    print(sorted(t.ranks_per_node))
"""


@pytest.mark.parametrize(
    ("started", "used", "ranks_per_node"), [(2, 2, "[1, 1]"), (4, 4, "[2, 2]"), (4, 3, "[1, 2]")], ids=str
)
def test_topology_of_two_hosts(mpi_run, hosts, started, used, ranks_per_node):
    result = mpi_run(PROGRAM.replace("SIZE", str(used)), started, hosts=hosts)
    assert result.returncode == 0, result
    assert [text.strip() for text in result.out] == [ranks_per_node] * used + [""] * (started - used)
