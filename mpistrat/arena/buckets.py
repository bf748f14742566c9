"""Sums of submitted gradients: a rank has two buckets for its own gradients, and its share of the sums.

Gradients are copied into a bucket in the node's shared memory. On one node, and if every node sums whole arenas, the ranks sum a
full bucket at once. Otherwise their threads sum it and exchange pieces with other nodes while the next one is filled. Only one
bucket is in flight: each rank waits for its part before the barrier after which the next one is summed, so no bucket is
overwritten before all have read it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import numpy as np

from ..base.partition import merge
from ..base.types import ReduceOp
from ..comm.process_group import ProcessGroup
from .arithmetic import arithmetic
from .early import EarlyMemory, EarlySums, threads_agree
from .reduction import BLOCK, Gradients

__all__ = ["BUCKET_BYTES", "BucketSums"]

BUCKET_BYTES = 4 << 20


class _Segment(NamedTuple):
    """Elements [low, high) of an arena, and their offset in a bucket."""

    low: int
    high: int
    at: int


@final
class _Bucket:
    """One replica's bucket, indexed by element numbers of the arena: `bucket[low:high]`."""

    __slots__ = ("_array", "_lows", "_segments")

    def __init__(self, array: np.ndarray, segments: Sequence[_Segment]) -> None:
        self._array, self._segments = array, segments
        self._lows = [segment.low for segment in segments]

    def __getitem__(self, where: slice) -> np.ndarray:
        parts, low = [], where.start
        for segment in itertools.islice(self._segments, bisect_right(self._lows, low) - 1, None):
            end = min(segment.high, where.stop)
            parts.append(self._array[segment.at + low - segment.low : segment.at + end - segment.low])
            low = end
            if low >= where.stop:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@final
class BucketSums:
    """The buckets of a strategy's ranks, and the sums of the gradients submitted in them.

    All ranks submit the same elements in the same order; otherwise an error reports the difference.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._early: EarlySums | None = None
        self._buckets: list[list[list[np.ndarray]]] = []  # by half, rank of the node and its replica, as bytes
        self._half = 0
        self._arena: Gradients | None = None  # of the open bucket
        self._room = 0  # elements
        self._segments: list[_Segment] = []
        self._names: list[str] = []

    def put(self, arena: Gradients, low: int, high: int, gradients: Sequence[np.ndarray], name: str) -> None:
        """Copy the gradients of elements [low, high), one flat array for each local replica. Collective.

        Shorter arrays are padded with zeros. Errors report `name` if ranks submit different gradients.
        """
        if self._early is None:
            self._early = self._open()
        if self._arena is not None and self._arena.key != arena.key:
            self.send()
        if self._arena is None:
            self._begin_bucket(arena)
        self._names.append(name)
        first = low
        while high > low:
            if not self._room:
                self.send()
                self._begin_bucket(arena)
                self._names.append(name)
            # From the end, as gradients of the last variables come first: then neighbours are adjacent.
            count = min(self._room, high - low)
            self._room, high = self._room - count, high - count
            for bucket, flat in zip(self._buckets[self._half][self._group.node.rank], gradients, strict=True):
                target = bucket.view(arena.dtype)[self._room : self._room + count]
                given = flat[high - first : high - first + count]
                target[: given.size] = given
                target[given.size :] = 0
            self._segments.append(_Segment(high, high + count, self._room))

    def send(self) -> None:
        """Start to sum the open bucket, if there is one. Collective."""
        arena, early = self._arena, self._early
        if arena is None or early is None:
            return
        names, segments = ", ".join(self._names), _joined(self._segments)
        half = self._buckets[self._half]
        self._close_bucket()
        with self._group.collective("begin", detail=f"of {names}", synchronize=False) as call:
            early.catch_up()
            self._group.node.barrier(call)
            if segments:
                arrays = [_Bucket(bucket.view(arena.dtype), segments) for rank in half for bucket in rank]
                ranges = merge([(segment.low, segment.high) for segment in segments])
                early.begin(arena, arrays, ranges, arithmetic(ReduceOp.SUM, arena.dtype, 1))
        self._half = 1 - self._half

    def finish(self) -> None:
        """Wait until all submitted gradients are summed, on all ranks of the node. Collective, inside one."""
        if self._early is not None:
            self._early.wait()

    def memory(self, arena: Gradients) -> EarlyMemory:
        """Return the memory of an arena's sums. Collective, inside one."""
        assert self._early is not None
        return self._early.memory(arena)

    def forget(self, arena: Gradients, ranges: Sequence[tuple[int, int]]) -> None:
        """Discard element ranges: their sums were used, or never will be. Every rank calls it."""
        if self._arena is not None and self._arena.key == arena.key:
            self._segments = [s for s in self._segments if not any(low <= s.low < high for low, high in ranges)]
        if self._early is not None:
            self._early.forget(arena.key, ranges)

    def _begin_bucket(self, arena: Gradients) -> None:
        self._arena, self._room = arena, BUCKET_BYTES // arena.dtype.itemsize

    def _close_bucket(self) -> None:
        self._arena, self._room, self._segments, self._names = None, 0, [], []

    def _open(self) -> EarlySums:
        """Allocate the buckets. Collective."""
        group, node = self._group, self._group.node
        with group.collective("begin: buckets"):
            threads = threads_agree(group)
            counts = list(group.replicas_of_node)
            block = node.allocate([2 * BUCKET_BYTES * count for count in counts], "the buckets of gradients")
            real = block.populate(node.rank, 0, 2 * BUCKET_BYTES * counts[node.rank])
            node.agree_populated(real, block.what)
            self._buckets = [
                [
                    [_cut(segment, 2 * replica + half) for replica in range(count)]
                    for segment, count in zip(block.segments, counts, strict=True)
                ]
                for half in (0, 1)
            ]
            return EarlySums(group, BLOCK, threads)

    def close(self) -> None:
        """Release the memory, which the group frees."""
        self._buckets.clear()
        self._early = None
        self._close_bucket()


def _cut(segment: np.ndarray, number: int) -> np.ndarray:
    return segment[number * BUCKET_BYTES : (number + 1) * BUCKET_BYTES]


def _joined(segments: Iterable[_Segment]) -> list[_Segment]:
    """Return segments in the order of the arena; merge those that are adjacent both there and in the bucket."""
    joined: list[_Segment] = []
    for segment in sorted(segments):
        last = joined[-1] if joined else None
        if last is not None and last.high == segment.low and last.at + last.high - last.low == segment.at:
            joined[-1] = last._replace(high=segment.high)
        else:
            joined.append(segment)
    return joined
