"""Members of structures (compound types) in HDF5 files as fields of their own."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, HDF5Dataset
from mpistrat.errors import ShardError

KIND = np.dtype([("a", "<i4"), ("b", [("c", ">f8"), ("v", "<f4", (2,))]), ("d.e", "<i2")])
TABLE = np.zeros(20, KIND)
TABLE["a"], TABLE["b"]["c"], TABLE["d.e"] = np.arange(20), np.arange(20) / 2, -np.arange(20)
TABLE["b"]["v"] = np.arange(40).reshape(20, 2)
ORDER = [19, 0, 3, 3, 8]


@pytest.fixture(params=["contiguous", "chunked", "gzip"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = {"contiguous": {}, "chunked": {"chunks": (6,)}, "gzip": {"chunks": (6,), "compression": "gzip"}}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/table", data=TABLE, **options[request.param])
        file["n"] = np.arange(20)
        file["n.a"] = np.arange(20) * 7
    return tmp_path / "a.h5"


@pytest.mark.parametrize("reader", ["auto", "pread", "h5py"])
def test_members_are_fields(path: Path, reader: str) -> None:
    fields = {"a": "group/table.a", "c": "/group/table.b.c", "v": "group/table.b.v", "n": "n", "whole": "group/table"}
    dataset = HDF5Dataset(path, fields, reader=reader)
    assert dataset.element_spec["c"] == ArraySpec((), np.float64)
    assert dataset.element_spec["v"] == ArraySpec((2,), np.float32)
    found = dataset.rows(ORDER)
    np.testing.assert_array_equal(found["a"], TABLE["a"][ORDER], strict=True)
    np.testing.assert_array_equal(found["c"], TABLE["b"]["c"][ORDER].astype(np.float64), strict=True)
    np.testing.assert_array_equal(found["v"], TABLE["b"]["v"][ORDER], strict=True)
    np.testing.assert_array_equal(found["whole"]["a"], TABLE["a"][ORDER])
    assert all(leaf.flags.c_contiguous for leaf in found.values())
    batch = next(iter(HDF5Dataset(path, "group/table.b.v").batch(4)))
    np.testing.assert_array_equal(batch, TABLE["b"]["v"][:4], strict=True)


def test_a_dataset_goes_before_a_member(path: Path) -> None:
    assert HDF5Dataset(path, "n.a").rows([3]).tolist() == [21]


def test_shards_with_a_manifest(tmp_path: Path) -> None:
    ms.data.write_shards(
        tmp_path / "set", {"t": TABLE[["a", "d.e"]].astype([("a", "<i4"), ("d", "<i2")])}, num_shards=2
    )
    np.testing.assert_array_equal(HDF5Dataset(tmp_path / "set", "t.d").rows(ORDER), TABLE["d.e"][ORDER], strict=True)


def test_what_is_not_there(path: Path) -> None:
    for name in ("group/table.no", "group/table.a.b", "group/no.a", "n.b", "group/table."):
        with pytest.raises(ShardError, match=f"expected a dataset '{name}', got datasets"):
            len(HDF5Dataset(path, name))
