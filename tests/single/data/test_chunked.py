"""Chunks read raw: any layout gives the rows that were written, each chunk is decoded once, damage is named."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import HDF5Dataset
from mpistrat.data.files import chunked
from mpistrat.data.files.chunked import ChunkCache, ChunkedReader
from mpistrat.data.stats import StageStats
from mpistrat.errors import ShardError
from tests.harness.clock import Clock

OPTIONS = [
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"fletcher32": True},
    {"shuffle": True, "compression": "lzf"},
    {},
]


def reader_of(dataset: HDF5Dataset, name: str = "x") -> ChunkedReader:
    found = dataset.node._open().readers[name]
    assert isinstance(found, ChunkedReader), found.kind
    return found


def write(path: Path, array: np.ndarray, chunk_rows: int, **options: Any) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=array, chunks=(chunk_rows, *array.shape[1:]), **options)


@settings(deadline=None, max_examples=60)
@given(
    files=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 17), st.sampled_from(OPTIONS)), min_size=1, max_size=4),
    shape=st.sampled_from([(), (3,), (2, 5)]),
    dtype=st.sampled_from(["u1", "<i4", ">i4", "<f8", "S7"]),
    cache_bytes=st.sampled_from([1, 500, 1 << 25]),
    data=st.data(),
)
def test_any_layout_gives_the_rows(
    tmp_path_factory: pytest.TempPathFactory, files: list, shape: tuple, dtype: str, cache_bytes: int, data: Any
) -> None:
    directory = tmp_path_factory.mktemp("layout")
    total = sum(rows for rows, _, _ in files)
    whole = np.arange(total * int(np.prod(shape, dtype=int))).reshape(total, *shape).astype(dtype)
    start = 0
    for number, (rows, chunk_rows, options) in enumerate(files):
        write(directory / f"{number}.h5", whole[start : start + rows], min(chunk_rows, rows), **options)
        start += rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CACHE_BYTES", cache_bytes)
        dataset = HDF5Dataset(directory, "x")
        for _ in range(3):
            rows = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=80)), np.int64)
            hints = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=80)), np.int64)
            dataset.node.expect(np.zeros_like(hints), hints)
            assert np.array_equal(dataset.rows(rows), whole[rows])
    starts = dataset.node.chunk_starts()
    if starts is not None:
        assert starts[0] == 0
        assert starts[-1] == total
        assert (np.diff(starts) > 0).all()


def test_chunks_that_were_never_written_and_filters_left_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w", libver="latest") as file:
        dataset = file.create_dataset(
            "x", (25, 2), ">i2", chunks=(10, 2), compression="gzip", shuffle=True, fletcher32=True, fillvalue=-7
        )
        dataset[20:] = np.arange(10).reshape(5, 2)
        plain = np.arange(20, dtype=">i2").reshape(10, 2)
        dataset.id.write_direct_chunk((10, 0), plain.tobytes(), 0b111)
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    expected = np.concatenate([np.full((10, 2), -7), plain, np.arange(10).reshape(5, 2)])
    assert np.array_equal(dataset.rows(np.arange(25)), expected)
    assert np.array_equal(dataset.rows([24, 3, 13, 3]), expected[[24, 3, 13, 3]])
    assert "raw chunks" in str(dataset)


def test_structs_and_booleans(tmp_path: Path) -> None:
    kind = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
    structs, flags = np.zeros(9, kind), np.arange(9) % 2 == 0
    structs["a"], structs["b"] = np.arange(9), np.arange(18).reshape(9, 2)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("struct", data=structs, chunks=(4,), compression="gzip", fillvalue=structs[3])
        file.create_dataset("flag", data=flags, chunks=(2,), compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5")
    found = dataset.rows([8, 0, 5])
    assert np.array_equal(found["struct"], structs[[8, 0, 5]])
    assert np.array_equal(found["flag"], flags[[8, 0, 5]])
    reader_of(dataset, "struct")
    reader_of(dataset, "flag")


def test_what_only_hdf5_can_read_says_why(tmp_path: Path) -> None:
    array = np.arange(60).reshape(10, 6)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("tile", data=array, chunks=(5, 3), compression="gzip")
        file.create_dataset("scaled", data=array, chunks=(5, 6), scaleoffset=0)
        file.create_dataset("edge", data=array, chunks=(4, 6), shuffle=True)
    with h5py.File(tmp_path / "u.h5", "w", userblock_size=512) as file:
        file.create_dataset("x", data=array, chunks=(4, 6), compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5")
    found = dataset.rows([9, 1])
    assert all(np.array_equal(found[name], array[[9, 1]]) for name in ("tile", "scaled", "edge"))
    for reason in ("not of whole rows", "filter 6", "last chunk that may be unfiltered"):
        assert reason in str(dataset)
    other = HDF5Dataset(tmp_path / "u.h5", "x")
    assert np.array_equal(other.rows([9, 1]), array[[9, 1]])
    assert "user block" in str(other)


@pytest.mark.parametrize("batch", [7, 64, 100, 333])
def test_each_chunk_is_decoded_once_in_order(tmp_path: Path, batch: int) -> None:
    array = np.arange(4000).reshape(1000, 4)
    write(tmp_path / "f.h5", array, 64, compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    assert np.array_equal(np.concatenate(list(dataset.batch(batch))), array)
    counters = reader_of(dataset).counters
    assert counters.chunk_reads == 16  # 1000 / 64, rounded up
    assert 0 < counters.bytes_read < array.nbytes
    assert counters.seconds > 0


def test_a_cache_of_few_chunks_reads_in_order_with_hardly_a_chunk_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    monkeypatch.setattr(chunked, "_SLACK", 10)
    array = np.arange(4000).reshape(1000, 4)
    write(tmp_path / "f.h5", array, 64, compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    assert np.array_equal(np.concatenate(list(dataset.batch(48))), array)
    assert reader_of(dataset).counters.chunk_reads <= 17  # one more where all slots are expected


def test_reading_more_chunks_at_once_than_are_kept_is_slow_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    array = np.random.default_rng(0).integers(0, 9, (1000, 4))
    write(tmp_path / "f.h5", array, 10, compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    rows = np.random.default_rng(1).permutation(1000)
    assert np.array_equal(dataset.rows(rows), array[rows])
    reader = reader_of(dataset)
    assert reader._cache is not None
    assert reader._cache.memory.nbytes == chunked._SLACK * 10 * 32  # a few chunks of ten rows
    assert reader.counters.chunk_reads == 100


def test_windows_that_are_to_be_kept_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    array = np.arange(1000)
    write(tmp_path / "f.h5", array, 10, compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    dataset.node.keep(200)
    for start in range(0, 1000, 200):  # each window of 20 chunks is read row by row, in a wild order
        for row in np.random.default_rng(start).permutation(200):
            assert dataset.rows([start + row]).tolist() == [start + row]
    assert reader_of(dataset).counters.chunk_reads == 100


def test_memory_goes_with_the_reader(tmp_path: Path) -> None:
    write(tmp_path / "f.h5", np.arange(1000), 10, compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    dataset.rows(np.arange(1000))
    reader = ChunkedReader([shard.storages["x"] for shard in dataset.node._open().shards])
    reader.read(np.arange(1000), np.empty(1000, np.int64))
    assert reader._cache is not None
    settle(reader._cache)
    gone = weakref.ref(reader._cache)
    gc.disable()
    try:
        del reader
        deadline = time.monotonic() + 10
        while gone() is not None and time.monotonic() < deadline:  # a thread may still hold its last task
            time.sleep(0.001)
        assert gone() is None
    finally:
        gc.enable()


def damaged(path: Path, chunk: int) -> None:
    """Overwrite the middle of one chunk."""
    with h5py.File(path) as file:
        info = file["x"].id.get_chunk_info(chunk)
    with path.open("r+b") as file:
        file.seek(info.byte_offset + info.size // 2)
        file.write(b"\xa5" * 6)


def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 50, (100, 30))
    write(tmp_path / "f.h5", array, 10, compression="gzip")
    damaged(tmp_path / "f.h5", 3)
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    zeros = np.zeros(100, np.int64)
    dataset.node.expect(zeros, np.arange(100))  # a hint raises nothing
    assert np.array_equal(dataset.rows(np.arange(30)), array[:30])
    for _ in range(2):  # and is tried again
        with pytest.raises(ShardError, match=r"f\.h5: x: expected chunk 3 \(rows 30 to 39\).*decompress"):
            dataset.rows(np.arange(100))
    assert np.array_equal(dataset.rows(np.arange(40, 100)), array[40:])


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    write(tmp_path / "f.h5", np.zeros((100, 30)), 10, fletcher32=True)
    damaged(tmp_path / "f.h5", 9)
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    assert not dataset.rows(np.arange(90)).any()
    with pytest.raises(ShardError, match=r"chunk 9 \(rows 90 to 99\).*checksum"):
        dataset.rows([95])


def test_a_chunk_of_another_length_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        dataset = file.create_dataset("x", (20,), "i8", chunks=(10,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(79)))
        dataset.id.write_direct_chunk((10,), zlib.compress(bytes(81)))
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    for row, chunk in ((0, 0), (10, 1)):
        with pytest.raises(ShardError, match=f"chunk {chunk} "):
            dataset.rows([row])


def test_truncation_is_an_error_before_and_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    write(path, np.random.default_rng(0).integers(0, 1 << 40, 1000), 100, compression="gzip")
    dataset = HDF5Dataset(path, "x")
    assert len(dataset) == 1000
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ShardError, match="f.h5"):
        dataset.rows(np.arange(1000))
    with pytest.raises(ShardError, match="f.h5"):
        HDF5Dataset(path, "x").rows([0])


def test_threads_may_read_and_hint_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CACHE_BYTES", 1)
    array = np.arange(3000)
    write(tmp_path / "f.h5", array, 10, compression="gzip")
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            rows = rng.integers(0, 3000, rng.integers(1, 40))
            try:
                hints = rng.integers(0, 3000, 3)
                dataset.node.expect(np.zeros_like(hints), hints)
                if not np.array_equal(dataset.rows(rows), rows):
                    wrong.append(rows)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


class Gate:
    """Decodes chunks into their numbers; one of them only when it is let through."""

    def __init__(self, held: int = -1) -> None:
        self.held = held
        self.seen: list[int] = []
        self.begun, self.open = threading.Event(), threading.Event()

    def decode(self, chunk: int, out: np.ndarray) -> int:
        self.seen.append(chunk)
        if chunk == self.held:
            self.begun.set()
            assert self.open.wait(30)
        out[:] = chunk
        return 1


def settle(cache: ChunkCache) -> None:
    """Wait until the threads have nothing left to do."""
    deadline = time.monotonic() + 30
    while np.isin(cache._state, (chunked._QUEUED, chunked._BUSY)).any():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def read(cache: ChunkCache, chunks: list[int]) -> list[int]:
    slots = cache.acquire(np.array(chunks))
    found = cache.memory[slots, 0].tolist()
    cache.release()
    return found


def test_a_hint_never_pushes_out_what_is_expected() -> None:
    gate = Gate()
    cache = ChunkCache(100, 8, 10, gate.decode, StageStats())
    for first in (0, 4, 8, 20):  # of the third hint two chunks find room, of the fourth none
        cache.expect(np.arange(first, first + 4))
        settle(cache)
    assert sorted(gate.seen) == list(range(10))
    assert read(cache, list(range(8))) == list(range(8))
    cache.expect(np.arange(20, 24))  # what was read may go
    settle(cache)
    assert read(cache, [20, 21, 22, 23, 8, 9]) == [20, 21, 22, 23, 8, 9]
    assert len(gate.seen) == 14


def test_what_was_used_longest_ago_goes_first() -> None:
    gate = Gate()
    cache = ChunkCache(100, 8, 6, gate.decode, StageStats())
    for chunks in ([0, 1], [2, 3], [0, 1], [4, 5], [6]):
        read(cache, chunks)
    assert read(cache, [0, 1, 4]) == [0, 1, 4]
    assert len(gate.seen) == 7


def test_a_slot_that_is_being_filled_or_read_is_not_given_away() -> None:
    gate = Gate(held=50)
    cache = ChunkCache(100, 8, 5, gate.decode, StageStats())
    cache.expect(np.array([50]))
    assert gate.begun.wait(30)
    for first in range(0, 30, 3):
        assert read(cache, [first, first + 1, first + 2]) == [first, first + 1, first + 2]
    gate.open.set()
    assert read(cache, [50]) == [50]
    settle(cache)
    assert np.array_equal(cache.memory[:, 0], cache._chunk_in)
    slots = cache.acquire(np.array([40, 41, 42]))
    for chunk in range(60, 70):  # hints while rows are taken
        cache.expect(np.array([chunk]))
        settle(cache)
    assert cache.memory[slots, 0].tolist() == [40, 41, 42]
    cache.release()


def test_a_reader_waits_for_a_chunk_that_a_thread_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate, counters = Clock(), Gate(held=5), StageStats()
    clock.replace_time(monkeypatch, chunked)
    cache = ChunkCache(100, 8, 10, gate.decode, counters)
    cache.expect(np.array([5]))
    assert gate.begun.wait(30)
    assert counters.wait_seconds == 0

    def open_while_it_waits() -> None:
        deadline = time.monotonic() + 30
        while not cache._waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        clock.sleep(0.05)
        gate.open.set()

    opening = threading.Thread(target=open_while_it_waits)
    opening.start()
    assert read(cache, [5]) == [5]
    opening.join()
    assert gate.seen == [5]
    assert counters.wait_seconds == pytest.approx(0.05)


PROGRAM = """
import os, sys, threading
import numpy as np
from mpistrat.data import HDF5Dataset
if __name__ == "__main__":
    dataset = HDF5Dataset(sys.argv[1], "x")
    dataset.node.expect(np.zeros(1000, int), np.arange(1000))
    assert dataset.rows([7]) == 7
    assert any("mpistrat-decode" in thread.name for thread in threading.enumerate())
    child = os.fork()
    if not child:  # none of the threads came along; reading makes new ones
        assert HDF5Dataset(sys.argv[1], "x").rows(np.arange(20000)).sum() == 20000 * 19999 // 2
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dataset.node.expect(np.zeros(3000, int), np.arange(10000, 13000))
    print("end")
"""


def test_the_threads_end_with_the_program(tmp_path: Path) -> None:
    write(tmp_path / "f.h5", np.arange(20_000), 100, compression="gzip")
    for _ in range(3):
        reply = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "f.h5")], capture_output=True, text=True, timeout=60
        )
        assert reply.returncode == 0, reply.stderr
        assert reply.stdout == "end\n"
        assert "rror" not in reply.stderr


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w", libver="latest") as file:  # 4 GiB, of which nearly nothing is written
        file.create_dataset("x", (1 << 22, 1024), "u1", chunks=(1 << 10, 1024), compression="gzip")[0] = 0
    dataset = HDF5Dataset(tmp_path / "f.h5", "x")
    rows = np.random.default_rng(0).integers(0, 1 << 22, 300)
    assert not dataset.rows(rows).any()
    reader = reader_of(dataset)
    assert reader._cache is not None
    assert reader._cache.memory.nbytes == chunked.CACHE_BYTES
