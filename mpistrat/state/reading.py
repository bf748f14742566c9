"""Reading a checkpoint's arrays: each rank reads its elements, or the root reads all and sends them.

If all ranks find the file that the root opened, no values are sent: the ranks of a node share the comparison of digests, then
each rank reads its elements. Otherwise the root reads, and each node receives each element once, through the staging memory of
the root's node, whose ranks send a slice each to their peers.
"""

from __future__ import annotations

import itertools
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from ..base.files import algorithm_of, digest_of_bytes
from ..base.partition import block, blocks
from ..comm.node import STAGING_BYTES
from ..comm.process_group import ProcessGroup
from ..variables import Receiver
from .file import Digests, check_digests, stored
from .list import Form

__all__ = ["FileSlices", "SliceReader", "read_own", "send"]

_ALIGNMENT = 64  # bytes, of arrays in the stream
_PIECE = 16 << 20  # bytes per read


class SliceReader(ABC):
    """A reader of slices of arrays, on each rank."""

    @abstractmethod
    def check(self, forms: Mapping[str, Form], index: int, count: int) -> None:
        """Compare share `index` of `count` of the arrays with their digests."""

    @abstractmethod
    def read(self, key: str, form: Form, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) of an array, flat."""


@final
class FileSlices(SliceReader):
    """The file of a checkpoint, read without HDF5 at the offsets of `CheckpointFile.places`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not the root's file.
    """

    def __init__(self, path: Path, places: Mapping[str, Any]) -> None:
        self._offsets: Mapping[str, int | None] = places["offsets"]
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            table, digest = self._bytes(*places["table"]).tobytes(), places["digest"]
            if digest_of_bytes(table, algorithm_of(digest)) != digest:
                raise ValueError(f"{path} is another file than the root's")
            self._digests: Digests = json.loads(table)["arrays"]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def check(self, forms: Mapping[str, Form], index: int, count: int) -> None:
        """Compare a share with its digests, see `SliceReader.check`. Also raises DamagedError."""
        pieces = [(key, number) for key in forms for number in range(len(self._digests[key]))]
        ends = np.cumsum([self._digests[key][number][1] - self._digests[key][number][0] for key, number in pieces])
        low, high = block(int(ends[-1]) if pieces else 0, count, index)
        mine = pieces[bisect_right(ends, low) if low else 0 : bisect_right(ends, high)]
        chosen = {key: {number for _, number in group} for key, group in itertools.groupby(mine, lambda one: one[0])}
        for key, form in forms.items():
            kept, numbers = self._digests[key], chosen.get(key, set())
            check_digests(key, form, kept, partial(self.read, key, form), numbers)

    def read(self, key: str, form: Form, start: int, stop: int) -> np.ndarray:
        dtype, offset = form.kind, self._offsets[key]
        if offset is None:
            return np.empty(0, dtype)
        return self._bytes(offset + start * dtype.itemsize, (stop - start) * dtype.itemsize).view(dtype)

    def _bytes(self, offset: int, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        done, memory = 0, data.data
        while done < nbytes:
            count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not count:
                raise OSError(f"the file ends {nbytes - done:,} bytes too early")
            done += count
        return data


Receivers = Mapping[str, Sequence[Receiver]]  # of this rank, by key of the array


def read_own(reader: SliceReader, forms: Mapping[str, Form], receivers: Receivers) -> None:
    """Read this rank's elements of arrays. Local."""
    for key, takers in receivers.items():
        step = max(1, _PIECE // stored(forms[key].kind).itemsize)
        for receiver in takers:
            for low, high in blocks(receiver.ranges, step):
                receiver.take(low, reader.read(key, forms[key], low, high))


def send(
    group: ProcessGroup,
    root: int,
    read: Callable[[str, Form], np.ndarray] | None,
    forms: Mapping[str, Form],
    receivers: Receivers,
) -> Exception | None:
    """Send arrays from the root to all nodes, whose ranks take their elements. Collective.

    If the root cannot read, it returns the error; later values are undefined.

    Args:
        group: the ranks.
        root: the rank that reads.
        read: returns an array, on the root.
        forms: of the arrays.
        receivers: by the keys of the sent arrays, equal on all ranks and in equal order.
    """
    begins = [0]
    for key in receivers:
        begins.append(begins[-1] + -(-forms[key].nbytes // _ALIGNMENT) * _ALIGNMENT)
    stream, node, slices = _Stream(forms, receivers, begins, read), group.node, group.slices
    home = next(index for index in range(group.num_nodes) if root in group.ranks_of(index))
    problem: Exception | None = None
    room = min(STAGING_BYTES, max(1, -(-begins[-1] // (slices * _ALIGNMENT))) * _ALIGNMENT)  # 0 bytes take no round
    with group.collective("restore", "values", detail=(len(receivers), begins[-1])) as call:
        for base in range(0, begins[-1], room * slices):
            buffers = node.staging()  # an odd number of barriers, so that the next buffers are the other ones
            cuts = [(low, min(low + room, begins[-1])) for low in range(base, base + room * slices, room)]
            if group.topology.rank == root and problem is None:
                try:
                    for buffer, (low, high) in zip(buffers, cuts, strict=False):
                        stream.fill(buffer, low, high)
                except Exception as error:  # the other ranks stay in this loop to its end
                    problem = error
            node.barrier(call)
            if group.num_nodes > 1 and group.slice_index is not None:
                low, high = cuts[group.slice_index]
                _broadcast(group, buffers[group.slice_index][: max(high - low, 0)], home)
            node.barrier(call)
            for buffer, (low, high) in zip(buffers, cuts, strict=False):
                stream.take(buffer, low, high)
            node.barrier(call)
    return problem


def _broadcast(group: ProcessGroup, data: np.ndarray, home: int) -> None:
    from mpi4py import MPI

    if data.size and group.inter is not None:
        group.inter.Bcast([data, MPI.BYTE], home)


@final
class _Stream:
    """Arrays one after the other, each starting at a multiple of 64 bytes."""

    def __init__(
        self,
        forms: Mapping[str, Form],
        receivers: Receivers,
        begins: Sequence[int],
        read: Callable[[str, Form], np.ndarray] | None,
    ) -> None:
        self._keys, self._forms, self._receivers, self._begins, self._read = (
            list(receivers),
            forms,
            receivers,
            begins,
            read,
        )
        self._cached: tuple[str, np.ndarray] | None = None

    def _inside(self, low: int, high: int) -> Iterator[tuple[str, Form, int, int, int]]:
        """Yield the arrays in a range of bytes: key, form, their offset in the range, and their elements [first, stop)."""
        for index in range(max(bisect_right(self._begins, low) - 1, 0), len(self._keys)):
            begin, key = self._begins[index], self._keys[index]
            if begin >= high:
                break
            form = self._forms[key]
            item = form.kind.itemsize
            start, stop = max(low, begin), min(high, begin + form.nbytes)
            if start < stop:
                yield key, form, start - low, (start - begin) // item, (stop - begin) // item

    def fill(self, buffer: np.ndarray, low: int, high: int) -> None:
        """Write bytes [low, high) into a buffer."""
        assert self._read is not None
        for key, form, at, first, stop in self._inside(low, high):
            if self._cached is None or self._cached[0] != key:
                self._cached = None  # freed before the next array is read
                self._cached = key, np.ascontiguousarray(self._read(key, form)).reshape(-1)
            part = self._cached[1][first:stop].view(np.uint8)
            buffer[at : at + part.size] = part

    def take(self, buffer: np.ndarray, low: int, high: int) -> None:
        """Pass bytes [low, high) to this rank's receivers."""
        for key, form, at, first, stop in self._inside(low, high):
            flat = buffer[at : at + (stop - first) * form.kind.itemsize].view(form.kind)
            for receiver in self._receivers[key]:
                for start, after in receiver.ranges:
                    start, after = max(start, first), min(after, stop)
                    if start < after:
                        receiver.take(start, flat[start - first : after - first])
