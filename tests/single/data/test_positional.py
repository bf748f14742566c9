"""Contiguous data by reads at positions: any rows into their places, and a cut file is an error, not a crash."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import HDF5Dataset, write_shards
from mpistrat.data.files import contiguous
from mpistrat.errors import ShardError

ROWS = 500
DATA = np.random.default_rng(0).integers(0, 255, (ROWS, 5, 3), np.uint8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, {"x": DATA}, rows_per_shard=70)
    return directory


@settings(deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 90), st.booleans()), max_size=8),
    buffers=st.sampled_from([2, 1024]),
)
def test_any_rows(written: Path, runs: list[tuple[int, int, bool]], buffers: int) -> None:
    rows = [row for start, count, down in runs for row in range(start, min(start + count, ROWS))[:: -1 if down else 1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contiguous, "_BUFFERS", buffers)
        assert np.array_equal(HDF5Dataset(written, "x", reader="pread").rows(rows), DATA[np.array(rows, np.int64)])


def test_neighbours_are_one_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = os.preadv

    def count(descriptor: int, buffers: list[np.ndarray], position: int) -> int:
        calls.append(len(buffers))
        return original(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", count)
    dataset = HDF5Dataset(written, "x", reader="pread")
    assert np.array_equal(dataset.rows(range(70)), DATA[:70])
    assert calls == [1]
    rows = [12, 10, 11, 10, 13, 40]
    assert np.array_equal(dataset.rows(rows), DATA[rows])
    assert calls == [1, 3, 1]  # rows 10 and 11 go to one buffer


def test_reads_that_come_short_go_on(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv

    def short(descriptor: int, buffers: list[np.ndarray], position: int) -> int:
        return original(descriptor, [buffers[0][:7]], position)

    monkeypatch.setattr(os, "preadv", short)
    rows = np.random.default_rng(1).permutation(ROWS)
    assert np.array_equal(HDF5Dataset(written, "x", reader="pread").rows(rows), DATA[rows])


def test_a_file_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, {"x": DATA}, num_shards=2)
    dataset = HDF5Dataset(tmp_path, "x", reader="pread")

    def inside(*rows: int) -> np.ndarray:
        """What an iterator does within a pass, in which nobody looks at the files."""
        return dataset.node.gather(np.zeros(len(rows), np.int64), np.array(rows))

    assert np.array_equal(inside(0, 499), DATA[[0, 499]])
    os.truncate(paths[1], paths[1].stat().st_size - 10)
    assert np.array_equal(inside(499 - 9, 0), DATA[[499 - 9, 0]])
    with pytest.raises(ShardError, match=f"{paths[1].name}: x: expected bytes at .* got the end of the file"):
        inside(499)
