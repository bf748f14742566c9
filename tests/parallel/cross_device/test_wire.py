"""Reductions whose sums travel between nodes in bfloat16: against NumPy, which rounds where they do."""

import json

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.partition import aligned_bounds
from mpistrat.types import ReduceOp
from tests.harness.process_groups import set_layout

pytestmark = pytest.mark.ranks(2, 3, 4)
IN_FEWER = ms.CommunicationOptions(wire="bfloat16")


@pytest.fixture(params=["private", "nodes"])
def opened(request, monkeypatch):
    set_layout(request.param, monkeypatch)
    return ms.MultiWorkerMirroredStrategy


def rounded(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def values_of(rank, size):
    return (np.random.default_rng((rank, size)).integers(-999, 1000, size) / 8).astype(np.float32)


def bounds_of(group, size):
    """Which elements each node sums, of an array that is one chunk for every slice."""
    for low, high in aligned_bounds(size, group.slices if group.environment.shared_memory else 1):
        yield [(low + begin, low + end) for begin, end in aligned_bounds(high - low, group.num_nodes)]


def expected_of(strategy, size):
    group = strategy.extended.process_group
    node_of = group.topology.node_of if group.environment.shared_memory else range(strategy.size)
    sums = np.zeros((group.num_nodes, size), np.float32)
    for rank, node in enumerate(node_of):
        sums[node] += values_of(rank, size)
    total = np.zeros(size, np.float32)
    for pieces in bounds_of(group, size):
        for owner, (low, high) in enumerate(pieces):
            for node in range(group.num_nodes):
                part = sums[node, low:high]
                total[low:high] += part if node == owner else rounded(part)
    return rounded(total)


def test_against_numpy(opened):
    with opened() as strategy:
        size = 60_001
        found = strategy.run(
            lambda: ms.get_replica_context().all_reduce("SUM", values_of(strategy.rank, size), options=IN_FEWER)
        )
        expected = expected_of(strategy, size)
        np.testing.assert_array_equal(found, expected)
        several = strategy.reduce(
            "MEAN", {"a": values_of(strategy.rank, size), "n": np.float64(1)}, axis=None, options=IN_FEWER
        )
        assert several["n"] == 1
        np.testing.assert_array_equal(several["a"], expected / np.float32(strategy.size))


def test_large_arrays_are_equal_on_all_ranks(opened):
    from mpi4py import MPI

    size = 1_500_003
    with opened() as strategy:
        mine = values_of(strategy.rank, size)
        found = strategy.reduce("SUM", mine, axis=None, options=IN_FEWER)
        exact = sum(values_of(rank, size).astype(float) for rank in range(strategy.size))
        most = sum(np.abs(values_of(rank, size)) for rank in range(strategy.size))
        assert (found != exact).any() and (np.abs(found - exact) <= most * 2 / 256).all()
        np.testing.assert_array_equal(found, MPI.COMM_WORLD.bcast(found))


def test_what_stays_as_it_is(opened):
    """Small arrays, other dtypes, extremes, and all where nobody asked for it: also under a strategy's own wire."""
    with opened(communication_options=IN_FEWER) as strategy:
        for size, dtype, op, options in (
            (1000, np.float32, "SUM", IN_FEWER),
            (60_001, np.float64, "SUM", IN_FEWER),
            (60_001, np.float32, "MAX", IN_FEWER),
            (60_001, np.float32, "SUM", None),
        ):
            mine = values_of(strategy.rank, size).astype(dtype)
            all_values = [values_of(rank, size).astype(dtype) for rank in range(strategy.size)]
            found = strategy.reduce(op, mine, axis=None, options=options)
            np.testing.assert_array_equal(found, np.max(all_values, 0) if op == "MAX" else np.sum(all_values, 0))


def test_what_has_no_such_form(opened):
    mine = np.ones(60_001, np.float32)
    with opened() as strategy:
        with pytest.raises(ValueError, match="int8 is for optimizer steps"):
            strategy.reduce("SUM", mine, axis=None, options=ms.CommunicationOptions(wire="int8"))
        options = ms.CommunicationOptions(wire="bfloat16", implementation="MPI")
        with pytest.raises(ValueError, match=r"options\.wire: expected none, for reductions by MpiAllReduce"):
            strategy.reduce("SUM", mine, axis=None, options=options)


def test_a_table_that_names_what_has_no_such_form(opened, monkeypatch, mpi_tmp_path, caplog):
    """Numbers travel as they are, and that is said."""
    rule = {"device": "cpu", "below": None, "algorithm": "MPI"}
    rules = [rule | {"nodes": nodes} for nodes in ("one", "several")]
    gpu = [one | {"device": "gpu"} for one in rules]
    path = mpi_tmp_path / "table.json"
    path.write_text(json.dumps({"rules": [*rules, *gpu]}))
    monkeypatch.setenv("MPISTRAT_CHOOSER", str(path))
    with opened() as strategy:
        strategy.barrier()
        found = strategy.reduce("SUM", values_of(strategy.rank, 60_001), axis=None, options=IN_FEWER)
        np.testing.assert_array_equal(found, sum(values_of(rank, 60_001) for rank in range(strategy.size)))
        assert strategy.rank or "table.json names MpiAllReduce for 240,004 bytes" in caplog.text


def test_ranks_must_agree(opened):
    with opened() as strategy:
        rank, size = strategy.rank, strategy.size
        options = IN_FEWER if rank == size - 1 or (size == 4 and rank == 2) else None  # the last node's in both layouts
        with pytest.raises(ms.errors.CollectiveMismatchError, match="wire bfloat16"):
            strategy.reduce("SUM", np.ones(60_001, np.float32), axis=None, options=options)


def test_gradients_of_variables(opened):
    with opened() as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(60_001, np.float32), name="v")

        def step():
            v.grad[...] = values_of(strategy.rank, 60_001)
            return v.grad

        found = strategy.extended.reduce_to(ReduceOp.SUM, strategy.run(step), v, options=IN_FEWER)
        np.testing.assert_array_equal(found, expected_of(strategy, 60_001))
