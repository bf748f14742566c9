"""Sources hear of rows before they are gathered: each batch once, in order, this rank's part only; or of nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset, HDF5Dataset, from_arrays
from mpistrat.data.feed import batches as feed_batches
from mpistrat.data.feed.batches import LOOK_AHEAD
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.files.hdf5 import HDF5Rows


@pytest.fixture
def source(tmp_path: Path) -> Dataset:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), compression="gzip")
    return HDF5Dataset(tmp_path / "f.h5", "x")


@pytest.fixture
def calls(source: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What the source is told and asked, in order; batches are not gathered together."""
    monkeypatch.setattr(feed_batches, "TOGETHER_BYTES", 0)
    seen: list[tuple[str, list[int]]] = []
    for name in ("expect", "gather"):
        original = getattr(HDF5Rows, name)

        def note(self: Any, epochs: Any, positions: Any, name: str = name, original: Any = original) -> Any:
            seen.append((name, positions.tolist()))
            return original(self, epochs, positions)

        monkeypatch.setattr(HDF5Rows, name, note)
    return seen


def test_each_batch_is_expected_once_before_it_is_gathered(source: Dataset, calls: list) -> None:
    parts = [list(range(low, min(low + 15, 100))) for low in range(0, 100, 15)]
    for _ in source.batch(15):
        pass
    assert [rows for name, rows in calls if name == "gather"] == parts
    assert [rows for name, rows in calls if name == "expect"] == parts[1:]  # all but the first
    for number, part in enumerate(parts[1:], 1):
        told, asked = calls.index(("expect", part)), calls.index(("gather", parts[max(0, number - LOOK_AHEAD)]))
        assert told < asked


def test_it_goes_on_from_where_a_state_says(source: Dataset, calls: list) -> None:
    iterator = iter(source.batch(15))
    iterator.restore({"epoch": 0, "next": 5})
    assert [len(batch) for batch in iterator] == [15, 10]
    assert calls == [
        ("expect", list(range(90, 100))),
        ("gather", list(range(75, 90))),
        ("gather", list(range(90, 100))),
    ]


def test_a_rank_expects_its_own_part(source: Dataset, calls: list) -> None:
    iterator = iter(distribute(source.batch(20), Workers([1] * 4, 1), buffer_size=0))
    assert next(iterator).tolist() == [5, 6, 7, 8, 9]
    assert [rows for name, rows in calls if name == "expect"] == [list(range(low, low + 5)) for low in (25, 45)]


def test_single_rows_are_expected_many_at_a_time(source: Dataset, calls: list) -> None:
    assert [int(row) for row in source] == list(range(100))
    told = [row for name, rows in calls if name == "expect" for row in rows]
    assert set(range(1, 100)) <= set(told)
    assert len(calls) < 40


def test_below_a_stage_that_reads_in_order_sources_hear_too(source: Dataset, calls: list) -> None:
    assert len(list(source.filter(lambda row: row % 2 == 0).batch(10))) == 5
    assert any(name == "expect" for name, _ in calls)


def test_where_rows_are_cheap_nothing_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = from_arrays(np.arange(100)).shuffle(seed=1).batch(10)

    def unexpected(*arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(type(dataset.node), "expect", unexpected)
    assert sum(len(batch) for batch in dataset) == 100
    assert sum(len(batch) for batch in distribute(dataset, Workers([1], 0))) == 100


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the sources are asked for, call by call, however long one takes."""
    monkeypatch.setattr(feed_batches, "TOGETHER_SECONDS", 1e9)
    seen: list[int] = []
    for kind in (HDF5Rows, type(from_arrays(np.zeros(1)).node)):
        original = kind.gather

        def note(self: Any, epochs: Any, positions: Any, original: Any = original) -> Any:
            seen.append(positions.size)
            return original(self, epochs, positions)

        monkeypatch.setattr(kind, "gather", note)
    return seen


def test_small_batches_are_gathered_together(gathered: list[int]) -> None:
    """Rows of 64 B: 512 KiB are 8,192 rows, 32 batches of 256. The first comes alone, then 2, 4, ... and 32 of them."""
    data = np.arange(20_000 * 8).reshape(20_000, 8)
    for dataset in (from_arrays(data).batch(256), distribute(from_arrays(data).batch(256), Workers())):
        gathered.clear()
        batches = list(dataset)
        assert [len(batch) for batch in batches] == [256] * 78 + [32]
        assert np.array_equal(np.concatenate(batches), data)
        assert gathered == [256, 512, 1024, 2048, 4096, 8192, 15 * 256 + 32]


@pytest.mark.parametrize("chain", ["map", "map batches", "strings", "large", "padded"])
def test_what_is_gathered_alone(chain: str, gathered: list[int]) -> None:
    """What a function sees, what takes an unknown number of bytes, and batches that are large enough."""
    rows = {
        "map": lambda: from_arrays(np.arange(100)).map(lambda x: x + 1),
        "map batches": lambda: from_arrays(np.arange(100)),
        "strings": lambda: from_arrays(np.array([str(i) for i in range(100)], object)),
        "large": lambda: from_arrays(np.zeros((100, 1 << 13))),
        "padded": lambda: from_arrays(np.arange(100)),
    }[chain]()
    dataset = rows.padded_batch(10) if chain == "padded" else rows.batch(10)
    if chain == "map batches":
        dataset = dataset.map(lambda x: x + 1)
    _ = dataset.element_spec
    gathered.clear()
    assert len(list(dataset)) == 10
    assert gathered == [10] * 10


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_slow_to_read_is_gathered_alone(
    slow: bool, gathered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads ahead would be in one long call while the loop waits. 1 ms a row here, and calls of at most 4 ms, or 1 s."""
    monkeypatch.setattr(feed_batches, "TOGETHER_SECONDS", 4e-3 if slow else 1.0)
    source = type(from_arrays(np.zeros(1)).node)
    noted = source.gather

    def gather(self: Any, epochs: Any, positions: Any) -> Any:
        time.sleep(1e-3 * positions.size)
        return noted(self, epochs, positions)

    monkeypatch.setattr(source, "gather", gather)
    assert len(list(from_arrays(np.arange(64)).batch(2))) == 32
    assert max(gathered[4:]) <= 4 if slow else max(gathered) >= 16


def test_passes_are_gathered_apart(gathered: list[int]) -> None:
    """Of 1, 2, 4 and 8 batches each run that ends in the same pass is one call."""
    rows = from_arrays(np.arange(10))
    assert [batch.tolist() for batch in rows.repeat(3).batch(4)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    ]  # fmt: skip
    assert gathered == [4, 4, 4, 8, 8, 2]


def test_batches_in_front_of_one_that_cannot_be_read_come_first(
    source: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HDF5Rows.gather

    def gather(self: Any, epochs: Any, positions: Any) -> Any:
        if 57 in positions:
            raise OSError("a cable")
        return original(self, epochs, positions)

    monkeypatch.setattr(HDF5Rows, "gather", gather)
    iterator = iter(source.batch(10))
    for first in range(0, 50, 10):
        assert next(iterator).tolist() == list(range(first, first + 10))
    with pytest.raises(OSError, match="a cable"):
        next(iterator)
    monkeypatch.setattr(HDF5Rows, "gather", original)
    assert [batch.tolist()[0] for batch in iterator] == [50, 60, 70, 80, 90]


def test_batches_gathered_together_share_no_rows() -> None:
    batches = list(from_arrays(np.arange(40)).batch(4))
    for batch in batches:
        batch += 100
    assert np.concatenate(batches).tolist() == list(range(100, 140))
