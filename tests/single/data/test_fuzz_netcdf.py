"""Damaged netCDF files: a ShardError that names the file, or the values of xarray."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.nets import fuzz_netcdf
from tests.nets.fuzz_shards import run, watch


def test_mutated_files_are_refused_or_read_as_xarray_does() -> None:
    for module in ("xarray", "netCDF4", "h5netcdf", "scipy"):
        pytest.importorskip(module)
    outcomes = run(240, seed=4, made=fuzz_netcdf.WrittenFiles)
    assert len(outcomes) == 240
    assert fuzz_netcdf.faults(outcomes) == []
    seen = Counter(outcome for _, _, outcome in outcomes)
    assert seen["refused"] > 60
    assert seen["as xarray"] > 60


def test_a_header_that_asks_for_too_much_memory(tmp_path: Path) -> None:
    """The child may have 8 GiB of addresses."""
    for module in ("xarray", "netCDF4", "h5netcdf", "scipy"):
        pytest.importorskip(module)
    ((_, what, outcome),) = watch(fuzz_netcdf.WrittenFiles(tmp_path), 7, range(1253, 1254))
    assert (what, outcome) == ("netCDF-3, noise", "refused")


def test_the_fuzz_run_sees_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the reader: the mutation does nothing, and the rows are in another order."""
    for module in ("xarray", "netCDF4", "h5netcdf", "scipy"):
        pytest.importorskip(module)
    whole = fuzz_netcdf.from_netcdf
    monkeypatch.setattr(
        fuzz_netcdf, "from_netcdf", lambda *args, **options: whole(*args, **options).shuffle(mode="full")
    )
    monkeypatch.setattr(fuzz_netcdf, "MUTATIONS", (lambda data, rng: None,))
    monkeypatch.setattr(fuzz_netcdf.MUTATIONS[0], "__name__", "nothing", raising=False)
    assert [outcome for _, _, outcome in run(3, seed=0, made=fuzz_netcdf.WrittenFiles)] == ["unlike xarray"] * 3
