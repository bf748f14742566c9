"""Process groups over two hosts of two ranks: shared memory inside, the network between."""

import numpy as np
import pytest

START = """
import sys, time
import numpy as np
from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.base.environment import Environment

topology = Topology.create()
group = ProcessGroup.create(topology, Environment(abort_after=3.0, warn_after=1.5))
last = topology.rank == 3

def all_reduce(shape=(4, 3)):
    with group.collective("all_reduce", "w", np.float32, shape):
        group.inter.Allreduce(np.ones(100), np.ones(100))
        group.node.barrier()

group.barrier()
all_reduce()
"""


@pytest.mark.hosts(2)
def test_group_over_two_hosts():
    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup
    from mpistrat.errors import CollectiveMismatchError

    topology = Topology.create()
    group = ProcessGroup.create(topology, Environment(abort_after=20.0))
    assert (group.num_nodes, group.slices, group.node.size, group.inter.size) == (2, 2, 2, 2)
    block = group.node.allocate([100, 100], "test")
    block.segments[group.node.rank][:] = topology.rank
    array = np.arange(4.0) if topology.rank == 3 else np.zeros(4)
    with group.collective("broadcast", "a", array.dtype, array.shape):
        group.broadcast(array, 3)
    assert array.tolist() == [0, 1, 2, 3]
    assert [int(segment[0]) for segment in block.segments] == list(group.node.ranks)
    shape = (topology.node_index,)  # alike on a host, different between hosts
    with pytest.raises(CollectiveMismatchError, match=r"ranks 0, 1: reduce \(0,\); ranks 2, 3: reduce \(1,\)$"):  # noqa: SIM117
        with group.collective("reduce", "", None, shape):
            pass
    group.barrier()
    group.close()
    topology.close()


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("time.sleep(topology.rank * 0.5)", 0, ""),
        ("if last: sys.exit(3)\nall_reduce()", None, "PeerExitError"),
        ("if last: raise ValueError('mine')\nall_reduce()", None, "ValueError: mine"),
        ("if last: time.sleep(40)\nall_reduce()", None, "rank 3 not in a collective, after #2"),
        ("all_reduce((4, 2) if topology.node_index else (4, 3))", None, "CollectiveMismatchError"),
    ],
    ids=["normal", "exit", "exception", "skip", "shape"],
)
def test_ends(mpi_run, hosts, program, status, text):
    result = mpi_run(START + program, 4, 60.0, hosts=hosts)
    assert (result.returncode == 0) == (status == 0), result
    assert text in result.stderr, result
    if not text:
        assert not "".join(result.err).strip(), result
