"""Rows of many files as one array: the files' pieces are mapped beside each other into one range of addresses.

Rows gathered from many arrays take a call for each; from one array they are one `take`. For that, all rows must lie on
one stride. A piece begins in its page of memory where it begins in its page of the file; so the pieces are placed pages
apart until every row stands a multiple of `row_bytes` behind the first. The gaps are reserved addresses, not memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .open_files import Descriptor, ShardFile

__all__ = ["JoinedMap", "Piece", "join", "place"]

_PAGE = mmap.ALLOCATIONGRANULARITY
_LARGEST = 1 << 42  # bytes of addresses for one array; processes have 1 << 47
_FIXED = 0x10  # MAP_FIXED, on all of Linux's common processors


@dataclass(frozen=True)
class Piece:
    """Rows that lie in one piece in a file."""

    file: ShardFile
    offset: int
    rows: int


@dataclass(frozen=True)
class JoinedMap:
    """Rows of several pieces as one read-only array of bytes; between the pieces it must not be touched.

    Attributes:
        rows: the array, of shape (rows and gaps, row_bytes).
        first: for each piece the place of its first row in the array; None for one that is not in it.
    """

    rows: NDArray[np.uint8]
    first: tuple[int | None, ...]


def place(
    sizes: Sequence[tuple[int, int]], row_bytes: int, page: int = _PAGE, largest: int = _LARGEST
) -> list[int | None]:
    """Return an address for each piece, behind each other, so that all rows stand on one stride.

    None is the answer for a piece that no number of pages brings onto the stride of the first, or that has no room.

    Args:
        sizes: each piece's offset in its file and its bytes.
        row_bytes: the stride.
        page: what addresses and offsets must agree in, modulo.
        largest: the addresses end before it, but for the first piece.
    """
    addresses: list[int | None] = []
    common = math.gcd(page, row_bytes)
    turns = row_bytes // common
    pages_a_step = pow(page // common, -1, turns)  # so many pages move a piece by `common` bytes, modulo the stride
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


def join(pieces: Sequence[Piece], row_bytes: int) -> JoinedMap:
    """Map those of the pieces that can stand on one stride, the first at least.

    Raises:
        OSError: when the system does not map the file.
        ShardError: for a file that has changed.
    """
    libc = _libc()
    if libc is None:
        return _alone(pieces, row_bytes)
    addresses = place([(piece.offset, piece.rows * row_bytes) for piece in pieces], row_bytes)
    placed = [(piece, address) for piece, address in zip(pieces, addresses, strict=True) if address is not None]
    last, start = placed[-1], placed[0][1]
    end = last[1] + last[0].rows * row_bytes
    reserved = _Reserved(libc, -(-end // _PAGE) * _PAGE)
    for piece, address in placed:
        reserved.map_file(piece, address, piece.rows * row_bytes)
    first = tuple(None if address is None else (address - start) // row_bytes for address in addresses)
    return JoinedMap(reserved.array(start, (end - start) // row_bytes, row_bytes), first)


def _alone(pieces: Sequence[Piece], row_bytes: int) -> JoinedMap:
    """Without the system's own calls: a map of the first file."""
    piece = pieces[0]
    inside = piece.offset % _PAGE
    nbytes = piece.rows * row_bytes
    with closing(Descriptor(piece.file)) as descriptor:
        mapped = mmap.mmap(descriptor.fileno(), inside + nbytes, access=mmap.ACCESS_READ, offset=piece.offset - inside)
    flat = np.frombuffer(mapped, np.uint8, count=nbytes, offset=inside)
    return JoinedMap(flat.reshape(piece.rows, row_bytes), (0, *[None] * (len(pieces) - 1)))


@functools.cache
def _libc() -> Any:
    """The C library, or None where its `mmap` is not known to be as it is used here."""
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


class _Reserved:
    """A range of addresses, given back when no array over it is left."""

    def __init__(self, libc: Any, length: int) -> None:
        self._libc = libc
        self._start = self._mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        weakref.finalize(self, libc.munmap, self._start, length).atexit = False  # threads may read until the end

    def _mmap(self, *arguments: Any) -> int:
        address = self._libc.mmap(*arguments)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(address)

    def map_file(self, piece: Piece, address: int, nbytes: int) -> None:
        """Put a piece of a file at an address within the range; the file need not stay open."""
        inside = piece.offset % _PAGE
        where, length = self._start + address - inside, inside + nbytes
        with closing(Descriptor(piece.file)) as descriptor:
            flags = mmap.MAP_SHARED | _FIXED
            self._mmap(where, length, mmap.PROT_READ, flags, descriptor.fileno(), piece.offset - inside)

    def array(self, address: int, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (rows, row_bytes), "data": (self._start + address, True),
        }  # fmt: skip
        return np.asarray(self)  # which holds this object
