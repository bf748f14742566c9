"""Caches of one process: what is read once, what is kept, and what is refused."""

import logging
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.base import log
from mpistrat.data import memory_limit
from mpistrat.data.nodes.cache import cache, fill
from mpistrat.data.nodes.cache.fill import Claims
from mpistrat.data.nodes.cache.job import RowPartition
from mpistrat.data.nodes.cache.rows import RowChunks, RowMemory
from mpistrat.data.nodes.order import Reindexed
from mpistrat.data.nodes.window import _OfEpoch
from mpistrat.data.spec import ArraySpec
from mpistrat.errors import CollectiveTimeoutError
from tests.harness.clock import Clock

Dataset = ms.data.Dataset


def as_lists(dataset):
    return [{name: leaf.tolist() for name, leaf in element.items()} for element in dataset]


def rows(count):
    return {"x": np.arange(3.0 * count).reshape(count, 3), "y": np.arange(count, dtype=np.int16)}


class Watched:
    """A function that leaves rows as they are and notes which were asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, row):
        self.seen.append(int(row["y"]))
        return row


STAGES = {
    "shuffle": lambda d: d.shuffle(seed=5),
    "take": lambda d: d.take(7),
    "skip": lambda d: d.skip(3),
    "repeat": lambda d: d.repeat(2),
    "batch": lambda d: d.batch(4),
    "partial batches": lambda d: d.batch(4, drop_remainder=True),
}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 23), st.lists(st.sampled_from(sorted(STAGES)), max_size=4), st.integers(0, 4))
@example(5, ["batch", "shuffle", "repeat"], 2)
def test_a_cache_changes_no_element(count, names, place):
    """It keeps epoch 0 of what is below, as in tf.data: a shuffle below has one order in all repetitions above."""

    def chain(cache):
        dataset = ms.data.from_arrays(rows(count))
        for number, name in enumerate([*names, None]):
            if number == min(place, len(names)):
                dataset = dataset.cache() if cache else Dataset(Reindexed(dataset.node, _OfEpoch(0)))
            if name is not None and not (dataset.node.batching is not None and "batch" in name):
                dataset = STAGES[name](dataset)
        return dataset

    plain, kept = chain(False), chain(True)
    for epoch in range(2):
        plain.set_epoch(epoch)
        assert as_lists(kept) == as_lists(plain)
    assert kept.element_spec == plain.element_spec


@pytest.mark.parametrize("batch_first", [False, True])
def test_each_row_is_made_once(batch_first):
    watched = Watched()
    dataset = ms.data.from_arrays(rows(50)).map(watched)
    dataset = dataset.batch(8).cache() if batch_first else dataset.cache().shuffle(seed=1).batch(8)
    spec = dataset.element_spec  # learns it from the first row
    assert watched.seen == [0]
    assert spec["x"].shape == (None, 3)
    for _ in range(3):
        for _ in dataset:
            pass
    assert sorted(watched.seen[1:]) == list(range(50))


def test_only_rows_that_are_asked_for_are_made():
    watched = Watched()
    dataset = ms.data.from_arrays(rows(50)).map(watched).cache()
    assert dataset.rows([3, 40, 3])["y"].tolist() == [3, 40, 3]
    assert dataset.rows([40, 5])["y"].tolist() == [40, 5]
    assert watched.seen[1:] == [3, 40, 5]
    assert dataset.node.counters.rows == 3


def test_chunks_are_read_whole_and_once(tmp_path):
    ms.data.write_shards(tmp_path, rows(100), layout="chunked", compression="gzip", chunk_rows=16)
    source = ms.data.HDF5Dataset(tmp_path, fields="x")
    dataset = source.cache()
    assert dataset.rows([17])[0, 0] == 51.0
    assert (dataset.node.counters.chunk_reads, dataset.node.counters.rows) == (1, 16)
    for _ in range(2):
        assert np.concatenate(list(dataset.shuffle(seed=1).batch(9))).shape == (100, 3)
    assert (dataset.node.counters.chunk_reads, dataset.node.counters.rows) == (7, 100)
    assert source.node.counters.chunk_reads == 7


def test_a_shuffle_below_keeps_the_order_of_its_first_epoch():
    below = ms.data.from_arrays(np.arange(30)).shuffle(seed=2)
    dataset = below.cache()
    first = [int(x) for x in dataset]
    assert [int(x) for x in dataset] == first == below.rows(range(30)).tolist()


def test_what_a_user_does_to_a_batch_does_not_reach_the_cache():
    for dataset in (
        ms.data.from_arrays(np.arange(6)).cache().batch(3),
        ms.data.from_arrays(np.arange(6)).batch(3).cache(),
        Dataset.from_generator(lambda: iter(range(6))).batch(3).cache(),
    ):
        for batch in dataset:
            batch[:] = 99
        for _ in range(2):
            assert [batch.tolist() for batch in dataset] == [[0, 1, 2], [3, 4, 5]]


def test_rows_of_different_shapes_and_strings():
    spec = ArraySpec((None,), np.int64)
    ragged = ms.data.from_arrays(np.arange(5)).map(lambda i: np.arange(i), element_spec=spec).cache()
    for _ in range(2):
        assert [row.tolist() for row in ragged] == [list(range(i)) for i in range(5)]
    assert [batch.shape for batch in ragged.padded_batch(2)] == [(2, 1), (2, 3), (1, 4)]
    padded = ms.data.from_arrays(np.arange(5)).map(lambda i: np.arange(i), element_spec=spec).padded_batch(2).cache()
    for _ in range(2):
        assert [batch.shape for batch in padded] == [(2, 1), (2, 3), (1, 4)]
    words = ms.data.from_arrays(np.arange(3)).map(lambda i: "abc"[int(i) :]).cache()
    for _ in range(2):
        assert list(words) == ["abc", "bc", "c"]


@pytest.mark.parametrize("lengths", [[1, 2, 3, 4], [3, 3, 1, 1]])  # what is narrower could be stretched to fit
def test_batches_that_a_map_says_wrongly_to_be_equally_wide(lengths):
    spec = ArraySpec((None,), np.int64)
    padded = ms.data.from_arrays(np.array(lengths)).map(lambda i: np.arange(i), element_spec=spec).padded_batch(2)
    with pytest.raises(
        ValueError, match=r"Dataset\.cache: expected rows like the first ones, int64\[\d\], got.*to map"
    ):
        list(padded.map(lambda batch: -batch).cache())
    cached = padded.map(lambda batch: -batch, element_spec=spec).cache()
    for _ in range(2):
        assert [batch.tolist() for batch in cached] == [(-batch).tolist() for batch in padded]


def test_batches_of_another_dtype_than_the_first():
    rows = ms.data.from_arrays(np.arange(4)).batch(2).map(lambda x: x / 2 if x[0] else x)
    with pytest.raises(ValueError, match=r"like the first ones, int64\[\], got float64\[\]"):
        list(rows.cache())


def test_in_order_a_complete_pass_is_kept():
    calls = []

    def generate():
        calls.append(1)
        yield from range(5)

    dataset = Dataset.from_generator(generate, ArraySpec((), np.int64)).cache()
    assert "no complete epoch" in str(dataset)
    for _ in range(3):
        assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    assert len(calls) == 1
    assert "5 elements, 40 B in memory" in str(dataset)
    iterator = iter(dataset)
    iterator.restore({"epoch": 7, "next": 3})
    assert [int(x) for x in iterator] == [3, 4]


def test_in_order_a_pass_that_begins_in_the_middle_is_kept_whole():
    dataset = Dataset.from_generator(lambda: iter(range(5)), ArraySpec((), np.int64)).cache()
    assert [int(x) for x in dataset.skip(3)] == [3, 4]
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]


def test_in_order_an_incomplete_pass_is_dropped_with_a_word(caplog):
    log.once.cache_clear()
    calls = []

    def generate():
        calls.append(1)
        yield from range(5)

    dataset = Dataset.from_generator(generate, ArraySpec((), np.int64)).cache()
    with caplog.at_level(logging.WARNING, logger="mpistrat"):
        assert [int(x) for x in dataset.take(2)] == [0, 1]
    assert "an epoch ended before the dataset did" in caplog.text
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    assert len(calls) == 2


def test_refusals():
    finite = ms.data.from_arrays(np.arange(4))
    with pytest.raises(ValueError, match=r"expected a dataset with an end.*Call repeat after cache"):
        finite.repeat().cache()
    with pytest.raises(ValueError, match=r"scope: expected one of 'rank', 'node', 'job', got 'host'"):
        finite.cache("host")
    with pytest.raises(ValueError, match=r"transport: expected one of"):
        finite.cache("job", transport="smoke")
    with pytest.raises(ValueError, match=r"a dataset with random access for cache\('node'\).*Use cache\(\)"):
        finite.filter(lambda x: True).cache("node")


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(cache, "available_memory", lambda: 1000)
    dataset = ms.data.from_arrays(np.zeros((300, 10), np.float32)).cache()
    message = r"expected 12 kB of free memory for 300 rows, got 1.0 kB. Use cache\(\"node\"\)"
    with pytest.raises(MemoryError, match=message):
        dataset.rows([0])
    monkeypatch.setattr(cache, "_CHECK_BYTES", 2000)
    ordered = Dataset.from_generator(lambda: iter(np.zeros((20, 100)))).cache()
    with pytest.raises(MemoryError, match="for the elements after the 3 cached ones"):
        list(ordered)


def test_unbound_shared_caches_work_as_those_of_a_rank():
    for scope in ("node", "job"):
        dataset = ms.data.from_arrays(rows(20)).cache(scope)
        assert "not distributed yet" in str(dataset)
        assert as_lists(dataset) == as_lists(ms.data.from_arrays(rows(20)))


def test_one_cache_serves_all_that_is_made_of_it():
    watched = Watched()
    base = ms.data.from_arrays(rows(20)).map(watched).cache()
    list(base.batch(3))
    list(base.shuffle(seed=1).take(9))
    assert as_lists(Dataset.zip({"a": base, "b": base}).map(lambda r: r["a"])) == as_lists(
        ms.data.from_arrays(rows(20))
    )
    assert len(watched.seen) == 21  # one of them for the spec


def test_many_threads_read_each_row_once():
    watched = Watched()

    def slow(row):
        time.sleep(1e-4)
        return watched(row)

    dataset = ms.data.from_arrays(rows(200)).map(slow).cache()
    _ = dataset.element_spec
    found = []

    def read(seed):
        for batch in dataset.shuffle(seed=seed).batch(10):
            found.append(np.array_equal(batch["x"][:, 0], 3.0 * batch["y"]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    assert sorted(watched.seen[1:]) == list(range(200))


def test_an_error_reaches_who_reads_and_the_next_try_reads_again():
    broken = [True]

    def function(x):
        if x == 3 and broken[0]:
            raise OSError("gone")
        return x

    dataset = ms.data.from_arrays(np.arange(6)).map(function).cache()
    assert dataset.rows([1, 2]).tolist() == [1, 2]
    with pytest.raises(OSError, match="gone"):
        dataset.rows([2, 3, 4])
    broken[0] = False
    assert dataset.rows(range(6)).tolist() == [0, 1, 2, 3, 4, 5]


def test_who_waits_meets_the_error_itself():
    started, go = threading.Event(), threading.Event()
    calls = []

    def function(x):
        if x == 1:
            calls.append(threading.current_thread().name)
            started.set()
            go.wait(5)
            raise OSError("gone")
        return x

    dataset = ms.data.from_arrays(np.arange(2)).map(function).cache()
    _ = dataset.element_spec
    errors = []

    def read():
        try:
            dataset.rows([1])
        except OSError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=read, name=str(i)) for i in range(2)]
    threads[0].start()
    started.wait(5)
    threads[1].start()
    time.sleep(0.05)
    go.set()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 2
    assert sorted(calls) == ["0", "1"]


def test_time_that_is_waited_for_another_thread_is_counted(monkeypatch):
    clock, started = Clock(), threading.Event()
    clock.replace_time(monkeypatch, fill)

    def function(x):
        clock.asked.clear()
        started.set()
        assert clock.asked.wait(30)  # the other thread waits
        clock.sleep(0.05)
        return x

    dataset = ms.data.from_arrays(np.arange(1)).map(function, element_spec=ms.data.ArraySpec((), "int64")).cache()
    first = threading.Thread(target=dataset.rows, args=([0],))
    first.start()
    assert started.wait(30)
    assert dataset.rows([0]).tolist() == [0]
    first.join(30)
    assert dataset.node.counters.waits == 1
    assert dataset.node.counters.wait_seconds == pytest.approx(0.05)
    assert "1 wait, 0.05 s waited" in str(dataset.node.counters)


def test_a_wait_has_an_end():
    claims = Claims(np.zeros(3, np.int16), 1, (40_000, 40_001), timeout=0.05)
    assert claims.claim(np.array([1])).tolist() == [1]
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for rows that rank 40001 reads"):
        claims.wait(np.array([1]))
    claims.release(np.array([1]), ready=True)
    assert claims.missing(np.array([1, 2, 1, 0, 2])).tolist() == [0, 2]
    assert issubclass(CollectiveTimeoutError, TimeoutError)


@given(st.integers(0, 60), st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_parts_are_whole_pieces_and_cover_all(count, size, ranks_of_nodes):
    chunks = RowChunks(count, size)
    numbers = iter(range(100))
    parts = RowPartition.of(chunks, [[next(numbers) for _ in range(n)] for n in ranks_of_nodes])
    ranges = [parts.of_rank(rank) for ranks in parts.ranks for rank in ranks]
    assert [row for low, high in ranges for row in range(low, high)] == list(range(count))
    assert all(low % size == 0 for low, _ in ranges if low < count)
    assert [row for node in range(len(ranks_of_nodes)) for row in range(*parts.of_node(node))] == list(range(count))
    fair = -(-count // len(ranges)) + size
    assert all(high - low <= fair for low, high in ranges)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(1, 20), st.data())
def test_pieces_of_chunks(lengths, at_a_time, data):
    starts = np.concatenate(([0], np.cumsum(lengths)))
    chunks = RowChunks(int(starts[-1]), starts=starts)
    owner = [chunk for chunk, length in enumerate(lengths) for _ in range(length)]
    assert chunks.numbers(np.arange(starts[-1])).tolist() == owner
    some = np.unique(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1)))
    runs = list(chunks.runs(some, at_a_time))
    assert np.concatenate(runs).tolist() == some.tolist()
    assert all(sum(lengths[p] for p in run.tolist()) <= at_a_time + 7 for run in runs)


def test_rows_in_shared_bytes_lie_beside_each_other():
    spec = {"a": ArraySpec((3,), np.uint8), "b": ArraySpec((), np.float64)}
    block = np.zeros(RowMemory.nbytes(spec, 5), np.uint8)
    memory = RowMemory(spec, 5, block)
    memory.put(np.array([1, 2]), {"a": np.full((2, 3), 7, np.uint8), "b": np.array([0.5, 1.5])})
    again = RowMemory(spec, 5, block)
    assert again.arrays[0].tolist() == [[0] * 3, [7] * 3, [7] * 3, [0] * 3, [0] * 3]
    assert again.arrays[1].tolist() == [0, 0.5, 1.5, 0, 0]
    assert memory.ranges(np.array([1, 2])) == [(3, 9), (64 + 8, 64 + 24)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 1"}, 4096 * 1024),
        ({"memory.max": "9000", "memory.current": "5000", "memory.stat": "anon 3\ninactive_file 1000"}, 5000),
        ({"memory.max": "9000", "memory.current": "9500", "memory.stat": ""}, 0),
        ({}, 4096 * 1024),
    ],
)
def test_available_memory(tmp_path, monkeypatch, files, expected):
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:  4096 kB\n")
    (tmp_path / "cgroup").write_text("0::/jobs/mine\n")
    folder = tmp_path / "fs/jobs/mine"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder.parent / name).write_text(text)
    monkeypatch.setattr(memory_limit, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limit, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limit, "_ROOT", tmp_path / "fs")
    assert memory_limit.available_memory() == expected
