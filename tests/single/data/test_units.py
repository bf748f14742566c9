"""Fields that are read in units: how often each unit is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpistrat.data import from_zarr
from mpistrat.data.files import units
from mpistrat.data.nodes import cast


@pytest.mark.parametrize("dtype", [None, "f4"])
def test_large_units_of_several_fields_are_read_once(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, also in the small blocks in which rows are cast, though no two units fit into the limit."""
    monkeypatch.setattr(units, "_KEPT", 1)
    monkeypatch.setattr(cast, "_BLOCK_BYTES", 64)
    group = pytest.importorskip("zarr").open_group(tmp_path / "a.zarr", mode="w")
    for name, chunk in (("x", 30), ("y", 20)):
        group.create_array(name, data=np.arange(120.0), chunks=(chunk,))
    dataset = from_zarr(tmp_path / "a.zarr", ("x", "y"))
    rows = dataset if dtype is None else dataset.cast(dtype)
    found = [x.tolist() for x, _ in rows.batch(25)]
    assert found == [list(range(start, min(start + 25, 120))) for start in range(0, 120, 25)]
    assert dataset.node.counters.chunk_reads == 120 // 30 + 120 // 20
    order = np.random.default_rng(1).permutation(120)
    before = dataset.node.counters.chunk_reads
    assert rows.rows(order)[1].tolist() == order.tolist()
    assert dataset.node.counters.chunk_reads - before <= 10
