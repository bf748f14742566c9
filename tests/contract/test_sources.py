"""The contract of all sources with random access, which are in tests/harness/sources.py.

Each holds the rows of the same arrays, so batches are compared with these, and shuffled orders with the permutation itself.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.errors import ShardError
from tests.harness.sources import ROWS, SOURCES, WITH_FILES, V, X, written


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


def test_cast_while_reading(dataset: ms.data.Dataset, tmp_path: Path) -> None:
    """The same rows in the same orders, resumed, cached and written in the new dtype; what does not fit is named."""
    cast = dataset.cast({"x": np.int16, "v": "float64"})
    assert cast.element_spec == {"x": ms.data.ArraySpec((), np.int16), "v": ms.data.ArraySpec((3,), np.float64)}
    rows = [22, 0, 3, 3, 9, 10, 21]
    for found in (cast.rows(rows), cast.cache().rows(rows), cast.batch(ROWS).peek()):
        numbers = rows if len(found["x"]) == len(rows) else np.arange(ROWS)
        np.testing.assert_array_equal(found["x"], X[numbers].astype(np.int16), strict=True)
        np.testing.assert_array_equal(found["v"], V[numbers].astype(np.float64), strict=True)
    assert labels(cast.shuffle(seed=5, mode="full").batch(4)) == order(5, 0)
    for mode in ("block", "auto"):
        both = [each.shuffle(8, seed=5, mode=mode).batch(4) for each in (cast, dataset)]
        assert labels(both[0]) == labels(both[1])
        for rank in range(2):
            resumed = [iter(distribute(each, Workers([1, 1], rank))) for each in both]
            for iterator in resumed:
                iterator.restore({"epoch": 0, "next": 2})
            assert labels(resumed[0]) == labels(resumed[1])
    assert ms.data.HDF5Dataset(ms.data.write_shards(tmp_path / "shards", cast), "x").element_spec.dtype == np.int16
    with pytest.raises(ValueError, match=r"Dataset.cast: row 0 of epoch 0: \['v'\]: .* that int64 holds, got 0\.5"):
        dataset.cast(np.int64).batch(4).peek()
    with pytest.raises(ValueError, match=r"row 1 of epoch 0: \['x'\]: expected values that bool holds, got 3"):
        dataset.cast({"x": bool}).batch(4).peek()


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


OTHERS = {"netcdf": ".h5", "netcdf_by_h5netcdf": ".grib", "tar": ".tgz", "tfrecord": ".tfrecord.gzip"}


@pytest.mark.parametrize("where", ["", "file://"])
@pytest.mark.parametrize("source", [name for name in WITH_FILES if not name.startswith(("zarr", "sparse"))])
def test_other_files_of_a_folder(source: str, where: str, tmp_path: Path) -> None:
    """Unknown endings are named in the description; compressed and similar files are an error."""
    folder = tmp_path / "files"
    written(source, folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    part = last_file(folder)
    for name in ("_SUCCESS", ".hidden", f".copy{part.suffix}", "part-7.data", "notes.txt"):
        (folder / name).write_bytes(b"other")
    opened = SOURCES[source].opened
    dataset = opened(f"{where}{folder}")
    assert len(dataset) == ROWS
    assert "files (left out: notes.txt, part-7.data)" in str(dataset)
    alone = opened(f"{where}{folder}/*{part.suffix}")
    assert len(alone) == ROWS
    assert "notes.txt" not in str(alone)
    similar = OTHERS.get(source, ".nc" if part.suffix == ".h5" else ".orc")
    for name in (f"part-8{similar}", f"PART-9{part.suffix.upper()}.ZST", f"{part.name}.gz"):
        (folder / name).write_bytes(b"other")
        with pytest.raises(ShardError, match=f"{name}: expected a file with an ending that is read .*by a pattern"):
            len(opened(f"{where}{folder}"))
        (folder / name).unlink()


def test_no_file_is_an_error(source: str, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="gone"):
        len(SOURCES[source].opened(tmp_path / "gone"))
