"""The contract of all sources with random access. A new source adds one entry to SOURCES.

Each holds the rows of the same arrays, so batches are compared with these, and shuffled orders with the permutation itself.
"""

from __future__ import annotations

import io
import itertools
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.errors import ShardError
from tests.harness.examples import example

ROWS = 23
X = np.arange(ROWS, dtype=np.int64) * 3
V = np.stack([X, X + 0.5, -X], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Source:
    """How the files of a source are written into a folder, and opened; where it has none, `opened` ignores the folder.

    Attributes:
        watched: the last part of the names of the files whose changes are seen.
        marked_end: False if a file that ends between two rows, or an empty one, cannot be told from a whole one.
    """

    opened: Callable[[Path], ms.data.Dataset]
    write: Callable[[Path, np.ndarray, np.ndarray], None] | None = None
    watched: str = ""
    marked_end: bool = True


def arrays(folder: Path) -> ms.data.Dataset:
    return ms.data.from_arrays({"x": X, "v": V})


def map_style(folder: Path) -> ms.data.Dataset:
    return ms.data.from_map_style([{"x": x, "v": v} for x, v in zip(X, V, strict=True)])


def write_hdf5(layout: str) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        chunk_rows = 4 if layout == "chunked" else None
        ms.data.write_shards(folder, {"x": x, "v": v}, rows_per_shard=9, layout=layout, chunk_rows=chunk_rows)

    return write


def write_tables(kind: str) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(v.reshape(-1)), 3)
        table = pyarrow.table({"x": x, "v": lists})
        for number, part in enumerate((table[:10], table[10:])):
            path = str(folder / f"part-{number}.{kind}")
            if kind == "parquet":
                parquet.write_table(part, path, row_group_size=4)
            else:
                with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(part, max_chunksize=4)

    return write


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def write_tar(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    for number, (first, stop) in enumerate(((0, 10), (10, len(x)))):
        with tarfile.open(folder / f"part-{number}.tar", "w") as archive:
            for row in range(first, stop):
                for name, data in (("x.cls", str(x[row]).encode()), ("v.npy", npy(v[row]))):
                    header = tarfile.TarInfo(f"sample/{row:04}.{name}")
                    header.size = len(data)
                    archive.addfile(header, io.BytesIO(data))


def write_tfrecord(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    """By the writer of tensorboardX."""
    pytest.importorskip("google_crc32c")
    writers = pytest.importorskip("tensorboardX.record_writer")
    for number, (first, stop) in enumerate(((0, 10), (10, len(x)))):
        writer = writers.RecordWriter(str(folder / f"part-{number}.tfrecord"))
        for row in range(first, stop):
            writer.write(example({"x": [int(x[row])], "v": v[row].tolist()}))
        writer.close()


def write_zarr(zarr_format: int) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        group = pytest.importorskip("zarr").open_group(folder, mode="w", zarr_format=zarr_format)
        # Not Blosc, the default of format 2: of small chunks it decodes truncated ones, too.
        codec = pytest.importorskip("numcodecs").Zstd() if zarr_format == 2 else "auto"
        group.create_array("x", data=x, chunks=(7,), compressors=codec)
        group.create_array("v", data=v, chunks=(4, 2), compressors=codec)

    return write


def write_sparse(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    with h5py.File(folder / "a.h5ad", "w") as file:
        file["obs/x"] = x
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": v.shape})
        rows, group["indices"] = np.nonzero(v)
        group["data"] = v[np.nonzero(v)]
        group["indptr"] = np.searchsorted(rows, np.arange(len(v) + 1))


def from_sparse(folder: Path) -> ms.data.Dataset:
    return ms.data.from_sparse(folder / "a.h5ad", {"x": "obs/x", "v": "X"}, dense=True)


def write_groups(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    for number, (first, stop) in enumerate(((0, 10), (10, len(x)))):
        with h5py.File(folder / f"part-{number}.h5", "w") as file:
            for row in range(first, stop):
                group = file.create_group(f"data/demo_{row}")
                group.attrs["x"], group["obs/v"] = x[row], v[row]


def from_groups(folder: Path) -> ms.data.Dataset:
    return ms.data.from_groups(folder, {"x": "@x", "v": "obs/v"}, within="data")


SOURCES = {
    "arrays": Source(arrays),
    "map_style": Source(map_style),
    "hdf5": Source(ms.data.HDF5Dataset, write_hdf5("contiguous")),
    "hdf5_chunked": Source(ms.data.HDF5Dataset, write_hdf5("chunked")),
    "parquet": Source(ms.data.from_tables, write_tables("parquet")),
    "arrow": Source(ms.data.from_tables, write_tables("arrow")),
    "tar": Source(lambda folder: ms.data.from_tar(folder, {"x": "x.cls", "v": "v.npy"}), write_tar),
    "tfrecord": Source(ms.data.from_tfrecord, write_tfrecord, marked_end=False),
    "groups": Source(from_groups, write_groups),
    "sparse": Source(from_sparse, write_sparse),
    "zarr_2": Source(ms.data.from_zarr, write_zarr(2), watched=".zarray"),
    "zarr_3": Source(ms.data.from_zarr, write_zarr(3), watched="zarr.json"),
}
WITH_FILES = [name for name, source in SOURCES.items() if source.write]


def written(name: str, folder: Path, x: np.ndarray = X, v: np.ndarray = V) -> ms.data.Dataset:
    """Return the dataset of a source whose files are written into a folder."""
    source = SOURCES[name]
    folder.mkdir()
    if source.write is not None:
        source.write(folder, x, v)
    return source.opened(folder)


@pytest.fixture(params=SOURCES)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> ms.data.Dataset:
    return written(request.param, tmp_path / "files")


@pytest.fixture(params=WITH_FILES)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def last_file(folder: Path, watched: str = "") -> Path:
    """Return the last file with rows, or the last one whose changes are seen."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name.endswith(watched)]
    return max(file for file in files if watched or not (file.suffix == ".json" or file.name.startswith(".")))


def same(batch: Any, rows: Any) -> None:
    """Compare a batch with those rows of the arrays."""
    np.testing.assert_array_equal(batch["x"], X[rows], strict=True)
    np.testing.assert_array_equal(batch["v"], V[rows], strict=True)


def order(seed: int, epoch: int) -> list[int]:
    return ms.data.permute(np.arange(ROWS), ROWS, seed=seed, epoch=epoch).tolist()


def labels(batches: Any) -> list[int]:
    return [int(x) // 3 for batch in batches for x in batch["x"]]


def test_rows_in_order_and_by_number(dataset: ms.data.Dataset) -> None:
    assert len(dataset) == ROWS
    assert dataset.element_spec == {"x": ms.data.ArraySpec((), np.int64), "v": ms.data.ArraySpec((3,), np.float32)}
    same(dataset.batch(ROWS).element(0, 0), np.arange(ROWS))
    rows = [22, 0, 3, 3, 9, 10, 21]
    same(dataset.rows(rows), rows)
    assert labels(dataset.batch(5)) == list(range(ROWS))
    assert [int(row["x"]) // 3 for row in dataset] == list(range(ROWS))
    with pytest.raises(IndexError, match=r"integers in \[0, 23\)"):
        dataset.rows([ROWS])


def test_shuffled_as_the_permutation_says(dataset: ms.data.Dataset) -> None:
    shuffled = dataset.shuffle(seed=5, mode="full").batch(4)
    for epoch in range(2):
        assert labels(shuffled) == order(5, epoch)


def test_shuffled_in_blocks(dataset: ms.data.Dataset) -> None:
    """Each row once, also by units that are read as a whole."""
    found = labels(dataset.shuffle(8, seed=5, mode="block").batch(4))
    assert sorted(found) == list(range(ROWS))
    assert found != list(range(ROWS))


@pytest.mark.parametrize("mode", ["full", "block"])
def test_resumed_on_other_ranks(dataset: ms.data.Dataset, mode: str) -> None:
    """An epoch that 2 ranks start and 3 resume has the batches of one rank, whose rows may have another order within a batch."""
    shuffled = dataset.shuffle(8 if mode == "block" else None, seed=5, mode=mode).batch(4)

    def iterators(ranks: int, state: dict[str, int]) -> list[Any]:
        made = [iter(distribute(shuffled, Workers([1] * ranks, rank))) for rank in range(ranks)]
        for iterator in made:
            iterator.restore(state)
        return made

    first = iterators(2, {"epoch": 1, "next": 0})
    steps = [labels([next(each) for each in first]) for _ in range(2)]
    steps += [labels(parts) for parts in zip(*iterators(3, first[0].state()), strict=True)]
    shuffled.set_epoch(1)
    assert [sorted(step) for step in steps] == [sorted(labels([batch])) for batch in shuffled]
    assert sorted(itertools.chain(*steps)) == list(range(ROWS))


def test_cached(dataset: ms.data.Dataset) -> None:
    cached = dataset.cache().shuffle(seed=2, mode="full").batch(6)
    for epoch in range(2):
        assert labels(cached) == order(2, epoch)


@pytest.mark.parametrize("layout", ["contiguous", "chunked"])
def test_written_as_shards(dataset: ms.data.Dataset, layout: str, tmp_path: Path) -> None:
    ms.data.write_shards(tmp_path / "shards", dataset, rows_per_shard=9, layout=layout)
    rows = [22, 0, 3, 3, 9]
    same(ms.data.HDF5Dataset(tmp_path / "shards").rows(rows), rows)


def test_two_copies_are_equal(source: str, tmp_path: Path) -> None:
    """Ranks compare fingerprints, or else descriptions, without the folder."""
    first = written(source, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = SOURCES[source].opened(tmp_path / "b")
    fewer = written(source, tmp_path / "c", X[1:], V[1:])
    assert first.node.fingerprint() == copy.node.fingerprint() != None  # noqa: E711
    assert first.node.fingerprint() != fewer.node.fingerprint()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_truncated_file_is_named(source: str, part: int, tmp_path: Path) -> None:
    """The error names the file; of a file that lacks only padding all rows are right."""
    written(source, tmp_path / "files")
    path = last_file(tmp_path / "files")
    whole = path.read_bytes()
    early = (0, 1) if SOURCES[source].marked_end else (1,)
    cuts = [early, (len(whole) // 3, len(whole) // 2), (len(whole) - 8, len(whole) - 1)][part]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        try:
            dataset = SOURCES[source].opened(tmp_path / "files")
            same(dataset.rows(np.arange(ROWS)), np.arange(ROWS))
        except ShardError as error:
            assert path.name in str(error) or (SOURCES[source].watched and ": x: rows 21 to 23" in str(error))
        else:
            assert part == 2


def test_a_file_that_changes_is_named(source: str, tmp_path: Path) -> None:
    dataset = written(source, tmp_path / "files").batch(4)
    next(iter(dataset))
    path = last_file(tmp_path / "files", SOURCES[source].watched)
    path.write_bytes(path.read_bytes() + bytes(1))
    with pytest.raises(ShardError, match=f"{path.name}.*must not change"):
        iter(dataset)


def test_no_file_is_an_error(source: str, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="gone"):
        len(SOURCES[source].opened(tmp_path / "gone"))
