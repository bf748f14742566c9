"""Digests of shards, and what tells sets of files apart that have none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import HDF5Dataset, write_shards
from mpistrat.errors import ShardError
from tests.harness.shard_sets import plain, small_set


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return small_set(tmp_path)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_a_flipped_bit_is_seen_by_the_digest(shards: list[Path], fraction: float) -> None:
    damaged = bytearray(shards[1].read_bytes())
    damaged[int(fraction * len(damaged))] ^= 4
    shards[1].write_bytes(damaged)
    with pytest.raises(ShardError, match=f"{shards[1].name}.*digest"):
        len(HDF5Dataset(shards[0].parent, verify=True))


def flip(path: Path) -> None:
    """Change a bit of the last row."""
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)


def exchange(shards: list[Path]) -> None:
    """Let two files of equal size have each other's names."""
    first, second = shards[1].read_bytes(), shards[2].read_bytes()
    assert len(first) == len(second)
    shards[1].write_bytes(second)
    shards[2].write_bytes(first)


@pytest.mark.parametrize("change", [lambda shards: flip(shards[1]), exchange])
def test_digests_of_a_small_set_are_compared_unasked(shards: list[Path], change: Any) -> None:
    change(shards)
    for first in (lambda data: data.rows([0]), lambda data: next(iter(data)), lambda data: next(iter(data.batch(4)))):
        with pytest.raises(ShardError, match=f"{shards[1].name}.*expected digest .*Copy the file again"):
            first(HDF5Dataset(shards[0].parent))
    assert len(HDF5Dataset(shards[0].parent, verify=False).rows(range(100))["x"]) == 100
    with pytest.raises(ValueError, match="verify: expected True or False or 'auto', got 'always'"):
        HDF5Dataset(shards[0].parent, verify="always")  # type: ignore[arg-type]


def test_digests_are_compared_once_and_of_small_sets_only(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from mpistrat.data.shards import files

    compared: list[str] = []
    digest = files.digest_of_file
    monkeypatch.setattr(files, "digest_of_file", lambda path, *args: compared.append(path.name) or digest(path, *args))
    caplog.set_level("INFO", logger="mpistrat")
    for _ in range(2):
        for _ in range(2):
            list(dataset := HDF5Dataset(shards[0].parent))
        assert list(dataset.batch(4)) and compared == [path.name for path in shards]
    os.utime(shards[2])  # a file that may be another one
    list(HDF5Dataset(shards[0].parent))
    assert compared == [path.name for path in [*shards, shards[2]]]
    monkeypatch.setattr(files, "_SMALL", {})
    list(HDF5Dataset(shards[0].parent))
    assert "are not compared; to do so, pass verify=True" in caplog.text
    assert len(compared) == 4


@pytest.mark.parametrize("change", [lambda shards: flip(shards[1]), exchange])
def test_ends_of_the_files_of_a_large_set_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    from mpistrat.data.shards import files

    monkeypatch.setattr(files, "_SMALL", {})
    shards = write_shards(tmp_path, {"x": np.arange(1 << 18)}, num_shards=4)  # of half a MiB each

    def total() -> int:
        return sum(int(batch["x"].sum()) for batch in HDF5Dataset(tmp_path).batch(1024))

    whole, good = total(), shards[1].read_bytes()
    shards[1].write_bytes(good[:80_000] + b"\1" + good[80_001:])
    assert total() != whole  # in the middle: nobody has looked
    shards[1].write_bytes(good)
    change(shards)
    with pytest.raises(ShardError, match=f"{shards[1].name}.*of the first and last 64 KiB .*Copy the file again"):
        total()
    document = json.loads((tmp_path / "manifest.json").read_text())
    for entry in document["shards"]:
        del entry["ends"]  # as before there were any
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    assert total()


def test_wrong_digests_are_left_out_unasked(shards: list[Path]) -> None:
    flip(shards[1])
    dataset = HDF5Dataset(shards[0].parent, "y", on_error="skip")
    assert len(dataset.rows(range(67))) == 67 and [path for path, _ in dataset.skipped] == [shards[1]]


def test_the_fingerprint_tells_sets_apart(tmp_path: Path) -> None:
    write_shards(tmp_path / "one", {"x": np.arange(100)}, num_shards=4)
    write_shards(tmp_path / "two", {"x": np.arange(100)}, num_shards=4)
    write_shards(tmp_path / "other", {"x": np.arange(100, 200)}, num_shards=4)
    write_shards(tmp_path / "three", {"x": np.arange(99)}, num_shards=4)
    write_shards(tmp_path / "four", {"x": np.arange(100.0)}, num_shards=4)
    prints = [HDF5Dataset(tmp_path / name, on_error="skip").fingerprint() for name in ("one", "two", "three", "four")]
    assert prints[0] == prints[1]  # the same names, rows, fields and digests
    assert len({*prints, HDF5Dataset(tmp_path / "other").fingerprint()}) == 4
    assert all(0 <= number < 2**63 for number in prints)
    next((tmp_path / "two").glob("00001*.h5")).write_text("x")
    assert HDF5Dataset(tmp_path / "two", on_error="skip").fingerprint() != prints[0]


def test_files_without_digests_are_told_apart_by_some_rows(tmp_path: Path) -> None:
    rows = np.arange(3000.0).reshape(1000, 3)
    for name, changed in (("one", 0), ("two", 0), ("first", 1), ("last", -1)):
        (tmp_path / name).mkdir()
        plain(tmp_path / name / "a.h5", x=rows, s=np.zeros(1000, "i1,f8"))
        other = rows + 1
        other[: 999 if changed == -1 else 1] += changed != 0
        plain(tmp_path / name / "b.h5", x=other if changed else rows + 1, s=np.zeros(1000, "i1,f8"))
    dataset = HDF5Dataset(tmp_path / "one")
    prints = [HDF5Dataset(tmp_path / name).fingerprint() for name in ("one", "two", "first", "last")]
    assert prints[0] == prints[1] == dataset.fingerprint()
    assert len({*prints}) == 3
    assert dataset.node.counters.bytes_read == 0  # what is compared is no row of an epoch


@pytest.mark.parametrize("kind", ["gzip", "chunks", "tiles", "strings", "ragged", "structures"])
def test_rows_that_must_be_decoded_are_told_apart_by_some(tmp_path: Path, kind: str) -> None:
    """The files have other values, names and sizes alike; the same rows in chunks of another size have one fingerprint."""

    def write(name: str, last: int, chunk: int) -> int:
        (tmp_path / name).mkdir()
        with h5py.File(tmp_path / name / "a.h5", "w") as file:
            numbers = np.arange(3000).reshape(1000, 3)
            numbers[999] = last
            if kind == "strings":
                file.create_dataset("x", data=[str(i) for i in numbers[:, 0]], dtype=h5py.string_dtype())
            elif kind == "ragged":
                file.create_dataset("x", (1000,), dtype=h5py.vlen_dtype(np.int64))[:] = list(map(list, numbers))
            elif kind == "structures":
                file["x"] = np.array(list(map(tuple, numbers)), "i8,i4,f8")
            else:
                columns = 2 if kind == "tiles" else 3
                file.create_dataset(
                    "x", data=numbers, chunks=(chunk, columns), compression="gzip" if kind == "gzip" else None
                )
        return HDF5Dataset(tmp_path / name).fingerprint()

    assert write("one", 7, 64) == write("two", 7, 50) != write("three", 8, 64)


def test_few_chunks_are_decoded_to_compare_and_no_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.data.files.chunked import ChunkFiles

    decoded = []
    decode = ChunkFiles.decode
    monkeypatch.setattr(
        ChunkFiles, "decode", lambda self, chunk, slot: decoded.append(slot.size) or decode(self, chunk, slot)
    )
    for number in range(20):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("small", data=np.zeros((2000, 64)), chunks=(100, 64), compression="gzip")
            file.create_dataset("large", data=np.zeros((2000, 512)), chunks=(2000, 512), compression="gzip")
    dataset = HDF5Dataset(tmp_path)
    dataset.fingerprint()
    assert 4 <= len(decoded) <= 8
    assert max(decoded) < 1 << 20
    assert dataset.node.counters.chunk_reads == 0  # what is compared is no row of an epoch
