"""Successive batches of a dataset with random access, or a part of each: where rows lie is found out for many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .look_ahead import LookAhead, Part

if TYPE_CHECKING:
    from .chain import Chain

__all__ = ["successive_batches"]

_TOGETHER = 4096  # rows: finding out costs the same for one batch and for many small ones


def successive_batches(dataset: Chain, epoch: int, start: int, part: Part | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the batches of an epoch from one on, each as its number of rows and the rows that are ours. Not collective.

    Args:
        dataset: with random access, after `batch`.
        epoch, start: where to begin.
        part: which rows of a batch of so many are ours; None for all.
    """
    length = dataset.cardinality()
    ahead = LookAhead(dataset, part)
    position, together = start, 1
    while length < 0 or position < length:
        stop = position + together if length < 0 else min(position + together, length)
        located = [dataset.locate(epoch, each) for each in range(position, stop)]
        counts = [positions.size for _, positions in located]
        if part is not None:
            ours = [slice(*part(count)) for count in counts]
            located = [(epochs[own], rows[own]) for (epochs, rows), own in zip(located, ours, strict=True)]
        ends = np.cumsum([positions.size for _, positions in located]).tolist()
        source, epochs, positions = dataset.source(
            np.concatenate([each for each, _ in located]), np.concatenate([each for _, each in located])
        )
        low = 0
        for number, (count, high) in enumerate(zip(counts, ends, strict=True)):
            ahead.batch(epoch, position + number)
            yield count, source.gather(epochs[low:high], positions[low:high])
            low = high
        position, together = stop, max(1, min(2 * together, _TOGETHER * (stop - position) // max(1, ends[-1])))
