"""The collectives of a group that only its members have made: results, the caller's own arrays, and the names in errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.cross_device import auto
from mpistrat.cross_device.collectives import Collectives
from mpistrat.cross_device.hierarchical import HierarchicalAllReduce
from mpistrat.cross_device.mpi import MpiAllReduce
from mpistrat.cross_device.ordered import OrderedAllReduce
from mpistrat.cross_device.to_one import ReductionToOneDevice
from mpistrat.errors import CollectiveMismatchError

ALGORITHMS = [None, MpiAllReduce, HierarchicalAllReduce, OrderedAllReduce, ReductionToOneDevice]


@pytest.fixture
def world():
    """All ranks but rank 0 where there are more than two; rank 0 makes nothing."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    first = 1 if world.size > 2 else 0
    if world.rank < first:
        yield None
        return
    comm = world.Create_group(world.group.Excl(list(range(first))))
    topology = Topology.create(comm, ("cpu:0",), "test")
    group = ProcessGroup.create(topology)
    yield group
    group.close()
    topology.close()
    comm.Free()


def of(rank, size=6):
    return np.random.default_rng(rank).integers(-9, 9, size=size)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts(2, ranks_per_host=2)
def test_each_operation(world):
    if world is None:
        return
    all_of, rank, size = Collectives(world, "dist"), world.topology.rank, world.topology.size
    every = [of(r, (size, 2 * size)).astype(float) for r in range(size)]
    mine, total = every[rank], sum(every)
    nest = {"a": mine, "b": (mine.astype(np.int8), np.arange(size) + rank)}
    assert np.array_equal(all_of.all_reduce("SUM", mine), total)
    assert np.array_equal(all_of.all_reduce("MAX", nest)["b"][1], np.arange(size) + size - 1)
    assert np.array_equal(all_of.all_gather(mine, axis=1), np.concatenate(every, 1))
    for axis in (0, 1):
        found = all_of.all_gather({"a": mine, "b": mine.astype("f4")}, axis=axis, equal=True)
        assert np.array_equal(found["b"], np.concatenate(every, axis).astype("f4")) and found["b"].dtype == "f4"
        assert np.array_equal(all_of.all_gather(mine, axis=axis, equal=True), np.concatenate(every, axis))
        part = all_of.reduce_scatter("SUM", mine, axis=axis, equal=True)
        assert np.array_equal(part, np.split(total, size, axis)[rank])
        whole = np.split(np.concatenate(every, 1 - axis), size, axis)[rank]
        assert np.array_equal(all_of.reshard(mine, old=1 - axis, new=axis), whole)
        assert np.array_equal(all_of.reshard([mine, mine], old=1 - axis, new=axis)[1], whole)
    parts, lengths = all_of.all_to_all(np.full(size, rank))
    assert parts.tolist() == list(range(size)) and lengths.tolist() == [1] * size
    assert np.array_equal(all_of.broadcast(nest, root=size - 1)["a"], every[-1])
    requests = all_of.all_reduce_async("SUM", nest), all_of.broadcast_async(mine)
    assert np.array_equal(requests[1].wait(), every[0]) and np.array_equal(requests[0].wait()["a"], total)
    assert all_of.broadcast_object({"of": rank}, root=1) == {"of": 1}
    assert all_of.all_gather_object(rank) == list(range(size))
    all_of.barrier(20, "here")
    all_of.close()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.hosts(2, ranks_per_host=1)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=[str(a and a.__name__) for a in ALGORITHMS])
def test_results_in_the_callers_own_array(world, algorithm):
    if world is None:
        return
    ops = None if algorithm is None else algorithm()
    if ops is not None:
        ops.bind(world)
    all_of, rank, size = Collectives(world, "dist", ops=ops), world.topology.rank, world.topology.size
    for length in (0, 5, 70_000, 1_100_000):
        for dtype in ("f8", "f4", "f2", "i4"):
            for op in ("SUM", "MEAN", "MIN"):
                mine = of(rank, length).astype(dtype)
                expected = all_of.all_reduce(op, mine)
                out = np.full(length, 7, expected.dtype)
                assert all_of.all_reduce(op, mine, out=out) is out and out.tobytes() == expected.tobytes()
                assert np.array_equal(mine, of(rank, length).astype(dtype))
                if expected.dtype == dtype:  # in place
                    assert all_of.all_reduce(op, mine, out=mine) is mine and mine.tobytes() == expected.tobytes()
        mine = np.concatenate([of(rank, length), [0, 0]]).astype(float)
        expected = all_of.all_reduce("SUM", mine[2:])
        all_of.all_reduce("SUM", mine[2:], out=mine[:length])  # which overlap
        assert mine[:length].tobytes() == expected.tobytes()
        every_other = np.zeros((length, 2))
        assert np.array_equal(
            all_of.all_reduce("SUM", of(rank, length) * 1.0, out=every_other[:, 1]), every_other[:, 1]
        )
        assert not every_other[:, 0].any() and np.array_equal(
            every_other[:, 1], sum(of(r, length) for r in range(size)) * 1.0
        )
    nest = {"a": of(rank) * 1.0, "b": np.full((2, 2), rank, "f4")}
    assert all_of.all_reduce("SUM", nest, out=nest) is nest
    assert np.array_equal(nest["a"], sum(of(r) for r in range(size)) * 1.0) and nest["b"][0, 0] == size * (size - 1) / 2
    for dtype in ("f8", "f2"):
        out = np.zeros(2, dtype)
        expected = all_of.reduce_scatter("SUM", of(rank, 2 * size).astype(dtype))
        assert all_of.reduce_scatter("SUM", of(rank, 2 * size).astype(dtype), out=out) is out
        assert out.tobytes() == expected.tobytes()
    for wrong in (np.zeros(3), np.zeros(4, "f4"), [0.0] * 4):
        for call in (
            lambda w: all_of.all_reduce("SUM", np.ones(4), out=w),
            lambda w: all_of.reduce_scatter("SUM", np.ones(4 * size), out=w),
        ):
            with pytest.raises(ValueError, match=r"dist\.\w+"):
                call(wrong)
    all_of.close()


@pytest.mark.ranks(3)
def test_errors_name_the_caller_and_the_ranks(world):
    if world is None:
        return
    all_of, odd = Collectives(world, "dist", "the last two"), world.topology.rank == 1
    calls = {
        "all_reduce": lambda: all_of.all_reduce("SUM", np.zeros(2 + odd)),
        "all_gather": lambda: all_of.all_gather(np.zeros((2, 2 + odd))),
        "reduce_scatter": lambda: all_of.reduce_scatter("SUM", np.zeros(2 + 2 * odd)),
        "all_to_all": lambda: all_of.all_to_all(np.zeros((2, 2 + odd))),
        "reshard": lambda: all_of.reshard(np.zeros((2, 2 + odd)), old=0, new=1),
        "broadcast": lambda: all_of.broadcast(np.zeros(2 + odd)),
        "all_reduce_async": lambda: all_of.all_reduce_async("SUM", np.zeros(2 + odd)),
        "broadcast_async": lambda: all_of.broadcast_async(np.zeros(2 + odd)),
        "broadcast_object": lambda: all_of.broadcast_object(1, root=int(odd)),
        "all_gather_object": lambda: all_of.barrier() if odd else all_of.all_gather_object(1),
        "barrier": lambda: all_of.barrier(name="b" if odd else "a"),
    }
    for name, call in calls.items():
        with pytest.raises(CollectiveMismatchError, match=rf"dist\.{name}.*rank|rank.*dist\.{name}"):
            call()
        assert all_of.all_gather_object(1) == [1, 1]
    for name, call, text in (
        ("all_reduce", lambda: all_of.all_reduce("SUM", np.zeros(2, bool)), "numbers"),
        ("all_gather", lambda: all_of.all_gather(np.zeros(2), axis=1), "axis < 1"),
        ("broadcast", lambda: all_of.broadcast(np.zeros(2), root=2), "from 0 to 1"),
        ("all_reduce_async", lambda: all_of.all_reduce_async("SUM", np.zeros(2, bool)), "numbers"),
        ("all_to_all", lambda: all_of.all_to_all(np.zeros(3)), "2 replicas divide"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^dist\.{name}: .*{text}"):
            call()
    all_of.close()


@pytest.mark.ranks(2)
def test_tables_of_algorithms_that_differ(tmp_path, monkeypatch):
    """One path, which is another file on each rank, as on nodes with folders of their own; then a missing file on one."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    table = json.loads(Path(auto.__file__).with_name("chooser_table.json").read_text())
    table["rules"][0]["algorithm"] = ("MPI", "HIERARCHICAL")[rank]
    own = tmp_path / str(rank)
    own.mkdir(exist_ok=True)
    (own / "table.json").write_text(json.dumps(table))
    monkeypatch.chdir(own)
    monkeypatch.setenv("MPISTRAT_CHOOSER", "table.json")
    with Topology.create() as topology:
        group = ProcessGroup.create(topology)
        with pytest.raises(
            CollectiveMismatchError, match="MPISTRAT_CHOOSER: the ranks have tables with different rules"
        ):
            Collectives(group, "Front")
        if rank:
            (own / "table.json").unlink()
        with pytest.raises((OSError, RuntimeError), match="MPISTRAT_CHOOSER"):
            Collectives(group, "Front")
        group.close()
