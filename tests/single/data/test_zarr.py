"""Zarr groups and arrays of both formats beside the zarr package: chunks, dtypes, members that do not fit, damage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, from_zarr
from mpistrat.errors import MissingDependencyError, ShardError

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

ROWS = 23
ORDER = [22, 0, 3, 3, 9, 10, 21]
X = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3)


@pytest.fixture(params=[2, 3])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=request.param)
    compressors = numcodecs.Zstd() if request.param == 2 else "auto"
    group.create_array("x", data=X, chunks=(5, 1, 3), compressors=compressors)
    group.create_array("label", data=np.arange(ROWS), chunks=(ROWS,), compressors=compressors)
    group.create_array("train/big_endian", data=np.arange(ROWS, dtype=">i4"), chunks=(4,), compressors=compressors)
    group.create_array("flag", data=np.arange(ROWS) % 2 == 0, chunks=(6,))
    group.create_array("latitude", data=np.arange(3.0))
    group.create_array("scalar", data=np.array(3.0))
    return group


def folder(group: Any) -> Path:
    return Path(str(group.store.root))


def test_arrays_with_the_rows_of_the_largest(group: Any) -> None:
    dataset = from_zarr(folder(group))
    assert dataset.element_spec == {
        "flag": ArraySpec((), bool),
        "label": ArraySpec((), "i8"),
        "train/big_endian": ArraySpec((), "i4"),
        "x": ArraySpec((2, 3), "f4"),
    }
    rows = dataset.rows(ORDER)
    np.testing.assert_array_equal(rows["x"], X[ORDER], strict=True)
    assert rows["label"].tolist() == rows["train/big_endian"].tolist() == ORDER
    assert rows["flag"].tolist() == [row % 2 == 0 for row in ORDER]
    assert "left out: latitude (3 rows, unlike x), scalar (no rows)" in str(dataset)


def test_fields_have_the_form_that_was_asked_for(group: Any) -> None:
    path = folder(group)
    x, big_endian = from_zarr(path, ("x", "/train/big_endian")).rows([5])
    assert (x[0].tolist(), big_endian.tolist()) == (X[5].tolist(), [5])
    assert list(from_zarr(path, {"y": "label"}).rows([0])) == ["y"]
    assert [int(x) for x in from_zarr(path, "label")] == list(range(ROWS))
    with pytest.raises(ShardError, match=r"a\.zarr: expected an array 'no', got arrays \['flag', 'label'"):
        from_zarr(path, "no")
    with pytest.raises(ShardError, match=r"expected arrays with equally many rows, got \{'latitude': 3, 'x': 23\}"):
        from_zarr(path, ["x", "latitude"])
    with pytest.raises(ShardError, match="scalar: expected rows of numbers, times or text, got float64 of shape"):
        from_zarr(path, "scalar")
    with pytest.raises(ValueError, match="from_zarr: fields: expected None, a name"):
        from_zarr(path, [])


def test_one_array(group: Any) -> None:
    dataset = from_zarr(folder(group) / "x")
    assert dataset.element_spec == ArraySpec((2, 3), "f4")
    np.testing.assert_array_equal(dataset.rows(ORDER), X[ORDER], strict=True)
    with pytest.raises(ValueError, match="fields: expected None for a single array"):
        from_zarr(folder(group) / "x", "x")


def test_a_shuffle_reads_each_chunk_once(group: Any) -> None:
    dataset = from_zarr(folder(group), ("x", "label"))
    assert dataset.node.chunk_starts().tolist() == [0, 5, 10, 15, 20, 23]
    shuffled = dataset.shuffle(seed=2)
    assert sorted(int(x) for _, label in shuffled.batch(5) for x in label) == list(range(ROWS))
    assert "in blocks" in str(shuffled)
    assert dataset.node.counters.chunk_reads == 5 + 1


def test_text_and_times(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    text = group.create_array("text", shape=(3,), chunks=(2,), dtype=str)
    text[:] = np.array(["a", "größe", ""], object)
    group.create_array("time", data=np.array(["2020-01-01", "NaT", "2021-01-01"], "datetime64[s]"))
    rows = from_zarr(tmp_path / "a.zarr").rows([2, 1])
    assert rows["text"].tolist() == ["", "größe"]
    assert rows["time"].astype(str).tolist() == ["2021-01-01T00:00:00", "NaT"]


def test_shards_of_format_3(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=X, chunks=(2, 2, 3), shards=(8, 2, 3))
    dataset = from_zarr(tmp_path / "a.zarr")
    np.testing.assert_array_equal(dataset.rows(ORDER), X[ORDER], strict=True)
    assert dataset.node.chunk_starts()[:3].tolist() == [0, 2, 4]


def test_a_zip_file(tmp_path: Path) -> None:
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        zarr.open_group(store, mode="w").create_array("x", data=X)
    np.testing.assert_array_equal(from_zarr(tmp_path / "a.zip", "x").rows(ORDER), X[ORDER], strict=True)


def test_a_damaged_chunk(group: Any) -> None:
    path = folder(group)
    (chunk,) = [
        file for file in path.rglob("*") if file.relative_to(path).parts in (("x", "1.0.0"), ("x", "c", "1", "0", "0"))
    ]
    chunk.write_bytes(chunk.read_bytes()[:-3])
    dataset = from_zarr(path, "x")
    assert dataset.rows([0]).tolist() == X[:1].tolist()
    with pytest.raises(ShardError, match=r"a\.zarr: x: rows 5 to 10: expected chunks that can be decoded, got"):
        dataset.rows([7])


def test_what_is_no_group(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="expected a Zarr group or array, got"):
        from_zarr(tmp_path)
    zarr.open_group(tmp_path / "empty", mode="w")
    with pytest.raises(ShardError, match=r"expected an array of numbers, times or text, got arrays \[\]"):
        from_zarr(tmp_path / "empty")


def test_without_zarr(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingDependencyError, match=r'from_zarr: expected zarr.*pip install "mpistrat\[zarr\]"'):
        from_zarr(folder(group))


def test_other_arrays_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, rows in enumerate([[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 4], [1.0, 2.0, 3.0]]):
        zarr.create_array(tmp_path / str(number) / "a.zarr", data=np.array(rows))
        prints.append(from_zarr(tmp_path / str(number) / "a.zarr").node.fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
