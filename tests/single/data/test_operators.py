"""Random chains of all operators, over random-access and in-order sources, against a model made of lists."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.data import INFINITE, UNKNOWN, Dataset, from_arrays
from mpistrat.data.nodes.order import with_shard
from tests.models.dataset_model import (
    NAMES,
    SOURCES,
    Chain,
    apply,
    begin,
    chained,
    endless,
    has_spec,
    listed,
    made_anew,
)

chains = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=250)
@given(
    n=st.integers(0, 12),
    source=st.sampled_from(SOURCES),
    chain=chains,
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
def test_any_chain_is_what_lists_are(n: int, source: str, chain: Chain, stops: list[int]) -> None:
    assume(has_spec(chained(n, source, chain)[0]))
    dataset, model = chained(n, source, chain)
    expected = model(0), model(1)
    assert (listed(dataset), listed(dataset)) == expected
    for epoch, elements in enumerate(expected):
        assert dataset.cardinality() in (len(elements), UNKNOWN)
        assert dataset.cardinality() == len(elements) or not dataset.node.random_access
        for position in range(0, len(elements), 3):
            assert np.asarray(dataset.element(epoch, position)).tolist() == elements[position]
        if dataset.node.random_access and dataset.node.batching is None and elements:
            order = np.arange(2 * len(elements))[::-1] % len(elements)
            assert dataset.rows(order, epoch=epoch).tolist() == [elements[i] for i in order]
    rebuilt = Dataset(made_anew(dataset.node))  # every node made anew over those below
    assert listed(rebuilt.node.elements(1)) == expected[1]

    # An iterator is left in the middle of epoch 1, another goes on there for a while, and so on.
    dataset.set_epoch(1)
    if expected[1]:
        assert np.asarray(dataset.peek()).tolist() == expected[1][0]
    iterator, seen = iter(dataset), []
    for stop in stops:
        seen += listed(itertools.islice(iterator, stop))
        state = iterator.state()
        length = dataset.cardinality()
        assert state == {"epoch": 1, "next": len(seen)} | ({"length": length} if length >= 0 else {})
        following = iter(chained(n, source, chain)[0])
        following.restore(state)
        assert following.state() == state
        rest = expected[1][len(seen) :]
        if rest:
            assert np.asarray(following.peek()).tolist() == rest[0]
        assert listed(iterator) == rest
        assert listed(iterator) == []  # an iterator that has ended stays so,
        iterator.restore(state)  # until it goes back
        assert listed(itertools.islice(iterator, 1)) == rest[:1]
        iterator = following
    assert seen + listed(iterator) == expected[1]


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 7), source=st.sampled_from(SOURCES), chain=chains, stop=st.integers(0, 12))
def test_any_chain_without_an_end(n: int, source: str, chain: Chain, stop: int) -> None:
    assume(has_spec(chained(n, source, chain)[0]))
    dataset, model = endless(*chained(n, source, chain))
    expected = model(2)[:20]
    dataset.set_epoch(2)
    iterator = iter(dataset)
    assert listed(itertools.islice(iterator, stop)) == expected[:stop]
    following = iter(dataset)
    following.restore(iterator.state())
    assert listed(itertools.islice(following, max(0, 20 - stop))) == expected[stop:]
    if len(expected) == 20:
        assert dataset.cardinality() in (INFINITE, UNKNOWN)
        assert np.asarray(dataset.element(2, 19)).tolist() == expected[19]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_from_every_position_on(name: str, source: str) -> None:
    for a, b, batched in itertools.product(range(4), range(4), (False, True)):
        dataset, model = begin(9, source)
        if batched:
            dataset, model = apply(dataset, model, "batch", 2, 0)
        dataset, model = apply(dataset, model, name, a, b)
        for epoch in (0, 2):
            expected = model(epoch)
            for start in (*range(0, len(expected), 2), len(expected)):
                assert listed(dataset.node.elements(epoch, start)) == expected[start:], (str(dataset), epoch, start)


@pytest.mark.parametrize("first", NAMES)
def test_every_operator_on_every_other(first: str) -> None:
    for number, (second, batched) in enumerate(itertools.product(NAMES, (False, True))):
        for a, b in ((2, 1), (1, 3)):
            source = SOURCES[(NAMES.index(first) + number + a) % len(SOURCES)]
            chain = [("shuffle", 0, 2), *[("batch", 1, 0)] * batched, (first, a, b), (second, a, b)]
            dataset, model = chained(9, source, chain)
            expected = model(2)
            for start in (0, 1, 3):
                assert listed(dataset.node.elements(2, start)) == expected[start:], (source, chain, start)
            rebuilt = Dataset(made_anew(dataset.node))  # every node made anew over those below
            assert listed(rebuilt.node.elements(2)) == expected, (source, chain)


def test_no_operator_is_left_out() -> None:
    reads = {
        "rows", "set_epoch", "element", "elements", "peek", "cardinality", "options", "describe", "row_spec", "element_spec",
        "parents", "batching", "bind", "check", "chunk_starts", "count_wait", "counters", "deterministic", "expect", "gather",
        "keep", "locality", "locate", "prefetch_depth", "random_access", "rebuild", "shard_hinted", "shares_memory", "source",
        "with_shard", "calls_functions", "apply", "as_numpy_iterator", "reduce", "get_single_element", "save", "snapshot",
    }  # fmt: skip
    sources = {
        "from_tensor_slices",
        "from_tensors",
        "from_generator",
        "range",
        "counter",
        "random",
        "list_files",
        "load",
    }
    names = {name for name in dir(Dataset) if not name.startswith("_")}
    assert names - reads - sources == {name for name in NAMES if " " not in name}


def test_a_chain_names_its_spec_before_and_after_reading() -> None:
    for in_order in (False, True):
        rows, _ = begin(5, "generator" if in_order else "arrays")
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


def test_interleave_of_nothing_is_empty_though_it_has_no_spec() -> None:
    rows = Dataset.range(0).interleave(lambda x: from_arrays(np.full(6, x)))
    assert not has_spec(rows)
    assert listed(rows) == listed(rows.batch(2)) == listed(rows.repeat(2).unbatch()) == []


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
    with pytest.raises(ValueError, match=r"map.*at least one element below.*Give element_spec"):
        _ = rows.take(0).map(lambda x: np.stack([x, x])).element_spec
    for method in (rows.filter, rows.interleave, rows.map):
        with pytest.raises(TypeError, match="callable"):
            method(3)  # type: ignore[operator]


def test_unbatch_keeps_random_access_right_after_batch_only() -> None:
    rows = Dataset.range(10).shuffle(seed=1)
    assert rows.batch(3).unbatch().node.random_access
    assert len(rows.batch(3, drop_remainder=True).unbatch()) == 9
    assert not rows.batch(3).map(lambda x: x).unbatch().node.random_access
    arrays = from_arrays(np.arange(12).reshape(2, 3, 2)).unbatch()
    assert arrays.element_spec == ms.data.ArraySpec((2,), np.int64)
    assert listed(arrays) == np.arange(12).reshape(6, 2).tolist()
    with pytest.raises(ValueError, match="first axis"):
        _ = rows.unbatch().element_spec
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        list(from_arrays((np.zeros((1, 1)), np.zeros((1, 2)))).unbatch())


def test_repeat_without_end_ends_where_nothing_is_below() -> None:
    rows, _ = begin(3, "generator")
    assert listed(rows.repeat().take(5)) == [0, 1, 2, 1000, 1001]
    assert listed(rows.filter(lambda x: x < 0).repeat()) == []
    assert rows.repeat().cardinality() == UNKNOWN
    assert Dataset.range(3).repeat().filter(bool).take(2).cardinality() == UNKNOWN


def test_repeat_no_times_of_what_has_no_end_is_empty() -> None:
    for rows in (Dataset.counter(), Dataset.counter().scan(np.int64(0), lambda state, x: (state, x))):
        assert rows.cardinality() == INFINITE
        assert listed(itertools.islice(rows.repeat(0).node.elements(0), 3)) == []
        assert listed(rows.repeat(0).concatenate(Dataset.range(2))) == [0, 1]


def test_repeat_a_number_of_times_goes_on_behind_a_pass_without_elements() -> None:
    rows, _ = begin(1, "generator")  # 0, then 1000, then 2000
    assert listed(rows.filter(lambda x: x % 3 != 0).repeat(3)) == [1000, 2000]
    assert listed(rows.filter(lambda x: x == 2000).repeat(4).node.elements(0)) == [2000]


def test_shard_hint_waits_for_its_numbers() -> None:
    hinted = Dataset.range(7).shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT).batch(2)
    assert hinted.node.traits.shard_hinted
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
        lambda: next(rows.node.elements(0)),
        lambda: in_order.element(0, 0),
        lambda: next(in_order.batch(2).node.elements(0)),
        lambda: in_order.map(lambda x: x + 1).element_spec,
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"got SHARD_HINT.*AutoShardPolicy\.HINT"):
            use()
    filled = Dataset(with_shard(hinted.node, 3, 1))
    assert not filled.node.traits.shard_hinted
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
            epochs, positions = dataset.node.locate(0, position)
            part = np.asarray(dataset.node.gather(epochs[1:3], positions[1:3]))
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
    class Chunky(type(Dataset.range(1).node)):  # type: ignore[misc]
        def chunk_starts(self) -> np.ndarray:
            return np.array([0, 4, 8, 10])

    rows = Dataset(Chunky(np.arange(10), 10))
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
        starts = dataset.node.chunk_starts()
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
    assert rows.node.prefetch_depth is None
    assert rows.prefetch(5).map(abs).node.prefetch_depth == 5
    assert rows.prefetch(5).batch(2).node.prefetch_depth == 3
    assert rows.batch(4).prefetch(2).unbatch().node.prefetch_depth == 8
    assert rows.prefetch(5).prefetch(0).node.prefetch_depth == 0
    assert ms.data.zip(rows.prefetch(1), rows.prefetch(2)).node.prefetch_depth == 2
    with pytest.raises(ValueError, match="buffer_size: expected at least 0"):
        rows.prefetch(-2)


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
    assert listed(Dataset.from_tensors([1.0, 2.0])) == [[1.0, 2.0]]
    assert listed(Dataset.from_tensor_slices([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert [x["a"].item() for x in Dataset.from_tensor_slices({"a": ["u", "v"]})] == ["u", "v"]
    with pytest.raises(ValueError, match="lists of one length"):
        Dataset.from_tensor_slices([[1, 2], [3]])


def test_arguments_as_tensorflow_documents_them() -> None:
    """The signatures of tf.data.Dataset: each by position and by name, with `name` and ms.data.AUTOTUNE where they go."""
    auto, rows = ms.data.AUTOTUNE, Dataset.range(5)
    batches = [[0, 1], [2, 3]]
    assert auto == -1
    assert listed(rows.batch(2, True)) == batches
    found = rows.batch(batch_size=2, drop_remainder=True, num_parallel_calls=auto, deterministic=None, name="b")
    assert listed(found) == listed(rows.batch(global_batch_size=2, drop_remainder=True)) == batches
    assert listed(rows.map(lambda x: x + 1, auto, True)) == [1, 2, 3, 4, 5]
    found = rows.map(map_func=lambda x: x + 1, num_parallel_calls=auto, deterministic=None, name="m")
    assert "map(<lambda>, AUTOTUNE threads)" in str(found)
    assert listed(found) == [1, 2, 3, 4, 5]
    assert listed(rows.filter(predicate=lambda x: x > 3, name="f")) == [4]
    assert listed(rows.take(count=2, name="t")) == [0, 1]
    assert (listed(rows.take(-1)), listed(rows.take(9)), listed(rows.skip(-1))) == (
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [],
    )
    assert listed(rows.skip(count=3)) == [3, 4]
    assert listed(rows.take(1).repeat(count=2)) == [0, 0]
    assert rows.repeat(-1).cardinality() == rows.repeat(count=None).cardinality() == INFINITE
    assert listed(rows.prefetch(buffer_size=auto)) == [0, 1, 2, 3, 4]
    assert listed(rows.shard(num_shards=2, index=1)) == [1, 3]
    expected = [0, 0, 1, 1, 2, 2]  # tf.data: cycle_length 3, block_length 2
    make = lambda x: Dataset.from_tensors(x).repeat(2)  # noqa: E731
    found = rows.take(3).interleave(
        map_func=make, cycle_length=3, block_length=2, num_parallel_calls=auto, deterministic=True
    )
    assert listed(found) == listed(rows.take(3).flat_map(map_func=make)) == expected
    assert listed(rows.take(3).interleave(make, auto, 2, auto)) == expected
    assert listed(rows.take(2).concatenate(dataset=rows.take(1))) == [0, 1, 0]
    assert listed(Dataset.zip(datasets=(rows.take(1), rows.take(1)))) == [[0, 0]]
    assert [(int(i), int(x)) for i, x in rows.skip(3).enumerate(start=5)] == [(5, 3), (6, 4)]
    assert [int(i) for i, x in rows.filter(lambda x: x > 2).enumerate(5).node.elements(0, 1)] == [6]
    spec = ms.data.ArraySpec((), np.int64)
    found = Dataset.from_generator(generator=lambda n: iter(range(n)), args=(2,), output_signature=spec)
    assert listed(found) == [0, 1]
    words = found.padded_batch(batch_size=2, padded_shapes=(), padding_values=None, drop_remainder=False)
    assert listed(words) == listed(found.padded_batch(2, (), None, True)) == [[0, 1]]
    assert listed(rows.batch(2).unbatch(name="u").cache(filename="")) == [0, 1, 2, 3, 4]
    assert Dataset.range(2, output_type=np.int32).element_spec.dtype == np.int32
    assert listed(rows.apply(lambda x: x.take(1)).as_numpy_iterator()) == [0]
    for wrong in (lambda: rows.batch(batch_size=1, global_batch_size=1), lambda: rows.batch(2, size=1)):
        with pytest.raises(TypeError, match=r"got both|unexpected keyword argument 'size'"):
            wrong()
    for wrong in (lambda: rows.map(make, num_parallel_calls=-2), lambda: rows.batch(2, num_parallel_calls=0)):
        with pytest.raises(ValueError, match=r"num_parallel_calls: expected at least 1"):
            wrong()
    with pytest.raises(ValueError, match=r"cache: filename:.*memory.*write_shards"):
        rows.cache("/tmp/rows")


def test_a_shuffle_without_a_seed_is_one_with_seed_0() -> None:
    """tf.data draws a seed for each run; here all ranks, and a job that goes on, must find the same order."""
    rows = Dataset.range(50)
    for unseeded, seeded in (
        (rows.shuffle(), rows.shuffle(seed=0)),
        (rows.shuffle(10, reshuffle_each_iteration=False), rows.shuffle(10, 0, reshuffle_each_epoch=False)),
        (rows.filter(lambda x: True).shuffle(10), rows.filter(lambda x: True).shuffle(10, 0)),
    ):
        first, second = listed(unseeded), listed(unseeded)
        assert [first, second] == [listed(seeded), listed(seeded)]
        assert sorted(first) == list(range(50)) != first
        assert (first == second) == ("reshuffle_each_epoch=False" in str(unseeded))
    both = [rows, rows]
    drawn = Dataset.sample_from_datasets(both, [0.5, 0.5], None, False)
    assert listed(drawn) == listed(Dataset.sample_from_datasets(both, weights=[0.5, 0.5], seed=0))


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
