"""`shards info` and `shards check` of named datasets, of names with commas, and of URLs."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.data import write_shards
from tests.harness.shards_command import mpistrat


def checked(*words: object, status: int = 0) -> list[dict[str, object]]:
    return list(json.loads(mpistrat("shards", "check", *words, "--json", status=status).stdout)["files"])


def test_only_the_named_datasets_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    rows = np.random.default_rng(0).integers(0, 9, (40, 100))
    with h5py.File(path, "w") as file:
        for name in ("x,1", "y"):
            file.create_dataset(name, data=rows, chunks=(10, 100), compression="gzip", fletcher32=True)
        file["plain"] = np.arange(40)
        damaged = file["y"].id.get_chunk_info(1)
    data = bytearray(path.read_bytes())
    data[damaged.byte_offset + damaged.size // 2] ^= 1
    path.write_bytes(data)
    assert [file["by"] for file in checked(path, "--fields", '"x,1"')] == ["checksums"]
    assert [file["by"] for file in checked(path, "--fields", 'plain,"x,1"')] == ["partly"]
    (bad,) = checked(path, "--fields", "plain,y", status=1)
    assert "y: expected rows 10 to 19" in str(bad["problem"])
    (bad,) = checked(path, "--fields", "no", status=1)
    assert "expected a dataset 'no'" in str(bad["problem"])
    found = json.loads(mpistrat("shards", "info", path, "--fields", '"x,1",plain', "--json").stdout)
    assert [field["name"] for field in found["fields"]] == ["x,1", "plain"]
    assert "expected names" in mpistrat("shards", "check", path, "--fields", 'a\n"b', status=2).stderr


def test_urls(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    write_shards(tmp_path / "set", {"x": np.arange(600)}, num_shards=3)
    url = f"file://{tmp_path}/set"
    assert [file["by"] for file in checked(url)] == ["digest"] * 3
    assert json.loads(mpistrat("shards", "info", url, "--json").stdout)["rows"] == 600
    path = sorted((tmp_path / "set").glob("*.h5"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    problems = [str(file["problem"]) for file in checked(url, status=1)]
    assert [f"{url}/{path.name}" in problem for problem in problems] == [False, True, False]
