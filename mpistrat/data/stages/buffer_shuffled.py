"""Elements that are read in order, in a random order as far as a buffer reaches (TF: tf.data.Dataset.shuffle)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..dataset import Dataset
from ..order import random_words
from .stage import Stage

__all__ = ["BufferShuffled"]


class BufferShuffled(Stage):
    """A buffer is filled; then each element of it goes at random, and the next one takes its place."""

    def __init__(self, parent: Dataset, buffer_size: int, seed: int, reshuffle_each_epoch: bool) -> None:
        super().__init__(parent)
        self._buffer_size = buffer_size
        self._seed = seed
        self._reshuffle_each_epoch = reshuffle_each_epoch

    @property
    def random_access(self) -> bool:
        return False

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Any]:
        words = random_words((self._seed, epoch if self._reshuffle_each_epoch else 0))
        below = self._parent.elements(epoch)
        buffer = list(itertools.islice(below, self._buffer_size))
        for element in below:
            place = next(words) % len(buffer)
            buffer[place], element = element, buffer[place]
            yield element
        while buffer:
            place = next(words) % len(buffer)
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            yield buffer.pop()

    def chunk_starts(self) -> None:
        return None

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return BufferShuffled(parents[0], self._buffer_size, self._seed, self._reshuffle_each_epoch)

    def describe(self) -> str:
        return (
            f"shuffle({self._buffer_size}, seed={self._seed}, reshuffle_each_epoch={self._reshuffle_each_epoch}):"
            " in a buffer: elements are read in order"
        )
