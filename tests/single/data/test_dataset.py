"""Chains of stages against a model made of lists; order, epochs, state."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import INFINITE, ArraySpec, Dataset, from_arrays
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.permutation import permute

Point = collections.namedtuple("Point", ["x", "y"])


def listed(dataset: Dataset) -> list[Any]:
    return [np.asarray(element).tolist() for element in dataset]


# Each operator as (dataset -> dataset, list -> list); the model of one epoch, the first.
def chunks(rows: list[int], size: int, drop: bool) -> list[list[int]]:
    cut = [rows[i : i + size] for i in range(0, len(rows), size)]
    return cut[: len(rows) // size] if drop else cut


def order_model(elements: list[Any], seed: int, epoch: int) -> list[Any]:
    return [elements[i] for i in permute(np.arange(len(elements)), len(elements), seed=seed, epoch=epoch)]


operators = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 12)),
    st.tuples(st.just("skip"), st.integers(0, 12)),
    st.tuples(st.just("repeat"), st.integers(0, 3)),
    st.tuples(st.just("map"), st.integers(1, 3)),
    st.tuples(st.just("shuffle_once"), st.integers(0, 5)),
)


def apply(dataset: Dataset, model: list[Any], operator: tuple[str, int]) -> tuple[Dataset, list[Any]]:
    name, value = operator
    if name == "take":
        return dataset.take(value), model[:value]
    if name == "skip":
        return dataset.skip(value), model[value:]
    if name == "repeat":
        return dataset.repeat(value), model * value
    if name == "map":
        return dataset.map(lambda x: x * value), [(np.array(x, np.int64) * value).tolist() for x in model]
    return dataset.shuffle(seed=value, reshuffle_each_epoch=False), order_model(model, value, 0)


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(0, 20),
    before=st.lists(operators, max_size=4),
    size=st.integers(1, 7),
    drop=st.booleans(),
    after=st.lists(operators, max_size=3),
)
def test_any_chain_gives_what_lists_give(
    n: int, before: list[tuple[str, int]], size: int, drop: bool, after: list[tuple[str, int]]
) -> None:
    dataset, model = from_arrays(np.arange(n)), list(range(n))
    for operator in before:
        dataset, model = apply(dataset, model, operator)
    assert (listed(dataset), len(dataset)) == (model, len(model))
    dataset, batches = dataset.batch(size, drop_remainder=drop), chunks(model, size, drop)
    for operator in after:
        dataset, batches = apply(dataset, batches, operator)
    assert (listed(dataset), len(dataset)) == (batches, len(batches))


def test_each_iter_is_a_new_epoch_in_a_new_order() -> None:
    dataset = from_arrays(np.arange(50)).shuffle(seed=4)
    first, second = listed(dataset), listed(dataset)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    dataset.set_epoch(0)
    assert listed(dataset) == first


def test_without_reshuffle_every_epoch_has_the_same_order() -> None:
    dataset = from_arrays(np.arange(50)).shuffle(seed=4, reshuffle_each_epoch=False)
    assert listed(dataset) == listed(dataset)


def test_every_pass_of_a_repeated_shuffle_is_an_epoch_and_batches_run_across() -> None:
    shuffled = from_arrays(np.arange(5)).shuffle(seed=9)
    expected = [row for epoch in range(2) for row in order_model(list(range(5)), 9, epoch)]
    assert listed(shuffled.repeat(2).batch(4)) == [expected[:4], expected[4:8], expected[8:]]


def test_an_endless_repetition_has_no_length_but_can_be_taken_from() -> None:
    endless = from_arrays(np.arange(3)).repeat()
    assert endless.cardinality() == INFINITE
    with pytest.raises(TypeError, match="without end"):
        len(endless)
    assert listed(endless.batch(2).skip(1).take(3)) == [[2, 0], [1, 2], [0, 1]]
    with pytest.raises(ValueError, match="Shuffle before repeat"):
        endless.shuffle(seed=1)


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((4, 2), np.float32), "y": np.arange(4)},
        (np.zeros((4, 2), np.float32), np.arange(4)),
        Point(np.zeros((4, 2), np.float32), np.arange(4)),
        {"pair": (np.zeros((4, 2), np.float32), np.arange(4))},
    ],
)
def test_elements_have_the_structure_of_the_source(arrays: Any) -> None:
    from mpistrat.base import nest

    batch = next(iter(from_arrays(arrays).batch(3)))
    assert type(batch) is type(arrays)
    assert nest.paths(batch) == nest.paths(arrays)
    assert [leaf.shape for leaf in nest.flatten(batch)] == [(3, 2), (3,)]
    spec = nest.flatten(from_arrays(arrays).batch(3).element_spec)
    assert spec == [ArraySpec((None, 2), np.float32), ArraySpec((None,), np.int64)]


def test_element_spec_of_rows_batches_and_maps() -> None:
    rows = from_arrays(np.zeros((5, 3), np.float32))
    assert rows.element_spec == ArraySpec((3,), np.float32)
    assert rows.batch(2).element_spec == ArraySpec((None, 3), np.float32)
    assert rows.batch(2, drop_remainder=True).element_spec == ArraySpec((2, 3), np.float32)
    assert rows.map(lambda x: (x.sum(), x.astype(np.float64))).element_spec == (
        ArraySpec((), np.float32),
        ArraySpec((3,), np.float64),
    )
    assert rows.batch(2).map(lambda x: x.sum(axis=1)).element_spec == ArraySpec((None,), np.float32)


def test_enumerate_names_the_sample_whatever_comes_later() -> None:
    dataset = from_arrays(np.arange(20) * 3).enumerate().skip(2).shuffle(seed=1).batch(7)
    assert dataset.element_spec == (ArraySpec((None,), np.int64),) * 2
    seen = []
    for index, value in dataset:
        assert np.array_equal(value, 3 * index)
        seen += index.tolist()
    assert sorted(seen) == list(range(2, 20))
    with pytest.raises(ValueError, match="before batch"):
        dataset.enumerate()


def test_map_gets_rows_before_batch_and_batches_after_it() -> None:
    shapes: list[tuple[int, ...]] = []

    def note(x: np.ndarray) -> np.ndarray:
        shapes.append(x.shape)
        return x

    list(from_arrays(np.zeros((4, 3))).map(note).batch(4))
    assert set(shapes) == {(3,)}
    shapes.clear()
    list(from_arrays(np.zeros((4, 3))).batch(4).map(note))
    assert set(shapes) == {(4, 3)}


def test_map_unpacks_a_tuple_and_passes_a_dict_whole() -> None:
    pairs = from_arrays((np.arange(3), np.arange(3) * 10)).map(lambda x, y: x + y)
    assert listed(pairs.batch(3)) == [[0, 11, 22]]
    named = from_arrays({"x": np.arange(3)}).map(lambda element: element["x"] + 1)
    assert listed(named.batch(3)) == [[1, 2, 3]]


def test_a_function_after_batch_must_keep_the_rows() -> None:
    with pytest.raises(ValueError, match=r"4 rows.*got shape \(\)"):
        list(from_arrays(np.arange(8)).batch(4).map(np.sum))


def test_rows_reads_at_random_and_checks_the_range() -> None:
    dataset = from_arrays(np.arange(10) * 2)
    assert dataset.rows([3, 0, 3]).tolist() == [6, 0, 6]
    assert dataset.skip(2).rows(0).tolist() == [4]
    assert dataset.rows([]).shape == (0,)
    for wrong in ([10], [-1], [0.5], [True]):
        with pytest.raises(IndexError):
            dataset.rows(wrong)
    with pytest.raises(ValueError, match="before batch"):
        dataset.batch(2).rows([0])


@settings(deadline=None, max_examples=50)
@given(n=st.integers(0, 40), size=st.integers(1, 7), stop=st.integers(0, 45))
def test_a_restored_iterator_goes_on_where_the_first_stopped(n: int, size: int, stop: int) -> None:
    dataset = from_arrays(np.arange(n)).shuffle(seed=1).batch(size)
    iterator = iter(dataset)
    before = [next(iterator).tolist() for _ in range(min(stop, len(dataset)))]
    state = iterator.state()
    rest = [batch.tolist() for batch in iterator]
    other = iter(from_arrays(np.arange(n)).shuffle(seed=1).batch(size))
    other.restore(state)
    assert [batch.tolist() for batch in other] == rest
    assert sorted(row for batch in before + rest for row in batch) == list(range(n))


@pytest.mark.parametrize("distributed", [False, True])
def test_a_state_belongs_to_epochs_of_its_length(distributed: bool) -> None:
    def begin(dataset: Dataset) -> Any:
        return iter(distribute(dataset, Workers([1, 1], 1)) if distributed else dataset)

    rows = from_arrays(np.arange(100))
    state = begin(rows.batch(10)).state()
    assert state == {"epoch": 0, "next": 0, "length": 10}
    for other in (rows.batch(9), rows.take(50).batch(10), rows.batch(10).take(9)):
        with pytest.raises(ValueError, match=r"epochs of \d+ elements.*'length': 10.*restore on the same dataset"):
            begin(other).restore(state)
    begin(rows.shuffle(seed=2).batch(10)).restore(state)
    endless = rows.batch(9).repeat()
    assert begin(endless).state() == {"epoch": 0, "next": 0}  # no length: any may be restored
    begin(endless).restore(state)
    begin(rows.batch(9)).restore({"epoch": 0, "next": 3})


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0},
        {"epoch": -1, "next": 0},
        {"epoch": 0, "next": 99},
        {"epoch": 0, "next": 0, "length": "many"},
        None,
        [0, 1],
    ],
)
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    iterator = iter(from_arrays(np.arange(4)).batch(2))
    with pytest.raises(ValueError, match="state"):
        iterator.restore(state)


def test_batches_are_copies() -> None:
    source = np.arange(6)
    for batch in from_arrays(source).batch(2):
        batch[:] = -1
    assert source.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("array", [np.arange(24).reshape(4, 6).T, np.arange(24)[::2].reshape(6, 2)])
def test_sources_with_strides(array: np.ndarray) -> None:
    dataset = from_arrays(array)
    assert np.array_equal(dataset.rows([5, 0, 2]), array[[5, 0, 2]])
    assert np.array_equal(dataset.rows([1, 2, 3]), array[1:4])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, r"\['y'\].*3 rows.*got 4 rows"),
        ({"x": np.float32(1)}, r"\['x'\].*scalar"),
        ({}, "at least one array"),
    ],
)
def test_arrays_that_make_no_rows_are_named(arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_arrays(arrays)


def test_wrong_arguments_of_stages() -> None:
    dataset = from_arrays(np.arange(4))
    with pytest.raises(ValueError, match="global_batch_size: expected at least 1, got 0"):
        dataset.batch(0)
    with pytest.raises(TypeError, match="global_batch_size: expected an integer"):
        dataset.batch(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="take: count"):
        dataset.take(-2)
    with pytest.raises(TypeError, match="same seed"):
        dataset.shuffle(seed="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        dataset.map(3)  # type: ignore[arg-type]


def test_print_draws_the_chain() -> None:
    dataset = from_arrays({"x": np.zeros((4, 2), np.float32)}).shuffle(seed=1).batch(2).take(1)
    assert str(dataset).splitlines() == [
        "from_arrays: 4 rows of 'x' float32[2]",
        "└─ shuffle(seed=1, reshuffle_each_epoch=True): full: single rows are cheap to read",
        "   └─ batch(2, drop_remainder=False)",
        "      └─ take(1)",
    ]


def test_namedtuples_of_other_fields_are_not_relabelled() -> None:
    other = collections.namedtuple("Point", ["y", "x"])
    numbers = np.arange(2)
    with pytest.raises(ValueError, match=r"dataset 0, Point\(x: \*, y: \*\), got Point\(y: \*, x: \*\) in dataset 1"):
        list(from_arrays(Point(numbers, numbers)).concatenate(from_arrays(other(numbers, numbers))))
    with pytest.raises(ValueError, match=r"structure Point\(x: \*, y: \*\), got Point\(y: \*, x: \*\)"):
        list(Dataset.from_generator(lambda: iter([Point(1, 2), other(1, 2)])))


@pytest.mark.parametrize("order", ["random", "in order", "batches"])
def test_an_element_that_does_not_exist(order):
    rows = from_arrays(np.arange(4))
    rows = rows.filter(lambda x: True) if order == "in order" else rows.batch(1) if order == "batches" else rows
    assert np.asarray(rows.element(0, np.int64(3))).item() == 3
    with pytest.raises(IndexError, match="Dataset.element: position: expected .*, got 4"):
        rows.element(0, 4)
    with pytest.raises(ValueError, match="Dataset.element: position: expected at least 0, got -1"):
        rows.element(0, -1)
    for epoch, position in ((0, 1.0), (0.0, 1), (0, True)):
        with pytest.raises(TypeError, match="Dataset.element: (epoch|position): expected an integer, got"):
            rows.element(epoch, position)
    for indices in ([0.0], [True], ["0"], [1j], 1.5):
        with pytest.raises(IndexError, match="Dataset.rows: indices: expected integers in one axis"):
            from_arrays(np.arange(4)).rows(indices)
