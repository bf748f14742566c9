"""Which shuffle a dataset gets."""

from __future__ import annotations

import logging

from ... import log
from ...errors import explain
from ..arguments import integer
from ..dataset import INFINITE, Dataset
from ..order import DEFAULT_SEED
from .block_shuffled import WINDOW_BYTES, BlockShuffle, BlockShuffled
from .buffer_shuffled import BufferShuffled
from .reindexed import Reindexed, Shuffle

__all__ = ["shuffled"]

_MODES = ("auto", "full", "block")


def shuffled(
    dataset: Dataset,
    buffer_size: int | None,
    seed: int | None,
    reshuffle_each_epoch: bool,
    mode: str,
    window_bytes: int | None,
) -> Dataset:
    """Return the dataset shuffled; see `Dataset.shuffle`."""
    seed = integer(
        "Dataset.shuffle", "seed", DEFAULT_SEED if seed is None else seed, remedy="All ranks must name the same seed."
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
        remedy = "A full shuffle has no window: leave it out, or say mode='block'."
        raise ValueError(explain("Dataset.shuffle", "mode", expected="no window", got="one", remedy=remedy))
    if not dataset.random_access:
        return _in_order(dataset, buffer_size, seed, reshuffle_each_epoch, mode)
    if dataset.cardinality() == INFINITE:
        remedy = "Shuffle before repeat: each repetition then has an order of its own."
        raise ValueError(
            explain("Dataset.shuffle", "", expected="a dataset with an end", got="one without", remedy=remedy)
        )
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
                'mode="block" reads each chunk once; cache() in front of the shuffle keeps the rows.',
            )
        full, why = mode == "full", f'mode="{mode}"'
    if full:
        return Reindexed(dataset, Shuffle(seed, reshuffle_each_epoch, why))
    return BlockShuffled(
        dataset, BlockShuffle(seed, reshuffle_each_epoch, why, buffer_size, window_bytes or WINDOW_BYTES)
    )


def _in_order(dataset: Dataset, buffer_size: int | None, seed: int, reshuffle_each_epoch: bool, mode: str) -> Dataset:
    if mode != "auto":
        remedy = "Shuffle before the stage that reads in order, or leave mode out and give a buffer_size."
        raise ValueError(
            explain("Dataset.shuffle", "mode", expected="'auto': elements are read in order", got=mode, remedy=remedy)
        )
    if buffer_size is None:
        remedy = "Give a buffer_size, or shuffle before the stage that reads in order."
        expected = "a number of elements to mix: the dataset reads in order"
        raise ValueError(explain("Dataset.shuffle", "buffer_size", expected=expected, got="none", remedy=remedy))
    return BufferShuffled(dataset, buffer_size, seed, reshuffle_each_epoch)
