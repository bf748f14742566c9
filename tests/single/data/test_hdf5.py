"""HDF5 shards: what is written is read back, by memory map and through h5py, in any order and structure."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, HDF5Dataset, write_shards
from mpistrat.errors import ShardError

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


@pytest.mark.parametrize("reader", ["auto", "pread"])
def test_batches_that_nobody_holds_give_their_memory_to_later_ones(tmp_path: Path, reader: str) -> None:
    data = np.arange(400_000.0).reshape(400, 1000)
    write_shards(tmp_path, {"x": data}, num_shards=3)
    dataset = HDF5Dataset(tmp_path, "x", reader=reader).batch(50)
    addresses = {batch.ctypes.data for batch in dataset}
    assert len(addresses) <= 2
    held = list(dataset)
    assert np.array_equal(np.concatenate(held), data)
    assert len({batch.ctypes.data for batch in held}) == 8


def test_rows_out_of_range_are_refused(written: Path) -> None:
    dataset = HDF5Dataset(written)
    for row in (-1, ROWS, 2**62):
        with pytest.raises(IndexError, match=f"expected rows in \\[0, {ROWS}\\), got"):
            dataset.node.gather(np.zeros(2, np.int64), np.array([0, row]))


def test_what_was_read_is_counted(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": np.zeros((100, 4))}, num_shards=4)
    dataset = HDF5Dataset(tmp_path, "x")
    list(dataset.batch(10))
    counted = dataset.node.counters
    assert (counted.rows, counted.bytes_read, counted.files) == (100, 3200, 4)
    assert counted.seconds > 0


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


def test_a_file_that_the_manifest_of_its_directory_does_not_list_is_no_secret(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": np.arange(4)}, num_shards=2)
    with h5py.File(tmp_path / "more.h5", "w") as file:
        file["x"] = np.arange(4)
    for files in (tmp_path, tmp_path / "*.h5"):
        with pytest.raises(ShardError, match=r"more\.h5.*manifest\.json lists"):
            HDF5Dataset(files)


@pytest.mark.parametrize("files", [1, 3])
def test_the_steady_state_allocates_no_batches(tmp_path: Path, files: int) -> None:
    write_shards(tmp_path, {"x": np.zeros((2000, 2048), np.float32)}, num_shards=files)
    batches = iter(HDF5Dataset(tmp_path, fields="x").shuffle(seed=1).batch(64).repeat())  # 524,288 bytes each
    for _ in range(40):  # more than an epoch, since NumPy imports parts of itself late
        batch = next(batches)
    tracemalloc.start()
    for _ in range(40):
        batch = next(batches)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.nbytes == 524_288
    assert peak < batch.nbytes  # orders of rows, and no batch
