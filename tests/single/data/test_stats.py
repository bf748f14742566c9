"""What the input says of itself: samples, bytes, time spent waiting, and counters of each stage."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from mpistrat.data import InputStats, StageStats, from_arrays
from mpistrat.data.distribution.distributed_dataset import distribute
from mpistrat.data.distribution.workers import Workers


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
    source = from_arrays(np.zeros(4))
    source.counters = StageStats()
    source.counters.add(bytes_read=2500, chunk_reads=1, files=3)
    part = distribute(source.batch(2), Workers())
    stats = part.stats()
    assert [text for text, _ in stats.stages] == ["from_arrays: 4 rows of float64[]", "batch(2, drop_remainder=False)"]
    assert stats.stages[0][1] == StageStats(bytes_read=2500, chunk_reads=1, files=3)
    assert stats.stages[1][1] is None
    source.counters.add(bytes_read=1)
    assert stats.stages[0][1].bytes_read == 2500  # it does not change any more
    assert part.stats().stages[0][1].bytes_read == 2501


def test_a_readable_table() -> None:
    counters = StageStats(calls=2, seconds=0.5, bytes_read=1_500_000)
    stats = InputStats(120, 11_520, 35_400_000, 0.225, 1.8, (("from_arrays", None), ("map(f)", counters)))
    assert str(stats).splitlines() == [
        "120 steps, 11,520 samples, 35.4 MB in 1.8 s: 6,400 samples/s, input-bound 12%",
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
    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.01)
        return x

    part = distribute(from_arrays(np.zeros(40)).batch(4).map(slow), Workers(), buffer_size=buffer_size)
    for _ in part:
        time.sleep(0.02)
    stats: Any = part.stats()
    assert (stats.wait_seconds < 0.06) == bool(buffer_size)
