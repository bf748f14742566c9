"""Sources of files of other kinds: what they do when folders move, paths are relative, and rows are changed in place."""

from __future__ import annotations

import io
import resource
import tarfile

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.__main__ import main

d = ms.data


def zarr_rows(path, count=20):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="w")
    group.create_array("x", data=np.arange(1, count + 1, dtype="f4").reshape(count, 1), chunks=(4, 1))
    return path


def csc(path, indices="u1"):
    """3 rows of 300 columns, with elements at (0, 299), (1, 5) and (2, 256)."""
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csc_matrix", (3, 300)
        group["data"] = np.array([10.0, 20.0, 7.0], ">f4")
        group["indices"] = np.array([1, 2, 0], indices)
        group["indptr"] = np.searchsorted([5, 256, 299], np.arange(301))
    return path


def tar(path, link=None):
    """Samples of one class each; with `link`, one more whose class is a link to the first."""
    with tarfile.open(path, "w") as archive:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"%d" % number))
        if link is not None:
            member = tarfile.TarInfo("3.cls")
            member.type, member.linkname = link, "0.cls"
            archive.addfile(member)
    return path


def test_a_link_is_not_a_sample_that_is_left_out(tmp_path):
    with pytest.raises(
        ms.errors.ShardError, match=r"3\.cls: expected a member that is stored as a whole, got a link to 0\.cls"
    ):
        list(d.from_tar(tar(tmp_path / "t.tar", tarfile.LNKTYPE)))


def test_a_decoder_of_no_field_is_refused(tmp_path):
    with pytest.raises(ValueError, match="from_tar: decode: expected names of the fields cls, got 'clss'"):
        list(d.from_tar(tar(tmp_path / "t.tar"), decode={"clss": bytes}))
    assert list(d.from_tar(tmp_path / "t.tar", "cls", decode={"cls": bytes})) == [b"0", b"1", b"2"]


def test_rows_of_a_zarr_folder_that_moves_are_an_error_and_not_its_fill_value(tmp_path, monkeypatch):
    rows = iter(d.from_zarr(zarr_rows(tmp_path / "a.zarr"), "x"))
    assert next(rows) == [1.0]
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    with pytest.raises(ms.errors.ShardError, match=r"a\.zarr"):
        list(rows)


@pytest.mark.parametrize("kind", ["zarr", "sparse", "tar"])
def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    if kind == "zarr":
        dataset, expected = d.from_zarr(zarr_rows("a.zarr"), "x"), np.arange(1.0, 21)
    elif kind == "sparse":
        dataset, expected = d.from_sparse(csc("c.h5ad"), dense=True).map(lambda row: row.sum()), [7.0, 10.0, 20.0]
    else:
        tar("t.tar")
        dataset, expected = d.from_tar("t.tar", "cls"), range(3)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    assert np.ravel(list(dataset)).tolist() == list(expected)


def test_column_numbers_are_wider_than_row_numbers(tmp_path):
    dataset = d.from_sparse(csc(tmp_path / "c.h5ad"))
    assert [row["indices"].tolist() for row in dataset] == [[299], [5], [256]]
    assert {row["data"].dtype for row in dataset} == {np.dtype("float32")}
    dense = np.array(list(d.from_sparse(tmp_path / "c.h5ad", dense=True)))
    assert [np.flatnonzero(row).tolist() for row in dense] == [[299], [5], [256]]


def test_rows_cannot_change_the_cache_they_are_read_from(tmp_path):
    def tenfold(row):
        return np.multiply(row["data"], 10, out=row["data"])

    with pytest.raises(ValueError, match="read-only"):
        list(d.from_sparse(csc(tmp_path / "c.h5ad")).map(tenfold))


def test_text_of_several_axes(tmp_path):
    with h5py.File(tmp_path / "t.h5ad", "w") as file:
        file.create_dataset("names", data=np.array([["a", "b"], ["c", "d"]], object), dtype=h5py.string_dtype())
    assert np.array(list(d.from_sparse(tmp_path / "t.h5ad", "names"))).tolist() == [["a", "b"], ["c", "d"]]


def test_units_of_text_fit_the_cache(tmp_path):
    """Two columns of text, each of which is larger than the cache, are read unit by unit, each once."""
    with h5py.File(tmp_path / "t.h5ad", "w") as file:
        for name in ("a", "b"):
            file.create_dataset(
                name, data=np.array(["x" * 5000] * 10_000, object), dtype=h5py.string_dtype(), chunks=(1024,)
            )
    rows = d.from_sparse(tmp_path / "t.h5ad", ("a", "b"))
    assert sum(len(a) for a, _ in rows.batch(500)) == 10_000
    assert rows.node.counters.chunk_reads == 2 * 10


def test_a_name_that_is_not_utf8(tmp_path):
    import os

    path = tmp_path / os.fsdecode(b"caf\xe9.h5ad")
    first, again = (d.from_sparse(csc(path)).node.fingerprint() for _ in range(2))
    assert first == again


def test_more_files_than_may_be_open(tmp_path):
    for number in range(200):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.full(2, number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(190, hard), hard))
    try:
        rows = list(d.from_groups(tmp_path, "x"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(row[0]) for row in rows] == list(range(200))


def test_classes_of_two_sets_are_not_mixed(tmp_path, capsys):
    for name, classes in (("a", ["cat", "dog"]), ("b", ["ant", "cat"]), ("c", ["cat", "dog"])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["label"] = [0, 1]
            file["label"].attrs["classes"] = classes
    a, b, c = (str(tmp_path / f"{name}.h5") for name in "abc")
    assert main(["shards", "write", str(tmp_path / "wrong"), a, b]) != 0
    assert "['ant', 'cat']" in capsys.readouterr().err
    assert main(["shards", "write", str(tmp_path / "right"), a, c]) == 0
    (written, *_) = sorted(tmp_path.glob("right/*.h5"))
    with h5py.File(written) as file:
        assert list(file["label"].attrs["classes"]) == ["cat", "dog"]


def test_one_array_of_zarr_becomes_a_field(tmp_path):
    zarr = pytest.importorskip("zarr")
    zarr.save_array(str(tmp_path / "one.zarr"), np.arange(6.0).reshape(3, 2))
    assert main(["shards", "write", str(tmp_path / "out"), str(tmp_path / "one.zarr")]) == 0
    (written, *_) = sorted(tmp_path.glob("out/*.h5"))
    with h5py.File(written) as file:
        assert file["one"][...].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_names_with_other_digits_are_sorted(tmp_path):
    for name in ("x1²2.h5", "x3.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = [1]
    assert d.HDF5Dataset(tmp_path / "*.h5", "x").cardinality() == 2
