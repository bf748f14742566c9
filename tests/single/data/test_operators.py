"""Random chains of all operators, over random-access and in-order sources, against a model made of lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.data import INFINITE, UNKNOWN, Dataset, from_arrays, from_generator
from mpistrat.data.order import permute

Model = Callable[[int], list[Any]]  # an epoch → its elements, as numbers or lists of numbers


def listed(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def interleaved(pieces: list[list[int]], cycle: int, block: int) -> list[int]:
    """TF's loop (kernels/data/interleave_dataset_op.cc), element by element."""
    waiting, places = list(pieces), [None] * cycle  # type: ignore[var-annotated]
    result, at, taken = [], 0, 0

    def advance() -> None:
        nonlocal at, taken
        at, taken = (at + 1) % cycle, 0

    while waiting or any(place is not None for place in places):
        if places[at] is not None:
            if places[at]:
                result.append(places[at].pop(0))
                taken += 1
                if taken == block:
                    advance()
            else:
                places[at] = None
                advance()
        elif waiting:
            places[at] = list(waiting.pop(0))
        else:
            advance()
    return result


def each(function: Callable[[int], int], element: Any) -> Any:
    return [function(x) for x in element] if isinstance(element, list) else function(element)


def total(element: Any) -> int:
    return sum(element) if isinstance(element, list) else element


def chunks(rows: list[Any], size: int, drop: bool) -> list[list[Any]]:
    cut = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [batch for batch in cut if len(batch) == size or not drop]


def from_list(n: int, in_order: bool, factor: int) -> tuple[Dataset, Model]:
    """Rows 0, factor, 2 factor …; in order they also tell the epoch."""
    if in_order:
        return (
            from_generator(
                lambda epoch: (factor * i + 1000 * epoch for i in range(n)), ms.data.ArraySpec((), np.int64)
            ),
            lambda epoch: [factor * i + 1000 * epoch for i in range(n)],
        )
    return from_arrays(factor * np.arange(n)), lambda epoch: [factor * i for i in range(n)]


def apply(dataset: Dataset, model: Model, name: str, a: int, b: int) -> tuple[Dataset, Model]:
    """One operator on both; what does not fit rows (or batches) leaves them as they are."""
    batched = dataset.batching is not None
    other, others = from_list(b + 2, a % 2 == 1, 7)
    if batched:
        other, others = other.batch(3), lambda epoch, rows=others: chunks(rows(epoch), 3, False)
    if name == "take":
        return dataset.take(3 * a), lambda epoch: model(epoch)[: 3 * a]
    if name == "skip":
        return dataset.skip(a), lambda epoch: model(epoch)[a:]
    if name == "shard":
        return dataset.shard(b + 1, a % (b + 1)), lambda epoch: model(epoch)[a % (b + 1) :: b + 1]
    if name == "repeat":
        return dataset.repeat(a), lambda epoch: [x for i in range(a) for x in model(epoch * a + i)]
    if name == "map":
        threads = b or None
        return dataset.map(lambda x: x * a + b, num_parallel_calls=threads), lambda epoch: [
            each(lambda x: x * a + b, element) for element in model(epoch)
        ]
    if name == "filter":
        return dataset.filter(lambda x: x.sum() % (a + 1) != 0), lambda epoch: [
            element for element in model(epoch) if total(element) % (a + 1) != 0
        ]
    if name == "prefetch":
        return dataset.prefetch(a), model
    if name == "concatenate":
        return dataset.concatenate(other), lambda epoch: model(epoch) + others(epoch)
    if name == "shuffle" and dataset.random_access:

        def shuffled(epoch: int) -> list[Any]:
            elements = model(epoch)
            return [elements[i] for i in permute(np.arange(len(elements)), len(elements), seed=b, epoch=epoch)]

        return dataset.shuffle(seed=b), shuffled
    if name == "batch" and not batched:
        return dataset.batch(a + 1, drop_remainder=b > 1), lambda epoch: chunks(model(epoch), a + 1, b > 1)
    if name == "padded_batch" and not batched:
        return dataset.padded_batch(a + 1), lambda epoch: chunks(model(epoch), a + 1, False)
    if name == "unbatch" and batched:
        return dataset.unbatch(), lambda epoch: [row for batch in model(epoch) for row in batch]
    if name == "enumerate" and not batched:
        return dataset.enumerate().map(lambda i, x: 50 * i + x), lambda epoch: [
            50 * i + x for i, x in enumerate(model(epoch))
        ]
    if name == "zip" and not batched:
        return ms.data.zip(dataset, other).map(lambda x, y: x - y), lambda epoch: [
            x - y for x, y in zip(model(epoch), others(epoch), strict=False)
        ]
    if name == "zip":  # with itself in another way, so that the lengths of the batches agree
        return ms.data.zip({"x": dataset, "y": dataset.map(lambda x: 2 * x)}).map(
            lambda e: e["x"] + e["y"]
        ), lambda epoch: [each(lambda x: 3 * x, batch) for batch in model(epoch)]
    if name == "interleave" and not batched:
        return dataset.interleave(
            lambda x: from_arrays(np.full(int(x) % 4, x)), a + 1, b + 1
        ), lambda epoch: interleaved([[x] * (x % 4) for x in model(epoch)], a + 1, b + 1)
    if name == "flat_map" and not batched:
        return dataset.flat_map(lambda x: from_arrays(np.stack([x, -x]))), lambda epoch: [
            y for x in model(epoch) for y in (x, -x)
        ]
    return dataset, model


NAMES = [
    "take", "skip", "shard", "repeat", "map", "filter", "prefetch", "concatenate", "shuffle", "batch", "padded_batch",
    "unbatch", "enumerate", "zip", "interleave", "flat_map",
]  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(0, 12),
    in_order=st.booleans(),
    chain=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6),
    stop=st.integers(0, 30),
)
def test_any_chain_is_what_lists_are(n: int, in_order: bool, chain: list[tuple[str, int, int]], stop: int) -> None:
    dataset, model = from_list(n, in_order, 1)
    for name, a, b in chain:
        dataset, model = apply(dataset, model, name, a, b)
    expected = model(0), model(1)
    assert (listed(dataset), listed(dataset)) == expected
    for epoch, elements in enumerate(expected):
        assert dataset.cardinality() in (len(elements), UNKNOWN)
        assert dataset.cardinality() == len(elements) or not dataset.random_access
        for position in range(0, len(elements), 3):
            assert np.asarray(dataset.element(epoch, position)).tolist() == elements[position]
        if dataset.random_access and dataset.batching is None and elements:
            order = np.arange(2 * len(elements))[::-1] % len(elements)
            assert dataset.rows(order, epoch=epoch).tolist() == [elements[i] for i in order]

    # An iterator is left in the middle of epoch 1, and another goes on there.
    dataset.set_epoch(1)
    iterator = iter(dataset)
    before = listed(itertools.islice(iterator, stop))
    state = iterator.state()
    length = dataset.cardinality()
    assert state == {"epoch": 1, "next": len(before)} | ({"length": length} if length >= 0 else {})
    other = iter(dataset)
    other.restore(state)
    rest = expected[1][len(before) :]
    if rest:
        assert np.asarray(other.peek()).tolist() == rest[0]
    assert other.state() == state
    assert before + listed(other) == expected[1]
    assert listed(iterator) == rest
    assert listed(iterator) == []  # an iterator that has ended stays so


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_from_every_position_on(name: str, in_order: bool) -> None:
    for a, b, batched in itertools.product(range(4), range(3), (False, True)):
        dataset, model = from_list(9, in_order, 1)
        if batched:
            dataset, model = apply(dataset, model, "batch", 2, 0)
        dataset, model = apply(dataset, model, name, a, b)
        for epoch in (0, 2):
            expected = model(epoch)
            for start in (*range(0, len(expected), 2), len(expected)):
                assert listed(dataset.elements(epoch, start)) == expected[start:], (str(dataset), epoch, start)


def test_a_chain_names_its_spec_before_and_after_reading() -> None:
    for in_order in (False, True):
        rows, _ = from_list(5, in_order, 1)
        scalar, batch = ms.data.ArraySpec((), np.int64), ms.data.ArraySpec((None,), np.int64)
        assert rows.filter(bool).element_spec == scalar
        assert rows.batch(2).element_spec == batch
        assert rows.batch(2, drop_remainder=True).element_spec == ms.data.ArraySpec((2,), np.int64)
        assert rows.batch(2).unbatch().element_spec == scalar
        assert rows.enumerate().element_spec == (scalar, scalar)
        assert ms.data.zip({"a": rows, "b": rows.map(float)}).batch(2).element_spec == {
            "a": batch,
            "b": ms.data.ArraySpec((None,), np.float64),
        }
        assert rows.interleave(lambda x: from_arrays(np.zeros((2, 3), np.float32))).element_spec == ms.data.ArraySpec(
            (3,), np.float32
        )
        assert rows.prefetch(2).concatenate(rows).take(3).element_spec == scalar


# The example of TF's documentation of Dataset.interleave.
def test_interleave_as_tf_documents_it() -> None:
    rows = Dataset.range(1, 6).interleave(lambda x: from_arrays(np.full(6, x)), cycle_length=2, block_length=4)
    assert listed(rows) == [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4 + [3] * 2 + [4] * 2 + [5] * 6


def test_interleave_shuffles_what_is_inside_anew_in_every_epoch() -> None:
    rows = Dataset.range(2).interleave(lambda x: from_arrays(x * 100 + np.arange(30)).shuffle(seed=1))
    first, second = listed(rows), listed(rows)
    assert first != second
    assert sorted(first) == sorted(second) == [*range(30), *range(100, 130)]


def test_wrong_functions_are_explained() -> None:
    rows = Dataset.range(4)
    with pytest.raises(TypeError, match="returns a bool"):
        list(rows.filter(lambda x: x))
    with pytest.raises(TypeError, match="returns a Dataset"):
        list(rows.interleave(lambda x: [x]))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"float64\[\] in dataset 1"):
        list(rows.flat_map(lambda x: from_arrays(np.zeros(2, np.float64 if x else np.int64))))
    with pytest.raises(ValueError, match="at least one element below"):
        _ = rows.take(0).flat_map(lambda x: rows).element_spec
    for method in (rows.filter, rows.interleave, rows.map):
        with pytest.raises(TypeError, match="callable"):
            method(3)  # type: ignore[operator]


def test_unbatch_keeps_random_access_right_after_batch_only() -> None:
    rows = Dataset.range(10).shuffle(seed=1)
    assert rows.batch(3).unbatch().random_access
    assert len(rows.batch(3, drop_remainder=True).unbatch()) == 9
    assert not rows.batch(3).map(lambda x: x).unbatch().random_access
    arrays = from_arrays(np.arange(12).reshape(2, 3, 2)).unbatch()
    assert arrays.element_spec == ms.data.ArraySpec((2,), np.int64)
    assert listed(arrays) == np.arange(12).reshape(6, 2).tolist()
    with pytest.raises(ValueError, match="first axis"):
        _ = rows.unbatch().element_spec
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        list(from_arrays((np.zeros((1, 1)), np.zeros((1, 2)))).unbatch())


def test_repeat_without_end_ends_where_nothing_is_below() -> None:
    rows, _ = from_list(3, True, 1)
    assert listed(rows.repeat().take(5)) == [0, 1, 2, 1000, 1001]
    assert listed(rows.filter(lambda x: x < 0).repeat()) == []
    assert rows.repeat().cardinality() == UNKNOWN
    assert Dataset.range(3).repeat().filter(bool).take(2).cardinality() == UNKNOWN


def test_shard_hint_waits_for_its_numbers() -> None:
    hinted = Dataset.range(7).shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT).batch(2)
    assert hinted.shard_hinted
    assert "shard(SHARD_HINT, SHARD_HINT)" in str(hinted)
    rows = Dataset.range(7).shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT)
    in_order = Dataset.range(7).filter(bool).shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT)
    uses: list[Any] = [
        lambda: list(hinted),
        hinted.peek,
        lambda: hinted.element(0, 0),
        lambda: hinted.skip(1).element(0, 0),
        lambda: rows.rows([0]),
        lambda: rows.take(3).rows([0, 2]),
        lambda: rows.element(0, 1),
        lambda: rows.map(lambda x: x + 1).element_spec,
        lambda: hinted.map(lambda x: x + 1).element_spec,
        lambda: rows.map(lambda x: x + 1).batch(2).element(0, 0),
        lambda: next(rows.elements(0)),
        lambda: in_order.element(0, 0),
        lambda: next(in_order.batch(2).elements(0)),
        lambda: in_order.map(lambda x: x + 1).element_spec,
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"got SHARD_HINT.*AutoShardPolicy\.HINT"):
            use()
    filled = hinted.with_shard(3, 1)
    assert not filled.shard_hinted
    assert listed(filled) == [[1, 4]]
    with pytest.raises(ValueError, match="0 <= index < 3, got 3"):
        Dataset.range(7).shard(3, 3)
    with pytest.raises(ValueError, match="num_shards: expected at least 1"):
        Dataset.range(7).shard(0, 0)


def test_shards_are_the_dataset_each_row_once() -> None:
    for count in (1, 2, 3, 11):
        shards = [listed(Dataset.range(10).shard(count, index)) for index in range(count)]
        assert sorted(itertools.chain(*shards)) == list(range(10))
        assert [len(Dataset.range(10).shard(count, index)) for index in range(count)] == [len(s) for s in shards]


def test_zip_takes_nests_and_the_shortest() -> None:
    a, b = Dataset.range(4), Dataset.range(10, 13)
    assert [(int(x), int(y)) for x, y in ms.data.zip(a, b)] == [(0, 10), (1, 11), (2, 12)]
    assert len(ms.data.zip({"a": a.repeat(), "b": b})) == 3
    assert ms.data.zip(a.repeat(), b.repeat()).cardinality() == INFINITE
    batches = ms.data.zip(a.batch(2), b.batch(2))
    assert [(x.tolist(), y.tolist()) for x, y in batches.take(1)] == [([0, 1], [10, 11])]
    with pytest.raises(ValueError, match=r"equally many rows in element 1, got \[1, 2\] rows.*before batch"):
        list(batches)
    with pytest.raises(ValueError, match=r"equally many rows in element 1, got \[1, 2\] rows.*before batch"):
        list(ms.data.zip(a.filter(lambda x: True).batch(2), b.batch(2)))
    with pytest.raises(ValueError, match="rows and batches"):
        ms.data.zip(a, b.batch(2))
    with pytest.raises(TypeError, match="Datasets"):
        ms.data.zip(a, 3)
    with pytest.raises(ValueError, match="at least one"):
        ms.data.zip()


def test_parts_of_zipped_and_joined_batches() -> None:
    """What a rank of several reads: some rows of one element."""
    rows = Dataset.range(20)
    shuffled = rows.batch(4).shuffle(seed=3)
    zipped = ms.data.zip(rows.batch(4), shuffled)
    joined = rows.batch(3).concatenate(shuffled)
    for dataset in (zipped, joined):
        for position in range(len(dataset)):
            whole = np.asarray(dataset.element(0, position))
            epochs, positions = dataset.locate(0, position)
            part = np.asarray(dataset.gather(epochs[1:3], positions[1:3]))
            assert np.array_equal(part, whole[..., 1:3])


def test_concatenate_wants_like_elements() -> None:
    rows = from_arrays({"x": np.arange(3), "y": np.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"float64\[2\] at \['y'\].*got float64\[3\] in dataset 1"):
        list(rows.concatenate(from_arrays({"x": np.arange(3), "y": np.zeros((3, 3))})))
    with pytest.raises(ValueError, match="structure of dataset 0"):
        _ = rows.concatenate(from_arrays(np.arange(3))).element_spec
    with pytest.raises(ValueError, match="rows and batches"):
        rows.concatenate(rows.batch(2))
    with pytest.raises(TypeError, match="Datasets"):
        rows.concatenate([1])  # type: ignore[arg-type]
    assert len(rows.concatenate(rows, rows)) == 9
    assert rows.repeat().concatenate(rows).cardinality() == INFINITE


def test_chunks_are_passed_on() -> None:
    class Chunky(type(Dataset.range(1))):  # type: ignore[misc]
        def chunk_starts(self) -> np.ndarray:
            return np.array([0, 4, 8, 10])

    rows = Chunky(np.arange(10), 10)
    for dataset, expected in [
        (rows.map(lambda x: x), [0, 4, 8, 10]),
        (rows.take(6), [0, 4, 6]),
        (rows.skip(5), [0, 3, 5]),
        (rows.skip(10), [0]),
        (rows.concatenate(rows.take(5)), [0, 4, 8, 10, 14, 15]),
        (ms.data.zip(rows.skip(1), Dataset.range(8)), [0, 3, 7, 8]),
        (rows.batch(4, drop_remainder=True).unbatch(), [0, 4, 8]),
        (rows.batch(2), None),
        (rows.filter(bool), None),
        (rows.repeat(2), None),
    ]:
        starts = dataset.chunk_starts()
        assert (None if starts is None else starts.tolist()) == expected, str(dataset)


def test_print_draws_a_tree() -> None:
    pairs = ms.data.zip(Dataset.range(3).skip(1), Dataset.range(4).concatenate(Dataset.range(2)))
    assert str(pairs.batch(2).prefetch(1)).splitlines() == [
        "┌─ from_arrays: 3 rows of int64[]",
        "│  └─ skip(1)",
        "├─ ┌─ from_arrays: 4 rows of int64[]",
        "│  ├─ from_arrays: 2 rows of int64[]",
        "│  └─ concatenate()",
        "└─ zip()",
        "   └─ batch(2, drop_remainder=False)",
        "      └─ prefetch(1)",
    ]


def test_prefetch_depth_counts_elements_of_the_chain() -> None:
    rows = Dataset.range(10)
    assert rows.prefetch_depth is None
    assert rows.prefetch(5).map(abs).prefetch_depth == 5
    assert rows.prefetch(5).batch(2).prefetch_depth == 3
    assert rows.batch(4).prefetch(2).unbatch().prefetch_depth == 8
    assert rows.prefetch(5).prefetch(0).prefetch_depth == 0
    assert ms.data.zip(rows.prefetch(1), rows.prefetch(2)).prefetch_depth == 2
    with pytest.raises(ValueError, match="buffer_size: expected at least 0"):
        rows.prefetch(-1)


def test_peek_begins_nothing() -> None:
    rows = Dataset.range(5).shuffle(seed=1)
    first = int(rows.peek())
    assert int(rows.peek()) == first
    assert listed(rows)[0] == first
    assert listed(rows)[0] != first or int(rows.peek()) != first
    iterator = iter(rows)
    seen = []
    while True:
        try:
            seen.append(int(iterator.peek()))
        except StopIteration:
            break
        assert int(next(iterator)) == seen[-1]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="an empty one"):
        rows.take(0).peek()


def test_names_of_tensorflow() -> None:
    assert listed(Dataset.from_tensor_slices(np.arange(3))) == [0, 1, 2]
    assert listed(Dataset.range(2, 9, 3)) == [2, 5, 8]
    assert Dataset.range(3).element_spec == ms.data.ArraySpec((), np.int64)
    assert listed(Dataset.from_generator(lambda: iter([1, 2]))) == [1, 2]
    assert listed(Dataset.zip(Dataset.range(2), Dataset.range(2))) == [[0, 0], [1, 1]]
    assert sorted(listed(Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(2)], seed=1))) == [0, 0, 1, 1]


def test_an_error_in_a_row_comes_after_the_rows_in_front_of_it() -> None:
    """Rows are read many at a time, which must not show."""
    iterator = iter(Dataset.range(200).map(lambda x: 1 // (int(x) - 150)))
    assert len(list(itertools.islice(iterator, 150))) == 150
    with pytest.raises(ZeroDivisionError):
        next(iterator)


def test_large_batches_use_memory_again() -> None:
    batches = from_arrays(np.zeros((64, 1 << 14))).batch(8)
    addresses = {batch.ctypes.data for _ in range(20) for batch in batches}
    assert len(addresses) <= 6
    held = list(batches)
    assert len({batch.ctypes.data for batch in held}) == 8
