"""Successive batches of a dataset with random access, or a slice of each: located and gathered in groups."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ..nodes.node import own_rows, read_plan
from ..permutation import by_locality
from ..spec import row_nbytes

if TYPE_CHECKING:
    from ..nodes.node import Addresses, LocatedRange, Node, OwnRows

__all__ = ["LOOK_AHEAD", "Located", "LookAhead", "successive_batches"]

_LOCATED = 1 << 14  # rows located at a time
TOGETHER_BYTES = 1 << 19  # most bytes of batches gathered at a time
TOGETHER_SECONDS = 1e-3


def successive_batches(dataset: Node, epoch: int, start: int, part: OwnRows | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the batches of an epoch from `start` on, each as its number of rows and this worker's rows.

    Args:
        dataset: a batched dataset with random access.
        epoch, start: the first batch.
        part: returns this worker's range of a batch's rows, in the order of locality; None for all, in the dataset's order.
    """
    pace = _Pace()
    for totals, ends, source, epochs, positions in LookAhead(dataset).batches(
        _located(dataset, epoch, start, part, pace)
    ):
        ranges = [slice(low, high) for low, high in itertools.pairwise((0, *ends))]
        if len(totals) > 1:
            try:
                rows = pace.gather(source, epochs, positions)
            except Exception:  # yield the batches before the unreadable one
                pass
            else:
                for total, own in zip(totals, ranges, strict=True):
                    yield total, nest.map_structure(operator.itemgetter(own), rows)
                del rows
                continue
        for total, own in zip(totals, ranges, strict=True):
            yield total, pace.gather(source, epochs[own], positions[own])  # a variable would hold the loop's batch


class _Pace:
    """The time per row of the latest call: slow batches are read one at a time, for low latency."""

    seconds = 0.0

    def gather(self, source: Node, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        started = perf_counter()
        rows = source.gather(epochs, positions)
        self.seconds = (perf_counter() - started) / max(1, positions.size)
        return rows


def _rows_together(source: Node) -> int:
    """Return the rows of several batches that TOGETHER_BYTES allows in a call; 0 if functions or other ranks would see it."""
    alone = source.traits.calls_functions or source.traits.shares_memory or source.batching is not None
    nbytes = 0 if alone else row_nbytes(source.row_spec)
    return TOGETHER_BYTES // nbytes if nbytes else 0


def _located(dataset: Node, epoch: int, start: int, part: OwnRows | None, pace: _Pace) -> Iterator[Located]:
    """Yield the batches, or slices, in groups for one call, addressed at the node that makes their rows."""
    length = dataset.cardinality()
    nothing = np.empty(0, np.int64)
    sort = part is not None and dataset.locality(nothing, nothing) is not None
    position, together = start, 1
    known, most_rows = None, 0
    while length < 0 or position < length:
        stop = position + together if length < 0 else min(position + together, length)
        if part is not None and sort:
            (epochs, positions), counts, ends = _sorted_parts(dataset, epoch, range(position, stop), part)
        else:
            (epochs, positions), counts, ends = dataset.locate_range(epoch, position, stop, part)
        source, epochs, positions = read_plan(dataset, epochs, positions)
        if source is not known:
            known, most_rows = source, _rows_together(source)
        # Groups never span epochs of a source: files are checked between epochs.
        several = epochs.size > 0 and epochs[0] != epochs[-1]
        epoch_of = epochs[np.maximum(ends, 1) - 1].tolist() if several else [0] * len(ends)
        first, rows = 0, max(1, ends[-1] // len(ends))
        while first < len(ends):
            most = int(min(most_rows, TOGETHER_SECONDS / max(pace.seconds, 1e-9)) // rows)
            last, limit = first + 1, min(first + most, len(ends))
            while last < limit and epoch_of[last] == epoch_of[first]:
                last += 1
            low, high = ends[first - 1] if first else 0, ends[last - 1]
            own = [end - low for end in ends[first:last]]
            yield Located(counts[first:last], own, source, epochs[low:high], positions[low:high])
            first = last
        located = sum(counts) if sort else ends[-1]
        position, together = stop, max(1, min(2 * together, _LOCATED * (stop - position) // max(1, located)))


def _sorted_parts(dataset: Node, epoch: int, batches: range, part: OwnRows) -> LocatedRange:
    """Return the same as `Node.locate_range`, for batches sorted by locality."""
    (epochs, positions), counts, _ = dataset.locate_range(epoch, batches.start, batches.stop)
    own, ends = own_rows(np.cumsum([0, *counts[:-1]], dtype=np.int64), counts, part)
    numbers = dataset.locality(epochs, positions)
    if numbers is not None:
        own = by_locality(numbers, counts)[own]
    return (epochs[own], positions[own]), counts, ends


# Batches or groups: with one a decoding thread would idle at its end, more only use memory.
LOOK_AHEAD = 2


class Located(NamedTuple):
    """Successive batches, or slices: the node that makes their rows, and their addresses there."""

    totals: Sequence[int]  # rows of each whole batch
    ends: Sequence[int]  # the end of this worker's slice of each
    source: Node
    epochs: NDArray[np.int64]
    positions: NDArray[np.int64]


class LookAhead:
    """Calls of a dataset's `expect` some elements ahead, if a source benefits."""

    def __init__(self, dataset: Node) -> None:
        self._dataset = dataset
        self._useful = dataset.random_access and _reads_chunks(dataset)

    def batches(self, located: Iterator[Located]) -> Iterator[Located]:
        """Yield the same batches, all but the first announced in advance."""
        return self._announced(located) if self._useful else located

    @staticmethod
    def _announced(located: Iterator[Located]) -> Iterator[Located]:
        waiting: deque[Located] = deque()
        for batches in located:
            if waiting:
                batches.source.expect(batches.epochs, batches.positions)
            waiting.append(batches)
            if len(waiting) > LOOK_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def rows(self, addresses: Addresses) -> None:
        """Announce rows."""
        if self._useful and np.size(addresses[0]):
            self._dataset.expect(*addresses)


def _reads_chunks(dataset: Node) -> bool:
    return dataset.chunk_starts() is not None or any(map(_reads_chunks, dataset.parents))
