"""Sums over all ranks of numbers, such as squares, of the elements that each updates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arena.arena import Arena
from ..comm.arrays import all_reduce
from ..optimizers.slots import owners
from ..variables.placement import Placement
from .interface import Norms

__all__ = ["OverAll"]


class OverAll(Norms):
    """Numbers of the owners of slices, equal on every node, or of pieces, each on its own node."""

    def __init__(self, placement: Placement) -> None:
        self._group = placement.group

    def totals(self, columns: Sequence[np.ndarray], arenas: Sequence[Arena]) -> list[np.ndarray]:
        column = np.concatenate([[], *columns])
        in_pieces = np.repeat(np.array([arena.sharded for arena in arenas], bool), [each.size for each in columns])
        if in_pieces.any() and self._group.inter is not None:
            column[in_pieces] = _over_nodes(self._group.inter, column[in_pieces])
        table, totals, first = self._table(column), [], 0
        for arena, each in zip(arenas, columns, strict=True):
            rows = table[: len(arena.bounds()), first : first + each.size]
            totals.append(functools.reduce(np.add, rows, np.zeros(each.size)))
            first += each.size
        return totals

    def _table(self, column: np.ndarray) -> np.ndarray:
        """Return the numbers of all owners of slices, a row each."""
        return self._group.of_first_node(column)

    def all_finite(self, finite: bool) -> bool:
        return finite  # all ranks have the same sums of squares

    def counted(self, arena: Arena) -> list[int]:
        return owners(arena)


def _over_nodes(inter: Any, numbers: np.ndarray) -> np.ndarray:
    """Return the sums of float64 numbers over the peers of other nodes. Collective over `inter`."""
    total = np.array(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        all_reduce(inter, total)
    return total
