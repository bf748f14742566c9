"""What every strategy promises of reduce_scatter and all_to_all in a step. See test_strategies for the rest."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def in_step(strategy, act):
    """What `act` returns on each local replica, by the replica's number; it gets the context and that number."""

    def step():
        ctx = ms.get_replica_context()
        return [act(ctx, ctx.replica_id_in_sync_group)]

    first = strategy.extended.topology.replica_offset
    found = strategy.run(step)[0]
    return {first + i: result for i, result in enumerate(strategy.local_results(found))}


def of(replica, shape, dtype):
    return np.random.default_rng(replica).integers(0, 20, size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float32", "complex128"])
def test_reduce_scatter(strategy, dtype):
    n = strategy.num_replicas_in_sync
    shape = (2 * n + 1, 3, n - 1)  # which n replicas do not divide evenly; the last is shorter than they are many
    every = np.array([of(r, shape, dtype) for r in range(n)])
    total = every.sum(axis=0).astype(dtype)
    mean = every.mean(axis=0, dtype="float64" if dtype.startswith("int") else None)
    for axis in range(-3, 3):
        sums = np.array_split(total, n, axis=axis)
        means = np.array_split(mean, n, axis=axis)
        for r, found in in_step(strategy, lambda c, r, a=axis: c.reduce_scatter("SUM", every[r], axis=a)).items():
            assert found.dtype == dtype
            assert np.array_equal(found, sums[r])
        for r, found in in_step(strategy, lambda c, r, a=axis: c.reduce_scatter("MEAN", every[r], axis=a)).items():
            assert found.shape == means[r].shape
            assert np.allclose(found, means[r], rtol=1e-3 if dtype == "float16" else 1e-6)


def test_reduce_scatter_of_other_reductions(strategy):
    n = strategy.num_replicas_in_sync
    every = np.array([of(r, (n, 2), "int64") + 1 for r in range(n)])
    for op, expected in {"MIN": every.min(axis=0), "MAX": every.max(axis=0), "PROD": every.prod(axis=0)}.items():
        for r, found in in_step(strategy, lambda c, r, op=op: c.reduce_scatter(op, every[r])).items():
            assert np.array_equal(found, expected[[r]])


def test_reduce_scatter_of_a_nest(strategy):
    """Leaves of other dtypes and odd sizes travel in one exchange."""
    n = strategy.num_replicas_in_sync

    def value(r):
        return {"a": of(r, 3 * n, "int8"), "b": [of(r, (n, 2), "float64"), of(r, (n, 1), "float32")]}

    every = [value(r) for r in range(n)]
    for r, found in in_step(strategy, lambda c, r: c.reduce_scatter("SUM", every[r])).items():
        assert np.array_equal(found["a"], sum(e["a"] for e in every)[3 * r : 3 * r + 3])
        for at, leaf in enumerate(found["b"]):
            assert np.array_equal(leaf, sum(e["b"][at] for e in every)[[r]])


def lengths(n):
    """How much replica i sends to replica j: also nothing."""
    return np.array([[(i + 2 * j) % 3 for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("dtype", ["bool", "int16", "float32", "complex64", "datetime64[s]", "S5", "U3"])
@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_all_to_all_with_splits(strategy, dtype, axis):
    n = strategy.num_replicas_in_sync
    table = lengths(n)
    every = []
    for r in range(n):
        shape = (table[r].sum(), 2) if axis in (0, -2) else (2, table[r].sum())
        every.append(of(r, shape, "int64").astype(dtype))
    cuts = [np.split(every[r], np.cumsum(table[r])[:-1], axis=axis) for r in range(n)]
    for splits in (table, table.tolist()):
        found = in_step(strategy, lambda c, r, s=splits: c.all_to_all(every[r], splits=s[r], axis=axis))
        for r, (value, received) in found.items():
            assert value.dtype == dtype
            assert np.array_equal(value, np.concatenate([cuts[s][r] for s in range(n)], axis=axis))
            assert received.tolist() == table[:, r].tolist()


def test_all_to_all_in_equal_parts(strategy):
    """Of arrays whose lengths may differ; in one exchange."""
    n = strategy.num_replicas_in_sync
    every = [{"x": of(r, ((r % 3) * n, 2), "float64"), "y": of(r, n, "uint8")} for r in range(n)]
    for r, found in in_step(strategy, lambda c, r: c.all_to_all(every[r])).items():
        expected = [np.split(every[s]["x"], n)[r] for s in range(n)]
        assert np.array_equal(found["x"], np.concatenate(expected))
        assert np.array_equal(found["y"], [every[s]["y"][r] for s in range(n)])


def test_more_than_staging_memory_has_room_for(strategy):
    n = strategy.num_replicas_in_sync
    table = lengths(n) * 100_000
    every = [of(r, table[r].sum(), "float64") for r in range(n)]
    found = in_step(strategy, lambda c, r: c.all_to_all(every[r], splits=table[r])[0])
    for r, value in found.items():
        assert np.array_equal(
            value, np.concatenate([np.split(every[s], np.cumsum(table[s])[:-1])[r] for s in range(n)])
        )
    large = np.array([of(r, 300_001, "float64") for r in range(n)])
    parts = np.array_split(large.sum(axis=0), n)
    for r, found in in_step(strategy, lambda c, r: c.reduce_scatter("SUM", large[r])).items():
        assert np.array_equal(found, parts[r])


def test_results_are_the_replicas_own(strategy):
    n = strategy.num_replicas_in_sync

    def act(ctx, r):
        given = np.full(n, r)
        for result in (ctx.reduce_scatter("MAX", given), ctx.all_to_all(given)):
            result += 100
        return given

    for r, given in in_step(strategy, act).items():
        assert given.tolist() == [r] * n


def test_ranks_that_differ_are_told(strategy):
    """On every rank, and the next call works."""
    n, size = strategy.num_replicas_in_sync, strategy.size
    if size == 1:
        return
    odd = strategy.rank == size - 1
    ok = np.arange(2 * n)
    each = {
        "a shape": lambda c: c.reduce_scatter("SUM", np.zeros((n, 3 if odd else 2))),
        "a dtype": lambda c: c.reduce_scatter("SUM", np.zeros(n, "float32" if odd else "float64")),
        "a reduction": lambda c: c.reduce_scatter("MAX" if odd else "SUM", ok),
        "an axis": lambda c: c.reduce_scatter("SUM", np.zeros((n, n)), axis=int(odd)),
        "another call": lambda c: c.all_to_all(ok) if odd else c.reduce_scatter("SUM", ok),
        "keys": lambda c: c.all_to_all({"b" if odd else "a": ok}),
        "a shape but for the axis": lambda c: c.all_to_all(np.zeros((n, 3 if odd else 2))),
        "a dtype of parts": lambda c: c.all_to_all(np.zeros(n, "float32" if odd else "float64")),
        "an axis of parts": lambda c: c.all_to_all(np.zeros((n, n)), axis=int(odd)),
        "splits on some": lambda c: c.all_to_all(ok, splits=[2] * n if odd else None),
    }
    for call in each.values():
        with pytest.raises(CollectiveMismatchError, match="rank"):
            in_step(strategy, lambda c, r, call=call: call(c))
        assert strategy.all_gather_object(strategy.rank) == list(range(size))


def test_wrong_splits_of_one_replica_are_told_on_every_rank(strategy):
    n = strategy.num_replicas_in_sync
    last = n - 1
    for wrong in ([1] * n, [2] * n + [0], [2.0] * n, [-1, *[2] * (n - 2), 5][:n]):
        with pytest.raises(ValueError, match=rf"{n} lengths, one for each replica"):
            in_step(strategy, lambda c, r, w=wrong: c.all_to_all(np.zeros(2 * n), splits=w if r == last else [2] * n))
        assert strategy.all_gather_object(strategy.rank) == list(range(strategy.size))
    if n > 1:
        with pytest.raises(ValueError, match="Give splits"):
            in_step(strategy, lambda c, r: c.all_to_all(np.zeros(n + (r == last))))


def test_wrong_use(strategy):
    n = strategy.num_replicas_in_sync
    for act in (lambda c, v, a: c.reduce_scatter("SUM", v, axis=a), lambda c, v, a: c.all_to_all(v, axis=a)):
        for value, axis, told in ((1.0, 0, "a scalar"), (np.zeros(n), 1, "axis < 1"), (np.zeros(n), -2, "axis < 1")):
            with pytest.raises(ValueError, match=told):
                in_step(strategy, lambda c, r, a=act, v=value, x=axis: a(c, v, x))
    with pytest.raises(TypeError):
        in_step(strategy, lambda c, r: c.reduce_scatter("SUM", np.zeros(n, bool)))
    with pytest.raises(TypeError):
        in_step(strategy, lambda c, r: c.all_to_all(np.array([object()] * n)))
