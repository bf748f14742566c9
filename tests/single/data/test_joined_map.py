"""Rows of many files as one array: where the files' extents are placed, what is read, and when the addresses go back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import HDF5Dataset
from mpistrat.data.files import contiguous
from mpistrat.data.files.contiguous import Extent, assign_addresses, join
from mpistrat.data.files.handles import ShardFile


@settings(deadline=None)
@given(
    row_bytes=st.integers(1, 20_000),
    extents=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 50)), min_size=1, max_size=12),
    page=st.sampled_from([4096, 16384, 65536]),
)
def test_places(row_bytes: int, extents: list[tuple[int, int]], page: int) -> None:
    sizes = [(offset, rows * row_bytes) for offset, rows in extents]
    addresses = assign_addresses(sizes, row_bytes, page)
    assert addresses[0] == sizes[0][0] % page
    end = 0
    for (offset, nbytes), address in zip(sizes, addresses, strict=True):
        # A multiple of pages brings the offset onto the stride if and only if one of all residues does.
        if address is None:
            residues = {(offset + page * steps - sizes[0][0]) % row_bytes for steps in range(row_bytes)}
            assert 0 not in residues
            continue
        assert address % page == offset % page
        assert (address - addresses[0]) % row_bytes == 0
        assert address - offset % page >= end  # pages of their own
        end = -(-(address + nbytes) // page) * page


def test_what_has_no_room_is_left_for_another_array() -> None:
    assert assign_addresses([(0, 4096), (0, 4096), (0, 8192), (0, 4096)], 64, 4096, largest=12288) == [
        0,
        4096,
        None,
        8192,
    ]
    assert assign_addresses([(0, 1 << 20)], 64, 4096, largest=4096) == [0]


def files(directory: Path, rows: list[int], row: tuple[int, ...], pads: list[int]) -> np.ndarray:
    """Write files in which different numbers of bytes stand before the data; return all their rows."""
    data = np.random.default_rng(0).integers(0, 255, (sum(rows), *row), np.uint8)
    for number, (count, pad) in enumerate(zip(rows, pads, strict=True)):
        start = sum(rows[:number])
        with h5py.File(directory / f"{number}.h5", "w", libver="latest") as file:
            if pad:
                file["pad/pad"] = np.zeros(pad, np.uint8)
            file["x"] = data[start : start + count]
    return data


@pytest.mark.parametrize("row", [(3072,), (7, 11), (1,), (4099,), (64, 64)])
@pytest.mark.parametrize("without_libc", [False, True])
def test_rows_of_many_files(
    tmp_path: Path, row: tuple[int, ...], without_libc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_libc:
        monkeypatch.setattr(contiguous, "_libc", lambda: None)
    rng = np.random.default_rng(1)
    rows = [5, 5, 0, 17, 1, 5, 9]
    data = files(tmp_path, rows, row, rng.integers(0, 9000, len(rows)).tolist())
    dataset = HDF5Dataset(tmp_path, "x")
    for order in (rng.permutation(len(data)), np.arange(len(data)), rng.integers(0, len(data), 100), np.arange(12, 20)):
        assert np.array_equal(dataset.rows(order), data[order])
    assert "memory map" in str(dataset)


def test_files_alike_are_one_array(tmp_path: Path) -> None:
    files(tmp_path, [10] * 30 + [3], (100,), [0] * 31)
    dataset = HDF5Dataset(tmp_path, "x")
    assert len(dataset) == 303
    assert "(memory map)" in str(dataset)
    assert "x uint8[100]" in str(dataset)


@pytest.mark.skipif(contiguous._libc() is None, reason="needs Linux")
def test_the_addresses_go_back_with_the_last_view_and_no_file_stays_open(tmp_path: Path) -> None:
    data = files(tmp_path, [4, 4], (5000,), [0, 0])
    path = tmp_path / "0.h5"
    with h5py.File(path) as file:
        offset = file["x"].id.get_offset()
    before = len(os.listdir("/proc/self/fd"))
    joined = join([Extent(ShardFile.of(tmp_path / f"{number}.h5"), offset, 4) for number in (0, 1)], 5000)
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) not in Path("/proc/self/maps").read_text()  # until it is needed
    for number in (0, 1):
        joined.map(number)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not joined.rows.flags.writeable
    view = joined.rows[1:2, 7:]
    del joined
    gc.collect()
    assert str(path) in Path("/proc/self/maps").read_text()
    assert np.array_equal(view[0], data[1, 7:])
    del view
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(contiguous._libc() is None, reason="needs Linux")
def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    """As where the addresses of a process are limited."""
    data = files(tmp_path, [4, 4], (5000,), [0, 0])
    code = f"""
import resource, sys, h5py, numpy as np
from mpistrat.data import HDF5Dataset
from mpistrat.data.files import contiguous
def refuse(*arguments):
    raise OSError(12, "Cannot allocate memory")
contiguous._Reserved._mmap = refuse
dataset = HDF5Dataset({str(tmp_path)!r}, "x")
print(dataset.rows([7, 0, 3]).sum(), dataset)
try:
    len(HDF5Dataset({str(tmp_path)!r}, "x", reader="mmap"))
except OSError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith(str(data[[7, 0, 3]].sum(dtype=np.uint64)))
    assert "pread: not mapped: [Errno 12] Cannot allocate memory" in first
    assert second.startswith("ShardError")
    assert "0.h5: x" in second


@pytest.mark.skipif(contiguous._libc() is None, reason="needs Linux")
def test_files_are_mapped_as_they_are_read(tmp_path: Path) -> None:
    data = files(tmp_path, [4] * 5, (100,), [0] * 5)
    dataset = HDF5Dataset(tmp_path, "x")
    assert len(dataset) == 20

    def mapped() -> list[int]:
        maps = Path("/proc/self/maps").read_text()
        return [number for number in range(5) if str(tmp_path / f"{number}.h5") in maps]

    assert mapped() == []
    assert np.array_equal(dataset.rows([13, 4]), data[[13, 4]])
    assert mapped() == [1, 3]
    assert np.array_equal(dataset.rows(range(20)), data)
    assert mapped() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(contiguous._libc() is None, reason="needs Linux")
def test_more_files_than_maps_are_read_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the system's maps is left to others. A field takes one for each file, one for each gap, and one more."""
    gc.collect()
    data = files(tmp_path, [4] * 9, (100,), [0] * 9)
    before = contiguous._Reserved._maps
    monkeypatch.setattr(contiguous, "_limit_of_maps", lambda: (before + 9 + 8 + 1) * 8 // 7 + 1)
    first = HDF5Dataset(tmp_path, "x")
    assert np.array_equal(first.rows(range(36)), data)
    assert "x uint8[100] (memory map)" in str(first)
    assert contiguous._Reserved._maps > before
    second = HDF5Dataset(tmp_path, "x")
    assert np.array_equal(second.rows(range(36)), data)
    assert "pread: not mapped: [Errno 12]" in str(second)
    assert "vm.max_map_count is" in str(second)
    assert "write fewer, larger files" in str(second)
    with pytest.raises(OSError, match=r"0\.h5: x: .*vm\.max_map_count.*reader=\"auto\""):
        len(HDF5Dataset(tmp_path, "x", reader="mmap"))
    del first
    gc.collect()
    assert contiguous._Reserved._maps == before


@pytest.mark.skipif(contiguous._libc() is None, reason="needs Linux")
def test_a_file_that_turns_out_not_to_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses the second file, in the midst of an epoch."""
    data = files(tmp_path, [4] * 3, (100,), [0] * 3)
    dataset, strict = HDF5Dataset(tmp_path, "x"), HDF5Dataset(tmp_path, "x", reader="mmap")
    for each in (dataset, strict):
        assert np.array_equal(each.rows([1]), data[[1]])

    def refuse(*arguments: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(contiguous._Reserved, "map_file", refuse)
    assert np.array_equal(dataset.rows([7, 1, 11]), data[[7, 1, 11]])
    assert "pread: not mapped: [Errno 12] Cannot allocate memory" in str(dataset)
    with pytest.raises(OSError, match="files that can be mapped"):
        strict.rows([7])


@pytest.mark.skipif(contiguous._libc() is None, reason="another system's maps")
@pytest.mark.parametrize("offset", [0, 2048, 3 << 20])
def test_a_map_begins_where_large_pages_can(tmp_path: Path, offset: int) -> None:
    """At an address that is the offset in the file, modulo 2 MiB; and what is beside it was given back."""
    path = tmp_path / "data"
    path.write_bytes(bytes(offset) + bytes(range(256)) * 64)
    reserved = contiguous._Reserved._maps
    joined = join([Extent(ShardFile.of(path), offset, 64)], 256)
    joined.map(0)
    address = joined.rows.ctypes.data
    assert address % (1 << 21) == offset % (1 << 21)
    assert (joined.rows == np.arange(256, dtype=np.uint8)).all()
    ranges = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
    ]
    assert [(int(low, 16), int(high, 16)) for low, high in ranges] == [
        (address // 4096 * 4096, -(-(address + 64 * 256) // 4096) * 4096)
    ]
    del joined
    gc.collect()
    assert contiguous._Reserved._maps == reserved
