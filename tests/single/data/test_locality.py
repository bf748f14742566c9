"""Shuffled batches are divided so that a rank needs few chunks: the same rows, in one order for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.base import nest
from mpistrat.base.distributed_values import PerReplica
from mpistrat.data import Dataset, HDF5Dataset, from_arrays, sample_from_datasets
from mpistrat.data import zip as zip_datasets
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.files import chunked
from mpistrat.data.permutation import LOCALITIES, by_locality, localities

ROWS, CHUNK = 1920, 8


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 chunks of 8 rows in three files; the second row of each is twice the first one."""
    directory = tmp_path_factory.mktemp("compressed")
    for number in range(3):
        with h5py.File(directory / f"{number}.h5", "w") as file:
            rows = np.arange(number * ROWS // 3, (number + 1) * ROWS // 3)
            file.create_dataset("x", data=rows, chunks=(CHUNK,), compression="gzip")
            file.create_dataset("y", data=2 * rows, chunks=(CHUNK,), compression="lzf")
    return directory


def twice(x: Any, y: Any) -> Any:
    return 2 * x, 2 * y


def chains(rows: Dataset, batch: int) -> dict[str, Dataset]:
    """Chains of pairs (x, 2 x), whose elements are batches."""
    mixed = rows.shuffle(300, seed=1)
    other = rows.shuffle(200, seed=9)
    pairs = from_arrays((np.arange(50), 2 * np.arange(50)))
    return {
        "blocks": mixed.batch(batch),
        "full": rows.shuffle(seed=2, mode="full").batch(batch),
        "parts": mixed.skip(7).take(1500).shard(3, 1).batch(batch),
        "repeated": mixed.repeat(2).batch(batch),
        "mapped": mixed.map(twice).batch(batch),
        "mapped batches": mixed.batch(batch).map(twice),
        "unbatched": mixed.batch(17).unbatch().batch(batch),
        "padded": mixed.padded_batch(batch),
        "shuffled batches": mixed.batch(batch).shuffle(seed=4),
        "shuffled again": mixed.shuffle(seed=5).batch(batch),
        "in blocks again": mixed.shuffle(100, seed=5, mode="block").batch(batch),
        "one behind the other": mixed.concatenate(other).batch(batch),
        "one behind the other, shuffled": rows.concatenate(rows).shuffle(300, seed=3).batch(batch),
        "batches behind each other": mixed.batch(batch).concatenate(other.batch(batch)),
        "drawn": sample_from_datasets([mixed, other], [0.7, 0.3], seed=6).batch(batch),
        "beside what is cheap": mixed.concatenate(pairs).batch(batch),
        "cached": mixed.cache().batch(batch),
        "prefetched": mixed.batch(batch).prefetch(1),
    }


def steps(dataset: Dataset, workers: Workers, start: int, stop: int, epoch: int = 0) -> list[list[Any]]:
    """The replicas' parts of some steps, with one worker's numbers of replicas."""
    iterator = iter(distribute(dataset, workers, buffer_size=0))
    iterator.restore({"epoch": epoch, "next": start})
    parts = []
    for _ in range(start, stop):
        element = next(iterator)
        leaves = nest.flatten(element)
        count = len(leaves[0].values) if isinstance(leaves[0], PerReplica) else 0
        pick = [[leaf.values[i] for leaf in leaves] for i in range(count)] if count else [leaves]
        parts.append(pick)
    iterator.close()
    return parts


def together(dataset: Dataset, replicas: list[int], start: int, stop: int) -> list[list[list[int]]]:
    """The arrays of whole global batches, put together from what each worker's replicas get."""
    of_workers = [steps(dataset, Workers(replicas, index), start, stop) for index in range(len(replicas))]
    whole = []
    for step in zip(*of_workers, strict=True):
        blocks = [block for worker in step for block in worker]
        whole.append([np.concatenate(column).tolist() for column in zip(*blocks, strict=True)])
    return whole


@pytest.mark.parametrize("name", chains(from_arrays((np.arange(100), np.arange(100))), 5))
def test_the_same_batches_in_the_same_order_for_any_number_of_ranks(compressed: Path, name: str) -> None:
    dataset = chains(HDF5Dataset(compressed, ("x", "y")), 90)[name]
    plain = [[leaf.tolist() for leaf in batch] for batch in dataset]
    last = len(plain)
    alone = together(dataset, [1], 0, last)
    for before, after in zip(plain, alone, strict=True):
        assert sorted(zip(*before, strict=True)) == sorted(zip(*after, strict=True))  # each row once, fields together
        assert after[1] == [2 * x for x in after[0]]
    for replicas in ([1] * 2, [1] * 3, [2, 1, 2], [1] * 64):
        for start, stop in ((0, min(3, last)), (last // 2, last // 2 + 1), (last - 1, last)):
            assert together(dataset, replicas, start, stop) == alone[start:stop]


@pytest.mark.parametrize("name", ["blocks", "repeated", "drawn"])
def test_it_does_not_depend_on_where_reading_begins(compressed: Path, name: str) -> None:
    dataset = chains(HDF5Dataset(compressed, ("x", "y")), 50)[name]
    alone = together(dataset, [1], 0, len(dataset))
    for start in range(len(dataset)):
        assert together(dataset, [1] * (start % 5 + 1), start, start + 1) == alone[start : start + 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows.batch(90),
        lambda rows: rows.skip(5).repeat(2).batch(90),
        lambda rows: zip_datasets(rows, rows.map(lambda x, y: y)).batch(90),
        lambda rows: rows.cache().shuffle(seed=1).batch(90),
        lambda rows: rows.shuffle(100, seed=1).concatenate(rows.take(20)).batch(90),
        lambda rows: rows.batch(90).shuffle(seed=1),
        lambda rows: from_arrays((np.arange(500), 2 * np.arange(500))).shuffle(seed=1).batch(90),
        lambda rows: from_arrays((np.arange(500), 2 * np.arange(500))).shuffle(20, seed=1, mode="block").batch(90),
    ],
)
def test_an_order_that_no_shuffle_of_chunks_made_stays(compressed: Path, make: Any) -> None:
    dataset = make(HDF5Dataset(compressed, ("x", "y")))
    plain = [[leaf.tolist() for leaf in nest.flatten(batch)] for batch in dataset]
    assert together(dataset, [1, 1], 0, len(plain)) == plain


def test_zipped_rows_stay_together(compressed: Path) -> None:
    rows = HDF5Dataset(compressed, "x")
    for zipped in (
        zip_datasets(rows.shuffle(100, seed=1), HDF5Dataset(compressed, "y").shuffle(100, seed=1)).batch(70),
        zip_datasets(rows.shuffle(100, seed=1).batch(70), HDF5Dataset(compressed, "y").shuffle(100, seed=1).batch(70)),
        zip_datasets(from_arrays(np.arange(ROWS)), rows.map(lambda x: 2 * x).shuffle(100, seed=1)).batch(70),
    ):
        plain = [list(zip(*(leaf.tolist() for leaf in batch), strict=True)) for batch in zipped]
        found = together(zipped, [1] * 3, 0, len(plain))
        assert [sorted(zip(*batch, strict=True)) for batch in found] == [sorted(batch) for batch in plain]
        assert [list(zip(*batch, strict=True)) for batch in found] != plain


def chunk_reads(path: Path, ranks: int, rank: int, window: int, batch: int) -> tuple[int, int]:
    """How many chunks a rank decodes in an epoch, and how many it has rows of."""
    source = HDF5Dataset(path, "x")
    data = distribute(source.shuffle(window * CHUNK, seed=1).batch(batch * ranks), Workers([1] * ranks, rank))
    rows = np.concatenate(list(data))
    return source.node.counters.chunk_reads, np.unique(rows // CHUNK).size


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 64])
def test_a_rank_decodes_its_part_of_each_window(compressed: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 windows of 80 chunks; the border of a part moves with the draw: by the square root of the rows of a batch."""
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    window, batch = 80, 64 if ranks <= 4 else 8
    for rank in {0, ranks // 2, ranks - 1}:
        read, needed = chunk_reads(compressed, ranks, rank, window, batch)
        part = ROWS / CHUNK / ranks
        border = 0 if ranks == 1 else window * 2 / np.sqrt(batch * ranks)  # two standard deviations, twice a half
        assert part <= needed <= part + 3 * (border + 2)
        assert needed <= read <= 1.2 * needed + 3  # the rest was announced, and not read then


@settings(deadline=None, max_examples=100)
@given(data=st.data(), counts=st.lists(st.integers(0, 40), max_size=8))
def test_batches_are_sorted_each_by_itself(data: Any, counts: list[int]) -> None:
    total = sum(counts)
    numbers = data.draw(st.lists(st.sampled_from([0, 1, 5, LOCALITIES - 1]), min_size=total, max_size=total))
    expected: list[int] = []
    for count in counts:
        low = len(expected)
        expected += sorted(range(low, low + count), key=lambda row: numbers[row])  # sorted() is stable
    assert by_locality(np.array(numbers, np.int64), counts).tolist() == expected


def test_localities_keep_the_order_of_places() -> None:
    assert localities(np.arange(4), 4).tolist() == [0, LOCALITIES // 4, LOCALITIES // 2, LOCALITIES // 4 * 3]
    assert localities(np.array([0, 2**36, 2**37 - 1]), 2**37).tolist() == [0, LOCALITIES // 2, LOCALITIES - 1]
    assert localities(np.empty(0, np.int64), 0).size == 0
