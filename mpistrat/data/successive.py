"""Successive batches of a dataset with random access, or a part of each: where rows lie is found out for many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .locality import by_locality
from .look_ahead import LocatedBatch, LookAhead

if TYPE_CHECKING:
    from .chain import Chain

__all__ = ["Part", "successive_batches"]

_TOGETHER = 4096  # rows: finding out costs the same for one batch and for many small ones

Part = Callable[[int], tuple[int, int]]  # which rows of a batch of so many are ours


def successive_batches(dataset: Chain, epoch: int, start: int, part: Part | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the batches of an epoch from one on, each as its number of rows and the rows that are ours. Not collective.

    Args:
        dataset: with random access, after `batch`.
        epoch, start: where to begin.
        part: which rows of a batch of so many are ours, once they stand in the order of their locality; None for all, in
            the order of the dataset.
    """
    for total, source, epochs, positions in LookAhead(dataset).batches(_located(dataset, epoch, start, part)):
        yield total, source.gather(epochs, positions)


def _located(dataset: Chain, epoch: int, start: int, part: Part | None) -> Iterator[LocatedBatch]:
    """Where the rows of the batches, or our part of each, are made."""
    length = dataset.cardinality()
    nothing = np.empty(0, np.int64)
    sort = part is not None and dataset.locality(nothing, nothing) is not None
    position, together = start, 1
    while length < 0 or position < length:
        stop = position + together if length < 0 else min(position + together, length)
        addresses = [dataset.locate(epoch, each) for each in range(position, stop)]
        counts = [positions.size for _, positions in addresses]
        epochs = np.concatenate([each for each, _ in addresses])
        positions = np.concatenate([each for _, each in addresses])
        ends = np.cumsum(counts).tolist()
        if part is not None:
            ranges = [(end - count, *part(count)) for count, end in zip(counts, ends, strict=True)]
            if sort and (numbers := dataset.locality(epochs, positions)) is not None:
                order = by_locality(numbers, counts)
                epochs, positions = epochs[order], positions[order]
            ends = np.cumsum([high - low for _, low, high in ranges]).tolist()
            if ends[-1] < positions.size:
                own = np.concatenate([np.arange(first + low, first + high) for first, low, high in ranges])
                epochs, positions = epochs[own], positions[own]
        source, epochs, positions = dataset.source(epochs, positions)
        low = 0
        for count, high in zip(counts, ends, strict=True):
            yield LocatedBatch(count, source, epochs[low:high], positions[low:high])
            low = high
        located = sum(counts) if sort else ends[-1]
        position, together = stop, max(1, min(2 * together, _TOGETHER * (stop - position) // max(1, located)))
