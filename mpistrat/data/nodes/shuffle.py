"""Shuffles: the choice of one, the block shuffle, and the buffer for elements read in order."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import log, nest
from ...base.arguments import integer
from ...base.errors import explain
from ..permutation import DEFAULT_SEED, BlockOrder, random_words
from ..spec import ArraySpec
from .batch import require_end
from .node import Addresses, Below, Node
from .order import Reindexed, Reordered, Shuffle, ShuffleSettings
from .stage import Stage
from .streamed import Streamed

__all__ = ["PSEUDO_CHUNK", "WINDOW_BYTES", "BlockShuffle", "BlockShuffled", "Shuffled", "shuffle"]

WINDOW_BYTES = 1 << 26  # the default size of a window
PSEUDO_CHUNK = 64  # rows that stay together in a window if the data has no chunks


@dataclass(frozen=True)
class BlockShuffle(ShuffleSettings):
    """A block shuffle."""

    window_rows: int | None  # elements per window; None to use window_bytes
    window_bytes: int

    def __str__(self) -> str:
        window = f"{self.window_bytes:,} bytes" if self.window_rows is None else f"{self.window_rows:,} elements"
        return f"{super().__str__()}: in blocks, mixed in windows of {window}: {self.why}"


@final
class BlockShuffled(Reordered):
    """Elements in the order of a block shuffle."""

    def __init__(self, parent: Node, shuffle: BlockShuffle) -> None:
        super().__init__(parent, shuffle)
        self._shuffle = shuffle
        self._made: BlockOrder | None = None
        self._of_chunks = False  # whether the data's own chunks are mixed; known once the order is made
        self._lock = threading.Lock()
        self._in_turn = False  # whether `expect` is called; then windows are read in sequence
        # Epoch, window, and the range of the next window's chunks that were announced to the source.
        self._told = (-1, -1, 0, 0)
        self._until = (-1, 0, 0)  # epoch, and the range of positions that needs no further announcement

    @property
    def _order(self) -> BlockOrder:
        with self._lock:
            if self._made is None:
                rows = self._parent.cardinality()
                starts = self._parent.chunk_starts() if self.batching is None else None
                self._of_chunks = starts is not None
                if starts is None:
                    starts = np.append(np.arange(0, rows, PSEUDO_CHUNK), rows)
                window = self._shuffle.window_rows
                if window is None:
                    window = max(1, self._shuffle.window_bytes // max(1, _element_bytes(self._parent)))
                self._parent.keep(window)
                self._made = BlockOrder(starts, window, self._shuffle.seed)
            return self._made

    def _addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        return self._shuffle.rows(epochs, positions, self._order.rows)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        rows = super().gather(epochs, positions)
        if self._in_turn and positions.size:
            self._expect_window(epochs, positions)
        return rows

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        if self.batching is None:
            self._in_turn = True
            near = self._near(epochs, positions)
            if not near.any():
                return
            epochs, positions = epochs[near], positions[near]
        super().expect(epochs, positions)

    def _near(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        epoch, window = self._told[:2]
        bound = self._order.window_end(self._shuffle.key(epoch), window + 1) if epoch >= 0 else 0
        return (epochs == epoch) & (positions < bound)

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        order = self._order
        if not self._of_chunks:
            return super().locality(epochs, positions)
        return self._shuffle.rows(epochs, positions, order.localities)[1]

    def _expect_window(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Prefetch the next window chunk by chunk while this one is read: two windows are in memory, never three.

        Where ranks split batches by locality, this one prefetches the same range of the next window as it reads of this one.
        """
        epoch = int(epochs.max())
        here = positions[epochs == epoch]
        last, order = int(here.max()), self._order
        if self._until[0] == epoch and self._until[1] <= last < self._until[2]:
            return
        numbers = order.localities(self._shuffle.key(epoch), here)
        near = int(numbers.min()), int(numbers.max())
        window, low, rows = order.ahead(self._shuffle.key(epoch), last, near)
        self._until = epoch, last, last + order.chunk_rows
        high = low + rows.size
        told_from, told_to = self._told[2:] if self._told[:2] == (epoch, window) else (low, low)
        new = np.concatenate((rows[: max(0, told_from - low)], rows[max(0, told_to - low) :]))
        self._told = (epoch, window, min(low, told_from), max(high, told_to))
        if new.size:
            self._parent.expect(np.full(new.size, epoch, np.int64), new)

    def chunk_starts(self) -> None:
        return None

    def describe(self) -> str:
        return str(self._shuffle)


def _element_bytes(dataset: Node) -> int:
    """Return the bytes of an element; lengths that vary count as 1."""

    def size(spec: ArraySpec) -> int:
        return spec.dtype.itemsize * int(np.prod([length or 1 for length in spec.shape], dtype=np.int64))

    rows = dataset.batching.size if dataset.batching is not None else 1
    return rows * sum(size(spec) for spec in nest.flatten(dataset.row_spec))


@final
class Shuffled(Stage):
    """A shuffle whose kind is chosen on first use: the chain is made before files are opened."""

    @functools.cached_property
    def _chosen(self) -> Node:
        return _choose(self._parent, *self._settings)

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._chosen.locate(epoch, position)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return [(self._chosen, (epochs, positions), None)]

    def describe(self) -> str:
        return self._chosen.describe()

    def __str__(self) -> str:
        _ = self._chosen  # opens the nodes below, whose texts are then complete
        return super().__str__()


def _from_buffer(buffer_size: int, seed: int, reshuffle_each_epoch: bool, epoch: int, below: Node) -> Iterator[Any]:
    """Fill a buffer; then yield a random element of it, replaced by the next one, until all are read."""
    words = random_words((seed, epoch if reshuffle_each_epoch else 0))
    elements = below.elements(epoch)
    buffer = list(itertools.islice(elements, buffer_size))
    for element in elements:
        place = next(words) % len(buffer)
        buffer[place], element = element, buffer[place]
        yield element
    while buffer:
        place = next(words) % len(buffer)
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


_MODES = ("auto", "full", "block")


def shuffle(
    parent: Node, buffer_size: int | None = None, seed: int | None = None, reshuffle_each_epoch: bool = True, *,
    mode: str = "auto", window_bytes: int | None = None,
) -> Node:  # fmt: skip
    """Shuffle all elements into an order that depends on the seed and the epoch only.

    No table of elements is stored, and a seed gives the same order on any number of ranks. A full shuffle may move every
    element anywhere. A block shuffle permutes the data's chunks (64 elements if there are none), and the elements within
    windows of successive chunks: each chunk is read once, and two windows are in memory. A dataset that reads in order is
    shuffled through a buffer, as in TF.

    Args:
        buffer_size: elements in a window, or in the buffer; a full shuffle needs none.
        seed: any integer, the same on every rank; None is 0 in every run (TensorFlow draws one per run), so ranks agree
            and a resumed job has the same order.
        reshuffle_each_epoch: whether each epoch has a different order.
        mode: "full", "block", or "auto": full if single rows are cheap to read, else (compressed data) block.
        window_bytes: the size of a window in bytes, instead of `buffer_size`; 64 MiB if neither is given.

    Raises:
        ValueError: for an endless dataset, for one that reads in order without a buffer_size, and for a window with mode="full".

    Example:
        >>> rows = ms.data.from_arrays(np.arange(6)).shuffle(seed=1)
        >>> sorted(int(row) for row in rows)
        [0, 1, 2, 3, 4, 5]
    """
    reshuffle_each_epoch = bool(reshuffle_each_epoch)
    seed = integer(
        "Dataset.shuffle", "seed", DEFAULT_SEED if seed is None else seed, remedy="All ranks must pass the same seed."
    )
    if buffer_size is not None:
        buffer_size = integer("Dataset.shuffle", "buffer_size", buffer_size, 1)
    if window_bytes is not None:
        window_bytes = integer("Dataset.shuffle", "window_bytes", window_bytes, 1)
    if buffer_size is not None and window_bytes is not None:
        expected = "one of buffer_size and window_bytes"
        raise ValueError(explain("Dataset.shuffle", "window_bytes", expected=expected, got="both"))
    if mode not in _MODES:
        raise ValueError(explain("Dataset.shuffle", "mode", expected=f"one of {', '.join(_MODES)}", got=repr(mode)))
    windowed = buffer_size is not None or window_bytes is not None
    if mode == "full" and windowed:
        remedy = "A full shuffle has no window: leave it out, or pass mode='block'."
        raise ValueError(
            explain("Dataset.shuffle", "mode", expected="no window", got="buffer_size or window_bytes", remedy=remedy)
        )
    if not parent.random_access:
        return _in_order(parent, buffer_size, seed, reshuffle_each_epoch, mode)
    require_end("Dataset.shuffle", parent, "Shuffle before repeat: then each repetition has a different order.")
    return Shuffled(parent, buffer_size, seed, reshuffle_each_epoch, mode, window_bytes)


def _choose(
    dataset: Node, buffer_size: int | None, seed: int, reshuffle_each_epoch: bool, mode: str, window_bytes: int | None
) -> Node:
    if dataset.batching is not None:
        full, why = mode != "block", "whole batches are moved"
    else:
        full, why = dataset.chunk_starts() is None, "single rows are cheap to read"
        if not full:
            why = "rows are read in chunks"
    if mode != "auto":
        if mode == "full" and not full:
            log.once(
                logging.WARNING,
                'Dataset.shuffle: mode="full" over data that is read in chunks: a chunk is read for almost every row. '
                'mode="block" reads each chunk once; cache() before the shuffle caches the rows.',
            )
        full, why = mode == "full", f'mode="{mode}"'
    if full:
        return Reindexed(dataset, Shuffle(seed, reshuffle_each_epoch, why))
    return BlockShuffled(
        dataset, BlockShuffle(seed, reshuffle_each_epoch, why, buffer_size, window_bytes or WINDOW_BYTES)
    )


def _in_order(dataset: Node, buffer_size: int | None, seed: int, reshuffle_each_epoch: bool, mode: str) -> Node:
    if mode != "auto":
        remedy = "Shuffle before the stage that reads in order, or leave mode out and give a buffer_size."
        raise ValueError(
            explain("Dataset.shuffle", "mode", expected="'auto': elements are read in order", got=mode, remedy=remedy)
        )
    if buffer_size is None:
        remedy = "Give a buffer_size, or shuffle before the stage that reads in order."
        expected = "a number of elements to mix: the dataset reads in order"
        raise ValueError(explain("Dataset.shuffle", "buffer_size", expected=expected, got="none", remedy=remedy))
    settings = f"{buffer_size}, seed={seed}, reshuffle_each_epoch={reshuffle_each_epoch}"
    return Streamed(
        f"shuffle({settings}): in a buffer: elements are read in order",
        [dataset],
        functools.partial(_from_buffer, buffer_size, seed, reshuffle_each_epoch),
        length=lambda below: below,
    )
