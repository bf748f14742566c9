"""netCDF files of netCDF4-python and h5netcdf next to xarray.open_dataset: packed and missing values, times, groups, damage."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat.__main__ import main
from mpistrat.data import ArraySpec, HDF5Dataset, from_netcdf, write_shards
from mpistrat.errors import MissingDependencyError, ShardError

xarray = pytest.importorskip("xarray")
netCDF4 = pytest.importorskip("netCDF4")
h5netcdf = pytest.importorskip("h5netcdf")

ROWS = 23
ORDER = [22, 0, 3, 3, 9, 10, 21]
FORMATS = ["NETCDF4", "NETCDF4_CLASSIC", "NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET"]


def write(path: Path, variables: dict[str, Any], format: str = "NETCDF4", unlimited: str | None = "time") -> Path:
    """Write variables, given as (dimensions, values, attributes), as they are stored."""
    with netCDF4.Dataset(path, "w", format=format) as file:
        for name, (dimensions, values, attributes) in variables.items():
            values, attributes = np.asarray(values), dict(attributes)
            for dimension, length in zip(dimensions, values.shape, strict=True):
                if dimension not in file.dimensions:
                    file.createDimension(dimension, None if dimension == unlimited else length)
            options = {"fill_value": attributes.pop("_FillValue", None)} if "_FillValue" in attributes else {}
            variable = file.createVariable(name, str if values.dtype == object else values.dtype, dimensions, **options)
            variable.set_auto_maskandscale(False)
            variable.set_auto_chartostring(False)
            variable.setncatts(attributes)
            variable[...] = values
    return path


def series(path: Path, offset: int = 0, rows: int = ROWS, **attributes: Any) -> Path:
    """One variable over hours that start at an offset."""
    values = np.arange(offset, offset + rows)
    hours = {"units": "hours since 2000-01-01", "axis": "T"}
    variables = {
        "time": (("time",), values.astype("i4"), hours),
        "t2m": (("time", "lat"), np.stack([values, values + 0.5], axis=1).astype("f4"), attributes),
        "lat": (("lat",), np.array([50.0, 60.0]), {"units": "degrees_north"}),
    }
    return write(path, variables)


def needs_scipy(format: str) -> None:
    if "NETCDF3" in format:
        pytest.importorskip("scipy")


def same_as_xarray(path: Path, names: list[str], dimension: str = "time", **options: Any) -> None:
    """Compare rows in another order with those of xarray: values, dtypes and missing values."""
    rows = from_netcdf(path, names, dimension=dimension, **options).rows(ORDER)
    with xarray.open_dataset(path, decode_timedelta=False, **options) as expected:
        for name in names:
            values = expected[name].transpose(dimension, ...).values[ORDER]
            if values.dtype.kind in "TU":
                values = values.astype(object)
            np.testing.assert_array_equal(rows[name], values, strict=True)


PACKED = [
    ("i2", {"scale_factor": np.float32(0.1), "add_offset": np.float32(273.15), "_FillValue": np.int16(7)}),
    ("i2", {"scale_factor": 0.1, "add_offset": 273.15, "missing_value": np.int16(7)}),
    ("i1", {"_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": np.float32(2)}),
    ("i1", {"_Unsigned": "true"}),
    ("i4", {"_FillValue": np.int32(3)}),
    ("i4", {"units": "K"}),
    ("i2", {"add_offset": 100.0}),
    ("f4", {"_FillValue": np.float32(5), "missing_value": np.float32(6)}),
    ("f8", {"missing_value": 1e20, "scale_factor": 3.0}),
    ("f4", {"valid_range": np.array([0, 10], "f4")}),
    ("i2", {"missing_value": np.array([2, 4], "i2")}),
]


@pytest.mark.filterwarnings("ignore")  # xarray: of the attributes
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dtype", "attributes"), PACKED)
def test_packed_and_missing_values(dtype: str, attributes: dict[str, Any], format: str, tmp_path: Path) -> None:
    needs_scipy(format)
    values = np.arange(-5, -5 + ROWS * 2).reshape(ROWS, 2).astype(dtype)
    path = write(tmp_path / "a.nc", {"x": (("time", "place"), values, attributes)}, format)
    same_as_xarray(path, ["x"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_random_variables(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    format = str(rng.choice(FORMATS))
    needs_scipy(format)
    limits = {"time": ROWS, "lat": int(rng.integers(1, 5)), "lon": int(rng.integers(1, 4))}
    variables = {}
    for number in range(rng.integers(1, 4)):
        others = rng.permutation(["lat", "lon"])[: rng.integers(0, 3)].tolist()
        dimensions = ["time", *others] if "NETCDF3" in format else rng.permutation(["time", *others]).tolist()
        kinds = ["i1", "i2", "i4", "f4", "f8"] + (["u1", "u2", "u4", "i8", "u8"] if format == "NETCDF4" else [])
        dtype = np.dtype(rng.choice(kinds))
        values = rng.integers(0, 20, [limits[name] for name in dimensions]).astype(dtype)
        attributes: dict[str, Any] = {}
        if rng.random() < 0.5:
            attributes["scale_factor"] = rng.choice([np.float32(0.1), np.float64(0.3)])
        if rng.random() < 0.5:
            attributes["add_offset"] = rng.choice([np.float32(10), np.float64(1 / 3)])
        for name in ("_FillValue", "missing_value"):
            if rng.random() < 0.4:
                attributes[name] = dtype.type(rng.integers(0, 20))
        if dtype.kind == "i" and rng.random() < 0.2:
            attributes["_Unsigned"] = "true"
        variables[f"v{number}"] = (tuple(dimensions), values, attributes)
    unlimited = "time" if rng.random() < 0.5 else None
    path = write(tmp_path / "a.nc", variables, format, unlimited)
    same_as_xarray(path, list(variables))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf", "scipy"])
def test_files_that_xarray_writes(engine: str, tmp_path: Path) -> None:
    """Flags, text, times with a missing one, packed values by encoding, and the dimension as a coordinate or not."""
    if engine == "scipy":
        pytest.importorskip("scipy")
    times = np.datetime64("2000-02-28", "ns") + np.arange(ROWS) * np.timedelta64(6, "h")
    started = times - np.timedelta64(1, "h")
    started[4] = "NaT"
    values = np.random.default_rng(0).normal(size=(ROWS, 2, 3))
    values[3, 1] = np.nan
    written = xarray.Dataset(
        {
            "t2m": (("time", "lat", "lon"), values, {"units": "K"}),
            "packed": (("time", "lat", "lon"), values),
            "started": (("time",), started),
            "flag": (("time",), np.arange(ROWS) % 2 == 0),
            "name": (("time",), np.array([f"ü{row}" for row in range(ROWS)])),
            "lat_bounds": (("lat", "two"), np.zeros((2, 2))),
            "height": ((), 2.0),
        },
        {"time": times, "lat": [10.0, 20.0]},
    )
    encoding = {"packed": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -32768}}
    written.to_netcdf(tmp_path / "a.nc", engine=engine, encoding=encoding)
    names = ["time", "t2m", "packed", "started", "flag", "name"]
    same_as_xarray(tmp_path / "a.nc", names)
    dataset = from_netcdf(tmp_path / "a.nc")
    assert sorted(dataset.element_spec) == sorted(names)
    assert np.isnat(dataset.rows([4])["started"][0])
    assert np.isnan(dataset.rows([3])["packed"][0]).tolist() == [[False] * 3, [True] * 3]


def test_variables_along_the_unlimited_dimension(tmp_path: Path) -> None:
    dataset = from_netcdf(series(tmp_path / "a.nc"))
    assert dataset.element_spec == {"time": ArraySpec((), "M8[ns]"), "t2m": ArraySpec((2,), "f4")}
    row = dataset.rows([2])
    assert row["time"][0] == np.datetime64("2000-01-01T02")
    assert row["t2m"].tolist() == [[2.0, 2.5]]
    assert "left out: lat (no dimension 'time')" in str(dataset)
    assert str(dataset).startswith(f"from_netcdf: {tmp_path}/a.nc, 23 rows along 'time' of t2m float32[2], time")


def test_the_dimension_that_is_chosen(tmp_path: Path) -> None:
    zeros, hours = np.zeros((4, 5), "f4"), {"units": "days since 1900-01-01"}
    x = {"x": (("a", "b"), zeros, {})}
    assert len(from_netcdf(write(tmp_path / "unlimited.nc", x, unlimited="b"), "x")) == 5
    times = {**x, "clock": (("b",), np.arange(5.0), hours)}
    assert len(from_netcdf(write(tmp_path / "time.nc", times, unlimited=None), "x")) == 5
    path = write(tmp_path / "none.nc", x, unlimited=None)
    with pytest.raises(
        ValueError, match=r"one unlimited dimension or one of time, got the dimensions \{'a': 4, 'b': 5\}"
    ):
        from_netcdf(path)
    assert from_netcdf(path, "x", dimension="b").element_spec == ArraySpec((4,), "f4")
    with pytest.raises(ShardError, match=r"x: expected rows along 'c', got the dimensions \['a', 'b'\]"):
        from_netcdf(path, "x", dimension="c")
    with pytest.raises(ShardError, match=r"expected variables along 'c', got"):
        from_netcdf(path, dimension="c")


def test_names_that_are_not_there(tmp_path: Path) -> None:
    path = series(tmp_path / "a.nc")
    with pytest.raises(ShardError, match=r"a\.nc: no: expected a variable that can be read, got no such variable"):
        from_netcdf(path, "no")
    with pytest.raises(ShardError, match=r"a\.nc: group: expected data that can be read"):
        from_netcdf(path, "group/x")
    with pytest.raises(ShardError, match="lat: expected rows along 'time', got the dimensions"):
        from_netcdf(path, ("t2m", "lat"))
    with pytest.raises(ValueError, match="from_netcdf: fields: expected None, a name"):
        from_netcdf(path, [])


def test_variables_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        product = file.createGroup("PRODUCT")
        product.createVariable("x", "f4", ("time",))[:] = np.arange(5)
        inner = product.createGroup("DETAIL")
        inner.createDimension("band", 2)
        inner.createVariable("y", "i4", ("time", "band"))[:5] = np.arange(10).reshape(5, 2)
    x, y = from_netcdf(path, ("PRODUCT/x", "/PRODUCT/DETAIL/y")).rows([3])
    assert (x.tolist(), y.tolist()) == ([3.0], [[6, 7]])
    with pytest.raises(ShardError, match="expected variables along 'time', got.*PRODUCT.*the names of fields"):
        from_netcdf(path)


def test_files_are_one_series(tmp_path: Path) -> None:
    """Each file has its own scale and its own start of the hours."""
    for number, (start, rows) in enumerate([(0, 10), (10, 2), (12, 0), (12, 11)]):
        values = np.arange(start, start + rows)
        scale = 2.0**-number
        variables = {
            "time": (("time",), np.arange(rows, dtype="i4"), {"units": f"hours since 2000-01-01 {start}:00"}),
            "x": (("time",), (values / scale).astype("i2"), {"scale_factor": scale, "units": "K"}),
        }
        write(tmp_path / f"{number}.nc", variables)
    dataset = from_netcdf(tmp_path)
    assert len(dataset) == ROWS
    rows = dataset.rows(ORDER)
    assert rows["x"].tolist() == ORDER
    assert (rows["time"] - np.datetime64("2000-01-01")).astype("m8[h]").astype(int).tolist() == ORDER
    with pytest.raises(
        ShardError, match=r"1\.nc: time: expected \('hours since 2000-01-01 0:00', None\), as in 0\.nc, got"
    ):
        from_netcdf(tmp_path, "time", decode_times=False)


@pytest.mark.parametrize(("values", "attributes"), [("f8", {"units": "K"}), ("f4", {"units": "C"}), ("f4", {})])
def test_files_that_differ(values: str, attributes: dict[str, str], tmp_path: Path) -> None:
    for number, (dtype, own) in enumerate([("f4", {"units": "K"}), (values, attributes)]):
        write(tmp_path / f"{number}.nc", {"x": (("time",), np.zeros(3, dtype), own)})
    with pytest.raises(ShardError, match=r"1\.nc: x: expected .*, as in 0\.nc, got"):
        from_netcdf(tmp_path, "x")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calendar", ["standard", "gregorian", "proleptic_gregorian"])
@pytest.mark.parametrize(
    "units", ["hours since 1900-01-01", "days since 2000-02-28T12:00:00", "seconds since 1970-01-01"]
)
def test_times(calendar: str, units: str, tmp_path: Path) -> None:
    hours = np.arange(ROWS) * 1.25
    time = (("time",), hours, {"units": units, "calendar": calendar, "bounds": "time_bounds"})
    bounds = (("time", "two"), np.stack([hours, hours + 1.25], axis=1), {})
    path = write(tmp_path / "a.nc", {"time": time, "time_bounds": bounds})
    same_as_xarray(path, ["time", "time_bounds"])
    same_as_xarray(path, ["time", "time_bounds"], decode_times=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("calendar", "units"), [("noleap", "days since 2000-01-01"), ("standard", "days since 0001-01-01")]
)
def test_times_that_numpy_lacks(calendar: str, units: str, tmp_path: Path) -> None:
    pytest.importorskip("cftime")
    time = (("time",), np.arange(60.0), {"units": units, "calendar": calendar})
    path = write(tmp_path / "a.nc", {"time": time, "x": (("time",), np.arange(60.0), {})})
    with pytest.raises(
        ShardError, match=f"times of the calendar {calendar!r} that .* lacks, cftime's .*decode_times=False"
    ):
        from_netcdf(path, ("x", "time"))
    assert from_netcdf(path, ("x", "time"), decode_times=False).rows([59])[1].tolist() == [59.0]
    dataset = from_netcdf(path)
    assert list(dataset.element_spec) == ["x"]
    assert "left out: time (" in str(dataset)


def test_a_time_in_the_middle_that_numpy_lacks(tmp_path: Path) -> None:
    """xarray looks at the first and last times only."""
    pytest.importorskip("cftime")
    days = np.arange(ROWS, dtype="f8")
    days[9] = 4e5
    path = write(tmp_path / "a.nc", {"time": (("time",), days, {"units": "days since 2000-01-01"})})
    with pytest.raises(ShardError, match=r"a\.nc: time"):
        list(from_netcdf(path, "time"))


LIMITED = [
    ("i2", {"valid_range": np.array([3, 20], "i2"), "scale_factor": 0.5}),
    ("i2", {"valid_min": np.int16(3)}),
    ("f4", {"valid_max": np.float32(9)}),
    ("i1", {"valid_range": np.array([3, -100], "i1"), "_Unsigned": "true", "_FillValue": np.int8(4)}),
    ("f8", {}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "attributes"), LIMITED)
def test_valid_ranges_as_netcdf4_python_masks_them(dtype: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    values = np.linspace(0, 200, ROWS).astype("u1").astype(dtype)
    path = write(tmp_path / "a.nc", {"x": (("time",), values, attributes)})
    with netCDF4.Dataset(path) as file:
        expected = np.ma.filled(file["x"][:].astype("f8"), np.nan)
    assert np.isnan(expected).any() or not attributes
    rows = from_netcdf(path, "x", valid_range=True).rows(np.arange(ROWS))
    np.testing.assert_array_equal(rows, expected.astype(rows.dtype), strict=True)
    assert rows.dtype.kind == "f"


def test_text(tmp_path: Path) -> None:
    words = np.array(["a", "größe", ""] * 8, object)[:ROWS]
    characters = np.array([list("ab"), list("cd"), list("e ")] * 8, "S1")[:ROWS]
    path = write(tmp_path / "a.nc", {"word": (("time",), words, {}), "code": (("time", "length"), characters, {})})
    rows = from_netcdf(path).rows(ORDER)
    assert rows["word"].tolist() == [words[row] for row in ORDER]
    assert rows["code"].tolist() == [b"".join(characters[row]) for row in ORDER]
    same_as_xarray(path, ["word", "code"])


def test_a_variable_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    path = series(tmp_path / "a.nc")
    with netCDF4.Dataset(path, "a") as file:
        pair = file.createCompoundType(np.dtype([("a", "f4"), ("b", "i4")]), "pair_type")
        file.createVariable("pair", pair, ("time",))[:] = np.zeros(ROWS, pair.dtype)
        lists = file.createVLType(np.int32, "list_type")
        file.createVariable("list", lists, ("time",))[0] = np.arange(3, dtype="i4")
        file.createVariable("when", "f8", ("time",)).units = "fortnights since yesterday"
    dataset = from_netcdf(path)
    assert list(dataset.element_spec) == ["time", "t2m"]
    for name in ("pair", "list", "when"):
        assert f"{name} (" in str(dataset)
        with pytest.raises(ShardError, match=rf"a\.nc: {name}"):
            from_netcdf(path, name)


def test_the_dimension_becomes_the_first_axis(tmp_path: Path) -> None:
    values = np.arange(2 * ROWS * 3, dtype="f4").reshape(2, ROWS, 3)
    path = write(tmp_path / "a.nc", {"x": (("lat", "time", "lon"), values, {})})
    np.testing.assert_array_equal(from_netcdf(path, "x").rows(ORDER), values.transpose(1, 0, 2)[ORDER], strict=True)


def test_sliding_windows_over_files(tmp_path: Path) -> None:
    for number, start in enumerate((0, 10)):
        series(tmp_path / f"{number}.nc", start, 10)
    windows = from_netcdf(tmp_path, "t2m").sliding_window(4, horizon=2, shift=3, stride=2)
    starts = range(0, 20 - 10, 3)
    assert len(windows) == len(starts)
    shuffled = windows.shuffle(seed=4, mode="full").batch(3)
    found = [
        (past[:, 0].tolist(), future[:, 0].tolist()) for batch in shuffled for past, future in zip(*batch, strict=True)
    ]
    expected = [([s, s + 2, s + 4, s + 6], [s + 8, s + 10]) for s in starts]
    assert sorted(found) == expected


def test_units_of_whole_chunks(tmp_path: Path) -> None:
    """Small chunks are read together, about 1 MiB at a time; large ones one by one."""
    for name, chunk, rows in (("small", 1, 16), ("large", 24, 24), ("odd", 5, 15)):
        with netCDF4.Dataset(tmp_path / f"{name}.nc", "w") as file:
            file.createDimension("time", None)
            file.createDimension("place", 1 << 14)
            variable = file.createVariable("x", "f4", ("time", "place"), chunksizes=(chunk, 1 << 14))
            variable[:] = np.arange(40, dtype="f4")[:, None] + np.zeros((1, 1 << 14), "f4")
        dataset = from_netcdf(tmp_path / f"{name}.nc", "x")
        assert dataset.node.chunk_starts().tolist() == [*range(0, 40, rows), 40]
        assert sorted(dataset.shuffle(seed=1).map(lambda row: int(row[5]))) == list(range(40))


def test_written_as_shards(tmp_path: Path) -> None:
    path = series(tmp_path / "a.nc")
    assert main(["shards", "write", str(tmp_path / "shards"), str(path), "--select", "t2m"]) == 0
    rows = HDF5Dataset(tmp_path / "shards").rows(ORDER)
    np.testing.assert_array_equal(rows["t2m"], from_netcdf(path, "t2m").rows(ORDER), strict=True)
    hours = from_netcdf(path).map(lambda row: {**row, "time": row["time"].astype("i8")})
    write_shards(tmp_path / "both", hours)
    assert HDF5Dataset(tmp_path / "both").rows(ORDER)["time"].tolist() == [
        np.datetime64("2000-01-01T00", "ns").astype("i8") + row * 3600 * 10**9 for row in ORDER
    ]


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_CLASSIC"])
def test_a_truncated_file_is_an_error(format: str, tmp_path: Path) -> None:
    """A file of netCDF-3 of which only padding is missing has all rows."""
    needs_scipy(format)
    values = np.arange(2 * ROWS, dtype="i4").reshape(ROWS, 2)
    path = write(tmp_path / "a.nc", {"x": (("time", "place"), values, {}), "y": (("time",), values[:, 0], {})}, format)
    whole = path.read_bytes()
    for cut in (0, 1, 3, 4, 9, len(whole) // 3, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ShardError, match=r"a\.nc"):
            from_netcdf(path, ["x", "y"]).rows(np.arange(ROWS))


def test_formats_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    five = write(tmp_path / "five.nc", {"x": (("time",), np.arange(3), {})}, "NETCDF3_64BIT_DATA")
    with pytest.raises(
        ShardError, match=r"five\.nc: expected a file of netCDF-4 or .*, got one of CDF-5.*nccopy -k nc4"
    ):
        from_netcdf(five)
    (tmp_path / "text.nc").write_text("time,x\n0,1\n")
    with pytest.raises(ShardError, match=r"text\.nc: expected an HDF5 file"):
        from_netcdf(tmp_path / "text.nc")
    classic = write(tmp_path / "classic.nc", {"x": (("time",), np.arange(3, dtype="i4"), {})}, "NETCDF3_CLASSIC")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingDependencyError, match="from_netcdf: expected SciPy.*pip install scipy; or convert"):
        from_netcdf(classic)


def test_a_classic_file_has_no_groups(tmp_path: Path) -> None:
    needs_scipy("NETCDF3_CLASSIC")
    classic = write(tmp_path / "classic.nc", {"x": (("time",), np.arange(3, dtype="i4"), {})}, "NETCDF3_CLASSIC")
    with pytest.raises(ShardError, match="expected a group 'a', got a netCDF-3 file, without groups"):
        from_netcdf(classic, "a/x")


@pytest.mark.parametrize("package", ["xarray", "h5netcdf"])
def test_without_a_package(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = series(tmp_path / "a.nc")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=rf'from_netcdf: expected {package}, .*pip install "mpistrat\[netcdf\]"'
    ):
        from_netcdf(path)


def test_a_missing_filter_names_its_package(tmp_path: Path) -> None:
    """netCDF4-python brings filters that h5py lacks."""
    import h5py

    path = series(tmp_path / "a.nc")
    with h5py.File(path, "a") as file:
        for name, code in (("x", 32004), ("y", 400)):  # optional filters: HDF5 writes without them
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((4,))
            plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())
            space = h5py.h5s.create_simple((ROWS,))
            h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_INT32, space, plist)
            file[name].dims[0].attach_scale(file["time"])
    with pytest.raises(ShardError, match=r"a\.nc: x: expected data that can be read, got filter 32004 .*hdf5plugin"):
        from_netcdf(path, "x")
    assert list(from_netcdf(path).element_spec) == ["time", "t2m"]


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/input.md, in a folder with two files."""
    for number, start in enumerate((0, 40)):
        series(tmp_path / f"era5-{number}.nc", start, 40)
    page = (Path(__file__).parents[3] / "docs/input.md").read_text()
    example = page.partition("### netCDF")[2].partition("```python")[2].partition("```")[0]
    steps: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {"ms": mpistrat, "strategy": mpistrat.OneDeviceStrategy(), "steps": steps}
    monkeypatch.chdir(tmp_path)
    exec(example.replace("...", "steps.append((t2m, time, t2m_after, time_after))"), names)
    names["strategy"].close()
    t2m, _, _, time_after = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    assert (t2m.shape, time_after.shape) == ((51, 24, 2), (51, 6))
    assert sorted(t2m[:, 0, 0].tolist()) == list(range(51))
    assert (time_after[:, 0] - np.datetime64("2000-01-01")).astype("m8[h]").astype(int).tolist() == [
        int(start) + 24 for start in t2m[:, 0, 0]
    ]


def test_other_rows_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, rows in enumerate([[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 4], [1.0, 2.0, 3.0]]):
        (tmp_path / str(number)).mkdir()
        path = write(tmp_path / str(number) / "a.nc", {"x": (("time",), np.array(rows), {})})
        prints.append(from_netcdf(path).node.fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


@pytest.mark.parametrize(("format", "more"), [("NETCDF4", 150), ("NETCDF3_CLASSIC", 290)])
def test_more_files_than_may_be_open(format: str, more: int, tmp_path: Path) -> None:
    """xarray keeps 128 files open; SciPy's maps take two descriptors each."""
    needs_scipy(format)
    for number in range(200):
        write(tmp_path / f"{number}.nc", {"x": (("time",), np.full(2, number, "i4"), {})}, format)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = len(os.listdir("/proc/self/fd"))  # of earlier tests, too
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(own + more, hard), hard))
    try:
        rows = [int(x) for x in from_netcdf(tmp_path, "x").shuffle(seed=1, mode="full")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (own + 30, hard))
        with pytest.raises(ShardError, match="Too many open files.*ulimit -n"):
            from_netcdf(tmp_path, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(rows) == sorted([*range(200)] * 2)
