"""What the readers ask of HDF5: not too much at once, and where chunks lie, of versions that do not list them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import HDF5Dataset
from mpistrat.data.files import library, storage
from mpistrat.data.files.storage import Chunks


def test_long_runs_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI-IO takes less than 2 GiB at once; a piece is 256 KiB here."""
    data = np.arange(9 * 32768 + 5, dtype=float)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = data
    asked: list[int] = []

    def rows(dataset: h5py.Dataset, storage: Any, start: int, stop: int) -> np.ndarray:
        asked.append((stop - start) * 8)
        return dataset[start:stop]

    monkeypatch.setattr(library, "_rows", rows)
    monkeypatch.setattr(library, "_AT_ONCE", 1 << 20)
    assert np.array_equal(HDF5Dataset(tmp_path, "x", reader="h5py").rows(range(len(data))), data)
    assert asked == [1 << 20, 1 << 20, (1 << 18) + 40]


class _Without:
    """An object without one of its attributes."""

    def __init__(self, real: Any, name: str, **instead: Any) -> None:
        self._real, self._name = real, name
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._real, name)


def test_chunks_are_found_without_a_list_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        x = file.create_dataset("x", (100, 3), "f8", chunks=(7, 3), compression="gzip")
        x[:30] = np.random.default_rng(0).random((30, 3))
        x[70:] = 1.0
        raw = x.id.get_chunk_info(0)
        assert raw.size > 0
    with h5py.File(tmp_path / "x.h5") as file:
        x = file["x"]
        old: Any = _Without(x, "", id=_Without(x.id, "chunk_iter"))
        found = Chunks.of(old, 24)
        assert isinstance(found, Chunks)
        written = [*range(5), *range(10, 15)]  # rows 0 to 29, and 70 to 99, in chunks of 7
        assert np.flatnonzero(found.offsets >= 0).tolist() == written
        for number in written:
            info = x.id.get_chunk_info_by_coord((7 * number, 0))
            assert (found.offsets[number], found.sizes[number]) == (info.byte_offset, info.size)
        monkeypatch.setattr(storage, "_ASKED_FOR", 14)
        assert Chunks.of(old, 24) == "15 chunks, which this HDF5 does not list"
