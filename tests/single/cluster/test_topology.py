"""The layout is arithmetic on what the ranks told each other, and one process needs no MPI for it."""

import subprocess
import sys

import pytest

from mpistrat.cluster import Topology
from mpistrat.errors import DeviceError


def test_uneven_scattered_nodes():
    """Ranks 0, 2, 5 on one node, 1, 4 on the next, 3 on the last; 1, 2, 1, 3, 1, 2 devices."""
    node_of, replicas = (0, 1, 0, 2, 1, 0), (1, 2, 1, 3, 1, 2)
    layouts = [Topology(r, node_of, replicas, [f"cpu:{k}" for k in range(replicas[r])]) for r in range(6)]
    assert [t.local_rank for t in layouts] == [0, 0, 1, 0, 1, 2]
    assert [t.local_size for t in layouts] == [3, 2, 3, 1, 2, 3]
    assert [t.node_index for t in layouts] == list(node_of)
    assert [t.replica_offset for t in layouts] == [0, 1, 3, 4, 7, 8]
    assert [t.num_local_replicas for t in layouts] == list(replicas)
    for t in layouts:
        assert (t.size, t.num_nodes, t.slices, t.num_replicas) == (6, 3, 1, 10)
        assert t.ranks_per_node == (3, 2, 1)
        assert t.replicas_per_rank == replicas
        assert [t.ranks_of_node(node) for node in range(3)] == [(0, 2, 5), (1, 4), (3,)]


def test_single():
    with Topology.single(["CPU:0", "/cpu:1"]) as t:
        assert (t.rank, t.size, t.local_rank, t.local_size, t.num_nodes, t.slices) == (0, 1, 0, 1, 1, 1)
        assert (t.comm, t.intra, t.inter) == (None, None, None)
        assert t.devices == ("cpu:0", "cpu:1")
        assert t.num_replicas == 2
        assert t.hostname
    t.close()
    assert not t.closed
    with pytest.raises(DeviceError, match="OneDeviceStrategy: devices"):
        Topology.single(["disk:0"], "OneDeviceStrategy")


def test_single_starts_no_mpi():
    program = (
        "import sys, mpistrat.cluster_resolver; from mpistrat.cluster import Topology; Topology.single();"
        "bad = {'mpi4py', 'mpi4py.MPI', 'cupy', 'h5py'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
