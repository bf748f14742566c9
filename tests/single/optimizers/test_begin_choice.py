"""Which way `Optimizer.begin` goes, by a clock of the test's own: never one that is slower, but for the steps that measure."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.step import early_start
from mpistrat.step.early_start import EarlyChoice

TRIED = 16  # steps


class Alone:
    """A group of one rank."""

    topology = SimpleNamespace(size=1)

    def collective(self, function: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sum_int(self, values: list[int]) -> np.ndarray:
        return np.array(values, np.int64)


@pytest.fixture
def run(monkeypatch):
    """Take steps; `took` gives the seconds of one by its number and way, `begins` in which something is begun."""
    now = [0]
    monkeypatch.setattr(early_start, "perf_counter_ns", lambda: now[0])

    def steps(choice, took, count, begins=lambda number: True, first=0):
        ways = []
        for number in range(first, first + count):
            ways.append(choice.early)
            now[0] += round(1e9 * took(number, choice.early))
            choice.note_step(Alone(), begins(number))
        return ways

    return steps


def test_the_faster_way_is_kept(run) -> None:
    for early, late in ((0.9, 1.0), (1.0, 0.9), (1.0, 1.0), (0.99, 1.0)):
        choice = EarlyChoice()
        ways = run(choice, lambda _, way, early=early, late=late: early if way else late, 500)
        assert ways[:TRIED] == [True, False] * 8
        assert ways[TRIED:] == [early < 0.98 * late] * (500 - TRIED)


def test_steps_that_were_disturbed_choose_nothing(run) -> None:
    """Two of the steps without took four times as long, and the others as long as with: by medians of few it could be either."""
    choice, rng = EarlyChoice(), np.random.default_rng(0)
    for _ in range(200):
        noise = rng.permutation([4.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        choice = EarlyChoice()
        run(choice, lambda number, way, noise=noise: 1.01 if way else noise[(number // 2 - 1) % 7], TRIED)
        assert not choice.early
    noise = [0.9, 0.9, 0.9, 0.9, 1.2, 1.2, 1.2]  # the median of these is less, but three are not
    choice = EarlyChoice()
    run(choice, lambda number, way: noise[(number // 2 - 1) % 7] if way else 1.0, TRIED)
    assert not choice.early


def test_a_machine_that_becomes_slower_chooses_nothing(run) -> None:
    choice = EarlyChoice()
    run(choice, lambda number, way: (1.0 if way else 0.95) * 1.02**number, TRIED)
    assert not choice.early


def test_both_ways_are_measured_again(run) -> None:
    choice, period = EarlyChoice(), TRIED + early_start._KEPT
    slower, faster = (lambda _, way: 1.5 if way else 1.0), (lambda _, way: 0.5 if way else 1.0)
    ways = run(choice, slower, period)
    assert sum(ways) == 8
    assert choice.words == "sums of gradients wait for apply_gradients: a step took 1000.0 ms so, 1500.0 ms otherwise"
    ways = run(choice, faster, period)
    assert ways[:TRIED] == [True, False] * 8
    assert all(ways[TRIED:])
    assert run(choice, slower, period) == [True, False] * 8 + [False] * early_start._KEPT


def test_what_it_costs_to_measure_a_way_that_takes_half_as_long_again(run) -> None:
    choice, taken = EarlyChoice(), []
    run(choice, lambda _, way: taken.append(1.5 if way else 1.0) or taken[-1], 10 * (TRIED + early_start._KEPT))
    assert sum(taken) < 1.005 * len(taken)


def test_steps_in_which_nothing_is_begun_are_not_measured(run) -> None:
    choice = EarlyChoice()
    times = lambda number, way: 100.0 if number % 2 else (0.5 if way else 1.0)  # noqa: E731
    ways = run(choice, times, 2 * TRIED, lambda number: number % 2 == 0)
    assert ways[::2] == [True, False] * 8
    assert choice.early
