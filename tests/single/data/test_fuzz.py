"""Damaged files: never another error or a crash, and with a verified manifest never a wrong row."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.nets import fuzz_shards


def test_mutated_files_give_rows_or_a_shard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_shards, "WAYS", ("unverified", "pread", "cut", "verified"))  # without HDF5's own loops
    outcomes = fuzz_shards.run(160, seed=4)
    assert len(outcomes) == 160
    assert fuzz_shards.faults(outcomes) == []
    seen = Counter(outcome for _, _, outcome in outcomes)
    assert set(seen) <= {"refused", "right rows", "wrong rows"}
    assert seen["refused"] > 80


def test_the_fuzz_run_sees_wrong_rows_crashes_and_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the reader in three ways."""
    import os
    import time

    def broken(self: object, rows: object) -> object:
        number = next(numbers)
        if number == 1:
            os.abort()
        if number == 2:
            time.sleep(60)
        if number == 3:
            raise KeyError("broken")
        return {}

    monkeypatch.setattr(fuzz_shards, "PATIENCE", 2.0)
    monkeypatch.setattr(fuzz_shards, "MUTATIONS", (lambda data, rng: None,))
    monkeypatch.setattr(fuzz_shards.MUTATIONS[0], "__name__", "nothing")
    for wrong, expected in ((1, "crash: SIGABRT"), (2, "hang"), (3, "other error: "), (4, "wrong rows")):
        numbers = iter([wrong] * 100)
        monkeypatch.setattr(fuzz_shards.HDF5Dataset, "rows", broken)
        monkeypatch.setattr(fuzz_shards, "WAYS", ("verified", "verified"))
        ((number, what, outcome),) = fuzz_shards.run(1, seed=0)
        assert (number, what) == (0, "contiguous, verified, nothing")
        assert outcome.startswith(expected)
        assert fuzz_shards.faults([(number, what, outcome)])
