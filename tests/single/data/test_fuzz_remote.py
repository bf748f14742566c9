"""Damaged files at URLs: a ShardError that names the file, or the rows of the same file on a path."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.nets import fuzz_remote
from tests.nets.fuzz_shards import run

for _module in ("fsspec", "pyarrow", "google_crc32c", "tensorboardX", "xarray", "netCDF4", "h5netcdf"):
    pytest.importorskip(_module)


def test_mutants_are_read_as_on_a_path() -> None:
    outcomes = run(180, seed=2, made=fuzz_remote.WrittenFiles)
    assert len(outcomes) == 180
    assert fuzz_remote.faults(outcomes) == []
    seen = Counter(outcome for _, _, outcome in outcomes)
    assert seen["refused"] > 40
    assert seen["as on the path"] > 40


def test_the_fuzz_run_sees_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the reader: the mutation does nothing, and a URL gives other rows."""
    whole = fuzz_remote._rows

    def broken(name: str, where: Any) -> Any:
        rows = whole(name, where)
        if isinstance(where, str):
            rows["x"] = rows["x"][::-1]
        return rows

    def nothing(data: bytearray, rng: object) -> None:
        pass

    monkeypatch.setattr(fuzz_remote, "_rows", broken)
    monkeypatch.setattr(fuzz_remote, "MUTATIONS", (nothing,))
    assert [outcome for _, _, outcome in run(4, seed=0, made=fuzz_remote.WrittenFiles)] == ["unlike on the path"] * 4
