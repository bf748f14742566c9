"""Waits: how sleeps grow, what a limit does, and what a wait for ranks raises."""

from __future__ import annotations

import dataclasses
import types
from typing import Any
from unittest import mock

import pytest

from mpistrat.base import waiting
from mpistrat.base.environment import Environment
from mpistrat.base.waiting import Backoff, Deadline, PeerWait, wait_until
from mpistrat.errors import CollectiveTimeoutError, PeerExitError, RanksLostError


@pytest.fixture
def slept():
    """What was slept, in seconds; time goes on by that alone."""
    naps: list[float] = []
    with (
        mock.patch.object(waiting, "sleep", naps.append),
        mock.patch.object(waiting, "monotonic", lambda: 100.0 + sum(naps)),
    ):
        yield naps


def test_sleeps_grow_by_an_eighth_up_to_the_ceiling_after_the_yields(slept):
    backoff = Backoff(1e-4, yields=3)
    assert [backoff.pause() for _ in range(5)] == [False] * 3 + [True] * 2
    assert slept == pytest.approx([2e-5, 2.25e-5])
    for _ in range(30):
        backoff.pause()
    assert slept[-1] == 1e-4
    backoff.reset()
    assert not backoff.pause()


def test_a_ceiling_below_the_first_sleep_holds(slept):
    Backoff(1e-6, yields=0).pause()
    assert slept == [1e-6]


def test_a_wait_is_noticed_to_be_over_at_most_an_eighth_too_late(slept):
    for seconds in (1e-4, 1e-3, 7e-3):
        slept.clear()
        end = waiting.monotonic() + seconds
        assert wait_until(lambda: waiting.monotonic() >= end)  # noqa: B023
        assert sum(slept) < 1.125 * seconds + 2e-5


def test_a_deadline(slept):
    deadline = Deadline(2.0)
    waiting.sleep(0.5)
    assert (deadline.passed, deadline.left, deadline.waited) == (False, 1.5, 0.5)
    waiting.sleep(2.0)
    assert (deadline.passed, deadline.left) == (True, 0.0)
    assert Deadline(None).left == float("inf")


def test_a_wait_with_a_limit_ends_at_it(slept):
    assert not wait_until(lambda: False, 0.25)
    assert sum(slept) == pytest.approx(0.25, abs=2e-3)


def group(left: tuple[int, ...] = ()) -> Any:
    monitor = types.SimpleNamespace(rank=0, where=lambda ranks: f" for {ranks}")
    settings = dataclasses.replace(Environment(), abort_after=3.0, warn_after=1.0)
    return types.SimpleNamespace(
        environment=settings, monitor=monitor, has_left=left.__contains__, look_for_losses=lambda: None
    )


def pause_until_error(wait: PeerWait) -> None:
    for _ in range(10_000):
        wait.pause()


def test_a_wait_ends_where_ranks_were_lost(slept):
    def lost() -> None:
        raise RanksLostError("ranks were lost")

    waited_for = group()
    waited_for.look_for_losses = lost
    with pytest.raises(RanksLostError):
        pause_until_error(PeerWait(waited_for, "flush", (1,)))


def test_a_wait_for_a_rank_that_left_ends(slept):
    with pytest.raises(PeerExitError, match="rank 2 left the program while rank 0 was in the meeting"):
        pause_until_error(PeerWait(group((2,)), "the meeting", (1, 2)))
    assert sum(slept) < 0.2


def test_a_wait_that_takes_long_warns_once_and_ends_with_who_and_what_to_do(slept, caplog):
    with pytest.raises(CollectiveTimeoutError, match=r"(?s)the meeting: rank 0 waited 3 s for \(1,\)\nCome sooner"):
        pause_until_error(PeerWait(group(), "the meeting", (1,), remedy="Come sooner"))
    assert 3.0 < sum(slept) < 3.2
    assert [record.getMessage() for record in caplog.records] == [
        "the meeting takes longer than 1 s: for (1,)\nCome sooner"
    ]


def test_a_wait_may_have_a_limit_of_its_own(slept):
    with pytest.raises(CollectiveTimeoutError, match="the meeting: rank 0 waited 0.5 s"):
        pause_until_error(PeerWait(group(), "the meeting", (1,), seconds=0.5))
    assert 0.5 < sum(slept) < 0.7


def test_a_wait_without_a_limit_goes_on(slept):
    wait = PeerWait(group(), "the meeting", (1,), limited=False)
    for _ in range(10_000):
        wait.pause()
    assert sum(slept) > 3.0
