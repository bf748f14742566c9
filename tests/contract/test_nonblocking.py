"""What every strategy promises of collectives that are started now and waited for later."""

import gc

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, ContextError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def values(strategy, of):
    """PerReplica of what a function gives for the numbers of the local replicas."""
    return strategy.distribute_values_from_function(lambda ctx: of(ctx.replica_id_in_sync_group))


def every(strategy, of):
    return np.array([of(r) for r in range(strategy.num_replicas_in_sync)])


def number(replica, shape, dtype):
    return np.random.default_rng(replica).integers(1, 5, size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float32", "float64", "complex128", "bfloat16"])
def test_reductions_of_each_dtype(strategy, dtype):
    """They are NumPy's; float16 and bfloat16 are summed in float32."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16

    def of(r):
        return number(r, (5, 3), dtype)

    wide = every(strategy, lambda r: of(r).astype("complex128" if dtype == "complex128" else "float64"))
    expected = {"SUM": wide.sum(axis=0), "MEAN": wide.mean(axis=0)}
    if dtype != "complex128":
        expected |= {"MIN": wide.min(axis=0), "MAX": wide.max(axis=0), "PROD": wide.prod(axis=0)}
    requests = {op: strategy.all_reduce_async(op, values(strategy, of)) for op in expected}
    for op, request in reversed(requests.items()):
        found = request.wait()
        result = np.float64 if op == "MEAN" and np.dtype(dtype).kind == "i" else dtype
        assert found.dtype == result
        assert np.allclose(found.astype(wide.dtype), expected[op].astype(result).astype(wide.dtype), rtol=1e-2)
        assert request.done() and request.wait() is found


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extremes_of_floats_are_exact_and_nan_wins(strategy, dtype):
    n = strategy.num_replicas_in_sync
    table = np.random.default_rng(1).normal(size=(n, 200)).astype(dtype)
    table[:, :4] = [0.0, -np.inf, np.inf, np.finfo(dtype).smallest_subnormal]
    table[n - 1, 5], table[0, 6] = np.nan, -np.float32(np.nan)
    table[n // 2, 7:9] = np.inf, -np.inf
    for op, ufunc in (("MIN", np.minimum), ("MAX", np.maximum)):
        found = strategy.all_reduce_async(op, values(strategy, lambda r: table[r])).wait()
        assert np.array_equal(found, ufunc.reduce(table), equal_nan=True) and found.dtype == dtype


def test_a_nest_of_several_dtypes(strategy):
    """Values may be changed after the start; no dimension gives a scalar, no element an empty array."""

    def of(r):
        return {"a": number(r, 7, "float32"), "b": [number(r, (2, 2), "float16"), 1.5 * r], "c": np.zeros((0, 3))}

    given = values(strategy, of)
    request = strategy.all_reduce_async("SUM", given)
    for value in strategy.local_results(given["a"]):
        value[:] = 100
    found = request.wait()
    n = strategy.num_replicas_in_sync
    assert np.array_equal(found["a"], every(strategy, lambda r: number(r, 7, "float32")).sum(axis=0))
    assert np.array_equal(found["b"][0], every(strategy, lambda r: number(r, (2, 2), "float16")).sum(axis=0))
    assert found["b"][1] == 1.5 * n * (n - 1) / 2 and np.ndim(found["b"][1]) == 0 and found["c"].shape == (0, 3)


def test_many_at_once_beside_others(strategy):
    """Each rank waits in an order of its own; other collectives come in between."""
    n, count = strategy.num_replicas_in_sync, 20
    requests = []
    for i in range(count):
        requests.append(strategy.all_reduce_async("SUM", values(strategy, lambda r, i=i: np.full(i + 1, float(r + i)))))
        if i % 3 == 0:
            assert strategy.all_gather_object(i) == [i] * strategy.size
            assert strategy.reduce("MAX", values(strategy, lambda r: r + 1), axis=None) == n
    order = np.random.default_rng(strategy.rank).permutation(count)
    for i in order:
        assert np.array_equal(requests[i].wait(), np.full(i + 1, sum(r + i for r in range(n))))


def test_polling_ends(strategy):
    request = strategy.all_reduce_async("SUM", values(strategy, lambda r: np.ones(100_000)))
    strategy.barrier()
    while not request.done():
        pass
    assert request.wait()[0] == strategy.num_replicas_in_sync


def test_broadcast(strategy):
    def of(r):
        return {"x": np.full((2, 3), r, "float32"), "text": np.array([f"of {r}", "all"]), "flag": np.array(r % 2 == 0)}

    n = strategy.num_replicas_in_sync
    requests = [strategy.broadcast_async(values(strategy, of), root=root) for root in range(n)]
    for root, request in reversed([*enumerate(requests)]):
        found = request.wait()
        assert found["x"].tolist() == [[root] * 3] * 2 and found["x"].dtype == np.float32
        assert found["text"].tolist() == [f"of {root}", "all"] and found["flag"] == (root % 2 == 0)
    with pytest.raises(ValueError, match=rf"root: expected a replica from 0 to {n - 1}, got {n}"):
        strategy.broadcast_async(values(strategy, of), root=n)


def test_variables(strategy):
    with strategy.scope():
        v = ms.Variable(np.arange(3.0), name="v")
    assert strategy.all_reduce_async("MEAN", v).wait().tolist() == [0, 1, 2]


def test_in_a_step(strategy):
    """Of ranks with one replica: others are told what to do, and do it."""

    def step(r):
        request = strategy.all_reduce_async("SUM", np.array([1.0, r]))
        ms.get_replica_context().all_reduce("SUM", 1)
        return request.wait()

    n = strategy.num_replicas_in_sync
    numbers = values(strategy, float)
    several = any(strategy.all_gather_object(strategy.extended.threads is not None))
    if not several:
        assert strategy.run(step, args=(numbers,)).tolist() == [n, n * (n - 1) / 2]
        return
    if strategy.extended.threads is not None:
        with pytest.raises(ContextError, match="merge_call"):
            strategy.run(lambda: strategy.all_reduce_async("SUM", 1))

    def merged(r):
        def start(strategy, value):
            return strategy.all_reduce_async("SUM", value).wait()

        return ms.get_replica_context().merge_call(start, args=(r,))

    found = strategy.run(merged, args=(numbers,))
    assert all(value == n * (n - 1) / 2 for value in strategy.local_results(found))


def test_ranks_that_differ_are_told(strategy):
    """On every rank, before anything is posted, and the next one works."""
    n, size = strategy.num_replicas_in_sync, strategy.size
    if size == 1:
        return
    odd = strategy.rank == size - 1

    def zeros(*shape, dtype="float64"):
        return values(strategy, lambda r: np.zeros(shape, dtype))

    each = {
        "a shape": lambda: strategy.all_reduce_async("SUM", zeros(3 if odd else 2)),
        "a dtype": lambda: strategy.all_reduce_async("SUM", zeros(2, dtype="float32" if odd else "float64")),
        "a reduction": lambda: strategy.all_reduce_async("MAX" if odd else "SUM", zeros(2)),
        "keys": lambda: strategy.all_reduce_async("SUM", {"b" if odd else "a": zeros(2)}),
        "a root": lambda: strategy.broadcast_async(zeros(2), root=int(odd)),
        "a dtype to be sent": lambda: strategy.broadcast_async(zeros(2, dtype="float32" if odd else "float64")),
        "another start": lambda: (
            strategy.broadcast_async(zeros(2)) if odd else strategy.all_reduce_async("SUM", zeros(2))
        ),
        "the call that waits": lambda: (
            strategy.reduce("SUM", zeros(2), axis=None) if odd else strategy.all_reduce_async("SUM", zeros(2))
        ),
        "no start": lambda: strategy.gather(zeros(2), 0) if odd else strategy.all_reduce_async("SUM", zeros(2)),
    }
    for call in each.values():
        with pytest.raises(CollectiveMismatchError, match="rank"):
            call()
        assert strategy.all_reduce_async("SUM", values(strategy, lambda r: 1)).wait() == n


def test_wrong_use(strategy):
    rows = ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    with pytest.raises(TypeError, match=r"expected arrays, got IndexedSlices. Pass to_dense\(\)"):
        strategy.all_reduce_async("SUM", values(strategy, lambda r: rows))
    with pytest.raises(TypeError, match="astype"):
        strategy.all_reduce_async("SUM", values(strategy, lambda r: np.ones(2, bool)))
    with pytest.raises(TypeError, match="at most 64 bits"):
        strategy.all_reduce_async("MAX", values(strategy, lambda r: np.ones(2, np.longdouble)))
    with pytest.raises(TypeError):
        strategy.broadcast_async(values(strategy, lambda r: np.ones(2, [("a", "i4")])))
    with pytest.raises(ValueError, match="reduce_op"):
        strategy.all_reduce_async("MEDIAN", values(strategy, lambda r: np.ones(2)))


def test_one_that_is_dropped_is_told(strategy, caplog):
    """By the line where it was started; nothing of one that was waited for."""
    strategy.all_reduce_async("SUM", values(strategy, lambda r: 1)).wait()
    strategy.all_reduce_async("SUM", values(strategy, lambda r: np.ones(3)))
    kept = strategy.all_reduce_async("SUM", values(strategy, lambda r: np.ones(4)))
    strategy.close()
    gc.collect()
    lines = [record.getMessage() for record in caplog.records if "never waited for" in record.getMessage()]
    assert len(lines) == 2 and all("started at test_nonblocking.py:" in line for line in lines)
    assert {"(3,)", "(4,)"} == {word for line in lines for word in ("(3,)", "(4,)") if word in line}
    assert kept.wait().tolist() == [strategy.num_replicas_in_sync] * 4
