"""cache("node", folder=…): the files of a source on a disk of the node, copied once, with a limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ShardError
from tests.harness.sources import WITH_FILES, V, X, written

pytest.importorskip("fsspec")

ORDER = [22, 0, 3, 3, 9]


@pytest.mark.parametrize("source", WITH_FILES)
def test_each_source_reads_its_copies(source: str, tmp_path: Path) -> None:
    """Also when the originals are gone, as long as nothing asks for them."""
    original = written(source, tmp_path / "files")
    cached = original.cache("node", folder=tmp_path / "disk")
    assert cached.node.fingerprint() == original.node.fingerprint()
    (tmp_path / "files").rename(tmp_path / "gone")
    rows = cached.rows(ORDER)
    np.testing.assert_array_equal(rows["x"], X[ORDER], strict=True)
    np.testing.assert_array_equal(rows["v"], V[ORDER], strict=True)
    assert f"{tmp_path}/disk/" in str(cached)


def test_a_second_run_copies_nothing(tmp_path: Path) -> None:
    written("hdf5", tmp_path / "files")
    made = {}
    for _ in range(2):
        cached = ms.data.HDF5Dataset(f"file://{tmp_path}/files").cache("node", folder=tmp_path / "disk")
        copies = sorted((tmp_path / "disk").rglob("*.h5"))
        assert len(copies) == 3
        found = {path: path.stat().st_ino for path in copies}
        assert made in ({}, found)
        made = found
        assert cached.rows([3])["x"].tolist() == [9]
    paths = (path for path in sorted((tmp_path / "files").glob("*.h5")))
    listed = ms.data.HDF5Dataset(paths).cache("node", folder=tmp_path / "disk")
    assert listed.rows([3, 22])["x"].tolist() == [9, 66]


def test_what_is_refused(tmp_path: Path) -> None:
    dataset = written("hdf5", tmp_path / "files")
    for wrong in (
        lambda: dataset.cache(folder=tmp_path / "disk"),
        lambda: dataset.cache("job", folder=tmp_path / "disk"),
        lambda: dataset.cache("node", limit=5),
        lambda: dataset.shuffle().cache("node", folder=tmp_path / "disk"),
        lambda: ms.data.from_arrays(X).cache("node", folder=tmp_path / "disk"),
        lambda: dataset.cache("node", folder=tmp_path / "disk").cache("node", folder=tmp_path / "more"),
    ):
        with pytest.raises(
            ValueError, match=r'Dataset\.cache: folder: expected folder= with cache\("node"\), right after'
        ):
            wrong()
    with pytest.raises(ShardError, match=r"at most 1\.0 kB of copies \(limit\)"):
        dataset.cache("node", folder=tmp_path / "disk", limit=1000)
