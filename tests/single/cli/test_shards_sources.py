"""Several inputs of `mpistrat shards write`, and those that sources read: HDF5, tar archives, TFRecord, Zarr."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.data import HDF5Dataset, write_shards
from mpistrat.data.shards.convert import Conversion, open_converter
from tests.harness.examples import example
from tests.harness.shards_command import mpistrat, read

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20)


def test_several_inputs_one_after_the_other(tmp_path: Path) -> None:
    for number in range(3):
        rows = slice(7 * number, 7 * number + 7)
        np.savez(tmp_path / f"{number}.npz", x=X[rows], y=Y[rows])
        (tmp_path / f"{number}.csv").write_text("y\n" + "\n".join(map(str, Y[rows])) + "\n")
    for kind in ("npz", "csv"):
        done = mpistrat(
            "shards", "write", kind, *(f"{n}.{kind}" for n in range(3)), "--rows-per-shard", "6", cwd=tmp_path
        )
        assert re.search(r"4 shards, 20 rows, .*, written in [\d.]+ s \(\d+ rows/s\)", done.stdout)
        assert read(tmp_path / kind)["y"].tolist() == Y.tolist()
    np.testing.assert_array_equal(read(tmp_path / "npz")["x"], X)


def test_a_rank_reads_its_rows_of_several_inputs(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.npy" for number in range(3)]
    for number, path in enumerate(paths):
        np.save(path, Y[7 * number : 7 * number + 7])
    for first, stop in ((0, 20), (5, 12), (7, 14), (8, 9), (19, 20), (20, 20)):
        batches = open_converter(Conversion(paths)).batches(first, stop)
        assert [int(y) for batch in batches for ys in batch.values() for y in ys] == list(range(first, stop))


def test_shards_into_shards(tmp_path: Path) -> None:
    """Another layout, compression and number of files; and files of other people's."""
    write_shards(tmp_path / "old", {"x": X, "y": Y, "t": [f"é{row}" for row in Y]}, rows_per_shard=6, layout="chunked")
    old = sorted((tmp_path / "old").glob("*.h5"))
    assert len(old) == 4
    mpistrat("shards", "write", tmp_path / "new", *old, "--compression", "gzip", "--chunk-rows", "5")
    dataset = HDF5Dataset(tmp_path / "new")
    assert len(sorted((tmp_path / "new").glob("*.h5"))) == 1
    np.testing.assert_array_equal(dataset.rows(Y)["x"], X, strict=True)
    assert dataset.rows(Y)["t"].tolist() == [f"é{row}" for row in Y]
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["a/x"], file["y"] = X, Y
    mpistrat("shards", "write", tmp_path / "other", tmp_path / "other.hdf5", "--select", "a/x")
    assert list(read(tmp_path / "other")) == ["a/x"]


def test_tar_archives(tmp_path: Path) -> None:
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as archive:
            for row in Y[10 * number : 10 * number + 10]:
                header = tarfile.TarInfo(f"{row:03}.cls")
                header.size = len(str(row))
                archive.addfile(header, io.BytesIO(str(row).encode()))
    mpistrat("shards", "write", tmp_path / "set", tmp_path / "0.tar", tmp_path / "1.tar")
    assert read(tmp_path / "set")["cls"].tolist() == Y.tolist()


def test_a_field_that_is_no_array(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        header = tarfile.TarInfo("0.json")
        header.size = len(b'{"a": 1}')
        archive.addfile(header, io.BytesIO(b'{"a": 1}'))
    done = mpistrat("shards", "write", tmp_path / "set", tmp_path / "a.tar", status=1)
    assert "a.tar: expected fields of one array each, got 'json' of several. Leave it out with --select" in done.stderr


def test_records(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    writer = pytest.importorskip("tensorboardX.record_writer").RecordWriter(str(tmp_path / "a.tfrecord"))
    for row in Y:
        writer.write(example({"x": X[row].tolist(), "y": [int(row)]}))
    writer.close()
    mpistrat("shards", "write", tmp_path / "set", tmp_path / "a.tfrecord")
    np.testing.assert_array_equal(read(tmp_path / "set")["x"], X)
    assert read(tmp_path / "set")["y"].tolist() == Y.tolist()


def test_a_zarr_group(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", data=X, chunks=(7, 3))
    group.create_array("y", data=Y)
    mpistrat("shards", "write", tmp_path / "set", tmp_path / "a.zarr")
    np.testing.assert_array_equal(read(tmp_path / "set")["x"], X)


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    np.savez(tmp_path / "a.npz", x=X)
    np.savez(tmp_path / "b.npz", x=X.astype("f8"))
    np.savez(tmp_path / "c.npz", z=X)
    done = mpistrat("shards", "write", tmp_path / "set", tmp_path / "a.npy", tmp_path / "a.npz", status=2)
    assert "INPUT: expected inputs of one kind, got" in done.stderr
    done = mpistrat("shards", "write", tmp_path / "set", status=2)
    assert "expected files or folders, or fields by name (--field x=x.npy), got none" in done.stderr
    for other, reason in (("b", "float64"), ("c", "z")):
        done = mpistrat("shards", "write", tmp_path / "set", tmp_path / "a.npz", tmp_path / f"{other}.npz", status=2)
        assert reason in done.stderr
        assert not (tmp_path / "set").exists() or not list((tmp_path / "set").glob("*.h5"))
    mpistrat("shards", "write", tmp_path / "set", tmp_path / "a.npz", tmp_path / "b.npz", "--dtype", "x=float64")
    assert len(read(tmp_path / "set")["x"]) == 40


def test_folders_with_other_classes(tmp_path: Path) -> None:
    """Their labels would have two meanings."""
    image = pytest.importorskip("PIL.Image")
    for folder, kind in (("a", "cat"), ("b", "dog"), ("c", "cat")):
        (tmp_path / folder / kind).mkdir(parents=True)
        image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / folder / kind / "0.png")
    done = mpistrat("shards", "write", tmp_path / "set", tmp_path / "a", tmp_path / "b", status=1)
    assert "b: expected the attributes of" in done.stderr
    mpistrat("shards", "write", tmp_path / "set", tmp_path / "a", tmp_path / "c")
    assert read(tmp_path / "set")["label"].tolist() == [0, 0]
