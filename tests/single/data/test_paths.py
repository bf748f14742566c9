"""Paths of data: suffixes in capitals, and relative paths in a program that goes to another directory."""

import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ShardError


def write(path, rows=5):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(rows)


def test_suffixes_in_capitals(tmp_path):
    """Files in capitals were left out silently."""
    for name in ("a.h5", "B.H5", "C.HDF5", "d.Hdf5"):
        write(tmp_path / name)
    assert len(ms.data.HDF5Dataset(tmp_path)) == 20


@pytest.mark.parametrize("suffix", ["H5", "HDF5"])
def test_a_set_in_capitals(tmp_path, suffix):
    for rows in (7, 5):  # the older set is replaced
        paths = ms.data.write_shards(tmp_path / f"train-*.{suffix}", {"x": np.arange(rows)}, num_shards=2)
        assert [path.suffix for path in paths] == [f".{suffix}"] * 2
        assert sorted(os.listdir(tmp_path)) == sorted(["train-manifest.json", *(path.name for path in paths)])
        for files in (tmp_path, tmp_path / f"train-*.{suffix}", paths):
            assert [int(x) for x in ms.data.HDF5Dataset(files, fields="x")] == list(range(rows))
    with pytest.raises(ValueError, match="a directory, or a pattern"):
        ms.data.write_shards(tmp_path / f"train.{suffix}", {"x": np.arange(5)})


def test_a_folder_of_other_hdf5_files_says_which_it_has(tmp_path):
    for name in ("a.nc", "b.nc", "notes.txt"):
        write(tmp_path / name)
    with pytest.raises(ShardError, match=r"files that end in \.nc, \.txt.*name them: .*/\*\.nc"):
        ms.data.HDF5Dataset(tmp_path)
    write(tmp_path / "c.hdf5")
    for made in (ms.data.HDF5Dataset, ms.data.from_groups):
        with pytest.raises(ShardError, match=r"[ab]\.nc: expected a file with an ending that is read from a folder"):
            made(tmp_path, "x")
    for name in ("a.nc", "b.nc"):
        (tmp_path / name).rename(tmp_path / f"{name}.hidden")
    assert len(ms.data.HDF5Dataset(tmp_path, "x")) == 5
    (tmp_path / "d.H5AD").write_bytes(b"")
    with pytest.raises(ShardError, match=r"d\.H5AD: expected a file with an ending"):
        ms.data.HDF5Dataset(tmp_path, "x")
    assert len(ms.data.HDF5Dataset(tmp_path / "*.hdf5", "x")) == 5
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match="at least one HDF5 file, got no match"):
        ms.data.HDF5Dataset(tmp_path / "empty")


@pytest.mark.parametrize("files", ["set", "set/*.h5", "set/a.h5", ["set/a.h5"]])
def test_a_dataset_reads_the_files_it_was_given(tmp_path, monkeypatch, files):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set/a.h5")
    monkeypatch.chdir(tmp_path)
    dataset = ms.data.HDF5Dataset(files, fields="x")
    assert "1 file in set" in str(dataset)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert [int(x) for x in dataset] == list(range(5))
    assert "1 file in set" in str(dataset)


def test_a_writer_writes_the_set_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    writer = ms.data.ShardWriter("set")
    snapshot = ms.data.from_arrays(np.arange(4)).snapshot("snapshot")
    monkeypatch.chdir(tmp_path / "other")
    with writer:
        writer.write({"x": np.arange(3)})
    assert len(list(snapshot)) == 4
    assert not os.listdir(tmp_path / "other")
    assert len(ms.data.HDF5Dataset(tmp_path / "set")) == 3
    assert [str(path) for path in writer.paths] == ["set/00000-of-00001.h5"]
