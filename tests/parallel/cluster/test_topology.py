"""The topology of real communicators, on one node and on nodes that a communicator pretends."""

import os
import subprocess

import numpy as np
import pytest

from mpistrat.base.cores import available_cores, usable_cores
from mpistrat.cluster import Topology
from mpistrat.errors import ClusterError, DeviceError, LayoutError


def pretend_nodes(MPI, node_of):
    """A communicator of the world whose shared-memory split gives these nodes."""

    class Pretended(MPI.Intracomm):
        def Split_type(self, split_type, key=0, info=MPI.INFO_NULL):
            return MPI.Intracomm(self.Split(node_of[self.rank], key))

    return Pretended(MPI.COMM_WORLD)


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_node():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with Topology.create() as t:
        assert (t.rank, t.size) == (world.rank, world.size)
        assert (t.local_rank, t.local_size) == (world.rank, world.size)
        assert (t.node_index, t.num_nodes, t.slices) == (0, 1, world.size)
        assert t.ranks_per_node == (world.size,)
        assert t.node_of == (0,) * world.size
        assert t.inter is None
        assert MPI.Comm.Compare(t.comm, world) == MPI.CONGRUENT
        assert MPI.Comm.Compare(t.intra, world) == MPI.CONGRUENT
        assert t.hostname == MPI.Get_processor_name()
        assert t.thread_level == MPI.Query_thread()
        assert usable_cores() <= t.node_cores <= len(available_cores()) * world.size


@pytest.mark.ranks(1, 2, 3, 4)
def test_replicas_of_uneven_devices():
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    with Topology.create(devices=[f"CPU:{k}" for k in range(rank + 1)]) as t:
        assert t.devices == tuple(f"cpu:{k}" for k in range(rank + 1))
        assert t.replicas_per_rank == tuple(range(1, size + 1))
        assert t.replica_offset == rank * (rank + 1) // 2
        assert t.num_replicas == size * (size + 1) // 2


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("pattern", [(0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 0, 1), (3, 2, 1, 0)], ids=str)
def test_pretended_nodes(pattern):
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    colors = pattern[:size]
    order = sorted(set(colors), key=colors.index)  # by smallest rank
    node_of = tuple(order.index(color) for color in colors)
    with Topology.create(pretend_nodes(MPI, colors)) as t:
        mine = [r for r in range(size) if node_of[r] == node_of[rank]]
        assert t.node_of == node_of
        assert t.num_nodes == len(order)
        assert (t.local_rank, t.local_size) == (mine.index(rank), len(mine))
        assert (t.intra.rank, t.intra.size) == (t.local_rank, t.local_size)
        assert t.slices == min(node_of.count(node) for node in range(len(order)))
        assert t.ranks_of_node(t.node_index) == tuple(mine)
        assert (t.inter is not None) == (len(order) > 1 and t.local_rank < t.slices)
        if t.inter is not None:
            assert (t.inter.rank, t.inter.size) == (t.node_index, t.num_nodes)
            peers = np.empty(t.num_nodes, np.int64)
            t.inter.Allgather(np.array([rank], np.int64), peers)
            assert peers.tolist() == [t.ranks_of_node(node)[t.local_rank] for node in range(t.num_nodes)]


@pytest.mark.ranks(1, 2, 3)
def test_close_frees_what_it_owns_and_nothing_else():
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    t = Topology.create(own)
    assert not t.closed
    t.close()
    t.close()
    assert t.closed
    assert t.comm == MPI.COMM_NULL
    assert own.allreduce(1) == own.size
    own.Free()


@pytest.mark.ranks(1, 2)
def test_many_topologies_leave_no_communicator_behind():
    """MPICH has about 2,000 communicators: 1,200 rounds of two would end it."""
    for _ in range(1200):
        Topology.create().close()
        with pytest.raises(DeviceError):
            Topology.create(devices=["disk:0"])


@pytest.mark.ranks(2, 3)
def test_a_sub_communicator():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, -world.rank)
    with Topology.create(half) as t:
        assert (t.rank, t.size) == (half.rank, half.size)
    half.Free()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrong", [["gpu:99"], [], "disk:0", 5], ids=str)
def test_wrong_devices_of_one_rank_are_an_error_on_all(wrong):
    from mpi4py import MPI

    last = MPI.COMM_WORLD.size - 1
    with pytest.raises(DeviceError, match=f"rank {last}: MirroredStrategy: devices"):
        Topology.create(devices=wrong if MPI.COMM_WORLD.rank == last else ["cpu:0"], function="MirroredStrategy")


@pytest.mark.ranks(2)
def test_communicators_that_will_not_do():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for wrong, named in [(MPI.COMM_NULL, "COMM_NULL"), ("world", "a str"), (3, "a int")]:
        with pytest.raises(LayoutError, match=named):
            Topology.create(wrong)
    half = world.Split(world.rank)
    inter = half.Create_intercomm(0, world, 1 - world.rank)
    with pytest.raises(LayoutError, match=r"an intercommunicator.*Merge"):
        Topology.create(inter)
    inter.Free()
    half.Free()


def test_an_mpi_that_the_program_started_at_a_lower_level(mpi_run):
    result = mpi_run(
        """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from mpistrat.cluster import Topology
from mpistrat.errors import LayoutError
try:
    Topology.create()
except LayoutError as error:
    assert "MPI.Init_thread" in str(error), error
else:
    raise SystemExit("no error before MPI runs")
MPI.Init_thread(MPI.THREAD_FUNNELED)
topology = Topology.create()
assert topology.thread_level == MPI.Query_thread() < MPI.THREAD_MULTIPLE, topology.thread_level
assert topology.size == 2
topology.close()
kept = Topology.create()
MPI.Finalize()
kept.close()
try:
    Topology.create()
except LayoutError as error:
    assert "finalised" in str(error), error
else:
    raise SystemExit("no error after MPI's end")
""",
        2,
    )
    assert result.returncode == 0, result


def test_every_rank_is_0_of_1(mpi_run):
    """As when the mpiexec of another MPI starts the program: each process is an MPI of its own."""
    program = """
import os
for name in list(os.environ):
    if name.startswith(("PMI", "OMPI_", "PRTE_", "HYD")):
        del os.environ[name]
from mpi4py import MPI
assert MPI.COMM_WORLD.size == 1
os.environ["PMI_SIZE"] = "2"
from mpistrat.cluster import Topology
Topology.create(MPI.COMM_SELF).close()   # asked for by the program: no error
Topology.create()
"""
    result = mpi_run(program, 1)
    assert result.returncode != 0
    assert "ClusterError" in result.stderr
    assert "PMI_SIZE=2" in result.stderr


MPMD = """
import pathlib, sys
from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.errors import ClusterError
resolver = MPIClusterResolver(jobs=["worker", "ps"])
assert resolver.task_type == sys.argv[1], resolver.task_type
assert resolver.ranks("worker") == (0, 1) and resolver.ranks("ps") == (2,)
assert resolver.cluster_spec().num_tasks("worker") == 2
try:
    MPIClusterResolver(jobs=["worker"])
except ClusterError as error:
    pathlib.Path(__file__).with_name(f"{resolver.task_type} {resolver.task_id}").touch()
"""


def test_jobs_by_program_of_an_mpmd_launch(mpi, tmp_path):
    from tests.launch.launcher import ROOT

    program = tmp_path / "program.py"
    program.write_text(MPMD)
    run = [mpi.python, str(program)]
    words = [*mpi.mpiexec, *mpi.flags, "-n", "2", *run, "worker", ":", "-n", "1", *run, "ps"]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "ps 0", "worker 0", "worker 1"]


@pytest.mark.ranks(2, 3)
def test_jobs_that_differ_between_ranks_are_an_error_on_all():
    from mpi4py import MPI

    from mpistrat.cluster_resolver import MPIClusterResolver

    size = MPI.COMM_WORLD.size
    jobs = {"worker": size} if MPI.COMM_WORLD.rank else {"worker": size - 1, "ps": 1}
    with pytest.raises(ClusterError, match="one value on all ranks"):
        MPIClusterResolver(jobs=jobs)


@pytest.mark.ranks(3)
def test_roles_by_explicit_ranks():
    from mpi4py import MPI

    from mpistrat.cluster_resolver import MPIClusterResolver

    resolver = MPIClusterResolver(jobs={"worker": [2, 0], "ps": [1]})
    expected = [("worker", 1), ("ps", 0), ("worker", 0)][MPI.COMM_WORLD.rank]
    assert (resolver.task_type, resolver.task_id) == expected
    assert resolver.ranks("worker") == (2, 0)
    assert resolver.ranks("chief") == ()
    for wrong in ({"worker": 2}, {"worker": [0, 1]}, {"trainer": 3}, {"chief": 2, "worker": 1}, "worker", 3, {}):
        with pytest.raises(ClusterError):
            MPIClusterResolver(jobs=wrong)


@pytest.mark.ranks(1, 2, 3)
def test_quotas_of_several_groups_on_a_node_add_up(monkeypatch):
    from mpi4py import MPI

    from mpistrat.base import cores

    world = MPI.COMM_WORLD
    cpus = list(range(40 * world.rank, 40 * world.rank + 40))
    monkeypatch.setattr(cores, "available_cores", lambda: cpus)
    monkeypatch.setattr(cores, "count_cores", len)
    monkeypatch.setattr(cores, "cpu_quota", lambda: cores.Quota(2.5, 1 + world.rank % 2))
    assert cores.count_node_cores(world) == (2 if world.size == 1 else 5)
    monkeypatch.setattr(cores, "cpu_quota", lambda: cores.Quota(1.0, 1) if world.rank else None)
    assert cores.count_node_cores(world) == 40 * world.size
