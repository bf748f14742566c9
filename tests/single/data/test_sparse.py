"""Sparse matrices of anndata and 10x Genomics beside anndata and SciPy: both compressions, labels, batches, damage."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import ArraySpec, from_sparse, to_csr
from mpistrat.errors import ShardError

ROWS, COLUMNS = 50, 20
ORDER = [49, 0, 3, 3, 17]


def counts() -> np.ndarray:
    random = np.random.default_rng(0)
    counts = random.integers(1, 9, (ROWS, COLUMNS)) * (random.random((ROWS, COLUMNS)) < 0.2)
    counts[3] = 0
    return counts.astype(np.float32)


def write(group: h5py.Group, matrix: np.ndarray, format: str = "csr") -> None:
    """As anndata does, by the definition of both formats."""
    major = matrix if format == "csr" else matrix.T
    rows, group["indices"] = (part.astype(np.int32) for part in np.nonzero(major))
    group["data"] = major[np.nonzero(major)]
    group["indptr"] = np.searchsorted(rows, np.arange(len(major) + 1)).astype(np.int32)
    group.attrs.update({"encoding-type": f"{format}_matrix", "shape": matrix.shape})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        write(file.create_group("X"), counts())
        write(file.create_group("layers/csc"), counts(), "csc")
        file["obs/label"] = np.arange(ROWS)
        file["obs/name"] = [f"cell {row}" for row in range(ROWS)]
        file["var/length"] = np.arange(COLUMNS)
    return tmp_path / "a.h5ad"


@pytest.mark.parametrize("name", [None, "X", "/layers/csc"])
def test_rows_are_pairs_of_arrays(path: Path, name: str | None) -> None:
    dataset = from_sparse(path, name)
    assert len(dataset) == ROWS
    assert dataset.element_spec == {"indices": ArraySpec((None,), "i4"), "data": ArraySpec((None,), "f4")}
    rows = dataset.rows(ORDER)
    for indices, data, expected in zip(rows["indices"], rows["data"], counts()[ORDER], strict=True):
        assert indices.tolist() == np.flatnonzero(expected).tolist()
        assert data.tolist() == expected[expected != 0].tolist()
        assert (indices.dtype, data.dtype) == (np.int32, np.float32)


def test_dense_matrices_beside_sparse_ones(tmp_path: Path) -> None:
    """Without a name: X as it is, or the only sparse matrix among datasets."""
    for name, found in (("X", ArraySpec((COLUMNS,), "f4")), ("other", {"indices", "data"})):
        with h5py.File(tmp_path / f"{name}.h5ad", "w") as file:
            file[name] = counts()
            write(file.create_group("counts"), counts())
        spec = from_sparse(tmp_path / f"{name}.h5ad").element_spec
        assert found in (spec, set(spec) if isinstance(spec, dict) else None)


@pytest.mark.parametrize("name", ["X", "layers/csc"])
def test_rows_with_their_zeros(path: Path, name: str) -> None:
    dataset = from_sparse(path, (name, "obs/label", "obs/name"), dense=True)
    assert dataset.element_spec[0] == ArraySpec((COLUMNS,), "f4")
    x, label, text = dataset.rows(ORDER)
    np.testing.assert_array_equal(x, counts()[ORDER], strict=True)
    assert label.tolist() == ORDER
    assert text.tolist() == [f"cell {row}" for row in ORDER]
    assert f"from_sparse: {path}, 50 rows of {name} float32[20], obs/label int64[]" in str(dataset)


def test_files_of_anndata(tmp_path: Path) -> None:
    """Written and read by the package itself."""
    anndata, sparse = pytest.importorskip("anndata"), pytest.importorskip("scipy.sparse")
    pandas = pytest.importorskip("pandas")
    kinds = pandas.Categorical(["b", "a"] * (ROWS // 2))
    obs = pandas.DataFrame({"kind": kinds}, index=[f"cell {row}" for row in range(ROWS)])
    made = anndata.AnnData(sparse.csr_matrix(counts()), obs=obs)
    made.layers["csc"] = sparse.csc_matrix(counts())
    for compression in (None, "gzip"):
        path = tmp_path / f"{compression}.h5ad"
        made.write_h5ad(path, compression=compression)
        theirs = anndata.read_h5ad(path)[ORDER]
        dataset = from_sparse(path, {"x": "X", "layer": "layers/csc", "kind": "obs/kind/codes"})
        rows = dataset.rows(ORDER)
        for name, expected in (("x", theirs.X), ("layer", theirs.layers["csc"])):
            found = to_csr(rows[name], COLUMNS)
            assert found.dtype == expected.dtype
            assert (found != expected.tocsr()).nnz == 0
            assert found.has_canonical_format
        assert rows["kind"].tolist() == theirs.obs["kind"].cat.codes.tolist()
        batch = dataset.ragged_batch(ROWS).element(0, 0)
        assert (to_csr(batch["x"], COLUMNS) != sparse.csr_matrix(counts())).nnz == 0
    assert to_csr(dataset.rows([])["x"], COLUMNS).shape == (0, COLUMNS)


def test_files_of_10x(tmp_path: Path) -> None:
    """Cells are columns there: genes by cells, with compressed columns."""
    with h5py.File(tmp_path / "matrix.h5", "w") as file:
        group = file.create_group("matrix")
        write(group, counts())
        for name in list(group.attrs):
            del group.attrs[name]
        group["shape"] = np.array([COLUMNS, ROWS], np.int32)
        group["barcodes"] = np.array([f"cell-{row}" for row in range(ROWS)], "S")
    dataset = from_sparse(tmp_path / "matrix.h5", ("matrix", "matrix/barcodes"), dense=True)
    x, name = dataset.rows(ORDER)
    np.testing.assert_array_equal(x, counts()[ORDER], strict=True)
    assert name.tolist() == [f"cell-{row}".encode() for row in ORDER]
    assert len(from_sparse(tmp_path / "matrix.h5")) == ROWS


def test_elements_of_one_place_are_added(tmp_path: Path) -> None:
    """As SciPy does."""
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        write(file.create_group("X"), np.eye(2, dtype=np.float32))
        file["X/indices"][...] = [1, 1]
        file["X/indptr"][...] = [0, 2, 2]
    assert from_sparse(tmp_path / "a.h5ad", dense=True).rows([0, 1]).tolist() == [[0, 2], [0, 0]]


def test_a_shuffle_reads_each_unit_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        write(file.create_group("X"), np.ones((1000, 1000)))
    dataset = from_sparse(tmp_path / "a.h5ad")
    assert np.diff(dataset.node.chunk_starts())[0] == (1 << 20) // 12000
    for row in dataset.shuffle(seed=1, window_bytes=1 << 20).take(1000):
        assert row["data"].size == 1000
    assert dataset.node.counters.chunk_reads == 2 * len(np.unique(np.arange(1000) // ((1 << 20) // 12000)))


@pytest.mark.parametrize(
    ("part", "values", "reason"),
    [
        ("indptr", [1, *[2] * ROWS], "indptr does not fit 50 rows"),
        ("indptr", [0] * ROWS, "indptr does not fit 50 rows"),
        ("indptr", [0, 3, 2, *[9] * (ROWS - 2)], "indptr does not fit 50 rows"),
        ("indptr", [0, 5, 4, *[np.count_nonzero(counts())] * (ROWS - 2)], "indptr does not fit 50 rows"),
        ("indptr", [0, *[np.count_nonzero(counts())] * (ROWS - 1)], "indptr does not fit 50 rows"),
        ("indptr", [0] * (ROWS + 1), "indptr does not fit 50 rows"),
        ("data", [1.0], "indptr does not fit 50 rows"),
        ("data", [[1.0]], "no data along one axis"),
        ("indices", [b"a"], "no indices along one axis"),
        ("indices", [0.0], "indices of float64, which are not integers"),
        ("indptr", np.zeros(ROWS + 1, np.float32), "indptr of float32, which are not integers"),
    ],
)
def test_parts_that_do_not_fit(path: Path, part: str, values: Any, reason: str) -> None:
    with h5py.File(path, "a") as file:
        del file[f"X/{part}"]
        file[f"X/{part}"] = values
    with pytest.raises(ShardError, match=rf"from_sparse: .*a\.h5ad: X: expected data that can be read, got {reason}"):
        from_sparse(path)


@pytest.mark.parametrize("wrong", [-1, COLUMNS])
@pytest.mark.parametrize("dense", [False, True])
def test_columns_that_do_not_exist(path: Path, wrong: int, dense: bool) -> None:
    """NumPy would take -1 for the last one."""
    with h5py.File(path, "a") as file:
        file["X/indices"][5] = wrong
        file["layers/csc/indices"][5] = -1 if wrong < 0 else ROWS
    dataset = from_sparse(path, "X", dense=dense)
    with pytest.raises(ShardError, match=r"a\.h5ad: X: rows 0 to 50: .*got indices from .* of 20. The file is damaged"):
        dataset.rows([0])
    with pytest.raises(ShardError, match=r"a\.h5ad: layers/csc: .*got indices from .* of 50"):
        from_sparse(path, "layers/csc")


def test_names_that_do_not_fit(path: Path) -> None:
    for name, reason in (("no", "no such group"), ("obs", "neither a sparse matrix of anndata nor one of 10x")):
        with pytest.raises(ShardError, match=rf"a\.h5ad: {name}: expected data that can be read, got {reason}"):
            from_sparse(path, name)
    with pytest.raises(ShardError, match="expected fields with equally many rows, got .*'var/length': 20"):
        from_sparse(path, ["X", "var/length"])
    gc.collect()  # the tracebacks above may refer to the open file
    with h5py.File(path, "a") as file:
        file.move("X", "Y")
        write(file.create_group("Z"), counts())
    with pytest.raises(ShardError, match=r"got the sparse matrices \['Y', 'Z'\]. Name one"):
        from_sparse(path)


def test_other_rows_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, rows in enumerate([np.eye(3), np.eye(3), np.eye(3) * 2, np.eye(2), np.eye(3, dtype="f4")]):
        (tmp_path / str(number)).mkdir()
        with h5py.File(tmp_path / str(number) / "a.h5ad", "w") as file:
            write(file.create_group("X"), rows)
        prints.append(from_sparse(tmp_path / str(number) / "a.h5ad").node.fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
