"""Files as netCDF, anndata, Loom, Cooler and others write them: what belongs together is read, and the rest is named."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import HDF5Dataset
from mpistrat.data.files import handles
from mpistrat.data.shards.files import resolve
from mpistrat.data.shards.survey import check_file, survey
from mpistrat.errors import ShardError

READERS = pytest.mark.parametrize("reader", ["auto", "pread", "h5py"])


def netcdf(path: Path, dimensions: dict[str, Any], variables: dict[str, tuple[tuple[str, ...], Any]]) -> None:
    """Write variables over dimensions, as the netCDF library does: a dimension is a length, or its values."""
    with h5py.File(path, "w") as file:
        for name, values in dimensions.items():
            if isinstance(values, int):
                file.create_dataset(name, (values,), ">f4")
                file[name].make_scale(f"This is a netCDF dimension but not a netCDF variable.{values:10}")
            else:
                file[name] = values
                file[name].make_scale(name)
        for name, (axes, values) in variables.items():
            file[name] = values
            for axis, dimension in enumerate(axes):
                file[name].dims[axis].attach_scale(file[dimension])


def test_dimensions_without_values_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = np.arange(200, dtype="f4").reshape(50, 4)
    netcdf(
        tmp_path / "a.nc", {"sample": 50, "channel": 4}, {"x": (("sample", "channel"), x), "y": (("sample",), x[:, 0])}
    )
    with caplog.at_level(logging.WARNING):
        dataset = HDF5Dataset(tmp_path / "a.nc")
        batch = dataset.batch(50).element(0, 0)
    assert list(batch) == ["x", "y"]
    np.testing.assert_array_equal(batch["x"], x, strict=True)
    assert "left out: channel (a dimension without values), sample (a dimension without values)" in str(dataset)
    assert "channel, sample: left out, as fields do not name them" in caplog.text
    with pytest.raises(ShardError, match="channel: .*4 rows that were never written"):
        len(HDF5Dataset(tmp_path / "a.nc", "channel"))


def test_coordinates_and_variables_of_other_axes_are_left_out(tmp_path: Path) -> None:
    field = np.arange(12 * 4 * 3, dtype="f4").reshape(12, 4, 3)
    dimensions = {"time": np.arange(12.0), "lat": np.arange(4.0), "lon": np.arange(3.0)}
    variables = {"t2m": (("time", "lat", "lon"), field), "mask": (("lat", "lon"), field[0] > 3)}
    netcdf(tmp_path / "b.nc", dimensions, variables)
    dataset = HDF5Dataset(tmp_path / "b.nc")
    assert len(dataset) == 12
    rows = dataset.rows([11, 2])
    assert list(rows) == ["t2m", "time"]
    np.testing.assert_array_equal(rows["t2m"], field[[11, 2]], strict=True)
    assert rows["time"].tolist() == [11.0, 2.0]
    assert "left out: lat (4 rows, unlike t2m), lon (3 rows, unlike t2m), mask (4 rows, unlike t2m)" in str(dataset)
    assert HDF5Dataset(tmp_path / "b.nc", ["mask", "lat"]).rows([1])["lat"].tolist() == [1.0]


def test_tables_of_other_lengths_in_other_groups_are_left_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:  # as Cooler's
        file["pixels/count"], file["pixels/bin1"] = np.arange(9), np.arange(9) * 2
        file["bins/start"], file["bins/end"] = np.arange(4), np.arange(4)
        file["chroms/name"] = np.array([b"1", b"2"])
    dataset = HDF5Dataset(tmp_path)
    assert {name: array.tolist() for name, array in dataset.rows([3]).items()} == {
        "pixels/bin1": [6],
        "pixels/count": [3],
    }
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["pixels/short"] = np.arange(8)  # beside the others: rows may be missing
    with pytest.raises(
        ShardError, match=r"expected 9 rows in 'pixels/short', as in 'pixels/bin1', got 8 rows.*fields="
    ):
        len(HDF5Dataset(tmp_path))


def anndata(path: Path, x: Any) -> None:
    """As anndata writes 5 cells of 3 genes."""
    with h5py.File(path, "w") as file:
        file.attrs["encoding-type"] = "anndata"
        if isinstance(x, np.ndarray):
            file["X"] = x
            file["X"].attrs["encoding-type"] = "array"
        else:
            for name, values in x.items():
                file[f"X/{name}"] = values
            file["X"].attrs["encoding-type"] = "csr_matrix"
        for group, rows in (("obs", 5), ("var", 3)):
            file[f"{group}/_index"] = [f"{group}{i}" for i in range(rows)]
            file[f"{group}/_index"].attrs["encoding-type"] = "string-array"
        file["obs/type/codes"] = np.array([0, 1, 1, 0, 0], "i1")
        file["obs/type/categories"] = ["a", "b"]
        for name in ("codes", "categories"):
            file[f"obs/type/{name}"].attrs["encoding-type"] = "array"


def test_anndata(tmp_path: Path) -> None:
    x = np.arange(15, dtype="f4").reshape(5, 3)
    anndata(tmp_path / "dense.h5ad", x)
    rows = HDF5Dataset(tmp_path / "dense.h5ad").rows([4, 1])
    assert list(rows) == ["X", "obs/_index", "obs/type/codes"]
    assert rows["X"].tolist() == x[[4, 1]].tolist()
    assert rows["obs/_index"].tolist() == ["obs4", "obs1"]
    anndata(tmp_path / "sparse.h5ad", {"data": np.ones(40), "indices": np.zeros(40, int), "indptr": np.arange(6)})
    dataset = HDF5Dataset(tmp_path / "sparse.h5ad")
    assert list(dataset.rows([0])) == ["obs/_index", "obs/type/codes"]
    assert "X/data (part of a sparse matrix)" in str(dataset)
    assert HDF5Dataset(tmp_path / "sparse.h5ad", ["X/data"]).rows([39])["X/data"].tolist() == [1.0]


def odd(file: h5py.File) -> dict[str, str]:
    """Datasets that cannot be read, each with a part of the reason."""
    file.create_dataset("reference", (3,), h5py.ref_dtype)
    file.create_dataset("member", (3,), np.dtype([("a", "i4"), ("s", h5py.string_dtype())]))
    file.create_dataset("strings", (3,), h5py.vlen_dtype(h5py.string_dtype()))
    h5py.h5d.create(file.id, b"time", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((3,)))
    return {"reference": "references", "member": "variable-length", "strings": "variable-length", "time": "time type"}


def test_types_that_cannot_be_read_are_left_out_unless_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        reasons = odd(file)
        file["x"] = np.arange(3)
    dataset = HDF5Dataset(tmp_path)
    assert {name: array.tolist() for name, array in dataset.rows([2]).items()} == {"x": [2]}
    for name, reason in reasons.items():
        with pytest.raises(ShardError, match=rf"a\.h5: {name}: .*{reason}"):
            len(HDF5Dataset(tmp_path, ["x", name]))
    found = survey(tmp_path)
    assert [field.name for field in found.fields] == ["x"]
    assert [text.split(" (")[0] for text in found.left_out] == sorted(reasons)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["x"]
    with pytest.raises(ShardError, match=r"a\.h5: member: expected numbers, .*got a structure"):
        len(HDF5Dataset(tmp_path))


def test_a_filter_that_is_missing_names_its_package(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for code in (32015, 400):  # optional filters: HDF5 writes without them
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((10,))
            plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())
            space = h5py.h5s.create_simple((10,))
            dataset = h5py.h5d.create(file.id, f"f{code}".encode(), h5py.h5t.NATIVE_FLOAT, space, plist)
            dataset.write_direct_chunk((0,), bytes(40))
        file["x"] = np.arange(10)
    if h5py.h5z.filter_avail(32015):
        pytest.skip("the plugins of hdf5plugin are loaded")
    assert list(HDF5Dataset(tmp_path).rows([0])) == ["x"]
    remedy = "pip install hdf5plugin, and write `import hdf5plugin`.*HDF5_PLUGIN_PATH"
    with pytest.raises(
        ShardError, match=rf"f32015: .*filter 32015 \(Zstandard\), which this HDF5 does not have. {remedy}"
    ):
        len(HDF5Dataset(tmp_path, "f32015"))
    with pytest.raises(ShardError, match="filter 400 .*Install the filter's plugin"):
        len(HDF5Dataset(tmp_path, "f400"))


@READERS
@pytest.mark.parametrize("order", ["<", ">"])
def test_array_types_are_further_axes(tmp_path: Path, reader: str, order: str) -> None:
    want = np.arange(100 * 2 * 6, dtype="f4").reshape(100, 2, 2, 3)
    dtype = np.dtype((f"{order}f4", (2, 3)))
    ways: dict[str, Any] = {
        "plain": {},
        "chunks": {"chunks": (16, 2)},
        "gzip": {"chunks": (16, 2), "compression": "gzip"},
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, how in ways.items():
            file.create_dataset(name, (100, 2), dtype=dtype, **how)[...] = want
        file.create_dataset("part", (100, 2), dtype=dtype, chunks=(16, 2), fillvalue=None)[:32] = want[:32]
    for name in ways:
        dataset = HDF5Dataset(tmp_path, name, reader=reader)
        assert dataset.element_spec.shape == (2, 2, 3)
        batch = dataset.batch(100).element(0, 0)
        np.testing.assert_array_equal(batch, want, strict=True)
        assert batch.dtype == dataset.element_spec.dtype
    part = HDF5Dataset(tmp_path, "part", reader=reader).rows([31, 32])
    assert part.tolist() == [want[31].tolist(), np.zeros((2, 2, 3)).tolist()]


@READERS
def test_big_endian_members_have_the_dtype_of_the_spec(tmp_path: Path, reader: str) -> None:
    inner = [("x", ">f4", (2,)), ("y", "<u1")]
    for number, members in enumerate(([("a", "<i2"), ("b", ">f8", (2,))], [("a", "<i2"), ("in", inner)], inner)):
        rows = np.zeros(6, np.dtype(members, align=True))
        for name in rows.dtype.names or ():
            values = rows[name]["x"] if rows[name].dtype.names else rows[name]
            values[...] = np.arange(values.size).reshape(values.shape)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = rows
            file.create_dataset("z", data=rows, chunks=(4,), compression="gzip")
        dataset = HDF5Dataset(tmp_path / f"{number}.h5", reader=reader)
        batch = dataset.batch(4).element(0, 1)
        for name, spec in dataset.element_spec.items():
            assert batch[name].dtype == spec.dtype
            np.testing.assert_array_equal(batch[name], rows[4:].astype(spec.dtype), strict=True)


@READERS
def test_text_in_latin_1_has_its_own_words(tmp_path: Path, reader: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("text", data=[b"M\xfcnchen"], dtype=h5py.string_dtype("ascii"))
    with pytest.raises(ShardError, match="another encoding, such as Latin-1: write it in UTF-8") as caught:
        HDF5Dataset(tmp_path, "text", reader=reader).rows([0])
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("swmr", [True, False])
def test_a_file_that_is_being_written(tmp_path: Path, swmr: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import h5py, sys\n"
        f"file = h5py.File({str(tmp_path / 'a.h5')!r}, 'w', libver='latest')\n"
        "file.create_dataset('x', (10,), maxshape=(None,), chunks=(5,))[:] = 1\n"
        f"file.swmr_mode = {swmr}\nfile.flush()\nprint(flush=True)\nsys.stdin.read()\n"
    ).replace("file.swmr_mode = False\n", "")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        writer.stdout.readline()
        with pytest.raises(ShardError, match="A program is writing it|open for writing") as caught:
            handles.open_hdf5(tmp_path / "a.h5")
        writer.stdin.close()
    assert "damaged" not in str(caught.value)
    assert not swmr or "h5clear -s a.h5" in str(caught.value)
    assert HDF5Dataset(tmp_path, "x").rows([9]).tolist() == [1.0]  # once it is closed


def test_information_as_json_has_every_attribute(tmp_path: Path) -> None:
    netcdf(tmp_path / "a.h5", {"t": np.arange(10.0)}, {"x": (("t",), np.zeros((10, 3)))})
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        attributes = file["x"].attrs
        attributes["_FillValue"], attributes["range"] = np.nan, [0, np.inf]
        attributes["z"], attributes["bytes"], attributes["none"] = 1 + 2j, np.bytes_(b"\xff"), h5py.Empty("f4")
        attributes["names"], attributes["ref"], attributes["blobs"] = ["a", "b"], file["x"].ref, np.array([b"a", b"b"])
    (found,) = [field for field in survey(tmp_path).fields if field.name == "x"]
    document = json.loads(json.dumps(found.attributes, allow_nan=False))
    assert document["_FillValue"] == "nan"
    assert document["range"] == [0.0, "inf"]
    assert document["names"] == ["a", "b"]
    assert document["blobs"] == ["a", "b"]
    assert document["bytes"] == "\\xff"


def test_a_whole_file_is_whole_whatever_the_lengths(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for rows in (3, 4):
            file.create_dataset(f"x{rows}", data=np.zeros(rows), chunks=(2,), compression="gzip")
        odd(file)
    assert check_file(resolve(tmp_path), 0, set()) == "checksums"
    with h5py.File(tmp_path / "a.h5", "r") as file:
        offset = file["x4"].id.get_chunk_info(1).byte_offset
    with (tmp_path / "a.h5").open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\0\0")
    with pytest.raises(ShardError, match="x4: expected rows 2 to 3 that can be read"):
        check_file(resolve(tmp_path), 0, set())


# Files of the packages' own writers.


def test_a_file_of_the_netcdf_library(tmp_path: Path) -> None:
    netcdf4 = pytest.importorskip("netCDF4")
    rng = np.random.default_rng(0)
    t2m, kind = rng.normal(size=(20, 4, 3)).astype("f4"), np.arange(20, dtype="i2")
    with netcdf4.Dataset(tmp_path / "era.nc", "w") as file:
        for name, length in {"time": None, "lat": 4, "lon": 3, "channel": 2}.items():
            file.createDimension(name, length)
        for name in ("time", "lat"):
            file.createVariable(name, "f8", (name,))[:] = np.arange(20 if name == "time" else 4)
        file.createVariable("t2m", "f4", ("time", "lat", "lon"), zlib=True)[:] = t2m
        file.createVariable("kind", ">i2", ("time",), endian="big")[:] = kind
        file.createVariable("crs", "i4", ())[...] = 7
        file.createVariable("weight", "f8", ("channel",))[:] = [1, 2]
    dataset = HDF5Dataset(tmp_path / "era.nc")
    rows = dataset.rows([19, 0])
    assert sorted(rows) == ["kind", "t2m", "time"]
    np.testing.assert_array_equal(rows["t2m"], t2m[[19, 0]], strict=True)
    np.testing.assert_array_equal(rows["kind"], kind[[19, 0]], strict=True)
    assert check_file(resolve(tmp_path / "era.nc"), 0, set()) in ("checksums", "partly")
    assert json.loads(json.dumps([vars(field) for field in survey(tmp_path / "era.nc").fields], allow_nan=False))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_of_anndata(tmp_path: Path, sparse: bool) -> None:
    ad = pytest.importorskip("anndata")
    pandas, scipy = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    x = np.random.default_rng(0).poisson(1.0, (30, 8)).astype("f4")
    cells = pandas.DataFrame(
        {"n": np.arange(30), "kind": pandas.Categorical(["a", "b", "c"] * 10)}, index=[f"cell{i}" for i in range(30)]
    )
    ad.AnnData(scipy.csr_matrix(x) if sparse else x, obs=cells).write_h5ad(tmp_path / "cells.h5ad")
    dataset = HDF5Dataset(tmp_path / "cells.h5ad")
    rows = dataset.rows([29, 3])
    assert len(dataset) == 30
    assert rows["obs/n"].tolist() == [29, 3]
    assert rows["obs/kind/codes"].tolist() == [2, 0]
    assert ("X" in rows) != sparse
    if not sparse:
        np.testing.assert_array_equal(rows["X"], x[[29, 3]], strict=True)


def test_a_file_that_hdf5plugin_compressed(tmp_path: Path) -> None:
    plugin = pytest.importorskip("hdf5plugin")
    x = np.arange(1000.0)
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(100,), compression=plugin.Zstd())
    assert HDF5Dataset(tmp_path, "x").rows([999, 5]).tolist() == [999.0, 5.0]
