"""Telling the sources of a chain which rows will be read soon, while others are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .nodes.node import Addresses, Node

__all__ = ["LOOK_AHEAD", "Located", "LookAhead"]

# Batches, or groups of small ones: one would leave a decoding thread idle as it ends, more only hold more memory.
LOOK_AHEAD = 2


class Located(NamedTuple):
    """Successive batches, or our part of each: who makes their rows, and the addresses of these there."""

    totals: Sequence[int]  # rows of each whole batch
    ends: Sequence[int]  # where our part of each ends
    source: Node
    epochs: NDArray[np.int64]
    positions: NDArray[np.int64]


class LookAhead:
    """Calls a dataset's `expect` some elements ahead of need. Without a source that gains by it, it does nothing.

    Args:
        dataset: what is read.
    """

    def __init__(self, dataset: Node) -> None:
        self._dataset = dataset
        self._useful = dataset.random_access and _reads_chunks(dataset)

    def batches(self, located: Iterator[Located]) -> Iterator[Located]:
        """Yield the same batches, all but the first announced some turns before."""
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
        """Take note that rows will be read soon."""
        if self._useful and np.size(addresses[0]):
            self._dataset.expect(*addresses)


def _reads_chunks(dataset: Node) -> bool:
    return dataset.chunk_starts() is not None or any(map(_reads_chunks, dataset.parents))
