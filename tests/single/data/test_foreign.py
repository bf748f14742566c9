"""HDF5 files that others wrote: groups, structures, strings, rows of varying length, virtual datasets, links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import ArraySpec, HDF5Dataset
from mpistrat.data.files import varying
from mpistrat.errors import MissingDependencyError, ShardError

ORDER = [7, 0, 3, 3, 11, 1]


def two_files(directory: Path, write: Callable[[h5py.File, slice], None], rows: int = 12) -> None:
    """Write the rows to two files of different length."""
    for number, part in enumerate((slice(0, 5), slice(5, rows))):
        with h5py.File(directory / f"part-{number}.h5", "w") as file:
            write(file, part)


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (2,)}, {"chunks": (3,), "compression": "gzip"}], ids=["contiguous", "chunked", "gzip"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("reader", ["auto", "pread", "h5py"])
def test_strings_of_varying_length(tmp_path: Path, options: dict[str, Any], encoding: str, reader: str) -> None:
    texts = ["", "a", "Ärger ✓" if encoding == "utf-8" else "plain", "x" * 1000] * 3

    def write(file: h5py.File, part: slice) -> None:
        file.create_dataset("group/text", data=texts[part], dtype=h5py.string_dtype(encoding), **options)

    two_files(tmp_path, write)
    dataset = HDF5Dataset(tmp_path, "group/text", reader=reader)
    assert dataset.node.row_spec == ArraySpec((), object)
    rows = dataset.rows(ORDER)
    assert rows.dtype == object
    assert rows.tolist() == [texts[i] for i in ORDER]
    assert all(type(text) is str for text in rows)
    assert [text for batch in dataset.batch(5) for text in batch] == texts
    assert ("h5py" if reader == "h5py" else "global heap") in str(dataset)


def test_strings_in_several_axes_and_of_fixed_length(tmp_path: Path) -> None:
    pairs = np.array([[f"a{i}", f"b{i}"] for i in range(12)], object)
    fixed = np.array([f"n{i}" for i in range(12)], "S5")
    utf8 = [f"ü{i}" for i in range(12)]

    def write(file: h5py.File, part: slice) -> None:
        file.create_dataset("pairs", data=pairs[part], dtype=h5py.string_dtype())
        file["fixed"] = fixed[part]
        file.create_dataset("utf8", data=[text.encode() for text in utf8[part]], dtype=h5py.string_dtype("utf-8", 6))

    two_files(tmp_path, write)
    rows = HDF5Dataset(tmp_path).rows(ORDER)
    assert rows["pairs"].tolist() == pairs[ORDER].tolist()
    assert rows["fixed"].dtype == "S5"
    assert rows["fixed"].tolist() == fixed[ORDER].tolist()
    assert [text.decode() for text in rows["utf8"]] == [utf8[i] for i in ORDER]


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "latin.h5", "w") as file:
        file.create_dataset("text", data=[b"good", b"M\xfcnchen"], dtype=h5py.string_dtype("ascii"))
    with pytest.raises(ShardError, match=r"latin\.h5: text: .*text in UTF-8"):
        HDF5Dataset(tmp_path, "text").rows([1])
    with pytest.raises(ShardError, match=r"latin\.h5: text: .*rows 0 to 1.*utf-8"):
        HDF5Dataset(tmp_path, "text", reader="h5py").rows([1])


@pytest.mark.parametrize("reader", ["auto", "pread", "h5py"])
def test_rows_of_varying_length(tmp_path: Path, reader: str) -> None:
    ragged = [np.arange(n % 4, dtype=np.int16) * n for n in range(12)]

    def write(file: h5py.File, part: slice) -> None:
        field = file.create_dataset("r", (len(ragged[part]),), h5py.vlen_dtype(np.int16))
        for i, row in enumerate(ragged[part]):
            field[i] = row
        file["label"] = np.arange(12)[part]

    two_files(tmp_path, write)
    dataset = HDF5Dataset(tmp_path, ("r", "label"), reader=reader)
    assert dataset.node.row_spec == (ArraySpec((None,), np.int16), ArraySpec((), np.int64))
    rows, labels = dataset.rows(ORDER)
    assert rows.dtype == object
    assert rows.shape == (6,)
    assert labels.tolist() == ORDER
    for row, i in zip(rows, ORDER, strict=True):
        assert row.dtype == np.int16
        assert np.array_equal(row, ragged[i])
    assert dataset.rows([])[0].shape == (0,)


def test_structures_enums_and_other_numbers(tmp_path: Path) -> None:
    inner = np.dtype([("a", "<i2"), ("b", "<f4", (2,))])
    table = np.zeros(12, np.dtype([("t", "<f8"), ("name", "S3"), ("inner", inner)]))
    table["t"], table["name"], table["inner"]["b"] = np.arange(12), b"xyz", np.arange(24).reshape(12, 2)
    swapped = np.array([(i, i / 2) for i in range(12)], [("a", ">i4"), ("b", ">f8")])
    arrays = {
        "table": table,
        "swapped": swapped,
        "flag": np.arange(12) % 3 == 0,
        "half": np.arange(12, dtype=np.float16),
        "wave": np.arange(12) * (1 + 2j),
        "big": np.arange(24, dtype=">u2").reshape(12, 2),
    }

    def write(file: h5py.File, part: slice) -> None:
        for name, array in arrays.items():
            file[f"g/{name}"] = array[part]
        file.create_dataset(
            "g/colour", data=np.arange(12)[part] % 2, dtype=h5py.enum_dtype({"RED": 0, "GREEN": 1}, "i1")
        )

    two_files(tmp_path, write)
    dataset = HDF5Dataset(tmp_path)
    rows = dataset.rows(ORDER)
    for name, array in arrays.items():
        found = rows[f"g/{name}"]
        assert found.dtype == array.dtype.newbyteorder("=") == dataset.node.row_spec[f"g/{name}"].dtype
        assert np.array_equal(found, array[ORDER])
    assert rows["g/colour"].tolist() == [i % 2 for i in ORDER]
    assert rows["g/colour"].dtype == np.int8
    assert dataset.rows([2])["g/table"]["inner"]["b"].tolist() == [[4.0, 5.0]]


def test_files_that_store_a_field_in_different_ways(tmp_path: Path) -> None:
    data = np.arange(120.0).reshape(40, 3)
    ways: list[dict[str, Any]] = [{}, {"chunks": (4, 3), "compression": "gzip"}, {}, {"chunks": (4, 2)}]
    for number, options in enumerate(ways):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=data[number * 10 : number * 10 + 10], **options)
    dataset = HDF5Dataset(tmp_path, "x")
    order = np.random.default_rng(0).integers(0, 40, 100)
    assert np.array_equal(dataset.rows(order), data[order])
    assert np.array_equal(dataset.rows(range(8, 33)), data[8:33])
    assert "memory map for 2 files" in str(dataset)
    assert "h5py for 1 file: " in str(dataset)
    assert "not of whole rows" in str(dataset)
    starts = dataset.node.chunk_starts()
    assert starts is None or (starts[0] == 0 and starts[-1] == 40 and (np.diff(starts) > 0).all())


@pytest.mark.parametrize("reader", ["auto", "mmap", "pread", "h5py"])
def test_every_reader_reads_the_same(tmp_path: Path, reader: str) -> None:
    data = np.random.default_rng(0).random((12, 7))

    def write(file: h5py.File, part: slice) -> None:
        file["x"] = data[part]
        file.create_dataset("z", data=data[part], compression="gzip")

    two_files(tmp_path, write)
    dataset = HDF5Dataset(tmp_path, reader=reader)
    rows = dataset.rows(ORDER)
    assert np.array_equal(rows["x"], data[ORDER])
    assert np.array_equal(rows["z"], data[ORDER])
    expected = {"auto": "(memory map)", "mmap": "(memory map)", "pread": '(pread: reader="pread")', "h5py": "(h5py"}
    assert f"x float64[7] {expected[reader]}" in str(dataset)


def test_wrong_settings() -> None:
    for settings in ({"reader": "fast"}, {"on_error": "ignore"}, {"driver": "core"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            HDF5Dataset(__file__, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reader.*h5py"):
        HDF5Dataset(__file__, driver="mpio", reader="mmap")


@pytest.mark.skipif(h5py.get_config().mpi, reason="this h5py was built with MPI")
def test_mpi_io_needs_an_h5py_with_mpi() -> None:
    with pytest.raises(MissingDependencyError, match="driver: expected an h5py.* built with MPI.*HDF5_MPI=ON"):
        HDF5Dataset(__file__, driver="mpio")


def test_strings_that_are_stored_in_unusual_ways_are_read_by_hdf5(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(12)]
    for number, options in enumerate([{"userblock_size": 512}, {}, {"libver": "latest"}]):
        with h5py.File(tmp_path / f"{number}.h5", "w", **options) as file:
            field = file.create_dataset("text", (4,), h5py.string_dtype(), fillvalue=b"row 7" if number == 1 else None)
            field[: 3 if number == 1 else 4] = texts[number * 4 : number * 4 + (3 if number == 1 else 4)]
    dataset = HDF5Dataset(tmp_path, "text")
    assert dataset.rows([7, 0, 11]).tolist() == ["row 7", "row 0", "row 11"]
    assert dataset.rows(range(12)).tolist() == texts
    assert "global heap" in str(dataset)
    assert "stored in an unusual way" in str(dataset)


def test_collections_are_read_once_in_order_and_not_all_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"row {i} " * 20 for i in range(2000)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = texts
    monkeypatch.setattr(varying, "_KEPT", 20_000)
    dataset = HDF5Dataset(tmp_path, "text")
    assert [text for batch in dataset.batch(100) for text in batch] == texts
    once = dataset.node.counters.chunk_reads
    assert once * 4096 < (tmp_path / "a.h5").stat().st_size
    order = np.random.default_rng(0).permutation(2000)
    assert dataset.rows(order[:50]).tolist() == [texts[i] for i in order[:50]]
    assert dataset.node.counters.chunk_reads > once


# Virtual datasets.


def virtual(path: Path, source: str, name: str = "x", *, rows: int = 4) -> None:
    layout = h5py.VirtualLayout((rows,), "i8")
    layout[:] = h5py.VirtualSource(source, name, (rows,))
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("v", layout)


def plain(path: Path, start: int = 0, rows: int = 4) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(start, start + rows)


def test_virtual_datasets_over_declared_files_are_read(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5")
    plain(tmp_path / "b.h5", 4)
    virtual(tmp_path / "c.h5", "b.h5")
    virtual(tmp_path / "d.h5", str(tmp_path / "a.h5"))
    dataset = HDF5Dataset(tmp_path, "v")
    assert dataset.rows(range(8)).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert "a virtual dataset" in str(dataset)


def master(path: Path, name: str, sources: Sequence[tuple[str, int]]) -> None:
    """A virtual dataset of the first rows of x in other files, one file after the other."""
    layout = h5py.VirtualLayout((sum(rows for _, rows in sources),), "i8")
    start = 0
    for source, rows in sources:
        layout[start : start + rows] = h5py.VirtualSource(source, "x", (4,))[:rows]
        start += rows
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset(name, layout)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("fields", [True, False])
@pytest.mark.parametrize("order", [["all.h5", "part0.h5", "part1.h5"], ["part1.h5", "all.h5", "part0.h5"], None])
def test_rows_of_a_virtual_dataset_and_its_sources_come_once(
    tmp_path: Path, name: str, fields: bool, order: list[str] | None
) -> None:
    plain(tmp_path / "part0.h5")
    plain(tmp_path / "part1.h5", 4)
    master(tmp_path / "all.h5", name, [("part0.h5", 4), ("part1.h5", 4)])
    files = tmp_path if order is None else [tmp_path / file for file in order]
    dataset = HDF5Dataset(files, [name] if fields else None)
    assert len(dataset) == 8
    assert dataset.rows(range(8))[name].tolist() == list(range(8))
    assert "3 files in" in str(dataset)
    assert "(2 files are sources of virtual datasets), 8 rows of" in str(dataset)
    assert dataset.skipped == ()
    plain(tmp_path / "part1.h5", 40)
    with pytest.raises(ShardError, match=r"part1\.h5.*must not change"):
        iter(dataset)


def test_a_file_that_is_drawn_from_in_part_has_no_rows_of_its_own(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5", 10)
    plain(tmp_path / "b.h5")
    plain(tmp_path / "c.h5", 20)
    master(tmp_path / "m.h5", "x", [("b.h5", 3)])
    dataset = HDF5Dataset(tmp_path, "x")
    assert dataset.rows(range(11)).tolist() == [10, 11, 12, 13, 20, 21, 22, 23, 0, 1, 2]
    assert "(1 file is a source of virtual datasets)" in str(dataset)
    virtual(tmp_path / "n.h5", "m.h5", rows=3)
    dataset = HDF5Dataset([tmp_path / "b.h5", tmp_path / "m.h5", tmp_path / "n.h5"], "v")
    assert dataset.rows(range(3)).tolist() == [0, 1, 2]
    assert "(2 files are sources" in str(dataset)


def test_only_virtual_datasets_that_are_wanted_make_files_sources(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5")
    plain(tmp_path / "b.h5", 4)
    virtual(tmp_path / "b.h5", "a.h5")
    assert HDF5Dataset(tmp_path, "x").rows(range(8)).tolist() == list(range(8))
    assert HDF5Dataset(tmp_path, "v").rows(range(4)).tolist() == [0, 1, 2, 3]


def test_a_source_that_lacks_the_field_is_no_bad_file(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5")
    virtual(tmp_path / "m.h5", "a.h5")
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file["other"] = np.arange(3)
    with pytest.raises(ShardError, match=r"z\.h5: expected a dataset 'v'"):
        len(HDF5Dataset(tmp_path, "v"))
    dataset = HDF5Dataset(tmp_path, "v", on_error="skip")
    assert dataset.rows(range(4)).tolist() == [0, 1, 2, 3]
    assert [path.name for path, _ in dataset.skipped] == ["z.h5"]
    (tmp_path / "a.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:-8])
    with pytest.raises(ShardError, match=r"a\.h5: .*HDF5 refuses"):
        len(HDF5Dataset(tmp_path, "v"))


def test_files_that_draw_from_each_other_are_refused(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        plain(tmp_path / f"{one}.h5")
        virtual(tmp_path / f"{one}.h5", f"{other}.h5")
    plain(tmp_path / "c.h5")
    virtual(tmp_path / "c.h5", ".")
    with pytest.raises(ShardError, match=r"a\.h5: .*files that draw from each other"):
        len(HDF5Dataset(tmp_path, "v"))


def test_a_virtual_dataset_over_its_own_file_is_read(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5")
    virtual(tmp_path / "a.h5", ".")
    rows = HDF5Dataset(tmp_path).rows([3, 0])
    assert {name: array.tolist() for name, array in rows.items()} == {"x": [3, 0], "v": [3, 0]}


def test_virtual_datasets_over_other_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "set"
    inside.mkdir()
    plain(inside / "a.h5")
    plain(tmp_path / "other.h5")
    virtual(inside / "a.h5", "../other.h5")
    with pytest.raises(ShardError, match=r"a\.h5: v: .*\.\./other\.h5, which is not a file of this dataset"):
        len(HDF5Dataset(inside))
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(tmp_path))
    with pytest.raises(ShardError, match="HDF5_VDS_PREFIX"):
        len(HDF5Dataset([inside / "a.h5", tmp_path / "other.h5"], "v"))


@pytest.mark.parametrize(
    ("source", "name", "rows", "message"),
    [("b.h5", "y", 4, "not there"), ("b.h5", "x", 9, r"shape \(4,\) only")],
)
def test_sources_that_hdf5_would_fill_in_are_refused(
    tmp_path: Path, source: str, name: str, rows: int, message: str
) -> None:
    plain(tmp_path / "a.h5")
    plain(tmp_path / "b.h5")
    virtual(tmp_path / "a.h5", source, name, rows=rows)
    with pytest.raises(ShardError, match=f"a.h5: v: .*{message}"):
        len(HDF5Dataset([tmp_path / "a.h5", tmp_path / "b.h5"], "v"))


def test_virtual_datasets_in_a_circle_are_refused(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        virtual(tmp_path / f"{one}.h5", f"{other}.h5", "v")
    with pytest.raises(ShardError, match="too many virtual datasets"):
        len(HDF5Dataset(tmp_path, "v"))


# Links.


def test_links_inside_the_file_are_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["deep/x"] = np.arange(4)
        file["deep/again"] = file["/"]  # a group inside itself
        file["alias"] = h5py.SoftLink("deep")
        file["deep/up"] = h5py.SoftLink("x")
        file["dangling"] = h5py.SoftLink("/nowhere")
    for name in ("deep/x", "/deep/x", "alias/x", "alias/up", "deep/again/alias/x"):
        assert HDF5Dataset(tmp_path, name).rows([2, 0]).tolist() == [2, 0]
    assert list(HDF5Dataset(tmp_path).rows([0])) == ["deep/x"]
    for name in ("dangling", "deep", "deep/x/y", "nothing"):
        with pytest.raises(ShardError, match=rf"a\.h5: expected a dataset '{name}', got datasets \['deep/x'\]"):
            len(HDF5Dataset(tmp_path, name))


def test_links_out_of_the_file_are_refused_unless_nobody_asks_for_them(tmp_path: Path) -> None:
    plain(tmp_path / "other.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(4)
        file["away"] = h5py.ExternalLink("other.h5", "/")
        file["soft"] = h5py.SoftLink("/away/x")
        file["loop"] = h5py.SoftLink("/loop")
    both = [tmp_path / "a.h5", tmp_path / "other.h5"]
    with pytest.raises(ShardError, match=r"a\.h5: .*external link at away, to other\.h5.*fields="):
        len(HDF5Dataset(both))
    for name in ("away/x", "soft"):
        with pytest.raises(ShardError, match=rf"a\.h5: {name}: .*external link at /away, to other\.h5"):
            len(HDF5Dataset(both, name))
    with pytest.raises(ShardError, match=r"a\.h5: loop: .*soft links"):
        len(HDF5Dataset(both, "loop"))
    with pytest.raises(ShardError, match=r"a\.h5: expected a dataset 'nothing', got datasets \['x'\]"):
        len(HDF5Dataset(both, "nothing"))
    assert HDF5Dataset(both, "x").rows([4, 1]).tolist() == [0, 1]


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(4)
            file["deep/step"] = 3
            file["none"] = h5py.Empty("f4")
            file["alias"] = h5py.SoftLink("x")
            file["deep/up"] = h5py.SoftLink("nowhere")
            file["deep/down"] = h5py.SoftLink("step")
            if number:
                file["loop"] = h5py.SoftLink("/loop")
    dataset = HDF5Dataset(tmp_path)
    assert list(dataset.rows([0])) == ["x"]
    steps = "deep/step (no rows), deep/up (a link to nothing), none (no rows), loop (too many soft links, at /loop)"
    assert str(dataset).endswith(f"; left out: {steps}")
    named = HDF5Dataset(tmp_path, ["x"])
    assert len(named) == 8
    assert "left out" not in str(named)
    with h5py.File(tmp_path / "0.h5", "r+") as file:
        for number in range(6):
            file[f"scalar {number}"] = number
    more = HDF5Dataset(tmp_path)
    assert len(more) == 8
    assert str(more).endswith("scalar 0 (no rows), scalar 1 (no rows) and 5 more")


# What is refused.


def test_other_contents_are_refused_with_the_reason(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("reference", (3,), h5py.ref_dtype)
        file.create_dataset("region", (3,), h5py.regionref_dtype)
        file.create_dataset("member", (3,), np.dtype([("a", "i4"), ("s", h5py.string_dtype())]))
        file.create_dataset("strings", (3,), h5py.vlen_dtype(h5py.string_dtype()))
        file.create_dataset("pairs", (3, 2), h5py.vlen_dtype(np.int32))
        file.create_dataset("swapped", (3,), h5py.vlen_dtype(np.dtype(">i4")))
        file.create_dataset("outside", (10,), "i1", external=[("/etc/passwd", 0, 10)])
        file["scalar"] = 3
        file["none"] = h5py.Empty("f4")
    reasons = {
        "reference": "references",
        "region": "references",
        "member": "variable-length members",
        "strings": "variable-length",
        "pairs": "along one axis",
        "swapped": "bytes h5py does not put in order",
        "outside": "external storage in /etc/passwd",
        "scalar": "without rows",
        "none": "without rows",
    }
    for name, reason in reasons.items():
        with pytest.raises(ShardError, match=rf"a\.h5: {name}: .*{reason}"):
            len(HDF5Dataset(tmp_path, name))


def test_a_filter_that_hdf5_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), compression="lzf")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    with pytest.raises(ShardError, match=r"a\.h5: x: .*filter 32000 \(lzf\)"):
        len(HDF5Dataset(tmp_path))
