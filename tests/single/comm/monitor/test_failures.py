"""Ranks that fail alike: who prints."""

from __future__ import annotations

from mpistrat.comm.monitor.abort import Failures, failure_key


def test_texts_that_name_the_rank_are_alike():
    assert failure_key("rank 0 of 4: the job ends\nValueError: x") == failure_key(
        "rank 3 of 4: the job ends\nValueError: x"
    )
    assert failure_key("rank 0 of 4: ValueError: x") != failure_key("rank 0 of 4: ValueError: y")


def test_all_ranks_fail_alike():
    failures = Failures(3)
    for rank in (2, 0):
        failures.note(rank, b"one", b"why", 1.0)
        assert failures.verdicts(1.1) == {}  # rank 1 may still come
    failures.note(1, b"one", b"why", 1.1)
    assert failures.verdicts(1.1) == {0: "(the same on ranks 1-2)\n", 1: None, 2: None}
    assert failures.verdicts(9.0) == {}


def test_ranks_that_fail_each_in_its_way_all_print():
    failures = Failures(4)
    for rank, text in ((1, b"one"), (3, b"two")):
        failures.note(rank, text, b"why", 1.0)
    assert failures.verdicts(1.2) == {}
    assert failures.verdicts(1.3) == {1: "", 3: ""}
    assert failures.reason == b"why"


def test_who_comes_late_prints_what_nobody_has_printed():
    failures = Failures(4)
    failures.note(3, b"one", b"why", 1.0)
    assert failures.verdicts(2.0) == {3: ""}
    failures.note(0, b"one", b"why", 2.1)
    failures.note(1, b"two", b"other", 2.1)
    assert failures.verdicts(2.5) == {0: None, 1: ""}
