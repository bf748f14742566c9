"""When a thread begins to read ahead: where reading is slow on average, not where single elements were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpistrat.data.feed import feed
from mpistrat.data.feed.feed import DatasetIterator

PATIENCE = 5e-3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the reader takes for the time."""
    now = [0.0]
    monkeypatch.setattr(feed, "perf_counter", lambda: now[0])
    return now


def first_ahead(clock: list[float], seconds: list[float]) -> int | None:
    """Read elements that take so long, and return how many were read when the thread had been started."""

    def elements(epoch: int, start: int) -> Iterator[int]:
        for number, duration in enumerate(seconds):
            clock[0] += duration
            yield number

    reader = DatasetIterator(elements, len(seconds), 0, 2, PATIENCE)
    try:
        for number in range(len(seconds)):
            assert next(reader) == number
            if reader._read_ahead is not None:
                return number
    finally:
        reader._stop()
    return None


def test_slow_elements(clock: list[float]) -> None:
    assert first_ahead(clock, [0.01] * 6) == 3


def test_two_outliers(clock: list[float]) -> None:
    assert first_ahead(clock, [0.05, 0.05] + [0.0] * 60 + [0.05, 0.05] + [0.0] * 60) is None


@pytest.mark.parametrize("together", [2, 4, 8])
def test_elements_that_come_several_at_a_time(clock: list[float], together: int) -> None:
    """10 ms an element, all in the first of those that come together: the third time is no outlier."""
    group = [0.01 * together] + [0.0] * (together - 1)
    assert first_ahead(clock, group * 4) == 2 * together + 1


def test_without_patience_at_once() -> None:
    reader = DatasetIterator(lambda epoch, start: iter(range(3)), 3, 0, 2, 0.0)
    assert next(reader) == 0
    assert reader._read_ahead is not None
    assert list(iter(reader.__next__, 2)) == [1]
    reader._stop()
