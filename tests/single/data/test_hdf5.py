"""HDF5 shards: what is written is read back, by memory map and through h5py, in any order and structure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, HDF5Dataset, write_shards

ROWS = 103


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.standard_normal((ROWS, 8, 8)).astype(np.float32),
        "label": np.arange(ROWS),
        "flag": rng.integers(0, 2, ROWS).astype(bool),
        "wave": rng.standard_normal((ROWS, 3)) + 1j,
        "half": rng.standard_normal((ROWS, 5)).astype(np.float16),
        "big": rng.integers(0, 1000, (ROWS, 2)).astype(">i4"),
        "name": np.array([f"row{i}" for i in range(ROWS)], "S8"),
        "nothing": np.zeros((ROWS, 0), np.float64),
    }


@pytest.fixture(scope="module", params=[None, "gzip", "lzf", 9])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, arrays(), rows_per_shard=25, compression=request.param)
    return directory


def equal(found: dict[str, np.ndarray], rows: Any) -> bool:
    expected = arrays()
    return set(found) == set(expected) and all(np.array_equal(found[name], expected[name][rows]) for name in expected)


def test_all_rows_in_order(written: Path) -> None:
    dataset = HDF5Dataset(written, verify=True)
    assert len(dataset) == ROWS
    batches = list(dataset.batch(10))
    assert equal({name: np.concatenate([b[name] for b in batches]) for name in batches[0]}, slice(None))
    assert [len(batch["label"]) for batch in batches] == [10] * 10 + [3]


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.integers(0, ROWS - 1), max_size=40))
def test_any_rows_in_any_order_and_repeated(written: Path, rows: list[int]) -> None:
    assert equal(HDF5Dataset(written).rows(rows), np.array(rows, np.int64))


def test_shuffled_rows_stay_together(written: Path) -> None:
    batches = list(HDF5Dataset(written).shuffle(seed=1).batch(32))
    labels = np.concatenate([batch["label"] for batch in batches])
    assert sorted(labels.tolist()) == list(range(ROWS))
    assert labels.tolist() != list(range(ROWS))
    assert equal({name: np.concatenate([b[name] for b in batches]) for name in batches[0]}, labels)


def test_dtypes_are_native_and_shapes_are_known(written: Path) -> None:
    dataset = HDF5Dataset(written)
    assert dataset.element_spec["big"] == ArraySpec((2,), np.int32)
    assert dataset.element_spec["image"] == ArraySpec((8, 8), np.float32)
    batch = next(iter(dataset.batch(4)))
    assert all(batch[name].dtype == spec.dtype for name, spec in dataset.element_spec.items())
    assert batch["big"].dtype.isnative


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ("label", lambda label, image: label),
        (("image", "label"), lambda label, image: (image, label)),
        (["label"], lambda label, image: {"label": label}),
        ({"x": "image", "y": "label"}, lambda label, image: {"x": image, "y": label}),
    ],
)
def test_the_form_of_fields_is_the_form_of_elements(written: Path, fields: Any, form: Any) -> None:
    expected = form(np.arange(4), arrays()["image"][:4])
    found = HDF5Dataset(written, fields).rows(range(4))
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert list(found) == list(expected)
        found, expected = tuple(found.values()), tuple(expected.values())
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_uncompressed_data_is_mapped_and_compressed_data_is_not(tmp_path: Path) -> None:
    for compression, kind in ((None, "memory map"), ("gzip", "raw chunks")):
        write_shards(tmp_path, {"x": np.zeros((10, 2))}, compression=compression)
        dataset = HDF5Dataset(tmp_path)
        assert "not opened yet" in str(dataset)
        assert len(dataset) == 10
        assert kind in str(dataset)


def test_compressed_chunks_carry_checksums_and_others_are_contiguous(tmp_path: Path) -> None:
    write_shards(tmp_path / "a-*.h5", {"x": np.zeros((1000, 500))}, compression="gzip")
    write_shards(tmp_path / "b-*.h5", {"x": np.zeros((1000, 500))})
    with h5py.File(tmp_path / "a-00000-of-00001.h5") as file:
        assert file["x"].fletcher32
        assert file["x"].chunks[1:] == (500,)
        assert file["x"].chunks[0] * 500 * 8 <= 2**18
    with h5py.File(tmp_path / "b-00000-of-00001.h5") as file:
        assert file["x"].chunks is None
        assert file["x"].id.get_offset() is not None


@pytest.mark.parametrize(
    ("options", "sizes"), [({"num_shards": 3}, [35, 34, 34]), ({"rows_per_shard": 50}, [50, 50, 3]), ({}, [103])]
)
def test_shard_sizes(tmp_path: Path, options: dict[str, int], sizes: list[int]) -> None:
    paths = write_shards(tmp_path, {"x": np.arange(ROWS)}, **options)
    assert [path.name for path in paths] == [f"{i:05d}-of-{len(sizes):05d}.h5" for i in range(len(sizes))]
    with_sizes = []
    for path in paths:
        with h5py.File(path) as file:
            with_sizes.append(len(file["x"]))
    assert with_sizes == sizes
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["rows"] == ROWS
    assert [shard["rows"] for shard in manifest["shards"]] == sizes
    assert [shard["bytes"] for shard in manifest["shards"]] == [path.stat().st_size for path in paths]


def test_the_digest_is_of_the_files_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setitem(sys.modules, "xxhash", None)  # as where xxhash is not installed
    path = write_shards(tmp_path, {"x": np.arange(10)})[0]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["shards"][0]["digest"] == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(HDF5Dataset(tmp_path, verify=True)) == 10


def test_nothing_is_left_aside_and_an_older_set_is_replaced(tmp_path: Path) -> None:
    write_shards(tmp_path / "train-*.h5", {"x": np.arange(10)}, num_shards=5)
    write_shards(tmp_path / "test-*.h5", {"x": np.arange(100, 103)})
    write_shards(tmp_path / "train-*.h5", {"x": np.arange(20, 26)}, num_shards=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "test-00000-of-00001.h5",
        "test-manifest.json",
        "train-00000-of-00002.h5",
        "train-00001-of-00002.h5",
        "train-manifest.json",
    ]
    assert HDF5Dataset(tmp_path / "train-*.h5", "x").rows(range(6)).tolist() == list(range(20, 26))
    assert HDF5Dataset(tmp_path / "test-*.h5", "x").rows(range(3)).tolist() == [100, 101, 102]


def test_a_failed_write_leaves_the_old_set_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.data.shards import write

    write_shards(tmp_path, {"x": np.arange(10)}, num_shards=2)
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no space left on device")
        original(*args)

    original = write._write_shard
    monkeypatch.setattr(write, "_write_shard", fail)
    with pytest.raises(OSError, match="no space"):
        write_shards(tmp_path, {"x": np.arange(50)}, num_shards=2)
    assert HDF5Dataset(tmp_path, "x", verify=True).rows(range(10)).tolist() == list(range(10))
    assert len(list(tmp_path.iterdir())) == 3


def test_no_rows_at_all(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": np.zeros((0, 3), np.float32)})
    dataset = HDF5Dataset(tmp_path)
    assert (len(dataset), list(dataset.batch(4))) == (0, [])
    assert dataset.rows([])["x"].shape == (0, 3)


def test_files_without_a_manifest_are_read_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            file["group/x"] = np.full(number, number)
    expected = [1] + [2] * 2 + [10] * 10
    for files in (tmp_path, f"{tmp_path}/part-*.h5", str(tmp_path / "part-*.h5")):
        assert HDF5Dataset(files).rows(range(13))["group/x"].tolist() == expected
    listed = HDF5Dataset([tmp_path / "part-10.h5", tmp_path / "part-1.h5"], "group/x")
    assert listed.rows(range(11)).tolist() == [10] * 10 + [1]
    assert len(HDF5Dataset(tmp_path / "part-2.h5")) == 2


def test_a_pattern_for_a_part_of_a_set(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": np.arange(40)}, num_shards=4)
    assert HDF5Dataset(tmp_path / "0000[12]-of-*.h5", "x").rows(range(20)).tolist() == list(range(10, 30))


@pytest.mark.parametrize("options", [{"userblock_size": 512}, {"libver": "earliest"}])
def test_foreign_files(tmp_path: Path, options: dict[str, Any]) -> None:
    x, y = np.arange(50.0).reshape(25, 2), np.arange(25, dtype=np.int16)
    point = np.array([(i, i / 2) for i in range(25)], [("a", "<i4"), ("b", "<f8")])
    with h5py.File(tmp_path / "f.h5", "w", **options) as file:
        file["x"] = x
        file.create_dataset("y", data=y, chunks=(4,))
        file.create_dataset("z", data=x, chunks=(7, 1), compression="gzip")
        file["point"] = point
        file.create_dataset("unwritten", (25,), "f4", fillvalue=3)
        file["alias"] = h5py.SoftLink("/x")
        file["scalar"] = 3
    dataset = HDF5Dataset(tmp_path / "f.h5")
    rows = [24, 0, 3, 3, 17]
    found = dataset.rows(rows)
    assert set(found) == {"x", "y", "z", "point", "unwritten"}
    assert np.array_equal(found["x"], x[rows])
    assert np.array_equal(found["y"], y[rows])
    assert np.array_equal(found["z"], x[rows])
    assert np.array_equal(found["point"], point[rows])
    assert found["unwritten"].tolist() == [3.0] * 5


def test_chunks_are_read_about_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("x", data=np.arange(1000), chunks=(64,), compression="gzip")
    rows_read = []
    original = h5py.Dataset.__getitem__

    def count(self: h5py.Dataset, key: Any, **options: Any) -> Any:
        block = original(self, key, **options)
        rows_read.append(len(block))
        return block

    monkeypatch.setattr(h5py.Dataset, "__getitem__", count)
    batches = list(HDF5Dataset(tmp_path / "c.h5", "x", reader="h5py").batch(48))
    assert np.array_equal(np.concatenate(batches), np.arange(1000))
    assert sum(rows_read) == 1000


def test_wrong_arguments() -> None:
    for fields in ([], (), {"x": 3}, 5):
        with pytest.raises(ValueError, match="fields"):
            HDF5Dataset(__file__, fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arrays": {"x": np.zeros(3), "y": np.zeros(4)}}, r"arrays\['y'\]: expected 3 rows"),
        ({"arrays": {}}, "a dict of arrays"),
        ({"arrays": [np.zeros(3)]}, "a dict of arrays"),
        ({"arrays": {"x": np.array(["a"])}}, "dtype <U1"),
        ({"arrays": {"x": np.array([None])}}, "dtype object"),
        ({"arrays": {"/x": np.zeros(3)}}, "leading slash"),
        ({"num_shards": 0}, "num_shards"),
        ({"rows_per_shard": 0}, "rows_per_shard"),
        ({"num_shards": 1, "rows_per_shard": 1}, "got both"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"arrays": {"x": np.zeros(3)}, **changed}
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path, **options)


@pytest.mark.parametrize("target", ["a-*-*.h5", "a-?.h5", "one.h5"])
def test_targets_that_are_no_set(tmp_path: Path, target: str) -> None:
    with pytest.raises(ValueError, match="target"):
        write_shards(tmp_path / target, {"x": np.zeros(3)})


def test_importing_the_package_does_not_import_h5py() -> None:
    code = "import sys, mpistrat.data; print(sorted({'h5py', 'mpi4py.MPI', 'xxhash'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_bytes_that_are_not_the_arrays_are_converted_not_mapped(tmp_path: Path) -> None:
    """Integers of 20 bits that begin at bit 4, and text padded with spaces: as large as NumPy's, but other bytes."""
    shifted = h5py.h5t.STD_I32LE.copy()
    shifted.set_precision(20)
    shifted.set_offset(4)
    padded = h5py.h5t.C_S1.copy()
    padded.set_size(4)
    padded.set_strpad(h5py.h5t.STR_SPACEPAD)
    number, text = np.arange(5, dtype=np.int32), np.array([b"a", b"bc", b"", b"d", b"efgh"], "S4")
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        for name, kind, data in (("number", shifted, number), ("text", padded, text)):
            h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((5,)))
            file[name][...] = data
    assert b"bc  " in (tmp_path / "odd.h5").read_bytes()  # the premise
    found = HDF5Dataset(tmp_path / "odd.h5").rows([4, 1, 0])
    assert found["number"].tolist() == [4, 1, 0]
    assert found["text"].tolist() == [b"efgh", b"bc", b"a"]
