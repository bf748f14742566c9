"""Variables outside every scope and under one device: an array to NumPy, written by methods only."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.types import IndexedSlices
from mpistrat.variables.sharded import ShardedVariable


def test_outside_every_scope_without_mpi():
    program = (
        "import sys, mpistrat as ms\n"
        "v = ms.Variable([1.0, 2.0], name='v')\n"
        "v.assign_add([1.0, 1.0]).scatter_update(([0], [9.0]))\n"
        "v.grad[...] = 3\n"
        "assert v.numpy().tolist() == [9.0, 3.0] and v.grad.tolist() == [3.0, 3.0]\n"
        "assert 'mpi4py.MPI' not in sys.modules and 'cupy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "make",
    [
        lambda name: ms.Variable(1.0, name=name),
        lambda name: ShardedVariable([ms.Variable([1.0])], name=name),
        lambda name: ms.optimizers.SGD(0.1, name=name),
    ],
)
def test_names_that_no_file_can_have(make):
    """They were accepted, and every save failed."""
    for name in ("v\udcff", "v\0w"):
        with pytest.raises(ValueError, match="name: expected a text in UTF-8 without null characters, got 'v"):
            make(name)
    make("größe")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, "float32"), (1, "int32"), (True, "bool"), (1j, "complex128"), ([1.0, 2.0], "float32"),
        ([[1, 2]], "int32"), (1 << 40, "int64"), (np.float64(1), "float64"), (np.zeros(2, np.float16), "float16"),
        (np.zeros(2, ">f8"), "float64"), (lambda: np.zeros(2), "float64"), ([], "float32"),
    ],
)  # fmt: skip
def test_dtype_of_the_initial_value(value, dtype):
    assert ms.Variable(value).dtype == np.dtype(dtype)
    assert ms.Variable(value).dtype.isnative


def test_attributes():
    v = ms.Variable(np.zeros((2, 3), np.float32), name="attributes", constraint=abs)
    assert (v.name, v.shape, v.dtype, v.size, v.nbytes, v.ndim) == ("attributes", (2, 3), np.float32, 6, 24, 2)
    assert v.trainable and v.constraint is abs and v.device == "cpu:0"
    assert v.synchronization is ms.VariableSynchronization.ON_WRITE
    assert v.aggregation is ms.VariableAggregation.NONE
    assert len(v.values) == 1
    assert not ms.Variable(0, trainable=False).trainable


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"initial_value": None}, ValueError, "initial_value"),
        ({"initial_value": object()}, TypeError, "initial_value"),
        ({"initial_value": ["a"]}, TypeError, "dtype"),
        ({"initial_value": 1.5, "dtype": "int32"}, TypeError, "float64"),
        ({"initial_value": 1.5, "dtype": "no such"}, TypeError, "dtype"),
        ({"initial_value": 1.5, "shape": (2,)}, ValueError, "shape"),
        ({"initial_value": 1.5, "name": ""}, TypeError, "name"),
        ({"initial_value": 1.5, "constraint": 3}, TypeError, "constraint"),
        ({"initial_value": 1.5, "synchronization": ms.VariableSynchronization.NONE}, ValueError, "NONE"),
        ({"initial_value": 1.5, "synchronization": "ON_READ"}, ValueError, "VariableSynchronization"),
        ({"initial_value": 1, "aggregation": ms.VariableAggregation.MEAN}, ValueError, "MEAN"),
        ({"initial_value": True, "aggregation": ms.VariableAggregation.SUM}, ValueError, "bool"),
        ({"initial_value": ms.PerReplica([1.0])}, ValueError, "PerReplica"),
    ],
)
def test_what_makes_no_variable(options, error, word):
    with pytest.raises(error, match=word):
        ms.Variable(**options)


def test_shape_may_leave_lengths_open():
    assert ms.Variable(np.zeros((2, 3)), shape=(None, 3)).shape == (2, 3)


def test_it_is_an_array_to_numpy():
    w = np.arange(6.0).reshape(2, 3)
    v = ms.Variable(w)
    for got, expected in [
        (v + 1, w + 1), (1 - v, 1 - w), (v * v, w * w), (w @ v.array.T, w @ w.T), (np.eye(2) @ v, w),
        (-v, -w), (abs(v), w), (v**2, w**2), (v / 2, w / 2), (v // 2, w // 2), (v % 2, w % 2), (v > 2, w > 2),
        (v == w, w == w), (np.tanh(v), np.tanh(w)), (np.concatenate([v, v]), np.concatenate([w, w])),
        (np.add.reduce(v), w.sum(0)), (np.sum(v, axis=1), w.sum(1)), (v[1], w[1]), (v[:, ::2], w[:, ::2]),
        (v[w > 2], w[w > 2]), (np.stack(list(v)), w), (np.asarray(v, np.float32), w.astype(np.float32)),
        (np.add(v, 1, out=np.empty((2, 3))), w + 1), (np.dot(v, np.ones(3)), w.sum(1)),
    ]:  # fmt: skip
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, expected)
    assert len(v) == 2 and v[1, 2] == 5
    one = ms.Variable(3)
    assert (int(one), float(one), bool(one), complex(one), [10, 20, 30, 40][one]) == (3, 3.0, True, 3, 40)
    with pytest.raises(TypeError, match="len"):
        len(one)


def test_views_are_read_only_and_copies_are_copies():
    v = ms.Variable(np.zeros(3))
    view, taken = np.asarray(v), [v.numpy(), v.value(), v.read_value(), np.array(v)]
    assert np.shares_memory(view, v.array) and np.shares_memory(v[1:], view)
    for read_only in (view, v.array, v[0:2], v.values[0]):
        with pytest.raises(ValueError, match="read-only"):
            read_only[...] = 1
    v.assign([1.0, 2.0, 3.0])
    assert view.tolist() == [1, 2, 3]
    for array in taken:
        assert array.tolist() == [0, 0, 0]
        array[0] = 5


def test_numpy_cannot_write_to_it():
    v = ms.Variable(np.zeros(3), name="kept")
    x = np.ones(3)

    def in_place():
        nonlocal v
        v += 1

    for write in (
        in_place,
        lambda: np.add(x, x, out=v),
        lambda: np.add.at(v, [0], 1),
        lambda: v.__setitem__(0, 1),
        lambda: v.__imul__(2),
    ):
        with pytest.raises(TypeError, match=r"kept.*assign_add"):
            write()
    assert v.numpy().tolist() == [0, 0, 0]


def test_it_is_not_copied():
    v = ms.Variable(1.0, name="one")
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"one.*numpy\(\)"):
            attempt(v)
    assert {v: 1}[v] == 1  # as a key it stands for itself


@pytest.mark.parametrize(
    ("value", "dtype", "error"),
    [
        (np.zeros(2), "float64", ValueError), (0.0, "float64", ValueError), (np.zeros((1, 3)), "float64", ValueError),
        (np.zeros(3), "int32", TypeError), ([0.5] * 3, "int32", TypeError), (np.zeros(3, complex), "float32", TypeError),
        (np.zeros(3, np.int64), "uint8", TypeError), ([300] * 3, "uint8", OverflowError), (["a", "b", "c"], "float32", TypeError),
    ],
)  # fmt: skip
def test_what_cannot_be_assigned(value, dtype, error):
    v = ms.Variable(np.ones(3, dtype))
    with pytest.raises(error):
        v.assign(value)
    assert v.numpy().tolist() == [1, 1, 1]


def test_values_are_converted_within_their_kind():
    v = ms.Variable(np.zeros(2, np.float32))
    assert v.assign(np.array([1, 2])).assign_add(np.array([0.5, 0.5])).assign_sub([1, 1]).numpy().tolist() == [0.5, 1.5]
    assert v.assign(ms.Variable(np.ones(2))).dtype == np.float32
    assert ms.Variable(np.uint8(1)).assign(255).numpy() == 255
    v.assign(np.asfortranarray(np.arange(4.0).reshape(2, 2))[:, 1])
    assert v.numpy().tolist() == [1.0, 3.0]


def test_gradients():
    v = ms.Variable(np.zeros((2, 2)))
    v.grad[0] = 1
    v.grad += 1
    assert v.grad.tolist() == [[2, 2], [1, 1]] and v.gradient(0) is v.grad
    for other in (ms.Variable(1), ms.Variable(1.0, trainable=False)):
        with pytest.raises(ValueError, match="trainable"):
            _ = other.grad


def test_one_device_needs_no_aggregation():
    with ms.OneDeviceStrategy("cpu:0") as strategy:
        with strategy.scope():
            v = ms.Variable(1.0)
        strategy.run(lambda: v.assign_add(1.0))
        assert float(v) == 2.0


ROWS = st.integers(1, 5)


@settings(max_examples=60, deadline=None)
@given(
    st.data(), st.sampled_from(["add", "sub", "mul", "div", "min", "max", "update"]), ROWS, st.lists(ROWS, max_size=2)
)
def test_scatter_is_numpys(data, op, rows, rest):
    shape = (rows, *rest)
    indices = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), np.int32)
    random = np.random.default_rng(len(indices))
    start, updates = random.normal(size=shape), random.normal(size=(len(indices), *rest))
    v, expected = ms.Variable(start), start.copy()
    if op == "update":
        for index, update in zip(indices, updates, strict=True):
            expected[index] = update
    else:
        names = {"sub": "subtract", "mul": "multiply", "div": "divide", "min": "minimum", "max": "maximum"}
        getattr(np, names.get(op, op)).at(expected, indices, updates)
    assert getattr(v, f"scatter_{op}")(IndexedSlices(updates, indices)) is v
    np.testing.assert_array_equal(v, expected)
    np.testing.assert_array_equal(v.sparse_read(indices), expected[indices])


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["add", "sub", "min", "max"]))
def test_scatter_nd_is_numpys(data, depth, op):
    shape = (3, 2, 4)
    places = st.tuples(*(st.integers(0, n - 1) for n in shape[:depth]))
    indices = np.array(data.draw(st.lists(places, max_size=6)), np.int64).reshape(-1, depth)
    random = np.random.default_rng(len(indices))
    start, updates = random.normal(size=shape), random.normal(size=(len(indices), *shape[depth:]))
    v, expected = ms.Variable(start), start.copy()
    names = {"sub": "subtract", "min": "minimum", "max": "maximum"}
    getattr(np, names.get(op, op)).at(expected, tuple(indices.T), updates)
    getattr(v, f"scatter_nd_{op}")(indices, updates)
    np.testing.assert_array_equal(v, expected)
    np.testing.assert_array_equal(v.gather_nd(indices), expected[tuple(indices.T)])


def test_documented_scatter_examples():
    v = ms.Variable([1, 2, 3, 4, 5, 6, 7, 8])  # the example of tf.Variable.scatter_nd_add
    v.scatter_nd_add([[4], [3], [1], [7]], [9, 10, 11, 12])
    assert v.numpy().tolist() == [1, 13, 3, 14, 14, 6, 7, 20]
    w = ms.Variable(np.zeros((2, 3)))
    w.batch_scatter_update(([[0, 2], [1, 1]], [[1.0, 2.0], [3.0, 4.0]]))
    assert w.numpy().tolist() == [[1, 0, 2], [0, 4, 0]]
    w.scatter_update(([1], 7.0))
    assert w[1].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("scatter", "error", "word"),
    [
        (lambda v: v.scatter_add(([3], [[0.0, 0.0]])), IndexError, "got 3"),
        (lambda v: v.scatter_add(([-1], [[0.0, 0.0]])), IndexError, "got -1"),
        (lambda v: v.sparse_read([5]), IndexError, "got 5"),
        (lambda v: v.scatter_add(([0, 1], [[0.0, 0.0]])), ValueError, "shape"),
        (lambda v: v.scatter_add(([0.5], [[0.0, 0.0]])), TypeError, "integers"),
        (lambda v: v.scatter_nd_add([[0, 0, 0]], [1.0]), ValueError, "coordinates"),
        (lambda v: v.batch_scatter_update(([[0]], [[1.0]])), ValueError, "batches"),
        (lambda v: ms.Variable([1, 2]).scatter_div(([0], [2])), TypeError, "floating"),
        (lambda v: ms.Variable(1.0).scatter_add(([0], [2.0])), ValueError, "coordinates"),
    ],
)
def test_what_cannot_be_scattered(scatter, error, word):
    v = ms.Variable(np.ones((3, 2)))
    with pytest.raises(error, match=word):
        scatter(v)
    assert (v.array == 1).all()


def test_arguments_as_tensorflow_documents_them():
    """tf.Variable: assign(value, use_locking, name, read_value), delta of assign_add, sparse_delta of the scatter methods."""
    whole = ms.Variable(np.zeros(3, np.float32), name="whole")
    parts = ms.ShardedVariable([ms.Variable(np.zeros(n, np.float32), name=f"part{n}") for n in (2, 1)])
    for v in (whole, parts):
        assert v.assign([1, 2, 3], use_locking=True, name="w", read_value=False) is v
        assert v.assign([1, 2, 3], False, None, True) is v
        assert v.assign_add(delta=[1, 1, 1], use_locking=True, name="a", read_value=True) is v
        assert v.assign_sub(delta=[0, 0, 1], read_value=False) is v
        slices = IndexedSlices(np.ones(1, np.float32), [0])
        v.scatter_add(sparse_delta=slices, use_locking=False, name="s").scatter_nd_add([[1]], [5.0], name="n")
        assert np.asarray(v).tolist() == [3, 8, 3]
        v.scatter_update(slices, name="u")
        v.batch_scatter_update(sparse_delta=([2], [9.0]), name="b")
        assert v.sparse_read([2], name="r").tolist() == [9]
        assert v.gather_nd(indices=[[0]], name="g").tolist() == [1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'locking'"):
        whole.scatter_add(slices, locking=True)
