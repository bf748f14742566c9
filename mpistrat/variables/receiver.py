"""Where the elements of an array go that is read from a file, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Receiver"]


def _nothing() -> None:
    """Nothing is left to do."""


class Receiver(NamedTuple):
    """What a rank takes of an array, and what it does with it.

    Attributes:
        ranges: the elements that it takes, by their numbers in the flat array.
        take: stores elements from a number on, which lie in one of the ranges.
        finish: called when all elements of all arrays were taken; it may be collective.
    """

    ranges: Sequence[tuple[int, int]]
    take: Callable[[int, np.ndarray], None]
    finish: Callable[[], None] = _nothing

    @classmethod
    def whole(cls, array: np.ndarray, finish: Callable[[], None] = _nothing) -> Receiver:
        """Return one that fills a C-contiguous array."""
        flat = array.reshape(-1)

        def take(start: int, part: np.ndarray) -> None:
            flat[start : start + part.size] = part

        return cls([(0, flat.size)], take, finish)
