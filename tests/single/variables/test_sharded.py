"""A ShardedVariable acts as one array: what is read and written is compared with NumPy's, however it is cut."""

import contextlib
import copy
import itertools
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import mpistrat as ms
from mpistrat.types import IndexedSlices
from mpistrat.variables.scatter import rows_of
from tests.harness.strategies import without_mpi

SHAPE = (7, 3, 2)
CUTS = [(7,), (3, 4), (3, 2, 2), (0, 4, 0, 3), (1,) * 7]
UFUNCS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def sharded(array, lengths, **options):
    edges = list(itertools.accumulate(lengths, initial=0))
    parts = [ms.Variable(array[low:high], **options) for low, high in itertools.pairwise(edges)]
    return ms.ShardedVariable(parts, name="whole")


@pytest.fixture(scope="module", params=CUTS, ids=str)
def table(request):
    """The numbers, and variables that hold them; only read."""
    array = np.arange(np.prod(SHAPE), dtype=np.float64).reshape(SHAPE)
    return array, sharded(array, request.param)


@contextlib.contextmanager
def partitioned(partitioner, replicas=1):
    with without_mpi(replicas) as strategy, strategy.scope():
        strategy.extended.placement.partitioner = partitioner
        yield strategy


# reading

first = st.one_of(
    st.integers(-9, 9),
    st.slices(9),
    st.sampled_from(
        [Ellipsis, None, True, False, [], [1.5], [[0], [1, 2]], "x", np.array(2), np.True_, ms.Variable(3)]
    ),
    hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=4, min_side=0), elements=st.integers(-8, 7)),
    hnp.arrays(bool, (7,)),
    hnp.arrays(bool, (7, 3)),
    hnp.arrays(bool, SHAPE),
    hnp.arrays(bool, (6,)),
    st.lists(st.integers(-7, 6), max_size=5),
)
other = st.one_of(
    st.integers(-3, 3),
    st.slices(3),
    st.sampled_from([Ellipsis, None, [0, 1], [[1], [0]], np.array([True, False, True])]),
)


@settings(max_examples=150, deadline=None)
@given(index=st.one_of(first, st.tuples(first), st.tuples(first, other), st.tuples(first, other, other), st.just(())))
def test_indices_are_numpys(table, index):
    array, v = table
    try:
        expected = array[index]
    except (IndexError, ValueError) as error:
        with pytest.raises(IndexError if isinstance(error, IndexError) else ValueError):
            v[index]
        return
    got = v[index]
    np.testing.assert_array_equal(got, expected, strict=True)


def test_it_is_an_array_to_numpy(table):
    w, v = table
    for got, expected in [
        (v + 1, w + 1), (1 - v, 1 - w), (v * v, w * w), (-v, -w), (v**2, w**2), (v > 2, w > 2), (v == w, w == w),
        (np.tanh(v), np.tanh(w)), (np.concatenate([v, v]), np.concatenate([w, w])), (np.sum(v, axis=1), w.sum(1)),
        (np.add.reduce(v), w.sum(0)), (np.stack(list(v)), w), (np.asarray(v), w), (np.array(v), w), (v.array, w),
        (np.asarray(v, np.float32), w.astype(np.float32)), (v.numpy(), w), (v.value(), w), (v.read_value(), w),
        (np.add(v, 1, out=np.empty(SHAPE)), w + 1), (v @ np.ones(2), w.sum(2)), (np.einsum("ijk->j", v), w.sum((0, 2))),
    ]:  # fmt: skip
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, expected, strict=True)
    assert (v.shape, v.dtype, v.ndim, v.size, v.nbytes, len(v)) == (SHAPE, np.float64, 3, 42, 336, 7)


def test_what_it_is():
    v = sharded(np.zeros((5, 2), np.float32), (2, 3), trainable=False)
    assert not isinstance(v, ms.Variable)
    assert v.name.startswith("whole") and v.offsets == (0, 2) and not v.trainable and not v.closed
    assert [part.shape for part in v.variables] == [(2, 2), (3, 2)]
    assert v.part_of([[4, 0], [1, 2]]).tolist() == [[1, 0], [0, 1]]
    assert v.synchronization is ms.VariableSynchronization.ON_WRITE and v.aggregation is ms.VariableAggregation.NONE
    assert repr(v) == f"<ShardedVariable {v.name!r} shape=(5, 2) dtype=float32 of 2 parts>"
    assert {v: 1}[v] == 1
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"whole.*numpy\(\)"):
            attempt(v)


def test_only_the_parts_that_are_asked_for_are_read(monkeypatch):
    v = sharded(np.arange(12.0).reshape(6, 2), (2, 2, 2))
    v.variables[0]._close()
    v.variables[2]._close()
    assert v[2].tolist() == [4, 5] and v[-3, 1] == 7 and v[2:4].tolist() == [[4, 5], [6, 7]]
    assert v[3:1:-1, 0].tolist() == [6, 4] and v[[3, 2, 3], 1].tolist() == [7, 5, 7]
    assert v[np.arange(6) == 3].tolist() == [[6, 7]] and v[v_mask(6, 2, (3, 1))].tolist() == [7]
    assert v.sparse_read([3]).tolist() == [[6, 7]] and v.gather_nd([[2, 1]]).tolist() == [5]
    assert v[:0].shape == (0, 2) and v[[]].shape == (0, 2)
    with pytest.raises(ms.errors.ClosedError):
        v[1:3]


def v_mask(rows, columns, *places):
    mask = np.zeros((rows, columns), bool)
    for place in places:
        mask[place] = True
    return mask


def test_rows_by_number_are_asked_for_once():
    rows, rest = rows_of(([5, 1, 5, -1], 0), (6, 2))
    assert rows.tolist() == [1, 5] and rest[0].tolist() == [1, 0, 1, 1] and rest[1] == 0


@settings(deadline=None)
@given(st.data(), hnp.array_shapes(max_dims=3, max_side=4, min_side=0), st.integers(1, 3))
def test_lookups_are_in_the_order_of_the_ids(table, data, shape, depth):
    array, v = table
    ids = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(0, 6)))
    np.testing.assert_array_equal(v.sparse_read(ids), array[ids], strict=True)
    np.testing.assert_array_equal(v.embedding_lookup(ids), array[ids], strict=True)
    places = np.stack([ids, ids % 3, ids % 2], axis=-1)[..., :depth]
    np.testing.assert_array_equal(v.gather_nd(places), array[tuple(np.moveaxis(places, -1, 0))], strict=True)


def test_what_cannot_be_read(table):
    _, v = table
    for wrong in ([7], [-1]):
        with pytest.raises(IndexError, match="0 <= index < 7"):
            v.sparse_read(wrong)
        with pytest.raises(IndexError, match="0 <= index < 7"):
            v.gather_nd([wrong])
    with pytest.raises(ValueError, match="coordinates"):
        v.gather_nd(3)
    with pytest.raises(ValueError, match="coordinates"):
        v.gather_nd([[0, 0, 0, 0]])
    assert v.gather_nd(np.zeros((2, 0), int)).shape == (2, *SHAPE)
    with pytest.raises(TypeError, match="integers"):
        v.sparse_read([0.5])


def test_copies_are_copies_and_what_is_read_is_read_only():
    v = sharded(np.zeros((4, 2)), (2, 2))
    for taken in (v.numpy(), v.value(), v.read_value(), np.array(v)):
        taken[...] = 1
    assert v.numpy().sum() == 0
    for view in (v.array, np.asarray(v)):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1
    with pytest.raises(ValueError, match="needs a copy"):
        v.__array__(copy=False)


# writing


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CUTS), st.lists(st.sampled_from(["assign", "assign_add", "assign_sub"]), max_size=5))
def test_assigning_is_numpys(lengths, ops):
    start = np.arange(42.0).reshape(SHAPE)
    v, expected = sharded(start, lengths), start.copy()
    for count, op in enumerate(ops):
        value = np.random.default_rng(count).normal(size=SHAPE)
        expected = {"assign": value, "assign_add": expected + value, "assign_sub": expected - value}[op]
        assert getattr(v, op)(value) is v
    np.testing.assert_array_equal(v, expected)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([*UFUNCS, "update"]), st.sampled_from(CUTS), st.integers(0, 3))
def test_scattering_is_numpys(data, op, lengths, depth):
    places = st.tuples(*(st.integers(0, n - 1) for n in SHAPE[:depth]))
    drawn = data.draw(st.lists(places, max_size=8))
    indices = np.array(drawn, np.int64).reshape(len(drawn), depth)
    random = np.random.default_rng(len(indices))
    start, updates = random.normal(size=SHAPE), random.normal(size=(len(indices), *SHAPE[depth:]))
    v, expected = sharded(start, lengths), start.copy()
    for place, update in zip(map(tuple, indices), updates, strict=True):
        expected[place] = UFUNCS[op](expected[place], update) if op in UFUNCS else update
    if depth == 1:
        assert getattr(v, f"scatter_{op}")(IndexedSlices(updates, indices[:, 0])) is v
    elif op in ("mul", "div"):
        return
    else:
        assert getattr(v, f"scatter_nd_{op}")(indices, updates) is v
    np.testing.assert_array_equal(v, expected)


def test_batch_scatter():
    v = sharded(np.zeros((3, 3)), (1, 2))
    v.batch_scatter_update(([[0, 2], [1, 1], [2, 0]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert v.numpy().tolist() == [[1, 0, 2], [0, 4, 0], [6, 0, 5]]


@pytest.mark.parametrize(
    ("write", "error", "text"),
    [
        (
            lambda v: v.assign(np.zeros((5, 2))),
            ValueError,
            r"expected shape \(4, 2\), the variable's, got shape \(5, 2\)",
        ),
        (lambda v: v.assign_add(1.0), ValueError, r"expected shape \(4, 2\)"),
        (lambda v: v.assign(ms.PerReplica([np.zeros((4, 2))])), ValueError, "PerReplica"),
        (lambda v: v.assign(np.zeros((4, 2), complex)), TypeError, "float32"),
        (lambda v: v.scatter_add(([4], [[0.0, 0.0]])), IndexError, "0 <= index < 4, got 4"),
        (lambda v: v.scatter_add(([0, 1], [[0.0, 0.0]])), ValueError, "shape"),
        (lambda v: v.__setitem__(slice(2, 3), 1), TypeError, "assign_add"),
        (lambda v: v.__iadd__(1), TypeError, "assign_add"),
        (lambda v: np.add(1, 1, out=v), TypeError, "assign_add"),
        (lambda v: np.add.at(v, [0], 1), TypeError, "assign_add"),
    ],
)
def test_what_cannot_be_written(write, error, text):
    v = sharded(np.ones((4, 2), np.float32), (2, 2))
    with pytest.raises(error, match=text):
        write(v)
    assert (v.array == 1).all()


def test_in_replica_context_what_the_replicas_write_is_aggregated():
    with partitioned(ms.partitioners.FixedShardsPartitioner(2), replicas=2) as strategy:
        v = ms.Variable(np.zeros((3, 1)), aggregation=ms.VariableAggregation.SUM, name="v")

        def step():
            replica = ms.get_replica_context().replica_id_in_sync_group
            v.assign_add(np.full((3, 1), 1.0 + replica))
            v.scatter_add(([2 * replica], [[10.0]]))  # each replica writes to another part

        strategy.run(step)
        assert v.numpy().ravel().tolist() == [13, 3, 13]


# gradients


@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_a_gradient_is_cut_into_views(lengths):
    v = sharded(np.zeros(SHAPE), lengths)
    gradient = np.arange(42.0).reshape(SHAPE)
    parts = v.parts(gradient)
    assert [variable for _, variable in parts] == list(v.variables)
    assert all(np.shares_memory(part, gradient) for part, _ in parts if part.size)
    np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), gradient)
    assert [part for part, _ in v.parts(None)] == [None] * len(lengths)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=9), st.sampled_from(CUTS))
def test_sparse_gradients_are_divided_by_rows(rows, lengths):
    v = sharded(np.zeros(SHAPE), lengths)
    values = np.random.default_rng(0).normal(size=(len(rows), *SHAPE[1:]))
    gradient = IndexedSlices(values, np.array(rows, np.int32), SHAPE)
    parts = [part.to_dense() for part, _ in v.parts(gradient)]
    np.testing.assert_array_equal(np.concatenate(parts), gradient.to_dense())


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        (np.zeros((4, 2)), r"whole.*expected shape \(5, 2\), got shape \(4, 2\)"),
        (IndexedSlices(np.zeros((1, 2)), np.array([5])), "whole.*indices from 0 to 4, got 5 to 5"),
        (IndexedSlices(np.zeros((1, 2)), np.array([-1])), "whole.*indices from 0 to 4, got -1 to -1"),
        (IndexedSlices(np.zeros((2, 2)), np.array([1])), "whole.*rows of shape"),
        (IndexedSlices(np.zeros((1, 2)), np.array([1.0])), "whole.*rows of shape"),
    ],
)
def test_gradients_that_do_not_fit(gradient, text):
    with pytest.raises(ValueError, match=text):
        sharded(np.zeros((5, 2)), (2, 3)).parts(gradient)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["grad", "array", "rows", "parts"])
@pytest.mark.parametrize("make", [lambda: ms.optimizers.SGD(0.1, momentum=0.9), lambda: ms.optimizers.Adagrad(0.1)])
def test_training_is_that_of_one_variable(replicas, how, make):
    def trained(partitioner):
        with partitioned(partitioner, replicas) as strategy:
            v, optimizer = ms.Variable(np.ones((5, 2)), name="v"), make()

            def step(number):
                seed = [number, ms.get_replica_context().replica_id_in_sync_group]
                gradient = np.random.default_rng(seed).normal(size=v.shape)
                if how == "rows":
                    rows = np.array([seed[1], 4])
                    optimizer.apply_gradients([(IndexedSlices(gradient[rows], rows), v)])
                elif how == "grad":
                    v.grad = gradient
                    optimizer.apply_gradients([(v.grad, v)])
                elif how == "parts" and isinstance(v, ms.ShardedVariable):
                    optimizer.apply_gradients(v.parts(gradient))
                else:
                    optimizer.apply_gradients([(gradient, v)])

            for number in range(3):
                strategy.run(step, args=(number,))
            slots = optimizer.slots(v)
            optimizer.set_slots(v, {name: array + 1 for name, array in slots.items()})
            for name, array in optimizer.slots(v).items():
                np.testing.assert_array_equal(array, slots[name] + 1)
            return v.numpy(), slots

    value, slots = trained(None)
    assert (value != 1).any()
    for shards in (2, 5):
        other_value, other_slots = trained(ms.partitioners.FixedShardsPartitioner(shards))
        np.testing.assert_array_equal(other_value, value)
        assert slots.keys() == other_slots.keys() and len(slots) == 1
        for name, array in slots.items():
            np.testing.assert_array_equal(other_slots[name], array)


def test_gradients_of_the_whole():
    v = sharded(np.zeros((4, 2)), (1, 3))
    assert v.grad.tolist() == [[0, 0]] * 4 and v.gradient(0) is v.grad
    v.grad += 2
    assert v.grad.sum() == 16
    with pytest.raises(ValueError, match="trainable"):
        _ = sharded(np.zeros((4, 2), int), (1, 3)).grad
    with pytest.raises(ValueError, match=r"set_slots.*expected shape \(4, 2\)"):
        ms.optimizers.Adagrad().set_slots(v, {"accumulator": np.zeros((5, 2))})


def test_weights_decay_but_those_that_are_excluded():
    with partitioned(ms.partitioners.FixedShardsPartitioner(2)) as strategy:
        v, w = ms.Variable(np.ones((4, 1)), name="v"), ms.Variable(np.ones((4, 1)), name="w")
        optimizer = ms.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay([v])
        strategy.run(lambda: optimizer.apply_gradients([(np.zeros((4, 1)), v), (np.zeros((4, 1)), w)]))
        assert v.numpy().tolist() == [[1]] * 4 and np.allclose(w, 0.95)


# creation


def test_a_strategy_with_a_partitioner_cuts_its_variables():
    with partitioned(ms.partitioners.FixedShardsPartitioner(5)) as strategy:
        array = np.arange(26.0).reshape(13, 2)
        v = ms.Variable(array, name="table", trainable=False)
        assert [len(part) for part in v.variables] == [3, 3, 3, 2, 2]
        assert [part.name for part in v.variables] == [f"table/part_{i}" for i in range(5)]
        assert v.name == "table" and not v.trainable and strategy.extended.placement.sharded == [v]
        assert strategy.extended.variables == v.variables
        np.testing.assert_array_equal(v, array)
        made = ms.Variable(lambda: np.arange(4.0), name="table")
        assert made.name == "table_1" and made.numpy().tolist() == [0, 1, 2, 3] and len(made.variables) == 4
        assert isinstance(ms.Variable(1.0), ms.Variable)  # a scalar is never cut
        assert isinstance(ms.Variable([1.0]), ms.Variable)  # and nothing is cut into one
        on_read = ms.VariableSynchronization.ON_READ
        assert isinstance(ms.Variable([1.0, 2.0], synchronization=on_read), ms.Variable)
        gradient = weakref.ref(made.grad)
        assert gradient() is not None
        strategy.close()
    assert v.closed and v.variables[4].closed and "closed" in repr(v) and gradient() is None
    for use in (lambda: v.numpy(), lambda: v[0], lambda: v.assign(array), lambda: v.grad):
        with pytest.raises(ms.errors.ClosedError):
            use()


def test_a_partitioner_sees_shape_and_dtype():
    seen = []

    def partitioner(shape, dtype, axis=0):
        seen.append((shape, dtype, axis))
        return [2, 1]

    with partitioned(partitioner):
        ms.Variable(np.zeros((4, 3), np.float16))
    assert seen == [((4, 3), np.dtype("float16"), 0)]


@pytest.mark.parametrize(
    ("partitioner", "options", "error", "text"),
    [
        (lambda shape, dtype: [7, 1], {}, ValueError, "variable_partitioner: w: expected at most 6 shards"),
        (lambda shape, dtype: [1, 2], {}, ValueError, "variable_partitioner: w: expected 1 on all axes but the first"),
        (lambda shape, dtype: None, {}, TypeError, "variable_partitioner: w: expected a list of 2 integers"),
        (lambda shape, dtype: [2, 1], {"constraint": abs}, ValueError, "w: constraint: expected no constraint"),
    ],
)
def test_what_cannot_be_cut(partitioner, options, error, text):
    with partitioned(partitioner) as strategy:
        with pytest.raises(error, match=text):
            ms.Variable(np.zeros((6, 2)), name="w", **options)
        assert strategy.extended.variables == ()


def test_a_constraint_stays_with_a_variable_that_is_not_cut():
    with partitioned(ms.partitioners.FixedShardsPartitioner(1)):
        assert ms.Variable(np.zeros((6, 2)), constraint=abs).constraint is abs


def test_what_makes_no_sharded_variable():
    v, w = ms.Variable(np.zeros((2, 2)), name="v"), ms.Variable(np.zeros((2, 2)), name="w")
    with without_mpi() as strategy, strategy.scope():
        elsewhere = ms.Variable(np.zeros((2, 2)))
    for variables, error, text in [
        (v, TypeError, "a list of Variables"), ([v, np.zeros((2, 2))], TypeError, "a list of Variables"),
        ([], ValueError, "at least one"), ([ms.Variable(1.0)], ValueError, "a scalar"),
        ([v, ms.Variable(np.zeros((2, 3)))], ValueError, r"rows of shape \(2,\)"),
        ([v, ms.Variable(np.zeros(2))], ValueError, r"rows of shape \(2,\)"),
        ([v, ms.Variable(np.zeros((2, 2), int))], ValueError, "dtype float64"),
        ([v, ms.Variable(np.zeros((2, 2)), trainable=False)], ValueError, "trainable True"),
        ([v, v], ValueError, "'v' twice"), ([v, elsewhere], ValueError, "one of another"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            ms.ShardedVariable(variables)
    ms.ShardedVariable([v])
    with pytest.raises(ValueError, match="'v' twice"):
        ms.ShardedVariable([w, v])
