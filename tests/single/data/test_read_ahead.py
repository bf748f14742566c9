"""Reads of remote files by requests that grow, and files of tables of which few are open at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.buffers import LastRead
from mpistrat.data.files.remote import SuccessiveReads

CONTENT = np.random.default_rng(0).bytes(1 << 24)


class Fetched:
    """A file of some bytes, and the requests for it."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> bytes:
        self.requests.append((start, min(stop, len(CONTENT))))
        return CONTENT[start:stop]

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.requests)


@pytest.mark.parametrize("gap", [0, 3000])
@pytest.mark.parametrize("size", [500, 70_000, 1 << 23])
def test_successive_reads(size: int, gap: int) -> None:
    """At most 4 MiB ahead: a file of 16 MiB takes two small requests, some that grow, and four of 4 MiB."""
    ahead, fetch = SuccessiveReads(LastRead(1 << 25)), Fetched()
    starts = range(0, len(CONTENT), size + gap)
    for start in starts:
        assert ahead.read(start, start + size, fetch) == CONTENT[start : start + size]
    assert len(fetch.requests) <= min(len(starts), 2 + 7 + 4)
    over_ends = size * len(fetch.requests) if size < 1 << 23 else 0  # a read beyond the bytes ahead gets all its bytes
    assert fetch.bytes <= len(CONTENT) + over_ends


def test_reads_at_random_places_get_their_own_bytes() -> None:
    ahead, fetch, rng = SuccessiveReads(LastRead(1 << 25)), Fetched(), np.random.default_rng(1)
    places = [int(place) << 17 for place in rng.permutation(128)]
    far = [place for place, before in zip(places[1:], places, strict=False) if abs(place - before) > 1 << 18]
    for place in far:
        assert ahead.read(place, place + 1000, fetch) == CONTENT[place : place + 1000]
    assert fetch.bytes == 1000 * len(far)
    again = len(fetch.requests)
    for _ in range(3):  # the same bytes again are not successive
        ahead.read(far[-1], far[-1] + 1000, fetch)
    assert fetch.bytes == 1000 * len(fetch.requests) == 1000 * (again + 3)


def test_several_places_and_threads() -> None:
    """Threads share what one of them has read ahead, from several places of the file; bytes that were dropped are read again."""
    ahead, fetch = SuccessiveReads(LastRead(1 << 22)), Fetched()
    wrong: list[int] = []

    def read(thread: int) -> None:
        for step in range(thread, 400, 2):
            for place in (0, 1 << 22, 3 << 22):
                start = place + step * 5000
                if ahead.read(start, start + 5000, fetch) != CONTENT[start : start + 5000]:
                    wrong.append(start)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2)))
    assert not wrong
    assert len(fetch.requests) < 1200 / 4


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow, zstd", "csv"])
def test_more_files_of_tables_than_are_kept_open(kind: str, tmp_path: Path) -> None:
    """Units stay valid when their file is closed, with or without memory maps."""
    pyarrow = pytest.importorskip("pyarrow")
    rows, format = np.arange(20 * 30).reshape(20, 30), kind.partition(",")[0]
    for number, part in enumerate(rows):
        table, path = (
            pyarrow.table({"wide": [f"{x:>900}" for x in part], "x": part}),
            str(tmp_path / f"{number}.{format}"),
        )
        if kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        elif kind == "csv":
            pytest.importorskip("pyarrow.csv").write_csv(table, path)
        else:
            options = pyarrow.ipc.IpcWriteOptions(compression="zstd" if "zstd" in kind else None)
            with pyarrow.ipc.new_file(path, table.schema, options=options) as sink:
                sink.write_table(table, max_chunksize=7)
    dataset = ms.data.from_tables(tmp_path, ("x", "wide") if format == "csv" else "x")
    shuffled = dataset.shuffle(seed=3, mode="full").batch(32)
    for epoch in range(2):
        batches = list(shuffled)
        found = np.concatenate([batch[0] if isinstance(batch, tuple) else batch for batch in batches])
        assert found.tolist() == ms.data.permute(np.arange(600), 600, seed=3, epoch=epoch).tolist()
