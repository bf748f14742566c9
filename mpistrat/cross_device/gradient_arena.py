"""What the reduction of a training step needs to know of the flat arrays in which gradients lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["GradientArena"]


class GradientArena(Protocol):
    """The gradients of many variables, side by side in one flat array for each replica.

    Attributes:
        dtype: of all of them.
        size: elements in each flat array.
        local: the flat arrays of this rank's replicas.
        node: those of all replicas of the node, in replica order; None where the node shares no memory.
        key: name of the arena, equal on every rank.
    """

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def size(self) -> int: ...

    @property
    def local(self) -> Sequence[Any]: ...

    @property
    def node(self) -> Sequence[np.ndarray] | None: ...

    @property
    def key(self) -> str: ...

    def owned(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the part of element ranges that this rank reduces and updates."""
        ...
