"""Dataset.cast: which values each dtype takes, structures, order of reading, and the memory of a batch."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset, HDF5Dataset, from_arrays, from_generator
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers

NUMBERS = np.arange(10, dtype=np.float64)


def in_order(rows: Any) -> Dataset:
    return from_arrays(rows).filter(lambda *row: True)


@pytest.mark.parametrize("made", [from_arrays, in_order])
@pytest.mark.parametrize(
    ("values", "dtype", "wrong", "row"),
    [
        ([1.0, 2.0, 0.5], "int64", "0.5", 2),
        ([1.0, np.nan], "int32", "nan", 1),
        ([0.0, 1.0, 2.0**31], "int32", "2147483648.0", 2),
        (np.array([1, 300], np.int16), "uint8", "300", 1),
        (np.array([0, -1], np.int8), "uint8", "-1", 1),
        ([0, 2**24 + 1], "float32", "16777217", 1),
        ([1.0, 1e39], "float32", r"1e\+39", 1),
        ([0, 1, 2], "bool", "2", 2),
        (["1", "2", "three"], "int64", "three", 2),
        ([1j], "float64", "1j", 0),
    ],
)
def test_a_value_that_does_not_fit_is_named(made: Any, values: Any, dtype: str, wrong: str, row: int) -> None:
    cast = made({"x": values}).cast({"x": dtype})
    batch = cast.batch(len(values))
    text = (
        rf"Dataset.cast: row {row} of epoch 0: \['x'\]: expected values (that {dtype} holds|of {dtype}), got .*{wrong}"
    )
    for dataset in (batch, made({"x": values}).batch(len(values)).cast(dtype)):
        with pytest.raises(ValueError, match=text):
            next(iter(dataset))
    assert len(list(itertools.islice(cast, row))) == row  # the rows before it are read
    assert len(list(cast.ignore_errors())) == len(values) - 1


@pytest.mark.parametrize("made", [from_arrays, in_order])
@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0.1, -np.inf, np.nan], "float32", np.array([0.1, -np.inf, np.nan], np.float32)),
        (np.array([0, 255], np.uint8), "float16", np.array([0, 255], np.float16)),
        ([0.0, -5.0], int, np.array([0, -5])),
        (np.array([1, 2], ">i4"), ">f8", np.array([1.0, 2.0])),
        ([True, False], "uint8", np.array([1, 0], np.uint8)),
        (["1", "-2"], np.int16, np.array([1, -2], np.int16)),
        (np.array(["1970-01-02"], "M8[h]"), "int64", np.array([24])),
        (np.ones((2, 3)), "complex64", np.ones((2, 3), np.complex64)),
    ],
)
def test_values_are_those_of_numpy(made: Any, values: Any, dtype: Any, expected: Any) -> None:
    cast = made(values).cast(dtype)
    assert cast.element_spec == ArraySpec(expected.shape[1:], expected.dtype)
    for found in (np.stack(list(cast)), next(iter(cast.batch(9))), next(iter(made(values).batch(9).cast(dtype)))):
        np.testing.assert_array_equal(found, expected, strict=True)


NUMBERS_OF = {
    "int64": [0, 1, -1, 127, 128, 255, 256, 2**24, 2**24 + 1, -(2**31), 2**31, 2**53 + 1],
    "uint64": [0, 2**31, 2**63 - 1, 2**63, 2**64 - 1],
    "uint8": [0, 127, 128, 255],
    "float64": [0.0, 1.0, -1.0, 2.5, -0.1, np.nan, np.inf, 255.0, 256.0, 2.0**31, 2.0**63, -(2.0**63)],
    "float32": [0.5, 3.0, 2.0**31, 2.0**24],
}


@pytest.mark.parametrize("given", NUMBERS_OF)
@pytest.mark.parametrize("wanted", ["int8", "uint8", "int32", "int64", "uint64", "float32", "float64"])
def test_beside_safe_casts_of_pyarrow(given: str, wanted: str) -> None:
    """Which also refuse integers like 2**31 in float32, that it holds exactly."""
    pyarrow = pytest.importorskip("pyarrow")
    values = np.array(NUMBERS_OF[given], given)
    for value, row in zip(values, from_arrays(values[:, None]).batch(1), strict=True):
        try:
            expected = pyarrow.array(row[:, 0]).cast(wanted).to_numpy()
        except pyarrow.ArrowInvalid:
            if "int" in given and "float" in wanted and int(np.dtype(wanted).type(value)) == int(value):
                assert int(from_arrays(row[:, 0]).cast(wanted).peek()) == int(value)
                continue
            with pytest.raises(ValueError, match="Dataset.cast: row 0 of epoch 0: expected values that"):
                from_arrays(row[:, 0]).cast(wanted).peek()
        else:
            np.testing.assert_array_equal(from_arrays(row[:, 0]).cast(wanted).rows([0]), expected, strict=True)
            assert np.isnan(value) or expected[0] == value or wanted == "float32"


@pytest.mark.parametrize("made", [from_arrays, in_order])
def test_arrays_by_name(made: Any) -> None:
    rows = {"a": NUMBERS, "b": {"c": NUMBERS, "d": np.arange(10), "e": list("abcdefghij")}}
    spec = made(rows).cast({"a": "f4", "b": {"d": "i2"}}).element_spec
    assert (spec["a"].dtype, *(spec["b"][name].dtype for name in "cde")) == ("f4", "f8", "i2", "U1")
    whole = made(rows["b"]).cast({"c": "f4", "d": None})
    assert {name: leaf.dtype for name, leaf in whole.peek().items() if name != "e"} == {"c": "f4", "d": "i8"}
    for dtypes in ((None, "f4"), {1: "f4"}):
        pair = made((NUMBERS, np.arange(10))).cast(dtypes)
        assert [leaf.dtype for leaf in pair.peek()] == ["f8", "f4"]
        assert [leaf.dtype for leaf in pair.element_spec] == ["f8", "f4"]
    both = made(rows).cast({"b": {"c": "f2", "d": "f2"}})
    assert str(both).endswith("cast({'b': {'c': 'float16', 'd': 'float16'}})")
    assert str(made(NUMBERS).cast("f4")).endswith("cast(float32)")


def test_names_and_dtypes_that_do_not_exist() -> None:
    rows = from_arrays({"a": NUMBERS, "b": NUMBERS})
    with pytest.raises(ValueError, match=r"Dataset.cast: dtypes: expected names among \['a'\], \['b'\], got \['c'\]"):
        rows.cast({"a": "f4", "c": "f4"}).batch(2).peek()
    with pytest.raises(ValueError, match="one dtype, for rows of one array, got"):
        _ = from_arrays(NUMBERS).cast({"x": "f4"}).element_spec
    for dtype in ("float31", "M8[s]", object, str, "S3"):
        with pytest.raises(TypeError, match="Dataset.cast: dtypes: expected dtypes of numbers or bool, got"):
            rows.cast({"a": dtype})
    with pytest.raises(ValueError, match=r"\['a'\]: expected arrays of numbers, times or text, got dataset of"):
        _ = rows.window(2).cast("f4").element_spec
    with pytest.raises(ValueError, match="expected arrays of numbers, times or text"):
        _ = from_arrays(np.zeros(3, [("x", "f8")])).cast("f4").element_spec


@pytest.mark.parametrize("order", ["random", "in order"])
def test_rows_of_varying_length(order: str) -> None:
    lengths = Dataset.range(1, 6)
    lengths = lengths if order == "random" else lengths.filter(lambda x: True)
    rows = lengths.map(lambda x: np.arange(float(x)), element_spec=ArraySpec((None,), "f8")).cast("i2")
    assert rows.element_spec == ArraySpec((None,), "i2")
    assert [row.tolist() for row in rows] == [list(range(n)) for n in range(1, 6)]
    assert all(row.dtype == "i2" for row in rows)
    for made in (rows.padded_batch(5), rows.ragged_batch(5)):
        batch = made.cast("f4").peek()
        found = list(batch) if batch.dtype == object else [batch[n - 1, :n] for n in range(1, 6)]
        assert [(row.dtype, row.tolist()) for row in found] == [(np.dtype("f4"), list(range(n))) for n in range(1, 6)]
    wrong = lengths.map(lambda x: np.full(int(x), x / 2), element_spec=ArraySpec((None,), "f8")).cast("i2")
    with pytest.raises(ValueError, match="row 0 of epoch 0: expected values that int16 holds, got 0.5"):
        next(iter(wrong.ragged_batch(5)))


def test_a_generator_that_differs_by_epoch() -> None:
    cast = from_generator(lambda epoch: (x + epoch for x in range(4)), ArraySpec((), "i8")).cast("f4")
    assert [[float(x) for x in cast] for _ in range(2)] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert cast.element(2, 1) == 3.0


@pytest.mark.parametrize("chunks", [None, (16, 4096)])
@pytest.mark.parametrize("shuffled", ["before", "after", "no"])
def test_a_batch_is_never_in_both_dtypes(chunks: Any, shuffled: str, tmp_path: Path) -> None:
    """Batches of 8 MiB are read in blocks of 1 MiB, in any order, also of a file whose chunks are read as a whole."""
    x = np.arange(512 * 4096, dtype=np.float64).reshape(512, 4096)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=chunks)
        file["y"] = np.arange(512)
    dataset = HDF5Dataset(tmp_path / "x.h5", ["x", "y"])
    if shuffled == "before":
        dataset = dataset.shuffle(seed=1, mode="full")
    dataset = dataset.cast({"x": "f4"})
    if shuffled == "after":
        dataset = dataset.shuffle(seed=1, mode="full")
    node = dataset.batch(512).node
    node.gather(*node.locate(0, 0))  # opens the files
    tracemalloc.start()
    batch = node.gather(*node.locate(1, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(batch["x"], x[batch["y"]].astype("f4"), strict=True)
    assert sorted(batch["y"].tolist()) == list(range(512))
    assert (batch["y"].tolist() != list(range(512))) == (shuffled != "no")
    assert peak < 8 * 2**20 + 3 * 2**20  # of the batch in float32, and a block


def test_an_error_in_a_block_names_its_row(tmp_path: Path) -> None:
    x = np.zeros((2048, 1024))
    x[1777, 3] = 0.5
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = x
    rows = HDF5Dataset(tmp_path / "x.h5", "x").cast("i2")
    with pytest.raises(ValueError, match=r"row 1777 of epoch 0: expected values that int16 holds, got 0\.5"):
        rows.batch(2048).peek()
    rows.batch(1777).peek()


@pytest.mark.parametrize("place", ["rows", "batches"])
@pytest.mark.parametrize("policy", ["auto", "file", "off", "hint"])
def test_workers_read_what_they_read_without(place: str, policy: str, tmp_path: Path) -> None:
    ms.data.write_shards(tmp_path, {"x": NUMBERS}, rows_per_shard=3)
    rows = HDF5Dataset(tmp_path, ["x"])
    rows = rows.shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT) if policy == "hint" else rows
    plain = rows.batch(4)
    cast = rows.cast("i4").batch(4) if place == "rows" else plain.cast("i4")
    options = ms.data.Options(auto_shard_policy=policy)
    for rank in range(2):
        workers = Workers([1, 1], rank)
        expected = [batch["x"].tolist() for batch in distribute(plain.with_options(options), workers)]
        found = [batch["x"] for batch in distribute(cast.with_options(options), workers)]
        assert [each.tolist() for each in found] == expected
        assert {each.dtype for each in found} == {np.dtype("i4")}
