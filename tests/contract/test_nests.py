"""What every strategy promises of gather and broadcast of nests: what they are of each leaf, in one collective."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cross_device import values as parts
from mpistrat.errors import CollectiveMismatchError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(params=["small", "some", "large"])
def limit(request, monkeypatch):
    """Whether all leaves travel together, some of them, or each alone."""
    monkeypatch.setattr(parts, "_SMALL", {"small": 1 << 30, "some": 100, "large": -1}[request.param])


def values(strategy, of):
    return strategy.distribute_values_from_function(lambda ctx: of(ctx.replica_id_in_sync_group))


def calls(strategy, act):
    """What it returns, and how many collectives this rank has entered in it."""
    monitor = strategy.extended.cross_device_ops.group.monitor
    before = monitor.number
    return act(), monitor.number - before


def leaf(replica, length, rest, dtype, axis):
    shape = (length, *rest) if axis == 0 else (*rest[:1], length, *rest[1:])
    return np.random.default_rng(replica).integers(0, 9, size=shape).astype(dtype)


def nest_of(r, axis):
    return {
        "x": leaf(r, 2 + r % 3, (3,), "float32", axis),
        "y": [leaf(r, 1, (2, 2), "complex128", axis), leaf(r, 40 * (r % 2), (3,), "S3", axis)],
        "flag": leaf(r, 5, (1,), "bool", axis),
        "half": leaf(r, 3, (5,), "float16", axis)[..., ::-1],
    }


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(strategy, limit, axis):
    n = strategy.num_replicas_in_sync
    found, count = calls(strategy, lambda: strategy.gather(values(strategy, lambda r: nest_of(r, axis)), axis))
    every = [nest_of(r, axis) for r in range(n)]
    assert count == (1 if strategy.size > 1 else 0)
    for place in (lambda v: v["x"], lambda v: v["y"][0], lambda v: v["y"][1], lambda v: v["flag"], lambda v: v["half"]):
        expected = np.concatenate([place(value) for value in every], axis=axis)
        assert place(found).dtype == expected.dtype and np.array_equal(place(found), expected)
        place(found)[...] = 0  # a rank's own


def test_gather_along_the_last_axis_of_each(strategy, limit):
    def nest_of(r):
        return {
            "a": leaf(r, 2 + r, (3,), "float32", 1),
            "b": [leaf(r, 1 + r, (), "int8", 0)],
            "c": np.full((2, 1, r), r),
        }

    found = strategy.gather(values(strategy, nest_of), -1)
    every = [nest_of(r) for r in range(strategy.num_replicas_in_sync)]
    for place in (lambda v: v["a"], lambda v: v["b"][0], lambda v: v["c"]):
        assert np.array_equal(place(found), np.concatenate([place(value) for value in every], axis=-1))


def test_in_a_step(strategy):
    n = strategy.num_replicas_in_sync

    def step():
        ctx = ms.get_replica_context()
        r = ctx.replica_id_in_sync_group
        a, b = ctx.all_gather((np.full(r, r), np.full((1, 2), 0.5 * r)))
        return a.sum(), b.sum(), ctx.broadcast({"k": np.array([r]), "j": r}, root=n - 1)["k"][0]

    total = (sum(r * r for r in range(n)), n * (n - 1) / 2, n - 1)
    for found in zip(*map(strategy.local_results, strategy.run(step)), strict=True):
        assert found == total


def test_broadcast(strategy, limit):
    n = strategy.num_replicas_in_sync

    def of(r):
        return {"a": np.full((30, 2), r, "float32")[:, ::-1], "b": (np.array([f"of {r}"]), r, np.zeros((0, 2), "int8"))}

    def act():
        return strategy.run(lambda v: ms.get_replica_context().broadcast(v, root=n - 1), args=(values(strategy, of),))

    found, count = calls(strategy, act)
    assert count == (1 if strategy.size > 1 else 0)
    for one in strategy.local_results(found):
        assert one["a"].tolist() == [[n - 1] * 2] * 30 and one["a"].dtype == np.float32
        assert one["b"][0][0] == f"of {n - 1}" and one["b"][1] == n - 1 and one["b"][2].shape == (0, 2)


def test_the_leaf_that_differs_is_named(strategy, limit):
    n, size = strategy.num_replicas_in_sync, strategy.size
    if size == 1:
        return
    last = n - 1
    wrong = {
        "a shape but for the axis": lambda r: {"a": np.zeros(2), "b": np.zeros((2, 3 if r == last else 2))},
        "a dtype": lambda r: {"a": np.zeros(2), "b": np.zeros((2, 2), "f4" if r == last else "f8")},
    }
    for of in wrong.values():
        with pytest.raises(CollectiveMismatchError, match=r"gather: value\['b'\]: .*\(2, 2\)"):
            strategy.gather(values(strategy, of), 0)
        assert strategy.all_gather_object(strategy.rank) == list(range(size))
    with pytest.raises(CollectiveMismatchError, match="rank"):
        strategy.gather(values(strategy, lambda r: {"b" if strategy.rank else "a": np.zeros(2)}), 0)
    with pytest.raises(ValueError, match=r"value\['b'\]: expected at least one dimension"):
        strategy.gather(values(strategy, lambda r: {"a": np.zeros(2), "b": 1.0}), 0)
    with pytest.raises(TypeError, match=r"value\['b'\]"):
        strategy.gather(values(strategy, lambda r: {"a": np.zeros(2), "b": np.zeros(2, [("x", "i4")])}), 0)
    assert strategy.gather(values(strategy, lambda r: [np.zeros(1)] * 2), 0)[1].shape == (n,)
