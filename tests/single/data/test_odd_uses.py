"""Uses of the operators that are rare: each gives what tf.data gives, or is an explained error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset, from_arrays


def listed(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def in_place(state: Any, x: Any) -> Any:
    state += x
    return state, state


def part_in_place(state: Any, x: Any) -> Any:
    state["sums"][0] += x
    return state, (state["sums"][:1], x)


def test_a_state_that_is_changed_in_place_leaves_the_elements_before() -> None:
    sums = Dataset.range(4).scan(np.zeros(1, np.int64), in_place)
    assert listed(list(sums)) == [[0], [1], [3], [6]]
    assert listed(sums.batch(4)) == [[[0], [1], [3], [6]]]
    parts = Dataset.range(4).scan({"sums": np.zeros(2, np.int64)}, part_in_place)
    assert [(sums.tolist(), int(x)) for sums, x in list(parts)] == [([0], 0), ([1], 1), ([3], 2), ([6], 3)]


def test_a_scan_s_elements_may_vary_in_length() -> None:
    spec = ArraySpec((None,), np.int64)
    growing = Dataset.range(4).scan(np.int64(0), lambda n, x: (n + 1, np.arange(n)), element_spec=spec)
    assert listed(growing.padded_batch(4)) == [[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 2]]]


def test_strings_are_padded_with_longer_ones() -> None:
    for words, pad in ((["a", "bb"], "long"), ([b"a", b"bb"], b"long")):
        rows = from_arrays(np.array(words)[:, None])
        (batch,) = rows.padded_batch(2, (2,), pad)
        assert batch.tolist() == [[words[0], pad], [words[1], pad]]
        assert batch.dtype == rows.padded_batch(2, (2,), pad).element_spec.dtype
        (batch,) = rows.padded_batch(2, (1,), pad)  # nothing is padded
        assert batch.dtype == rows.padded_batch(2, (1,), pad).element_spec.dtype


ONES = np.ones((2, 1), "uint8")
WORDS = np.array([["a"], ["b"]])


@pytest.mark.parametrize(
    ("rows", "shape", "value", "told"),
    [
        (ONES, (3,), 300, r"padding_values: expected a uint8, got 300"),
        (ONES, (3,), -1, r"padding_values: expected a uint8, got -1"),
        (ONES, (3,), np.array([1, 2], "uint8"), r"padding_values: expected a uint8, got array"),
        (WORDS, (3,), 5, r"padding_values: expected a string, got 5"),
        (WORDS.astype(object), (3,), 5, r"padding_values: expected a string, got 5"),
        (ONES, (-5,), None, r"padded_shapes: expected at least 0, got -5"),
    ],
)
def test_what_rows_cannot_be_padded_with(rows: Any, shape: Any, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list(from_arrays(rows).padded_batch(2, shape, value))


def test_a_length_is_an_integer() -> None:
    with pytest.raises(TypeError, match=r"padded_shapes: expected an integer, got 2.5"):
        list(from_arrays(ONES).padded_batch(2, (2.5,)))


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((0, 0.5), ValueError, "step: expected a int64, got 0.5. Give another dtype"),
        ((300, 1, np.uint8), ValueError, "start: expected a uint8, got 300"),
        ((float("nan"),), ValueError, "start: expected a int64, got nan"),
        ((0, 1, bool), TypeError, "dtype: expected one of integers or floats, got bool"),
        ((0, 1, str), TypeError, "dtype: expected one of integers or floats"),
    ],
)
def test_counts_that_a_dtype_has_not(arguments: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Dataset.counter(*arguments)


def test_counts_that_a_dtype_has() -> None:
    assert listed(Dataset.counter(0.5, 0.25, np.float64).take(3)) == [0.5, 0.75, 1.0]
    assert listed(Dataset.counter(3.0, -1.0, np.uint8).take(3)) == [3, 2, 1]


def test_datasets_to_choose_from_may_come_from_an_iterator() -> None:
    chosen = Dataset.choose_from_datasets((Dataset.range(n, n + 2) for n in (0, 10)), Dataset.range(2).repeat(2))
    assert listed(chosen) == [0, 10, 1, 11]


def test_sizes_and_shares_that_are_none() -> None:
    for sizes in ([[1], [1, 2]], [[1, 2], [1, 1]], "12"):
        with pytest.raises(TypeError, match="rebatch: global_batch_size: expected an integer"):
            Dataset.range(4).batch(2).rebatch(sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"target_dist: expected numbers of at least 0 that add up to 1, got \['a'\]"):
        Dataset.range(4).rejection_resample(lambda x: x, ["a"])
    with pytest.raises(ValueError, match="Dataset.scan: initial_state: expected arrays, numbers or strings"):
        Dataset.range(4).scan(None, lambda s, x: (s, x))


def test_an_empty_key_is_no_name(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="expected keys that are valid names in HDF5: not empty"):
        from_arrays({"": np.arange(3)}).save(tmp_path / "set")


def test_paths_without_a_set(tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("absent", "file", "folder"):
        with pytest.raises(FileNotFoundError, match=rf"Dataset.load: path: .*{name}', where there is no such set"):
            Dataset.load(tmp_path / name)
    with pytest.raises(FileExistsError, match="Dataset.save: target: expected a folder .*, got File exists"):
        Dataset.range(3).save(tmp_path / "file")
    with pytest.raises(FileExistsError, match="expected a folder .*, got File exists"):
        list(Dataset.range(3).snapshot(tmp_path / "file"))
    with pytest.raises(ValueError, match="target: expected a path, got an empty one"):
        Dataset.range(3).save("")


def test_a_snapshot_of_other_rows_is_told_as_one(tmp_path: Any) -> None:
    list(Dataset.range(3).snapshot(tmp_path / "rows"))
    with pytest.raises(
        ValueError, match=r"expected rows of float64\[\] in .*, got int64\[\]. The files are of another"
    ):
        list(from_arrays(np.arange(3.0)).snapshot(tmp_path / "rows"))


STRUCTURED = np.zeros(20, [("t", "f8"), ("n", "i4", (2,))])
STRUCTURED["t"] = np.arange(20) / 2
STAGES = {
    "map": lambda rows, folder: rows.map(lambda t, y: (t, y)),
    "filter": lambda rows, folder: rows.filter(lambda t, y: y >= 0),
    "buffer shuffle": lambda rows, folder: rows.filter(lambda t, y: True).shuffle(5, seed=1),
    "cache": lambda rows, folder: rows.map(lambda t, y: (t, y)).cache(),
    "save": lambda rows, folder: (rows.save(folder), ms.data.Dataset.load(folder))[1],
    "generator": lambda rows, folder: ms.data.from_generator(lambda: zip(STRUCTURED, range(20), strict=True)),
}


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_rows_of_structures_next_to_another_field(stage, size, tmp_path):
    rows = ms.data.from_arrays((STRUCTURED, np.arange(20)))
    batches = list(STAGES[stage](rows, tmp_path / "saved").batch(size))
    assert all(t.dtype == STRUCTURED.dtype and np.array_equal(t, STRUCTURED[y]) for t, y in batches)
    assert sorted(np.concatenate([y for _, y in batches]).tolist()) == list(range(20))
