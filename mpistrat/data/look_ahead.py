"""Telling the sources of a chain which rows will be read soon, while others are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .chain import Addresses, Chain

__all__ = ["LOOK_AHEAD", "LookAhead"]

LOOK_AHEAD = 2  # batches: one would leave a decoding thread idle as it ends, more only hold more memory

Part = Callable[[int], tuple[int, int]]  # which rows of a batch of so many are ours


class LookAhead:
    """Calls a dataset's `expect` some elements ahead of need. Without a source that gains by it, it does nothing.

    Args:
        dataset: what is read.
        part: which rows of a batch this rank reads; None for all.
    """

    def __init__(self, dataset: Chain, part: Part | None = None) -> None:
        self._dataset = dataset
        self._part = part
        self._told = -1  # the last position that the source has heard of, in this epoch
        self._useful = dataset.random_access and _reads_chunks(dataset)

    def batch(self, epoch: int, position: int) -> None:
        """Take note that a batch is about to be read. Not collective."""
        if not self._useful:
            return
        length = self._dataset.cardinality()
        stop = position + LOOK_AHEAD + 1
        for following in range(max(position, self._told) + 1, stop if length < 0 else min(stop, length)):
            epochs, positions = self._dataset.locate(epoch, following)
            start, end = self._part(positions.size) if self._part else (0, positions.size)
            self._dataset.expect(epochs[start:end], positions[start:end])
        self._told = stop - 1

    def rows(self, addresses: Addresses) -> None:
        """Take note that rows will be read soon. Not collective."""
        if self._useful and np.size(addresses[0]):
            self._dataset.expect(*addresses)


def _reads_chunks(dataset: Chain) -> bool:
    return dataset.chunk_starts() is not None or any(map(_reads_chunks, dataset.parents))
