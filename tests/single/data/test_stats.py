"""What the input says of itself: samples, bytes, time spent waiting, and counters of each stage."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import HDF5Dataset, InputStats, StageStats, from_arrays, write_shards
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers


def test_a_slow_source_is_seen() -> None:
    """10 steps: the source sleeps 20 ms in each, the loop 5 ms: some 80 % of the time is spent waiting."""

    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return x

    dataset = from_arrays(np.zeros(40)).batch(4)
    part = distribute(dataset.map(slow), Workers(), buffer_size=0)
    for _ in part:
        time.sleep(0.005)
    stats = part.stats()
    assert (stats.steps, stats.samples, stats.bytes) == (10, 40, 320)
    assert stats.wait_seconds >= 0.2
    assert stats.seconds >= stats.wait_seconds + 0.05
    assert stats.input_bound == stats.wait_seconds / stats.seconds
    assert 0.6 < stats.input_bound < 0.95
    assert stats.samples_per_second == 40 / stats.seconds


def test_time_outside_the_loops_does_not_count() -> None:
    part = distribute(from_arrays(np.zeros(4)).batch(2), Workers(), buffer_size=0)
    for _ in range(3):
        list(part)
        time.sleep(0.1)
    assert part.stats().seconds < 0.1


def test_nothing_was_done_yet() -> None:
    stats = distribute(from_arrays(np.zeros(4)).batch(2), Workers()).stats()
    assert (stats.steps, stats.samples_per_second, stats.input_bound) == (0, 0.0, 0.0)


def test_each_stage_is_listed_with_its_counters() -> None:
    def twice(x: np.ndarray) -> np.ndarray:
        time.sleep(0.01)
        return 2 * x

    part = distribute(from_arrays(np.zeros(5)).batch(2).map(twice), Workers(), buffer_size=0)
    iterator = iter(part)
    before = part.stats()
    list(iterator)
    stats = part.stats()
    names = [text.split("(")[0].split(":")[0] for text, _ in stats.stages]
    assert names == ["from_arrays", "batch", "map"]
    assert stats.stages[1][1] is None
    calls, earlier = stats.stages[2][1], before.stages[2][1]
    assert calls is not None
    assert earlier is not None
    assert calls.calls - earlier.calls == 3  # `before` does not change any more
    assert calls.seconds - earlier.seconds >= 0.03


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip", "chunk_rows": 50}], ids=["contiguous", "chunks"])
def test_files_count_what_is_read(tmp_path: Path, layout: Any) -> None:
    """3 files of 100 rows of 8 bytes: mapped, 2,400 bytes; in chunks of 50 rows, 6 chunk reads."""
    write_shards(tmp_path, {"x": np.arange(300.0)}, num_shards=3, **layout)
    part = distribute(HDF5Dataset(tmp_path, "x").batch(30), Workers(), buffer_size=0)
    before = part.stats().stages[0][1]  # one row was read to learn what rows look like, or none
    list(part)
    counters = part.stats().stages[0][1]
    assert counters is not None
    assert before is not None
    assert counters.files == 3
    if layout:
        assert counters.chunk_reads - before.chunk_reads == 6
    else:
        assert counters.bytes_read - before.bytes_read == 2400


def test_a_readable_table() -> None:
    counters = StageStats(calls=2, seconds=0.5, bytes_read=1_500_000)
    stats = InputStats(120, 11_520, 35_400_000, 0.225, 1.8, (("from_arrays", None), ("map(f)", counters)))
    assert str(stats).splitlines() == [
        "120 steps, 11,520 samples, 35 MB in 1.8 s: 6,400 samples/s, input-bound 12%",
        "  from_arrays",
        "  map(f)       2 calls, 0.5 s, 1.5 MB read",
    ]


def test_threads_may_count() -> None:
    counters = StageStats()
    threads = [
        threading.Thread(target=lambda: [counters.add(rows=1, seconds=0.5) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters.rows, counters.seconds) == (8000, 4000.0)


@pytest.mark.parametrize("buffer_size", [0, 1])
def test_reading_ahead_shortens_the_wait(buffer_size: int) -> None:
    """Ten batches of 30 ms, and a loop that takes longer: without reading ahead each is waited for, else the first ones only."""

    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.03)
        return x

    part = distribute(from_arrays(np.zeros(40)).batch(4).map(slow), Workers(), buffer_size=buffer_size)
    for _ in part:
        time.sleep(0.06)
    stats: Any = part.stats()
    assert (stats.wait_seconds < 0.18) == bool(buffer_size)


def test_rows_a_second_are_those_of_the_stage() -> None:
    counters = StageStats(rows=3000, seconds=1.5, skipped=1, waits=2, wait_seconds=0.25)
    assert counters.samples_per_second == 2000
    assert str(counters) == "3,000 rows, 1.5 s, 2,000 samples/s, 1 file skipped, 2 waits, 0.25 s waited"
    assert StageStats(rows=3).samples_per_second == 0
    assert StageStats(calls=3, seconds=1).samples_per_second == 0


@pytest.mark.parametrize("distributed", [False, True])
def test_prefetch_counts_the_time_that_it_is_waited_for(distributed: bool) -> None:
    """10 batches of 20 ms, of a loop that does nothing: all of it is waited for, at the last prefetch only."""

    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return x

    below = from_arrays(np.zeros(40)).batch(4).map(slow).prefetch(1)
    dataset = below.map(lambda x: x).prefetch(2)
    for _ in distribute(dataset, Workers()) if distributed else dataset:
        pass
    counters: Any = dataset.node.counters
    assert 0.15 <= counters.wait_seconds < 2
    assert below.node.counters == StageStats()


def test_a_loop_that_computes_does_not_wait_for_prefetch() -> None:
    dataset = from_arrays(np.zeros(40)).batch(4).prefetch(2)
    for _ in dataset:
        time.sleep(0.02)
    counters: Any = dataset.node.counters
    assert counters.wait_seconds < 0.1


def test_skipped_files_are_counted(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, {"x": np.arange(30)}, num_shards=3)
    paths[1].write_bytes(b"not HDF5")
    part = distribute(HDF5Dataset(tmp_path, "x", on_error="skip").batch(10), Workers())
    counters = part.stats().stages[0][1]
    assert counters is not None
    assert (counters.files, counters.skipped) == (2, 1)
    assert "2 files, 1 file skipped" in str(part.stats())
