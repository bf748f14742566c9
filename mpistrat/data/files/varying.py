"""Rows of varying length, read without HDF5: damage in its global heap can make the library loop forever.

Such a dataset stores pointers: a length, the address of a collection in the global heap, and an object's index in it. A
collection is a header, then a sequence of objects, each with a header that has its size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import ShardError, shard_error
from ..buffers import LastRead
from ..stats import StageStats
from .handles import DAMAGED, NOT_UTF8, ShardFile, open_bytes
from .storage import FieldReader, Storage

__all__ = ["POINTER", "VaryingReader"]

POINTER = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
_COLLECTION = struct.Struct("<4sB3xQ")  # "GCOL", version, bytes of all
_OBJECT = struct.Struct("<HHxxxxQ")  # index, count of references, bytes
_KEPT = 1 << 25  # bytes of collections


class _Collection:
    """The bytes of a collection, and each object's range in them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.objects: dict[int, tuple[int, int]] = {}  # start and bytes, by index
        start = _COLLECTION.size
        while start + _OBJECT.size <= len(data):
            index, _, size = _OBJECT.unpack_from(data, start)
            step = _OBJECT.size + (size + 7) // 8 * 8 if index else size  # the size of free space includes its header
            if not _OBJECT.size <= step <= len(data) - start:
                raise ValueError(f"an object of {size} bytes at {start} of {len(data)}")
            self.objects[index] = (start + _OBJECT.size, size)
            start += step


class VaryingReader(FieldReader):
    """Strings as `str`, and rows of numbers as arrays of their own length. The latest collections are cached."""

    def __init__(self, storages: Sequence[Storage], pointers: FieldReader) -> None:
        super().__init__(storages)
        self.kind = f"global heap, pointers by {pointers.kind}"
        self._dtype = storages[0].field.dtype
        self._pointers = pointers
        self._files = open_bytes()
        self._kept = LastRead[_Collection](_KEPT)  # collections, by file and address

    @property
    def counters(self) -> StageStats:
        return StageStats.reading((self._pointers.counters, self._counters))

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        if out.size == 0:
            return
        pointers = np.empty((rows.size, out.size // rows.size), POINTER)
        self._pointers.read(rows, pointers)
        shards = np.repeat(self._index.shard_of(rows), pointers.shape[1])
        flat, values = pointers.reshape(-1), out.reshape(-1)
        empty = flat["length"] == 0
        for at in np.flatnonzero(empty).tolist():
            values[at] = "" if self._dtype.hasobject else np.empty(0, self._dtype)
        order = np.lexsort((flat["address"], shards))  # group the rows of a collection
        order = order[~empty[order]]
        if not order.size:
            return
        changes = (np.diff(shards[order]) != 0) | (np.diff(flat["address"][order]) != 0)
        for own in np.split(order, np.flatnonzero(changes) + 1):
            self._read_collection(int(shards[own[0]]), int(flat["address"][own[0]]), flat[own], own.tolist(), values)

    def _read_collection(
        self, shard: int, address: int, pointers: NDArray[Any], places: list[int], values: NDArray[Any]
    ) -> None:
        """Read the objects of one collection to their indices among the values."""
        collection = self._collection(shard, address)
        data, objects = collection.data, collection.objects
        text = self._dtype.hasobject
        lengths, indices = pointers["length"].tolist(), pointers["index"].tolist()
        try:
            for at, length, index in zip(places, lengths, indices, strict=True):
                start, size = objects.get(index, (0, 0))
                if length * (1 if text else self._dtype.itemsize) > size:
                    raise self._error(shard, address, f"{length} items of object {index}", f"{size} bytes")
                if text:
                    values[at] = data[start : start + length].partition(b"\0")[0].decode()
                else:
                    values[at] = np.frombuffer(data, self._dtype, length, start).copy()
        except UnicodeDecodeError as error:
            where = self._storages[shard].where
            raise shard_error(where, f"text in UTF-8 at {address} of the file", error, NOT_UTF8) from error

    def _collection(self, shard: int, address: int) -> _Collection:
        collection = self._kept.get((shard, address))
        if collection is None:
            collection = self._load(shard, address)
            self._kept.put((shard, address), collection, len(collection.data))
        return collection

    def _load(self, shard: int, address: int) -> _Collection:
        file = self._storages[shard].file
        room = file.bytes - address
        with self._files.lend(file) as opened:
            head = bytearray(_COLLECTION.size)
            complete = room >= len(head) and opened.read_into(memoryview(head), address) == len(head)
            mark, version, size = _COLLECTION.unpack(head) if complete else (b"", 0, 0)
            if mark != b"GCOL" or version != 1 or not _COLLECTION.size <= size <= room:
                raise self._error(shard, address, "a collection of objects", "something else")
            data = bytearray(size)
            if opened.read_into(memoryview(data), address) < size:
                raise self._error(shard, address, f"{size} bytes", "the end of the file")
        self._counters.add(bytes_read=size, chunk_reads=1)
        try:
            return _Collection(bytes(data))
        except ValueError as error:
            raise self._error(shard, address, "a sequence of objects", str(error)) from error

    def _error(self, shard: int, address: int, expected: str, got: str) -> ShardError:
        where = self._storages[shard].where
        return shard_error(where, f"{expected} at {address} of the file", got, DAMAGED)

    def opened(self) -> Set[ShardFile]:
        return self._pointers.opened() | self._files.opened

    def expect(self, rows: NDArray[np.int64]) -> None:
        self._pointers.expect(rows)

    def keep(self, rows: int) -> None:
        self._pointers.keep(rows)
