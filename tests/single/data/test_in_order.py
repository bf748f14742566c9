"""Generators, ragged rows and strings: what is read in order, and what is padded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.base import nest
from mpistrat.data import UNKNOWN, ArraySpec, Dataset, from_arrays, from_generator

RAGGED = ArraySpec((None,), np.int64)


def words(lengths: list[int]) -> Dataset:
    """Rows 1; 1, 2; … of these lengths."""
    return from_generator(lambda: (np.arange(1, n + 1) for n in lengths), RAGGED)


def objects(rows: list[Any]) -> np.ndarray:
    array = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        array[i] = row
    return array


# from_generator


def test_every_epoch_calls_the_function_again() -> None:
    calls: list[int] = []

    def rows(epoch: int) -> Iterator[int]:
        calls.append(epoch)
        return iter([epoch, 10 + epoch])

    dataset = from_generator(rows, ArraySpec((), np.int64))
    assert [[int(x) for x in dataset] for _ in range(2)] == [[0, 10], [1, 11]]
    assert calls == [0, 1]
    iterator = iter(dataset)
    assert len(list(iterator)) == 2
    assert list(iterator) == []
    assert calls == [0, 1, 2]  # an iterator that has ended does not begin anew
    assert [x.tolist() for x in dataset.batch(3)] == [[0, 10]]
    assert dataset.cardinality() == UNKNOWN
    assert not dataset.node.random_access
    with pytest.raises(TypeError, match="reads in order"):
        len(dataset)
    with pytest.raises(ValueError, match="random access"):
        dataset.rows([0])


@pytest.mark.parametrize(
    "function",
    [lambda: [5, 6], lambda n: [5, 5 + n], lambda epoch=9: [5, 5 + epoch], lambda a=6: [5, a], lambda *rest: [5, 6]],
)
def test_the_epoch_is_given_to_who_asks_for_it(function: Any) -> None:
    dataset = from_generator(function)
    dataset.set_epoch(1)
    assert [int(x) for x in dataset] == [5, 6]


def test_the_first_element_says_what_all_look_like() -> None:
    dataset = from_generator(lambda: ({"x": np.full(3, i, np.float32), "y": i, "s": "t" * i} for i in range(4)))
    spec = {"x": ArraySpec((3,), np.float32), "y": ArraySpec((), np.int64), "s": ArraySpec((), object)}
    assert dataset.element_spec == spec
    batch = next(iter(dataset.batch(3)))
    assert batch["x"].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert batch["y"].dtype == np.int64
    assert batch["s"].tolist() == ["", "t", "tt"]


@pytest.mark.parametrize(
    ("elements", "spec", "message"),
    [
        ([1, 2, 3.5], None, r"element 2: expected int64\[\], got float64\[\].*first element"),
        ([np.zeros(2), np.zeros(3)], None, r"element 1: expected float64\[2\], got float64\[3\]"),
        ([np.zeros((2, 3))], RAGGED, r"element 0: expected int64\[\?\], got float64\[2, 3\].*element_spec"),
        ([(1, 2), (1, 2, 3)], None, r"element 1: expected the structure tuple\(\[0\], \[1\]\), got tuple"),
        ([{"a": 1, "b": 2}, {"a": 1, "b": "x"}], None, r"element 1: at \['b'\]: expected int64\[\], got a string 'x'"),
        ([300], ArraySpec((), np.uint8), "300"),
        (["a", 3], None, r"element 1: expected a string, got int64\[\]"),
        ([None], None, "arrays, numbers or strings, got a NoneType"),
    ],
)
def test_an_element_that_does_not_fit_is_named(elements: list[Any], spec: Any, message: str) -> None:
    with pytest.raises((ValueError, OverflowError), match=message):
        list(from_generator(lambda: iter(elements), spec))


def test_numbers_and_lists_become_what_the_spec_says() -> None:
    dataset = from_generator(lambda: iter([[1, 2], (3,), np.array([4.0], np.float32)]), ArraySpec((None,), np.float32))
    assert [(x.tolist(), x.dtype) for x in dataset] == [([1, 2], "f4"), ([3], "f4"), ([4], "f4")]


def test_wrong_generators_are_explained() -> None:
    with pytest.raises(TypeError, match="function itself"):
        from_generator(iter([1]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returns an iterator, got int"):
        list(from_generator(lambda: 3))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"element_spec\['x'\]: expected an ArraySpec"):
        from_generator(lambda: iter([]), {"x": np.float32})
    with pytest.raises(ValueError, match="Give element_spec"):
        _ = from_generator(lambda: iter([])).element_spec
    assert list(from_generator(lambda: iter([])).batch(2)) == []


def test_errors_of_the_generator_arrive_in_their_turn() -> None:
    def rows() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("mine")

    for depth in (0, 3):
        iterator = iter(from_generator(rows).prefetch(depth))
        assert [int(next(iterator)), int(next(iterator))] == [1, 2]
        with pytest.raises(KeyError, match="mine"):
            next(iterator)


# Ragged rows and strings


def test_batch_refuses_rows_of_different_shapes_and_names_the_remedies() -> None:
    for dataset in (words([1, 2]), from_arrays({"x": objects([np.zeros(1), np.zeros(2)])})):
        for use in (list, lambda batches: batches.element_spec):
            with pytest.raises(ValueError, match=r"rows of one shape, got .*\[\?\].*padded_batch.*map"):
                use(dataset.batch(2))


def test_ragged_arrays_are_a_source_with_random_access() -> None:
    rows = from_arrays((objects([np.zeros((n, 2), np.float32) for n in (1, 3, 2)]), np.arange(3)))
    assert rows.element_spec == (ArraySpec((None, 2), np.float32), ArraySpec((), np.int64))
    assert [x.shape for x, _ in rows.shuffle(seed=1).skip(0)] != []
    assert sorted(x.shape for x, _ in rows.shuffle(seed=1)) == [(1, 2), (2, 2), (3, 2)]
    assert [x.shape for x in rows.rows([2, 0])[0]] == [(2, 2), (1, 2)]
    with pytest.raises(ValueError, match="one dtype"):
        from_arrays(objects([np.zeros(2), np.zeros(2, np.int64)]))


def test_strings_are_batched_and_mapped() -> None:
    rows = from_arrays({"s": objects(["a", "bc", "def"]), "n": np.arange(3)})
    assert rows.element_spec == {"s": ArraySpec((), object), "n": ArraySpec((), np.int64)}
    assert next(iter(rows))["s"] == "a"
    assert [batch["s"].tolist() for batch in rows.batch(2)] == [["a", "bc"], ["def"]]
    assert [batch.tolist() for batch in rows.map(lambda e: e["s"].upper()).batch(2)] == [["A", "BC"], ["DEF"]]
    assert [batch.tolist() for batch in rows.map(lambda e: len(e["s"])).batch(3)] == [[1, 2, 3]]
    fixed = from_arrays(np.array(["a", "bcd"]))
    assert [batch.tolist() for batch in fixed.filter(lambda s: True).batch(2)] == [["a", "bcd"]]
    assert [batch.tolist() for batch in rows.map(lambda e: e["s"]).padded_batch(3)] == [["a", "bc", "def"]]


def test_a_map_whose_rows_vary_says_so() -> None:
    texts = from_arrays(objects(["a", "bc", "def"]))
    codes = texts.map(lambda s: np.frombuffer(s.encode(), np.uint8))
    with pytest.raises(ValueError, match=r"element 1: expected uint8\[1\], got uint8\[2\].*element_spec.*padded_batch"):
        list(codes.padded_batch(3))
    codes = texts.map(lambda s: np.frombuffer(s.encode(), np.uint8), element_spec=ArraySpec((None,), np.uint8))
    assert [batch.tolist() for batch in codes.padded_batch(2)] == [[[97, 0], [98, 99]], [[100, 101, 102]]]
    with pytest.raises(ValueError, match="unlike element_spec"):
        list(texts.map(lambda s: len(s), element_spec=ArraySpec((None,), np.uint8)))


# padded_batch


# The example of TF's documentation: rows of 1, 2, 3, 4 ones.
def test_padding_as_tf_documents_it() -> None:
    rows = Dataset.range(1, 5).map(lambda x: np.full(x, x), element_spec=RAGGED)
    assert [b.tolist() for b in rows.padded_batch(2)] == [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
    padded = rows.padded_batch(2, padded_shapes=(5,))
    assert [b.tolist() for b in padded] == [
        [[1, 0, 0, 0, 0], [2, 2, 0, 0, 0]],
        [[3, 3, 3, 0, 0], [4, 4, 4, 4, 0]],
    ]
    padded = rows.padded_batch(2, padded_shapes=(5,), padding_values=-1)
    assert next(iter(padded)).tolist() == [[1, -1, -1, -1, -1], [2, 2, -1, -1, -1]]
    # Two components padded to different shapes with different values.
    pairs = ms.data.zip(rows, rows).padded_batch(2, padded_shapes=((4,), (None,)), padding_values=(-1, 100))
    first = next(iter(pairs))
    assert [leaf.tolist() for leaf in first] == [[[1, -1, -1, -1], [2, 2, -1, -1]], [[1, 100], [2, 2]]]
    assert pairs.element_spec == (ArraySpec((None, 4), np.int64), ArraySpec((None, None), np.int64))


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=12),
    size=st.integers(1, 5),
    fixed=st.booleans(),
    drop=st.booleans(),
    random=st.booleans(),
)
def test_padding_against_lists(lengths: list[int], size: int, fixed: bool, drop: bool, random: bool) -> None:
    dataset = words(lengths)
    if random:
        rows = objects([np.arange(1, n + 1) for n in lengths])
        dataset = Dataset.range(len(lengths)).map(lambda i: rows[i], element_spec=RAGGED)
    dataset = dataset.padded_batch(size, (6,) if fixed else None, -7, drop_remainder=drop)
    expected = []
    for i in range(0, len(lengths), size):
        own = lengths[i : i + size]
        if len(own) == size or not drop:
            width = 6 if fixed else max(own)
            expected.append([[*range(1, n + 1), *[-7] * (width - n)] for n in own])
    assert [batch.tolist() for batch in dataset] == expected
    assert dataset.element_spec == ArraySpec((size if drop else None, 6 if fixed else None), np.int64)
    if random:
        for number, batch in enumerate(expected):  # part of a batch, as a rank of several reads it
            epochs, positions = dataset.node.locate(0, number)
            for low in range(len(batch)):
                assert dataset.node.gather(epochs[low:], positions[low:]).tolist() == batch[low:]
                assert dataset.node.gather(epochs[low:low], positions[low:low]).shape[0] == 0


@pytest.mark.parametrize(
    ("shapes", "values", "message"),
    [
        ((2,), None, r"padded_shapes: expected rows of at most \(2,\), got \(3,\) in row 1"),
        ((2, 2), None, "expected a shape of 1 axes"),
        (((2,), (2,)), None, "expected a shape of 1 axes"),
        (None, 0.5, "padding_values: expected a int64, got 0.5"),
        ({"a": (2,)}, None, "expected a shape of 1 axes"),
    ],
)
def test_wrong_padding_is_explained(shapes: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(words([1, 3]).padded_batch(2, shapes, values))


def test_padding_of_nests() -> None:
    rows = ms.data.zip({"a": words([1, 2]), "b": Dataset.range(2)})
    batch = next(iter(rows.padded_batch(2, {"a": (3,), "b": ()}, {"a": 9, "b": 0})))
    assert nest.map_structure(np.ndarray.tolist, batch) == {"a": [[1, 9, 9], [1, 2, 9]], "b": [0, 1]}
    with pytest.raises(ValueError, match="structure of an element"):
        list(rows.padded_batch(2, {"a": (3,)}))


@pytest.mark.parametrize("value", [300, -1, [1, 256], 1 << 40, [[-3]]])
def test_numbers_that_a_dtype_does_not_hold_are_an_error(value: Any) -> None:
    """With NumPy 1 they were wrapped round, or cut off."""
    spec = ArraySpec(np.shape(value), np.uint8)
    rows = ms.data.from_generator(lambda: [np.zeros(np.shape(value), int).tolist(), value], spec)
    with pytest.raises(ValueError, match=r"expected uint8.*, from 0 to 255, got"):
        list(rows.batch(2))
    with pytest.raises(ValueError, match="expected uint8"):
        list(Dataset.range(1).map(lambda x: value, element_spec=spec))
    wide = ArraySpec(np.shape(value), np.float32)
    assert next(iter(ms.data.from_generator(lambda: [value], wide))).tolist() == np.asarray(value, float).tolist()


def test_the_first_element_of_a_generator_is_known_by_epoch() -> None:
    """Ranks compare it: it must not depend on what one of them has read besides, or ahead."""
    spec = ArraySpec((), np.int64)

    def numbers(epoch: int) -> Iterator[int]:
        yield from range(10 * epoch, 10 * epoch + 3)

    one, other = (ms.data.from_generator(numbers, spec).batch(2) for _ in range(2))
    list(one.node.elements(0)), list(one.node.elements(3)), list(other.node.elements(3))
    assert one.node.first_read(3) == other.node.first_read(3) != one.node.first_read(0)
    assert one.concatenate(other).node.first_read(3) == 0
