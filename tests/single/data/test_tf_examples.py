"""The examples of TensorFlow's documentation of tf.data.Dataset (2.21), and what it says of the arguments."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import INFINITE, UNKNOWN, ArraySpec, Dataset, from_arrays, from_generator
from mpistrat.errors import ShardError


def listed(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def test_take_while() -> None:
    rows = Dataset.range(10).take_while(lambda x: x < 5)
    assert listed(rows) == [0, 1, 2, 3, 4]
    assert rows.cardinality() == UNKNOWN
    # Behind the first that is refused nothing is looked at.
    assert listed(Dataset.range(10).take_while(lambda x: x != 3)) == [0, 1, 2]
    assert listed(Dataset.counter().take_while(lambda x: x * x < 20)) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError, match=r"Dataset\.take_while: predicate: expected a function that returns a bool"):
        list(Dataset.range(3).take_while(lambda x: x))


def test_unique() -> None:
    assert sorted(listed(from_arrays([1, 37, 2, 37, 2, 1]).unique())) == [1, 2, 37]
    assert listed(from_arrays([1, 37, 2, 37, 2, 1]).unique()) == [1, 37, 2]
    assert list(from_arrays(["b", "a", "b"]).unique()) == ["b", "a"]
    # All arrays of an element count; those of TensorFlow have one.
    pairs = from_arrays({"x": np.array([1, 1, 1]), "y": np.array([2.0, 3.0, 2.0])})
    assert [(int(row["x"]), float(row["y"])) for row in pairs.unique()] == [(1, 2.0), (1, 3.0)]
    shapes = from_arrays(np.array([[1, 2], [3, 4], [1, 2]])).unique()
    assert listed(shapes) == listed(shapes) == [[1, 2], [3, 4]]  # each epoch begins anew
    words = from_arrays(np.array([["a", "b"], ["a", "c"], ["a", "b"]], object))
    assert listed(words.unique()) == [["a", "b"], ["a", "c"]]


def test_apply_and_as_numpy_iterator() -> None:
    rows = Dataset.range(100).apply(lambda ds: ds.filter(lambda x: x < 5))
    assert [x.item() for x in rows.as_numpy_iterator()] == [0, 1, 2, 3, 4]
    nested = Dataset.from_tensor_slices({"a": ([1, 2], [3, 4]), "b": [5, 6]})
    assert list(nested.as_numpy_iterator()) == [{"a": (1, 3), "b": 5}, {"a": (2, 4), "b": 6}]
    with pytest.raises(TypeError, match=r"Dataset\.apply: transformation_func: expected a function that returns a Dat"):
        Dataset.range(3).apply(list)  # type: ignore[arg-type]


def test_from_tensors() -> None:
    assert listed(Dataset.from_tensors([1, 2, 3])) == [[1, 2, 3]]
    ((numbers, letter),) = Dataset.from_tensors(([1, 2, 3], "A"))
    assert (numbers.tolist(), str(letter)) == ([1, 2, 3], "A")
    assert listed(Dataset.from_tensors(np.array([1, 2, 3])).repeat(2)) == [[1, 2, 3], [1, 2, 3]]
    assert len(Dataset.from_tensors(7)) == 1


def test_counter() -> None:
    assert listed(Dataset.counter().take(5)) == [0, 1, 2, 3, 4]
    assert Dataset.counter().element_spec == ArraySpec((), np.int64)
    assert Dataset.counter(dtype=np.int32).element_spec == ArraySpec((), np.int32)
    assert listed(Dataset.counter(start=2).take(5)) == [2, 3, 4, 5, 6]
    assert listed(Dataset.counter(start=2, step=5).take(5)) == [2, 7, 12, 17, 22]
    assert listed(Dataset.counter(start=10, step=-1).take(5)) == [10, 9, 8, 7, 6]
    assert listed(Dataset.counter(0.5, 0.25, np.float32).take(3)) == [0.5, 0.75, 1.0]
    assert Dataset.counter().cardinality() == INFINITE
    assert Dataset.counter(step=3).element(7, 10**9) == 3 * 10**9  # any element, at once
    with pytest.raises(TypeError, match=r"Dataset\.counter: step: expected a number, got 'a'"):
        Dataset.counter(step="a")


def test_random() -> None:
    numbers = Dataset.random(seed=4).take(1000)
    assert listed(numbers) == listed(Dataset.random(seed=4).take(1000)) == listed(numbers)
    anew = Dataset.random(seed=4, rerandomize_each_iteration=True).take(1000)
    first = listed(anew)
    assert listed(numbers) == first != listed(anew)
    assert listed(Dataset.random(seed=5).take(1000)) != first
    assert numbers.element_spec == ArraySpec((), np.int64)
    assert Dataset.random().cardinality() == INFINITE
    # Uniform in [0, 2**32): means within five standard deviations, no number twice but by chance.
    assert all(0 <= x < 2**32 for x in first)
    assert abs(np.mean(first) / 2**32 - 0.5) < 5 / np.sqrt(12 * 1000)
    bits = [sum(x >> bit & 1 for x in first) for bit in range(32)]
    assert max(abs(count - 500) for count in bits) < 5 * np.sqrt(250)
    assert len(set(first)) > 990
    assert int(Dataset.random(seed=4).element(3, 999)) == first[999]


def test_list_files(tmp_path: Path) -> None:
    for name in ("c.py", "a.txt", "b.py"):
        (tmp_path / name).write_text("")
    names = Dataset.list_files(f"{tmp_path}/*.py", shuffle=False)
    assert list(names) == [f"{tmp_path}/b.py", f"{tmp_path}/c.py"]
    both = Dataset.list_files([tmp_path / "*.txt", tmp_path / "b*"], shuffle=False)
    assert list(both) == [f"{tmp_path}/a.txt", f"{tmp_path}/b.py"]
    for number in range(20):
        (tmp_path / f"{number}.h5").write_text("")
    shuffled = Dataset.list_files(f"{tmp_path}/*.h5", seed=3)  # by default, and anew in every epoch
    first, second = list(shuffled), list(shuffled)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(str(path) for path in tmp_path.glob("*.h5"))
    assert list(Dataset.list_files(f"{tmp_path}/*.h5", seed=3)) == first
    with pytest.raises(
        ValueError, match=r"Dataset\.list_files: file_pattern: expected at least one file that matches, got"
    ):
        Dataset.list_files(f"{tmp_path}/*.none")


def test_ranks_that_found_other_files_are_told_apart(tmp_path: Path) -> None:
    def look() -> tuple[str, Any]:
        node = Dataset.list_files(f"{tmp_path}/*", shuffle=False).node
        return node.describe(), node.fingerprint()

    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("")
    first = look()
    assert look() == first
    (tmp_path / "b").rename(tmp_path / "bb")
    assert look()[0] == first[0]
    assert look()[1] != first[1]


def test_choose_from_datasets() -> None:
    datasets = [Dataset.from_tensors(word).repeat() for word in ("foo", "bar", "baz")]
    choices = Dataset.range(3).repeat(3)
    assert [str(word) for word in Dataset.choose_from_datasets(datasets, choices)] == ["foo", "bar", "baz"] * 3
    short, long = Dataset.range(2), Dataset.range(10, 20)
    choices = from_arrays(np.array([0, 1, 0, 0, 1, 1]))
    assert listed(Dataset.choose_from_datasets([short, long], choices)) == [0, 10, 1]
    assert listed(Dataset.choose_from_datasets([short, long], choices, False)) == [0, 10, 1, 11, 12]
    batches = Dataset.choose_from_datasets([short.batch(2), long.batch(3)], Dataset.range(2))
    assert listed(batches) == [[0, 1], [10, 11, 12]]
    assert batches.element_spec == ArraySpec((None,), np.int64)


def test_wrong_choices_are_explained() -> None:
    rows = Dataset.range(3)
    with pytest.raises(ValueError, match=r"choice_dataset: expected numbers in \[0, 2\), got 2 as element 2"):
        list(Dataset.choose_from_datasets([rows, rows], Dataset.range(3)))
    with pytest.raises(TypeError, match=r"choice_dataset: expected a dataset of single integers, got float64\[\]"):
        list(Dataset.choose_from_datasets([rows], from_arrays(np.zeros(2))))
    with pytest.raises(TypeError, match=r"choice_dataset: expected a dataset of single integers, got batches"):
        list(Dataset.choose_from_datasets([rows], Dataset.range(1).batch(1)))
    with pytest.raises(ValueError, match=r"float64\[\] in dataset 1"):
        list(Dataset.choose_from_datasets([rows, from_arrays(np.zeros(2))], Dataset.range(1)))
    with pytest.raises(TypeError, match=r"expected Datasets, got list"):
        Dataset.choose_from_datasets([rows], [0])  # type: ignore[arg-type]


def test_scan() -> None:
    sums = Dataset.range(10).scan(initial_state=np.int64(0), scan_func=lambda state, i: (state + i, state + i))
    assert listed(sums) == listed(sums) == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45]
    assert sums.element_spec == ArraySpec((), np.int64)
    # A tuple is one argument, and a state may be a nest whose arrays grow.
    pairs = from_arrays((np.arange(3), np.arange(3) / 2))

    def both(state: dict[str, Any], pair: tuple[Any, Any]) -> tuple[dict[str, Any], Any]:
        seen = np.append(state["seen"], pair[0])
        return {"seen": seen, "count": state["count"] + 1}, (len(seen), pair[1] * state["count"])

    made = pairs.scan({"seen": np.zeros(0, np.int64), "count": 0}, both)
    assert [(int(n), float(x)) for n, x in made] == [(1, 0.0), (2, 0.5), (3, 2.0)]
    batches = Dataset.range(5).batch(2).scan(0, lambda state, x: (state + len(x), x + state))
    assert listed(batches) == [[0, 1], [4, 5], [8]]
    iterator = iter(sums)
    assert listed(next(iterator) for _ in range(4)) == [0, 1, 3, 6]
    following = iter(sums)
    following.restore(iterator.state())
    assert listed(following) == [10, 15, 21, 28, 36, 45]


def test_wrong_scans_are_explained() -> None:
    rows = Dataset.range(3)
    with pytest.raises(
        TypeError, match=r"scan_func: expected a function that returns the new state and the new element"
    ):
        list(rows.scan(0, lambda state, x: state))
    with pytest.raises(
        ValueError, match=r"scan_func: expected a state like the initial one, got another: expected int64"
    ):
        list(rows.scan(0, lambda state, x: (0.5, x)))
    with pytest.raises(ValueError, match=r"scan\(<lambda>\): element 1: expected int64\[0\], got int64\[1\], unlike"):
        list(rows.scan(0, lambda state, x: (state, np.zeros(int(x), np.int64))))


def test_reduce() -> None:
    assert Dataset.range(5).reduce(np.int64(0), lambda x, _: x + 1) == 5
    assert Dataset.range(5).reduce(np.int64(0), lambda x, y: x + y) == 10
    assert Dataset.range(0).reduce(7, lambda x, y: x + y) == 7
    pairs = from_arrays((np.arange(3), np.arange(3)))
    total, count = pairs.reduce((0, 0), lambda state, pair: (state[0] + pair[0] * pair[1], state[1] + 1))
    assert (int(total), int(count)) == (5, 3)
    with pytest.raises(ValueError, match=r"Dataset\.reduce: expected a dataset with an end"):
        Dataset.counter().reduce(0, lambda x, y: x + y)
    with pytest.raises(ValueError, match=r"Dataset\.reduce: reduce_func: expected a state like the initial one"):
        Dataset.range(3).reduce(0, lambda x, y: (x, y))


def test_get_single_element() -> None:
    assert Dataset.range(4).batch(4).get_single_element().tolist() == [0, 1, 2, 3]
    for rows, got in ((Dataset.range(0), "none"), (Dataset.range(2), "several"), (Dataset.counter(), "several")):
        with pytest.raises(ValueError, match=rf"get_single_element: expected one element, got {got}"):
            rows.get_single_element()
    assert from_generator(lambda: [5]).get_single_element() == 5


def one_over(x: float) -> float:
    return 1 / float(x)


def test_ignore_errors(caplog: pytest.LogCaptureFixture) -> None:
    numbers = from_arrays([1.0, 2.0, 0.0, 4.0]).map(one_over)
    with pytest.raises(ZeroDivisionError):
        list(numbers)
    assert listed(numbers.ignore_errors()) == [1.0, 0.5, 0.25]
    assert numbers.ignore_errors().cardinality() == UNKNOWN
    assert not caplog.records
    assert listed(numbers.ignore_errors(log_warning=True)) == [1.0, 0.5, 0.25]
    (record,) = caplog.records
    assert "element 2 of epoch 0 is left out: ZeroDivisionError" in record.getMessage()
    # A batch with an error goes as a whole; before batch its row.
    rows = from_arrays([1.0, 2.0, 0.0, 4.0, 0.0]).map(one_over)
    assert listed(rows.batch(2).ignore_errors()) == [[1.0, 0.5]]
    assert listed(rows.ignore_errors().batch(2)) == [[1.0, 0.5], [0.25]]


def test_ignore_errors_of_what_reads_in_order() -> None:
    rows = from_generator(lambda: iter([1.0, 2.0, 0.0, 4.0, 0.0, 3.0]))
    assert listed(rows.map(one_over).ignore_errors()) == [1.0, 0.5, 0.25, 1 / 3]
    assert listed(rows.filter(lambda x: one_over(x) < 0.9).ignore_errors()) == [2.0, 4.0, 3.0]
    both = (
        rows.filter(lambda x: one_over(x) < 0.9).prefetch(2).map(lambda x: one_over(float(x) - 3), num_parallel_calls=2)
    )
    assert listed(both.ignore_errors()) == [-1.0, 1.0]
    # An error behind which nothing can be read is told.
    with pytest.raises(ZeroDivisionError):
        list(rows.map(one_over).batch(2).ignore_errors())


def test_ignore_errors_does_not_hide_what_only_one_rank_may_meet() -> None:
    def lost(x: float) -> float:
        raise error("lost")

    for error in (ShardError, MemoryError):
        with pytest.raises(error, match="lost"):
            list(Dataset.range(3).map(lost).ignore_errors())
    error = OSError
    assert list(Dataset.range(3).map(lost).ignore_errors()) == []


def shares(dataset: Dataset, classes: int) -> Any:
    return np.bincount([int(row) for row in dataset.map(lambda number, row: row)], minlength=classes)


def test_rejection_resample() -> None:
    rows = from_arrays(np.random.default_rng(1).choice(2, 4000, p=[0.6, 0.4]))
    for initial in ([0.6, 0.4], None):
        even = rows.rejection_resample(class_func=lambda x: x, target_dist=[0.5, 0.5], initial_dist=initial)
        zeros, ones = shares(even, 2)
        total = zeros + ones
        assert abs(ones / total - 0.5) < 5 * 0.5 / np.sqrt(total)
        # Of each kept row 5/6 is one as it is, of rows that are left 0.4 of all: it ends with the first of the two.
        assert 3000 < total < 5000
    rare = rows.rejection_resample(lambda x: x, [0.1, 0.9], [0.6, 0.4])
    zeros, ones = shares(rare, 2)
    assert abs(zeros / (zeros + ones) - 0.1) < 5 * np.sqrt(0.09 / (zeros + ones))
    same = rows.rejection_resample(lambda x: x, [0.6, 0.4], [0.6, 0.4])
    assert [int(row) for _, row in same] == listed(rows)  # nothing has to change
    assert even.element_spec == (ArraySpec((), np.int64), ArraySpec((), np.int64))
    assert all(number == row for number, row in even)


def test_rejection_resample_depends_on_seed_and_epoch() -> None:
    rows = Dataset.range(300).rejection_resample(lambda x: x % 3, [0.2, 0.3, 0.5], [1 / 3] * 3, seed=1)
    first, second = ([int(x) for _, x in rows.node.elements(epoch)] for epoch in range(2))
    assert first != second
    assert [int(x) for _, x in rows.node.elements(0)] == first
    iterator = iter(rows)
    begun = [int(x) for _, x in itertools.islice(iterator, 20)]
    following = iter(rows)
    following.restore(iterator.state())
    assert begun + [int(x) for _, x in following] == first


def test_wrong_distributions_are_explained() -> None:
    rows = Dataset.range(6)
    for wrong in ([0.5, 0.6], [-0.5, 1.5], [], [[1.0]], 1.0):
        with pytest.raises(ValueError, match=r"target_dist: expected numbers of at least 0 that add up to 1"):
            rows.rejection_resample(lambda x: x % 2, wrong)
    with pytest.raises(ValueError, match=r"initial_dist: expected 2 shares, as target_dist has, got 3"):
        rows.rejection_resample(lambda x: x % 2, [0.5, 0.5], [0.2, 0.2, 0.6])
    with pytest.raises(ValueError, match=r"class_func: expected an integer in \[0, 2\), got 2 for row 2"):
        list(rows.rejection_resample(lambda x: x, [0.5, 0.5]))
    with pytest.raises(ValueError, match=r"rejection_resample: expected a dataset of rows"):
        rows.batch(2).rejection_resample(lambda x: 0, [1.0])


def test_a_function_that_overwrites_its_state_begins_each_epoch_with_the_initial_one() -> None:
    initial = np.array([10])

    def add(state, x):
        state += x
        return state, int(state[0])

    sums = Dataset.range(1, 4).scan(initial, add)
    assert [[int(x) for x in sums] for _ in range(2)] == [[11, 13, 16]] * 2
    assert Dataset.range(1, 4).reduce(initial, lambda state, x: add(state, x)[0]).tolist() == [16]
    assert initial.tolist() == [10]
