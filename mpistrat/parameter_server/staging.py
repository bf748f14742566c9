"""Staging buffers for large pushes, which the server applies in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from .layout import aligned
from .memory import ServerMemory

__all__ = ["HALVES", "LARGEST_AREA", "Staging", "area_bytes"]

HALVES = 2  # a worker writes one while the server applies the other
LARGEST_AREA = 64 << 20  # bytes; what is larger comes in parts


@final
@dataclass(frozen=True)
class Staging:
    """Two areas for each worker on each server.

    Attributes:
        areas: for each server the bytes of one area.
        memory: the servers' segments.
    """

    areas: Sequence[int]
    memory: ServerMemory

    def offset(self, server: int, worker: int, half: int) -> int:
        """Return where an area lies in its server's segment."""
        return (HALVES * worker + half) * self.areas[server]


def area_bytes(largest: int, now: int, chunk_bytes: int) -> int:
    """Return how large the areas of a server should be.

    Args:
        largest: bytes of the largest of the variables that come.
        now: bytes of an area so far.
        chunk_bytes: what goes with its header anyway.

    Example:
        >>> [area_bytes(largest, 3000, 1024) for largest in (500, 3000, 3001, 9000, 1 << 40)]
        [3000, 3000, 6016, 9024, 3000]
    """
    if largest <= max(now, chunk_bytes) or largest > LARGEST_AREA:
        return now
    return aligned(max(largest, min(2 * now, LARGEST_AREA)))
