"""What ranks tell each other of files is what was found in them, for every kind of storage, in few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data.files.storage import Chunks, Contiguous, OnlyHDF5, Pointers
from mpistrat.data.shards.files import resolve
from mpistrat.data.shards.look import ShardContents, Unfit, from_bytes, look, to_bytes

STRUCTURE = np.dtype([("a", "<i2"), ("b", ">f8", (2,))], align=True)
STORED: dict[str, tuple[type, Any]] = {
    "contiguous": (Contiguous, {"data": np.zeros((6, 2), ">f4")}),
    "structure": (Contiguous, {"data": np.zeros(6, STRUCTURE)}),
    "chunks": (
        Chunks,
        {"data": np.arange(6), "chunks": (4,), "compression": "gzip", "shuffle": True, "fletcher32": True},
    ),
    "unwritten": (Chunks, {"shape": (6,), "dtype": "i4", "chunks": (2,), "fillvalue": 7}),
    "text": (Pointers, {"data": ["a", "bc"] * 3}),
    "text in chunks": (Pointers, {"data": ["a", "bc"] * 3, "chunks": (2,), "compression": "gzip"}),
    "parts of rows": (OnlyHDF5, {"data": np.zeros((6, 4)), "chunks": (6, 2)}),
}


def alike(one: Any, other: Any) -> bool:
    """Whether two values of the same classes are equal, arrays in them, too."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if hasattr(one, "__dict__") and not callable(one):
        return type(one) is type(other) and alike(vars(one), vars(other))
    return bool(one == other)


@pytest.mark.parametrize("name", STORED)
def test_what_was_found_arrives(tmp_path: Path, name: str) -> None:
    kind, stored = STORED[name]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(name, **stored)
        file["number"] = 1
    files = resolve(tmp_path)
    (shard,) = look(files, [0], None)
    assert isinstance(shard, ShardContents)
    assert type(shard.storages[name].layout) is kind
    assert shard.left_out == ("number (no rows)",)
    told = from_bytes(to_bytes({0: shard}), files.paths)
    assert list(told) == [0]
    assert alike(told[0], shard)


def test_what_cannot_be_read_arrives(tmp_path: Path) -> None:
    (tmp_path / "b.h5").write_text("no HDF5")
    files = resolve([tmp_path / "a.h5", tmp_path / "b.h5"])
    found = look(files, [0, 1], None)
    assert [isinstance(one, Unfit) and one.unopened for one in found] == [True, False]
    assert from_bytes(to_bytes(dict(enumerate(found))), files.paths) == dict(enumerate(found))


def test_a_file_takes_some_hundred_bytes(tmp_path: Path) -> None:
    for number in range(32):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = np.zeros((10, 3)), np.arange(10)
    files = resolve(tmp_path)
    assert len(to_bytes(dict(enumerate(look(files, range(32), None))))) < 32 * 200
