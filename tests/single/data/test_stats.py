"""What the input says of itself: samples, bytes, time spent waiting, and counters of each stage."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, HDF5Dataset, InputStats, StageStats, from_arrays, write_shards
from mpistrat.data.feed import distributed, feed
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.nodes import calls
from tests.harness.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of what is distributed, of mapped functions, and of what is read ahead."""
    clock = Clock()
    clock.replace_time(monkeypatch, distributed, calls, feed)
    return clock


def test_a_slow_source_is_seen(clock: Clock) -> None:
    """10 steps: the source sleeps 20 ms in each, the loop 5 ms: 80 % of the time is spent waiting."""

    def slow(x: np.ndarray) -> np.ndarray:
        clock.sleep(0.02)
        return x

    dataset = from_arrays(np.zeros(40)).batch(4)
    part = distribute(dataset.map(slow), Workers(), buffer_size=0)
    for _ in part:
        clock.sleep(0.005)
    stats = part.stats()
    assert (stats.steps, stats.samples, stats.bytes) == (10, 40, 320)
    assert stats.wait_seconds == pytest.approx(0.2)
    assert stats.seconds == pytest.approx(0.25)
    assert stats.input_bound == pytest.approx(0.8)
    assert stats.samples_per_second == pytest.approx(160)


def test_time_outside_the_loops_does_not_count(clock: Clock) -> None:
    part = distribute(from_arrays(np.zeros(4)).batch(2), Workers(), buffer_size=0)
    for _ in range(3):
        list(part)
        clock.sleep(0.1)
    assert part.stats().seconds == 0


def test_nothing_was_done_yet() -> None:
    stats = distribute(from_arrays(np.zeros(4)).batch(2), Workers()).stats()
    assert (stats.steps, stats.samples_per_second, stats.input_bound) == (0, 0.0, 0.0)


def test_each_stage_is_listed_with_its_counters(clock: Clock) -> None:
    def twice(x: np.ndarray) -> np.ndarray:
        clock.sleep(0.01)
        return 2 * x

    part = distribute(from_arrays(np.zeros(5)).batch(2).map(twice), Workers(), buffer_size=0)
    iterator = iter(part)
    before = part.stats()
    list(iterator)
    stats = part.stats()
    names = [text.split("(")[0].split(":")[0] for text, _ in stats.stages]
    assert names == ["from_arrays", "batch", "map"]
    assert stats.stages[1][1] is None
    later, earlier = stats.stages[2][1], before.stages[2][1]
    assert later is not None
    assert earlier is not None
    assert later.calls - earlier.calls == 3  # `before` does not change any more
    assert later.seconds - earlier.seconds == pytest.approx(0.03)


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
def test_reading_ahead_shortens_the_wait(buffer_size: int, clock: Clock) -> None:
    """Ten batches of 30 ms, and a loop that takes longer: with reading ahead only those are waited for that show it helps."""
    may_begin, made, waited_for = threading.Semaphore(1), threading.Semaphore(0), 4 if buffer_size else 10

    def slow(x: np.ndarray) -> np.ndarray:
        assert may_begin.acquire(timeout=30)
        clock.sleep(0.03)
        made.release()
        return x

    dataset = from_arrays(np.zeros(40)).batch(4).map(slow, element_spec=ArraySpec((4,), "float64"))
    part = distribute(dataset, Workers(), buffer_size=buffer_size)
    for number, _ in enumerate(part, 1):
        if number <= waited_for:
            assert made.acquire(timeout=30)
        may_begin.release()
        if waited_for <= number < 10:
            assert made.acquire(timeout=30), "the next batch is not made while the loop computes"
    assert part.stats().wait_seconds == pytest.approx(0.03 * waited_for)


def test_rows_a_second_are_those_of_the_stage() -> None:
    counters = StageStats(rows=3000, seconds=1.5, skipped=1, waits=2, wait_seconds=0.25)
    assert counters.samples_per_second == 2000
    assert str(counters) == "3,000 rows, 1.5 s, 2,000 samples/s, 1 file skipped, 2 waits, 0.25 s waited"
    assert StageStats(rows=3).samples_per_second == 0
    assert StageStats(calls=3, seconds=1).samples_per_second == 0


class AskingClock(Clock):
    """Of one that asks the time before a wait and after it: it goes on only in between."""

    def __init__(self) -> None:
        super().__init__()
        self.changed, self.waiting = threading.Condition(), False

    def perf_counter(self) -> float:
        with self.changed:
            self.waiting = not self.waiting
            self.changed.notify_all()
            return super().perf_counter()

    def sleep(self, seconds: float) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.waiting, 30)
            super().sleep(seconds)


@pytest.mark.parametrize("with_workers", [False, True])
def test_prefetch_counts_the_time_that_it_is_waited_for(with_workers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 batches of 20 ms, of a loop that does nothing: all of it is waited for, at the last prefetch only."""
    clock = AskingClock()
    clock.replace_time(monkeypatch, feed)

    def slow(x: np.ndarray) -> np.ndarray:
        clock.sleep(0.02)
        return x

    below = from_arrays(np.zeros(40)).batch(4).map(slow, element_spec=ArraySpec((4,), "float64")).prefetch(1)
    dataset = below.map(lambda x: x, element_spec=ArraySpec((4,), "float64")).prefetch(2)
    for _ in distribute(dataset, Workers()) if with_workers else dataset:
        pass
    counters: Any = dataset.node.counters
    assert counters.wait_seconds == pytest.approx(0.2)
    assert below.node.counters == StageStats()


def test_a_loop_that_computes_does_not_wait_for_prefetch(clock: Clock) -> None:
    dataset = from_arrays(np.zeros(40)).batch(4).prefetch(2)
    for _ in dataset:
        clock.sleep(0.02)
    counters: Any = dataset.node.counters
    assert counters.wait_seconds == 0


def test_skipped_files_are_counted(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, {"x": np.arange(30)}, num_shards=3)
    paths[1].write_bytes(b"not HDF5")
    part = distribute(HDF5Dataset(tmp_path, "x", on_error="skip").batch(10), Workers())
    counters = part.stats().stages[0][1]
    assert counters is not None
    assert (counters.files, counters.skipped) == (2, 1)
    assert "2 files, 1 file skipped" in str(part.stats())
