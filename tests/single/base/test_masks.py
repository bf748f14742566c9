"""Masked arrays are refused wherever a program passes arrays: NumPy drops masks silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.masks import plain_array
from mpistrat.data.spec import ArraySpec
from mpistrat.train.callbacks import plain
from tests.harness.strategies import without_mpi

MASKED: Any = np.ma.masked_array([1.0, 999.0, 3.0, 4.0], mask=[0, 1, 0, 0])
FLAG: Any = np.ma.masked_array([True], mask=[True])
INDEX: Any = np.ma.masked_array([0, 999], mask=[0, 1])
RAGGED = np.empty(2, object)
RAGGED[:] = [np.ones(4), MASKED]


class Lazy:
    """Becomes a masked array when NumPy asks it, as a variable of netCDF4 does."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return MASKED


def in_step(function):
    return lambda it: it.strategy.run(lambda: function(it))


def replica():
    return ms.get_replica_context()


def read(dataset):
    return list(dataset)


def rows(second):
    return ms.data.from_generator(lambda: iter([{"x": np.ones(4)}, {"x": second}]))


def ragged():
    return ms.data.from_generator(lambda: iter([np.ones(1), np.ones(3)]), ArraySpec((None,), np.float64))


def writer(it, method, data):
    with ms.data.ShardWriter(it.folder / "rows") as shards:
        getattr(shards, method)(data)


DOORS = {
    "reduce": lambda it: it.strategy.reduce("SUM", MASKED, axis=None),
    "reduce over an axis": lambda it: it.strategy.reduce("MEAN", MASKED, axis=0),
    "reduce of a nest": lambda it: it.strategy.reduce("SUM", {"a": [1.0, (MASKED,)]}, axis=None),
    "reduce of what becomes one": lambda it: it.strategy.reduce("SUM", Lazy(), axis=None),
    "reduce of PerReplica": lambda it: it.strategy.reduce("SUM", ms.PerReplica((MASKED,)), axis=None),
    "reduce of rows": lambda it: it.strategy.reduce("SUM", ms.IndexedSlices(MASKED, np.arange(4), (4,)), axis=None),
    "gather": lambda it: it.strategy.gather(MASKED, 0),
    "gather of a nest": lambda it: it.strategy.gather([MASKED, MASKED], 0),
    "all_reduce": in_step(lambda it: replica().all_reduce("SUM", MASKED)),
    "all_gather": in_step(lambda it: replica().all_gather(MASKED, 0)),
    "broadcast": in_step(lambda it: replica().broadcast(MASKED)),
    "reduce_scatter": in_step(lambda it: replica().reduce_scatter("SUM", MASKED)),
    "all_to_all": in_step(lambda it: replica().all_to_all(MASKED)),
    "all_reduce_async": lambda it: it.strategy.all_reduce_async("SUM", MASKED).wait(),
    "Variable": lambda it: it.make(lambda: ms.Variable(MASKED)),
    "Variable of a list": lambda it: it.make(lambda: ms.Variable([MASKED, MASKED])),
    "assign": lambda it: it.variable.assign(MASKED),
    "assign_add": lambda it: it.variable.assign_add(MASKED),
    "scatter_update": lambda it: it.variable.scatter_update(ms.IndexedSlices(MASKED, np.arange(4), (4,))),
    "rows to scatter": lambda it: it.variable.scatter_update(ms.IndexedSlices(np.ones(2), INDEX, (4,))),
    "gradient": in_step(lambda it: it.optimizer.apply_gradients([(MASKED, it.variable)])),
    "gradient of rows": in_step(
        lambda it: it.optimizer.apply_gradients([(ms.IndexedSlices(MASKED, np.arange(4), (4,)), it.variable)])
    ),
    "v.grad = ": in_step(lambda it: setattr(it.variable, "grad", MASKED)),
    "v[index]": lambda it: it.variable[INDEX],
    "v[index, ...]": lambda it: it.variable[INDEX, ...],
    "rows of a dataset": lambda it: ms.data.from_arrays(np.arange(4)).rows(INDEX),
    "take": lambda it: ms.data.from_arrays(np.arange(4)).take(np.ma.masked_array(2, mask=True)),
    "batch": lambda it: ms.data.from_arrays(np.arange(4)).batch(np.ma.masked_array(2, mask=True)),
    "padding_values": lambda it: read(ragged().padded_batch(2, padding_values=np.ma.masked_array(7.0, mask=True))),
    "padding_values, masked": lambda it: read(ragged().padded_batch(2, padding_values=np.ma.masked)),
    "attributes of fields": lambda it: ms.data.write_shards(
        it.folder / "set", {"x": np.ones(3)}, attributes={"x": {"scale": MASKED}}
    ),
    "set_slots": lambda it: it.optimizer.set_slots(it.variable, {"momentum": MASKED}),
    "metric": in_step(lambda it: it.mean.update_state(MASKED)),
    "weights of a metric": in_step(lambda it: it.mean.update_state(np.ones(4), sample_weight=MASKED)),
    "Sum": in_step(lambda it: it.total.update_state(MASKED)),
    "labels of a metric": in_step(lambda it: it.precision.update_state(MASKED, np.ones(4))),
    "predictions of a metric": in_step(lambda it: it.error.update_state(np.ones(4), MASKED)),
    "loss": in_step(lambda it: ms.nn.compute_average_loss(MASKED, global_batch_size=4)),
    "weights of a loss": in_step(
        lambda it: ms.nn.compute_average_loss(np.ones(4), sample_weight=MASKED, global_batch_size=4)
    ),
    "regularization": in_step(lambda it: ms.nn.scale_regularization_loss(MASKED)),
    "to_dense": lambda it: ms.IndexedSlices(MASKED, np.arange(4), (4,)).to_dense(),
    "from_arrays": lambda it: ms.data.from_arrays(MASKED),
    "from_arrays, copied": lambda it: ms.data.from_arrays({"x": MASKED}, copy=True),
    "from_arrays of arrays": lambda it: ms.data.from_arrays(RAGGED),
    "from_tensors": lambda it: ms.data.Dataset.from_tensors((1, MASKED)),
    "from_generator, first": lambda it: read(ms.data.from_generator(lambda: iter([MASKED]))),
    "from_generator, second": lambda it: read(rows(MASKED)),
    "from_generator, list": lambda it: read(
        ms.data.from_generator(lambda: iter([[MASKED]]), [ArraySpec((4,), np.float64)])
    ),
    "map of rows": lambda it: read(ms.data.from_arrays(np.arange(3)).map(lambda x: MASKED)),
    "map of some rows": lambda it: read(
        ms.data.from_arrays(np.arange(3)).map(lambda x: MASKED if x else np.ones(4)).batch(2)
    ),
    "map of batches": lambda it: read(ms.data.from_arrays(np.arange(4)).batch(4).map(lambda x: MASKED)),
    "map to arrays of arrays": lambda it: read(ms.data.from_arrays(np.arange(2)).batch(2).map(lambda x: RAGGED)),
    "filter": lambda it: read(ms.data.from_arrays(np.arange(4)).filter(lambda x: FLAG)),
    "batches of a function": lambda it: read(it.strategy.distribute_datasets_from_function(lambda context: [MASKED])),
    "write_shards": lambda it: ms.data.write_shards(it.folder / "set", {"x": MASKED}),
    "write_shards of arrays": lambda it: ms.data.write_shards(it.folder / "set", {"x": RAGGED}),
    "ShardWriter.write": lambda it: writer(it, "write", {"x": MASKED}),
    "ShardWriter.write_row": lambda it: writer(it, "write_row", {"x": MASKED}),
    "extra of a file": lambda it: it.strategy.save(it.folder / "file.h5", extra={"best": np.ma.masked}),
    "results of a callback": lambda it: plain({"loss": np.ma.masked}),
    "lookup": lambda it: ms.lookup.KeyValueTensorInitializer([1, 2, 3, 4], MASKED),
    "lookup of keys": lambda it: ms.lookup.StaticHashTable(
        ms.lookup.KeyValueTensorInitializer([0, 1], [5, 6]), -1
    ).lookup(INDEX),
}


class Program:
    """What the doors above are tried on."""

    def __init__(self, folder):
        self.folder = folder
        self.strategy = without_mpi()
        with self.strategy.scope():
            self.variable = ms.Variable(np.zeros(4), name="v")
            self.optimizer = ms.optimizers.SGD(1.0, momentum=0.5)
            self.mean, self.total = ms.train.Mean(), ms.train.Sum()
            self.precision, self.error = ms.train.Precision(), ms.train.MeanSquaredError()

    def make(self, function):
        with self.strategy.scope():
            return function()


@pytest.mark.parametrize("door", DOORS)
def test_masked_numbers_are_refused(door, tmp_path):
    program = Program(tmp_path)
    with pytest.raises(TypeError, match=r"expected no masked numbers, got \d masked.*filled"):
        DOORS[door](program)
    assert program.variable.numpy().tolist() == [0, 0, 0, 0]


def test_the_error_names_function_place_and_count(tmp_path):
    program = Program(tmp_path)
    with pytest.raises(TypeError, match=r"^from_arrays: arrays\['a'\]\[1\]: expected no masked numbers, got 2 masked"):
        ms.data.from_arrays({"a": (np.ones(2), np.ma.masked_all(2))})
    with pytest.raises(TypeError, match=r"^from_generator: element 1: at \['x'\]: expected no masked numbers, got 1"):
        read(rows(MASKED))
    with pytest.raises(TypeError, match=r"^map\(.*\): element 2: expected no masked numbers, got 1 masked"):
        read(ms.data.from_arrays(np.arange(4)).map(lambda x: MASKED if x == 2 else np.ones(4)))
    with pytest.raises(TypeError, match=r"^Metric.update_state: sample_weight: expected no masked numbers"):
        program.mean.update_state(np.ones(4), sample_weight=MASKED)


def test_without_a_masked_number_it_is_plain_data(tmp_path):
    program = Program(tmp_path)
    for unmasked in (np.ma.masked_array([1.0, 2.0, 3.0, 4.0]), np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask=[0] * 4)):
        program.variable.assign(unmasked)
        assert program.variable.numpy().tolist() == [1, 2, 3, 4]
        assert program.strategy.reduce("SUM", unmasked, axis=0) == 10
        (batch,) = ms.data.from_arrays(unmasked).batch(4)
        assert type(batch) is np.ndarray and batch.tolist() == [1, 2, 3, 4]
        assert [element["x"].tolist() for element in rows(unmasked)] == [[1.0] * 4, [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (np.ma.masked, 1),
        (np.ma.masked_all((2, 3)), 6),
        (np.ma.masked_array([(1, 2.0), (3, 4.0)], [(0, 1), (1, 1)], [("a", int), ("b", float)]), 3),
        ([[MASKED], [MASKED]], 2),
        ((np.ones(4), MASKED), 1),
        (RAGGED, 1),
        (np.ma.masked_array([1, 2, 3, 4], [1, 0, 1, 0])[::2], 2),
    ],
)
def test_masked_numbers_are_counted(value, count):
    with pytest.raises(TypeError, match=rf"^f: x: expected no masked numbers, got {count} masked"):
        plain_array(value, "f", "x")


@pytest.mark.parametrize("value", [3, [1, 2], [[1.5], [2]], "text", np.arange(3), [np.ones(2), [3, 4]], np.float32(1)])
def test_other_values_are_what_numpy_makes_of_them(value):
    found = plain_array(value, "f")
    assert (
        type(found) is np.ndarray
        and np.array_equal(found, np.asarray(value))
        and found.dtype == np.asarray(value).dtype
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([2**63, -1], "integers that one dtype of NumPy's integers holds, got 9223372036854775808 among them"),
        ([[0, 1], [2**63, -5]], "got 9223372036854775808 among them"),
        ((-(2**63) - 1, 0), "got -9223372036854775809 among them"),
        ([2**64, 1], "got 18446744073709551616 among them"),
        (2**64, "got 18446744073709551616 among them"),
        ([np.uint64(2**63), np.int64(-1)], "got 9223372036854775808 among them"),
        ([np.array([2**63], np.uint64), np.array([-1])], "got 9223372036854775808 among them"),
        ([np.uint64(3), 5], "integers that one dtype of NumPy's integers holds, got some of different dtypes"),
        ([1, "a"], "strings only, or numbers only, got both"),
        ([["a", "b"], ["c", 3]], "strings only, or numbers only, got both"),
    ],
)
def test_numbers_that_numpy_would_round_or_spell_are_refused(values, told):
    with pytest.raises(
        (OverflowError, ValueError), match=f"f: x: expected {told}" if told.startswith(("int", "str")) else told
    ):
        plain_array(values, "f", "x")


@pytest.mark.parametrize(
    "values",
    [
        [2**63, 2**64 - 1],
        [-(2**63), 2**63 - 1],
        [2**63, 1.5],
        [True, 2],
        ["a", b"b"],
        [],
        [[]],
        [None],
        2**63,
        [np.array([], "U3")],
    ],
)
def test_what_one_dtype_holds_is_taken(values):
    np.testing.assert_array_equal(plain_array(values, "f"), np.asarray(values))


def test_lists_of_large_integers_are_no_rows():
    with pytest.raises(OverflowError, match="from_arrays: arrays: expected integers"):
        ms.data.from_arrays([2**64, 1])
    with pytest.raises(
        OverflowError, match=r"from_arrays: arrays\['x'\]: expected integers|from_arrays: arrays: expected integers"
    ):
        ms.data.from_arrays({"x": [2**63, -1]})
