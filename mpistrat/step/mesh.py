"""Replicas divided over ranks: the ranks compare values that must be equal, and add up norms of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from ..base.errors import explain
from ..variables.equal import different_parts, held_by_several
from ..variables.placement import Placement
from ..variables.variable import Variable
from .interface import Replica

__all__ = ["ReplicaParts"]

_STEP = "apply_gradients"


@final
class ReplicaParts(Replica):
    """The ranks of a replica, in the step of an optimizer on some variables."""

    whole = False

    def __init__(self, placement: Placement, variables: Sequence[Variable]) -> None:
        grid = placement.grid
        assert grid is not None
        self._grid, self._group = grid, grid.replica
        self._parts = {variable.name: variable.part for variable in variables if variable.part is not None}
        self._variables = held_by_several(grid, variables)

    def compare(self, detail: str, words: str, due: bool) -> None:
        if self._group.topology.size == 1:
            return
        with self._group.collective(_STEP, detail=f"{detail}, in a replica").stamp(words):
            error = different_parts(_STEP, self._grid, self._variables, ["gradient", "value"]) if due else None
            if error is not None:
                raise error

    def total(self, squares: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over the replica of the squares of parts. Collective over the replica."""
        if self._group.topology.size == 1:
            return dict(squares)
        mine = np.array(list(squares.values()), np.float64)
        with self._group.collective(_STEP, "squares", detail=len(squares)):
            table = self._group.all_gather_int(mine.view(np.int64).tolist()).view(np.float64)
        return {name: sum(table[self._parts[name].holders, number].tolist()) for number, name in enumerate(squares)}

    def refuse(self, number: int) -> None:
        got = f"others in a part of a variable that lies on other ranks, in step {number}"
        raise FloatingPointError(explain(_STEP, "", expected="finite numbers", got=got))
