"""Sources hear of rows before they are gathered: each batch once, in order, this rank's part only; or of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset, HDF5Dataset, from_arrays
from mpistrat.data.distribution.distributed_dataset import distribute
from mpistrat.data.distribution.workers import Workers
from mpistrat.data.look_ahead import LOOK_AHEAD


@pytest.fixture
def source(tmp_path: Path) -> Dataset:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), compression="gzip")
    return HDF5Dataset(tmp_path / "f.h5", "x")


@pytest.fixture
def calls(source: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What the source is told and asked, in order."""
    seen: list[tuple[str, list[int]]] = []
    for name in ("expect", "gather"):
        original = getattr(HDF5Dataset, name)

        def note(self: Any, epochs: Any, positions: Any, name: str = name, original: Any = original) -> Any:
            seen.append((name, positions.tolist()))
            return original(self, epochs, positions)

        monkeypatch.setattr(HDF5Dataset, name, note)
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

    monkeypatch.setattr(type(dataset), "expect", unexpected)
    assert sum(len(batch) for batch in dataset) == 100
    assert sum(len(batch) for batch in distribute(dataset, Workers([1], 0))) == 100
