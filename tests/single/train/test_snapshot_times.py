"""When snapshots are taken: as often as they shall, and not more often than costs a hundredth of the time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from mpistrat.train import checkpoints

STEP = 0.1  # seconds


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def taken(monkeypatch, steps, takes=0.0, waits=lambda seconds: 0.0):
    """Return when snapshots were taken, and how many seconds were spent to meet, of so many steps of 0.1 s.

    A snapshot takes `takes` seconds; to meet takes what `waits` says of the seconds since the ranks have met last.
    """
    clock = Clock()
    monkeypatch.setattr(checkpoints, "time", clock)
    strategy = SimpleNamespace(broadcast_object=lambda value: value)
    period, moments, met, spent = checkpoints._Period(strategy, 1.0), [], 0.0, 0.0
    for step in range(1, steps + 1):
        clock.now += STEP
        if step < period.next:
            continue
        cost = waits(clock.now - met)
        clock.now += cost
        met, spent = clock.now, spent + cost
        if period.due(step, cost):
            clock.now += takes
            moments.append(clock.now)
            period.begin(step, takes)
    return moments, spent, clock.now


def test_every_second_where_they_cost_nothing(monkeypatch):
    moments, _, _ = taken(monkeypatch, 1000)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *moments])]
    assert max(gaps) < 1.0 + 2 * STEP
    assert len(moments) == pytest.approx(100, abs=10)


def test_a_hundredth_of_the_time_where_they_take_longer(monkeypatch):
    moments, _, seconds = taken(monkeypatch, 10_000, takes=0.05)
    assert len(moments) * 0.05 < 0.012 * seconds
    assert len(moments) > seconds / 10


def test_meetings_cost_a_hundredth_too(monkeypatch):
    moments, spent, seconds = taken(monkeypatch, 10_000, waits=lambda passed: 0.1)
    assert spent < 0.012 * seconds
    assert len(moments) > 0.5 * seconds / 10


def test_a_meeting_that_nobody_waited_for_says_nothing_of_the_others(monkeypatch):
    """As at the end of an epoch, where all meet in any case."""
    often = itertools.cycle([0.1] * 5 + [0.0])
    _, spent, seconds = taken(monkeypatch, 10_000, waits=lambda passed: next(often))
    assert spent < 0.012 * seconds


def test_behind_a_slow_rank_they_come_every_minute(monkeypatch):
    moments, _, seconds = taken(monkeypatch, 20_000, waits=lambda passed: 0.2 * passed)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert 60 < max(gaps) < 90
    assert len(moments) > seconds / 90
