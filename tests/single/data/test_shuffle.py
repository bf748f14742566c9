"""Dataset.shuffle: which order a dataset gets, the same for any number of ranks, resumed anywhere, each chunk once."""

from __future__ import annotations

import collections
import logging
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.base import log
from mpistrat.data import Dataset, HDF5Dataset, from_arrays
from mpistrat.data.feed import batches as feed_batches
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.files import chunked, codecs, library, storage

ROWS = 1000


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1000 rows in two files, in chunks of 16 rows."""
    directory = tmp_path_factory.mktemp("compressed")
    for number, (low, high) in enumerate(((0, 610), (610, ROWS))):
        with h5py.File(directory / f"{number}.h5", "w") as file:
            rows = np.arange(low, high)
            file.create_dataset("x", data=rows, chunks=(16,), compression="gzip")
            file.create_dataset("y", data=np.repeat(rows, 3).reshape(-1, 3), chunks=(16, 3), compression="gzip")
    return directory


def listed(dataset: Dataset, epoch: int = 0) -> list[int]:
    dataset.set_epoch(epoch)
    return [int(row) for row in dataset]


def batches(iterator: Any, count: int | None = None) -> list[int]:
    """The samples of so many steps, or of all that are left."""
    samples: list[int] = []
    for step, batch in enumerate(iterator):
        samples += batch.tolist()
        if step + 1 == count:
            break
    return samples


def one_rank(dataset: Dataset, epoch: int = 0) -> list[int]:
    """The samples of an epoch on one rank: of each batch the same as without ranks, in an order of their own."""
    distributed = distribute(dataset, Workers([1], 0), buffer_size=0)
    distributed.set_epoch(epoch)
    dataset.set_epoch(epoch)
    samples: list[int] = []
    for batch, own in zip(dataset, distributed, strict=True):
        assert sorted(own.tolist()) == sorted(batch.tolist())
        samples += own.tolist()
    return samples


def test_the_shuffle_fits_the_data(compressed: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"] = np.arange(50)
    rows, chunks = from_arrays(np.arange(9)), HDF5Dataset(compressed, "x")
    for text, length, dataset in (
        ("full: single rows are cheap to read", 9, rows.shuffle(seed=1)),
        ("full: single rows are cheap to read", 50, HDF5Dataset(tmp_path / "plain.h5", "x").shuffle(10, seed=1)),
        ("in blocks, mixed in windows of 67,108,864 bytes: rows are read in chunks", ROWS, chunks.shuffle(seed=1)),
        ("in blocks, mixed in windows of 100 elements", 900, chunks.take(900).shuffle(100, seed=1)),
        ("in windows of 800 bytes", ROWS, chunks.map(lambda x: x).shuffle(seed=1, window_bytes=800)),
        ("full: whole batches are moved", ROWS, chunks.batch(10).shuffle(seed=1).unbatch()),
        ('full: mode="full"', ROWS, chunks.shuffle(seed=1, mode="full")),
        ('windows of 4 elements: mode="block"', 9, rows.shuffle(4, seed=1, mode="block")),
        ("in a buffer: elements are read in order", 9, rows.filter(lambda x: True).shuffle(5, seed=1)),
    ):
        assert text in str(dataset)
        assert sorted(listed(dataset)) == list(range(length)), text


def test_wrong_arguments() -> None:
    rows = from_arrays(np.arange(9))
    ordered = rows.filter(bool)
    for wrong, arguments, match in (
        (rows, {"seed": "a"}, "seed"),
        (rows, {"seed": 1, "mode": "best"}, "mode"),
        (rows, {"seed": 1, "mode": "full", "window_bytes": 5}, "no window"),
        (rows, {"seed": 1, "buffer_size": 5, "mode": "full"}, "no window"),
        (rows, {"seed": 1, "buffer_size": 0}, "buffer_size"),
        (rows, {"seed": 1, "buffer_size": 1.5}, "buffer_size"),
        (rows, {"seed": 1, "window_bytes": 0}, "window_bytes"),
        (rows, {"seed": 1, "buffer_size": 5, "window_bytes": 5}, "one of buffer_size and window_bytes"),
        (rows.repeat(), {"seed": 1}, "Shuffle before repeat"),
        (ordered, {"seed": 1}, "buffer_size"),
        (ordered, {"seed": 1, "mode": "block", "buffer_size": 5}, "mode"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"Dataset.shuffle.*{match}"):
            wrong.shuffle(**arguments)


@pytest.mark.parametrize("mode", ["full", "block"])
def test_rows_elements_and_batches_agree(compressed: Path, mode: str) -> None:
    window = 100 if mode == "block" else None
    dataset = HDF5Dataset(compressed, ("x", "y")).shuffle(window, seed=3, mode=mode)
    x, y = dataset.rows(np.arange(ROWS), epoch=2)
    assert np.array_equal(y, np.repeat(x, 3).reshape(-1, 3))  # fields stay together
    assert sorted(x.tolist()) == list(range(ROWS))
    dataset.set_epoch(2)
    assert [int(row[0]) for row in dataset] == x.tolist()
    whole = dataset.batch(64)
    whole.set_epoch(2)
    assert np.array_equal(np.concatenate([batch[0] for batch in whole]), x)
    assert dataset.rows([5, 999, 5], epoch=2)[0].tolist() == x[[5, 999, 5]].tolist()


def test_epochs_and_repetitions_have_orders_of_their_own(compressed: Path) -> None:
    rows = HDF5Dataset(compressed, "x")
    shuffled = rows.shuffle(100, seed=3)
    first, second = listed(shuffled), listed(shuffled, 1)
    assert first != second
    assert listed(shuffled.repeat(2)) == first + second
    assert shuffled.repeat(2).batch(ROWS * 2).element(0, 0).tolist() == first + second  # two epochs in one gather
    fixed = rows.shuffle(100, seed=3, reshuffle_each_epoch=False)
    assert listed(fixed) == listed(fixed, 1) == first
    assert listed(rows.shuffle(100, seed=4)) != first


def test_parts_of_a_dataset_are_shuffled_within_themselves(compressed: Path) -> None:
    rows = HDF5Dataset(compressed, "x")
    assert sorted(listed(rows.take(333).shuffle(50, seed=1))) == list(range(333))
    assert sorted(listed(rows.skip(333).shuffle(50, seed=1))) == list(range(333, ROWS))
    assert listed(rows.take(0).shuffle(50, seed=1)) == []
    moved = HDF5Dataset(compressed, "x").batch(30).shuffle(5, seed=2, mode="block")
    assert sorted(batches(moved)) == list(range(ROWS))


@settings(deadline=None, max_examples=25)
@given(ranks=st.integers(1, 64), batch=st.integers(1, 130), window=st.integers(1, 600), seed=st.integers(0, 9))
def test_the_order_is_the_same_for_any_number_of_ranks(
    compressed: Path, ranks: int, batch: int, window: int, seed: int
) -> None:
    dataset = HDF5Dataset(compressed, "x").shuffle(window, seed=seed).batch(batch)
    alone = one_rank(dataset)
    assert sorted(alone) == list(range(ROWS))
    steps = -(-ROWS // batch)
    for step in {0, steps // 2, steps - 1}:
        together: list[int] = []
        for rank in range(ranks):
            iterator = iter(distribute(dataset, Workers([1] * ranks, rank), buffer_size=0))
            iterator.restore({"epoch": 0, "next": step})
            together += next(iterator).tolist()
        assert together == alone[step * batch : (step + 1) * batch]


@pytest.mark.parametrize("mode", ["full", "block"])
def test_another_number_of_ranks_goes_on_where_one_stopped(compressed: Path, mode: str) -> None:
    """Kill and resume after every step, each time on another number of ranks."""
    window = 100 if mode == "block" else None
    dataset = HDF5Dataset(compressed, "x").shuffle(window, seed=5, mode=mode).batch(90)
    alone = one_rank(dataset, 3)
    state = {"epoch": 3, "next": 0}
    seen: list[int] = []
    for ranks in (1, 2, 3, 64, 5, 1, 16, 7, 33, 2, 4, 8):
        step: list[int] = []
        states = []
        for rank in range(ranks):
            iterator = iter(distribute(dataset, Workers([1] * ranks, rank)))
            iterator.restore(state)
            step += next(iterator).tolist()  # with what was read ahead thrown away
            states.append(iterator.state())
            iterator.close()
        assert all(each == states[0] for each in states)
        state = states[0]
        seen += step
    assert seen == alone
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_chunk_is_decoded_once_a_pass_and_rank(
    compressed: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    monkeypatch.setattr(feed_batches, "TOGETHER_BYTES", 0)  # which are more than these windows
    for rank in range(ranks):
        source = HDF5Dataset(compressed, ("x", "y"))
        dataset = source.shuffle(200, seed=1).batch(48)
        iterator = iter(distribute(dataset, Workers([1] * ranks, rank)))
        for _ in iterator:
            pass
        for reader in source.node._open().readers.values():
            chunks = 39 + 25  # 610 / 16 and 390 / 16, rounded up
            if ranks == 1:
                assert reader.counters.chunk_reads == chunks
            else:  # of each of the 5 windows' 12 or 13 chunks a part, and some at the borders of the parts
                assert chunks / ranks <= reader.counters.chunk_reads <= chunks / ranks + 5 * 3
            assert reader._cache.memory.shape[0] <= 2 * (200 / 16 + 1) + chunked._SLACK  # two windows, not all


@pytest.mark.parametrize("batch", [100, 200, 500])
def test_batches_as_large_as_windows_decode_few_chunks_again(
    compressed: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    monkeypatch.setattr(feed_batches, "TOGETHER_BYTES", 0)  # which are more than these windows
    source = HDF5Dataset(compressed, "x")
    assert sorted(batches(source.shuffle(100, seed=1).batch(batch))) == list(range(ROWS))
    assert source.node.counters.chunk_reads < 1.25 * (39 + 25)


def test_the_next_window_is_decoded_while_one_is_read(compressed: Path) -> None:
    source = HDF5Dataset(compressed, "x")
    dataset = source.shuffle(200, seed=1)
    order = dataset.node._chosen._order  # type: ignore[attr-defined]
    first_window = int(order._epoch(0).window_starts[1])
    addresses = np.zeros(first_window, np.int64), np.arange(first_window)
    dataset.node.expect(*addresses)
    dataset.node.gather(*addresses)
    reader = source.node._open().readers["x"]
    present = set(np.flatnonzero(reader._cache._slot_of >= 0).tolist())
    expected = {
        row // 16 if row < 610 else 39 + (row - 610) // 16 for row in dataset.rows(np.arange(first_window + 150))
    }
    assert expected <= present


def test_a_full_shuffle_of_compressed_data_says_that_it_is_slow(
    compressed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            HDF5Dataset(compressed, "x").shuffle(seed=1, mode="full").peek()
        HDF5Dataset(compressed, "x").shuffle(seed=1).peek()
        from_arrays(np.arange(3)).shuffle(seed=1, mode="full").peek()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Dataset.shuffle"]
    assert 'mode="block"' in caplog.text


def in_order(length: int) -> Dataset:
    return from_arrays(np.arange(length)).filter(lambda row: True)


@settings(deadline=None, max_examples=60)
@given(length=st.integers(0, 60), buffer=st.integers(1, 80), seed=st.integers(), start=st.integers(0, 70))
def test_a_buffer_mixes_as_far_as_it_reaches(length: int, buffer: int, seed: int, start: int) -> None:
    shuffled = in_order(length).shuffle(buffer, seed=seed)
    rows = [int(row) for row in shuffled.node.elements(0)]
    assert sorted(rows) == list(range(length))
    assert all(row < place + buffer for place, row in enumerate(rows))  # row r enters when r - buffer + 1 have gone
    assert [int(row) for row in shuffled.node.elements(0, start)] == rows[start:]
    if buffer == 1:
        assert rows == list(range(length))


def test_all_permutations_in_a_buffer_are_equally_likely() -> None:
    counts = collections.Counter(tuple(listed(in_order(4).shuffle(4, seed=seed))) for seed in range(1200))
    statistic = sum((count - 50) ** 2 / 50 for count in counts.values()) + 50 * (math.factorial(4) - len(counts))
    assert statistic < 67.5  # chi-square's 1 - 1e-6 quantile for 23 degrees of freedom


def test_a_buffer_holds_no_more_than_it_says() -> None:
    made = 0

    def count(row: Any) -> bool:
        nonlocal made
        made += 1
        return True

    iterator = iter(from_arrays(np.arange(10_000)).filter(count).shuffle(10, seed=1))
    next(iterator)
    assert made == 11


def test_buffers_of_epochs_differ_and_states_are_restored() -> None:
    shuffled = in_order(50).shuffle(20, seed=1)
    first, second = listed(shuffled), listed(shuffled, 1)
    assert first != second
    fixed = in_order(50).shuffle(20, seed=1, reshuffle_each_epoch=False)
    assert listed(fixed) == listed(fixed, 1) == first
    iterator = iter(shuffled)
    iterator.restore({"epoch": 1, "next": 17})
    assert [int(row) for row in iterator] == second[17:]


def _order(directory: Path, fields: Any, reader: str) -> tuple[str, list[int]]:
    dataset = HDF5Dataset(directory, fields, reader=reader)
    shuffled = dataset.enumerate().map(lambda i, row: i).shuffle(seed=4)
    return str(shuffled), [int(row) for row in shuffled]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"compression": "lzf"}, "x"),
        ({"compression": "gzip"}, "x"),
        ({}, "x"),
        ({"compression": "lzf"}, "text"),
        ({"compression": "gzip"}, ("x", "wide")),
    ],
)
def test_data_in_chunks_has_one_order_whoever_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fields: Any
) -> None:
    for number in range(3):
        stored = {} if number == 1 and fields == "x" else {"chunks": (7,), **options}  # a set of mixed files
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=np.arange(100), **stored)
            file.create_dataset("text", data=["word"] * 100, dtype=h5py.string_dtype(), chunks=(9,), **options)
            file["wide"] = np.zeros((100, 5))  # not chunked, and larger than x
    monkeypatch.setattr(library, "_KEPT", 1000)  # so that h5py reads "wide" in pieces
    text, expected = _order(tmp_path, fields, "auto")
    assert "rows are read in chunks" in text
    assert sorted(expected) == list(range(300))
    assert _order(tmp_path, fields, "h5py")[1] == expected
    monkeypatch.setattr(storage.Chunks, "of", lambda *_: "9999 chunks, which this HDF5 does not list")
    assert _order(tmp_path, fields, "auto")[1] == expected
    monkeypatch.undo()
    monkeypatch.setattr(codecs, "lzf_decoders", tuple)
    monkeypatch.setattr(codecs, "deflate_decoders", tuple)
    text, order = _order(tmp_path, fields, "auto")
    assert order == expected
    assert ("without compiled loops or imagecodecs" in text) == bool(options)
