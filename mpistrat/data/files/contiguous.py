"""Contiguous, unfiltered data, read through memory maps or by positional reads.

Gathering rows from many arrays takes one call per array; from one array it is one `take`. So all files are mapped next to
each other into one address range, in which all rows must have one stride. A file's rows start at the same offset in a
memory page as in the file's page; so files are placed some pages apart, until every row is a multiple of `row_bytes`
after the first. Gaps are reserved addresses, not memory.

Positional reads are for files that may be truncated while they are read: under a map, that kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.errors import ShardError, shard_error
from ..buffers import take_rows
from ..stats import StageStats
from .handles import Descriptor, OpenFiles, ShardFile
from .storage import Contiguous, FieldReader, Storage

__all__ = ["Extent", "JoinedMap", "MappedReader", "PositionalReader", "assign_addresses", "join"]

_PAGE = mmap.ALLOCATIONGRANULARITY
_LARGEST = 1 << 42  # address range of one array; processes have 1 << 47
_HUGE = 1 << 21  # huge page, used if the page cache has one and both addresses are multiples of it
_FIXED = 0x10  # MAP_FIXED, on all of Linux's common processors


@dataclass(frozen=True)
class Extent:
    """Contiguous rows in a file."""

    file: ShardFile
    offset: int
    rows: int


@dataclass(frozen=True)
class JoinedMap:
    """Rows of several extents as one read-only array of bytes; the gaps between them must not be accessed.

    Attributes:
        rows: the array, of shape (rows and gaps, row_bytes).
        first: each extent's first row in the array; None if it is not in the array.
        map: maps an extent, given its number. Its rows must not be accessed before.
    """

    rows: NDArray[np.uint8]
    first: tuple[int | None, ...]
    map: Callable[[int], None]


def assign_addresses(
    sizes: Sequence[tuple[int, int]], row_bytes: int, page: int = _PAGE, largest: int = _LARGEST
) -> list[int | None]:
    """Return an address for each extent, in sequence, so that all rows have one stride.

    None for an extent that no number of pages aligns with the first, or that does not fit.

    Args:
        sizes: each extent's offset in its file and its bytes.
        row_bytes: the stride.
        page: the modulus in which addresses and offsets must agree.
        largest: the limit of addresses, except for the first extent.
    """
    addresses: list[int | None] = []
    common = math.gcd(page, row_bytes)
    turns = row_bytes // common
    pages_a_step = pow(page // common, -1, turns)  # pages that move an extent by `common` bytes, modulo the stride
    start = sizes[0][0] % page
    end = 0
    for offset, nbytes in sizes:
        address = end + offset % page
        missing = (start - address) % row_bytes
        address += missing // common * pages_a_step % turns * page
        stop = -(-(address + nbytes) // page) * page
        if missing % common or (addresses and stop > largest):
            addresses.append(None)
        else:
            addresses.append(address)
            end = stop
    return addresses


def join(extents: Sequence[Extent], row_bytes: int) -> JoinedMap:
    """Reserve addresses for the extents that fit one stride, at least the first.

    Files are opened only when mapped, except the first one without the system's own calls.

    Raises:
        OSError: when the system does not map the files, or not this many; `JoinedMap.map` raises it too.
        ShardError: for a file that has changed; so does `JoinedMap.map`.
    """
    libc = _libc()
    if libc is None:
        return _alone(extents, row_bytes)
    addresses = assign_addresses([(extent.offset, extent.rows * row_bytes) for extent in extents], row_bytes)
    placed = [(extent, address) for extent, address in zip(extents, addresses, strict=True) if address is not None]
    last, start = placed[-1], placed[0][1]
    end = last[1] + last[0].rows * row_bytes
    first_page = placed[0][0].offset // _PAGE * _PAGE
    reserved = _Reserved(libc, -(-end // _PAGE) * _PAGE, _count_maps(placed, row_bytes), first_page)

    def map_extent(number: int) -> None:
        address, extent = addresses[number], extents[number]
        assert address is not None
        reserved.map_file(extent, address, extent.rows * row_bytes)

    first = tuple(None if address is None else (address - start) // row_bytes for address in addresses)
    return JoinedMap(reserved.array(start, (end - start) // row_bytes, row_bytes), first, map_extent)


def _count_maps(placed: Sequence[tuple[Extent, int]], row_bytes: int) -> int:
    """Return the number of maps that the system counts: one per extent, and one per gap."""
    pages = [(address // _PAGE, -(-(address + extent.rows * row_bytes) // _PAGE)) for extent, address in placed]
    return len(pages) + sum(end < begin for (_, end), (begin, _) in itertools.pairwise(pages)) + 1


def _alone(extents: Sequence[Extent], row_bytes: int) -> JoinedMap:
    """Map the first file without the system's own calls."""
    extent = extents[0]
    inside = extent.offset % _PAGE
    nbytes = extent.rows * row_bytes
    with closing(Descriptor(extent.file)) as descriptor:
        mapped = mmap.mmap(descriptor.fileno(), inside + nbytes, access=mmap.ACCESS_READ, offset=extent.offset - inside)
    flat = np.frombuffer(mapped, np.uint8, count=nbytes, offset=inside)
    return JoinedMap(flat.reshape(extent.rows, row_bytes), (0, *[None] * (len(extents) - 1)), lambda number: None)


@functools.cache
def _libc() -> Any:
    """Return the C library, or None if its `mmap` may differ from the use here."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    except (OSError, AttributeError):
        return None
    return libc


def _limit_of_maps() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return sys.maxsize


_OTHERS = 8  # fraction of the limit left to others: a process without free maps cannot start threads


class _Reserved:
    """A range of addresses for a number of maps, released with the last array over it.

    Args:
        first_page: the file offset of the first mapped page.
    """

    _maps = 0  # maps of all ranges
    _lock = threading.Lock()

    def __init__(self, libc: Any, length: int, maps: int, first_page: int) -> None:
        self._libc = libc
        limit = _limit_of_maps()
        with self._lock:
            if maps + self._maps > limit - limit // _OTHERS:
                taken = f" besides {self._maps} of other fields" if self._maps else ""
                text = f"{maps} maps{taken}, where vm.max_map_count is {limit}: write fewer, larger files, or raise it by sysctl"
                raise OSError(errno.ENOMEM, text)
            reserved = self._mmap(None, length + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            type(self)._maps += maps
        self._start = reserved + (first_page - reserved) % _HUGE
        for begin, end in ((reserved, self._start), (self._start + length, reserved + length + _HUGE)):
            if begin < end:
                libc.munmap(begin, end - begin)
        give_back = weakref.finalize(self, self._give_back, libc, self._start, length, maps)
        give_back.atexit = False  # threads may read until the process ends

    @classmethod
    def _give_back(cls, libc: Any, start: int, length: int, maps: int) -> None:
        libc.munmap(start, length)
        cls._maps -= maps

    def _mmap(self, *arguments: Any) -> int:
        address = self._libc.mmap(*arguments)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(address)

    def map_file(self, extent: Extent, address: int, nbytes: int) -> None:
        """Map an extent of a file at an address in the range; the file can be closed after."""
        inside = extent.offset % _PAGE
        where, length = self._start + address - inside, inside + nbytes
        with closing(Descriptor(extent.file)) as descriptor:
            flags = mmap.MAP_SHARED | _FIXED
            self._mmap(where, length, mmap.PROT_READ, flags, descriptor.fileno(), extent.offset - inside)

    def array(self, address: int, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (rows, row_bytes), "data": (self._start + address, True),
        }  # fmt: skip
        return np.asarray(self)  # the array references this object


@final
class MappedReader(FieldReader):
    """Rows of contiguous data from as few arrays as possible. A file is mapped at the first read of its rows.

    Rows are copied as bytes, so alignment and byte order do not matter, and single rows are cheap.

    Args:
        storages: the field in each file.
        instead: returns the reader to use if the system does not map a file, or raises.

    Raises:
        OSError: when the system does not map files, or not this many.
    """

    def __init__(self, storages: Sequence[Storage], instead: Callable[[OSError], PositionalReader]) -> None:
        super().__init__(storages)
        self._row_bytes = storages[0].row_bytes
        self._make_instead = instead
        self._instead: PositionalReader | None = None
        self._lock = threading.Lock()
        self._mapped = np.array([not storage.rows for storage in storages])
        self._all_mapped = False
        self._joined: list[JoinedMap] = []
        self._array_of = np.zeros(len(storages), np.int64)  # the array with each file's rows
        self._shift = np.zeros(len(storages), np.int64)  # offset from a row's number to its index in that array
        self._extent = np.zeros(len(storages), np.int64)  # each file's index among the extents of that array
        self._arrays: list[NDArray[np.uint8]] = []
        waiting = [shard for shard, storage in enumerate(storages) if storage.rows]
        while waiting:
            joined = join([_extent(storages[shard]) for shard in waiting], self._row_bytes)
            firsts = dict(zip(waiting, joined.first, strict=True))
            numbers = {shard: number for number, shard in enumerate(waiting)}
            for shard, first in firsts.items():
                if first is not None:
                    self._array_of[shard] = len(self._arrays)
                    self._shift[shard] = first - self._index.starts[shard]
                    self._extent[shard] = numbers[shard]
            self._joined.append(joined)
            self._arrays.append(joined.rows)
            waiting = [shard for shard, first in firsts.items() if first is None]
        self.kind = "memory map" if len(self._arrays) <= 1 else f"{len(self._arrays)} memory maps"

    @property
    def counters(self) -> StageStats:
        own, instead = self._counters, self._instead
        return own if instead is None else StageStats.reading((own, instead.counters))

    def opened(self) -> Set[ShardFile]:
        if self._instead is not None:
            return self._instead.opened()
        return {
            self._storages[shard].file for shard in np.flatnonzero(self._mapped).tolist() if self._storages[shard].rows
        }

    def _map(self, shards: NDArray[np.int64]) -> None:
        missing = np.unique(shards[~self._mapped[shards]]).tolist()
        if not missing:
            return
        with self._lock:
            for shard in missing:
                if not self._mapped[shard]:
                    self._joined[self._array_of[shard]].map(int(self._extent[shard]))
                    self._mapped[shard] = True
            self._all_mapped = bool(self._mapped.all())

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        if out.nbytes == 0:
            return
        shards = self._index.shard_of(rows) if self._shift.size > 1 else np.zeros(1, np.int64)
        if not self._all_mapped and self._instead is None:
            try:
                self._map(shards)
            except ShardError:
                raise
            except OSError as error:
                self._instead = self._make_instead(error)
                self.kind, self.reason = self._instead.kind, self._instead.reason
        if self._instead is not None:
            self._instead.read(rows, out)
            return
        flat = out.reshape(len(rows), -1).view(np.uint8)
        self._counters.add(bytes_read=flat.nbytes)
        if self._shift.size == 1:
            take_rows(self._arrays[0], rows, flat)
            return
        places = rows + self._shift[shards]
        if len(self._arrays) == 1:
            take_rows(self._arrays[0], places, flat)
            return
        array_of = self._array_of[shards]
        for number in np.unique(array_of):
            own = np.flatnonzero(array_of == number)
            if own[-1] - own[0] == own.size - 1:
                take_rows(self._arrays[number], places[own], flat[own[0] : own[-1] + 1])
            else:
                flat[own] = self._arrays[number].take(places[own], axis=0, mode="clip")


def _extent(storage: Storage) -> Extent:
    assert isinstance(storage.layout, Contiguous)
    return Extent(storage.file, storage.layout.offset, storage.rows)


_BUFFERS = 1024  # most buffers of one call, on Linux and macOS


@final
class PositionalReader(FieldReader):
    """Rows of contiguous data. Neighbouring rows of a file are one read, scattered to their places."""

    kind = "pread"

    def __init__(self, storages: Sequence[Storage], reason: str = "") -> None:
        super().__init__(storages)
        self._row_bytes = storages[0].row_bytes
        self._files = OpenFiles(Descriptor)
        self.reason = reason

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        if out.nbytes == 0:
            return
        flat = out.reshape(len(rows), -1).view(np.uint8)
        self._counters.add(bytes_read=flat.nbytes)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        again = np.flatnonzero(np.diff(ordered) == 0) + 1  # repeated rows
        if again.size:
            firsts = np.searchsorted(ordered, ordered[again])
            wanted = np.delete(order, again)
            self._read_increasing(rows[wanted], wanted, flat)
            flat[order[again]] = flat[order[firsts]]
        else:
            self._read_increasing(ordered, order, flat)

    def opened(self) -> Set[ShardFile]:
        return self._files.opened

    def _read_increasing(self, rows: NDArray[np.int64], places: NDArray[np.int64], flat: NDArray[np.uint8]) -> None:
        for shard, own in self._index.by_shard(rows):
            storage = self._storages[shard]
            with self._files.lend(storage.file) as file:
                for first, buffers in _runs(rows[own] - self._index.starts[shard], places[own], flat):
                    self._fill(storage, first * self._row_bytes, buffers, file.fileno())

    def _fill(self, storage: Storage, start: int, buffers: list[memoryview], descriptor: int) -> None:
        assert isinstance(storage.layout, Contiguous)
        position = storage.layout.offset + start
        while buffers:
            try:
                count = os.preadv(descriptor, buffers, position)
            except OSError as error:
                raise self._error(storage, position, str(error)) from error
            if not count:
                raise self._error(storage, position, f"the end of the file at {os.fstat(descriptor).st_size}")
            position += count
            while buffers and count >= buffers[0].nbytes:
                count -= buffers.pop(0).nbytes
            if count:
                buffers[0] = buffers[0][count:]

    @staticmethod
    def _error(storage: Storage, position: int, got: str) -> ShardError:
        remedy = "The file was truncated while it was read: copy it again, or write the shards again."
        return shard_error(storage.where, f"bytes at {position}", got, remedy)


def _runs(
    rows: NDArray[np.int64], places: NDArray[np.int64], flat: NDArray[np.uint8]
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield runs of neighbouring rows: the first row, and the run's buffers, which are slices of `flat`."""
    new_run = np.diff(rows) != 1
    cuts = np.flatnonzero(new_run | (np.diff(places) != 1)) + 1
    begins = [True, *new_run[cuts - 1].tolist()]
    first, buffers = int(rows[0]), list[memoryview]()
    for new, (start, stop) in zip(begins, itertools.pairwise([0, *cuts.tolist(), rows.size]), strict=True):
        if buffers and (new or len(buffers) == _BUFFERS):
            yield first, buffers
            first, buffers = int(rows[start]), []
        place = int(places[start])
        buffers.append(flat[place : place + stop - start].reshape(-1).data)
    yield first, buffers
