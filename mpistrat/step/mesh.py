"""Replicas divided over ranks: the ranks compare values that must be equal, and add up norms of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from ..arena.layout import Grid
from ..arena.values import checksum
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..comm.arrays import to_host
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

    def different(self, function: str) -> CollectiveMismatchError | None:
        """Return the error of shared values that differ; None if they are equal. Collective over the replica."""
        with self._group.collective("compare parts", function):
            return different_parts(function, self._grid, self._variables, ["value"])

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


def held_by_several(grid: Grid, variables: Sequence[Variable]) -> list[Variable]:
    """Return the variables with parts that several ranks of a replica hold."""
    ranks = grid.replica.topology.size
    return [variable for variable in variables if variable.part is not None and len(variable.part.holders) < ranks]


def different_parts(
    function: str, grid: Grid, variables: Sequence[Variable], kinds: Sequence[str]
) -> CollectiveMismatchError | None:
    """Return the error of equal parts that differ over the ranks of a replica; None if they are equal.

    Collective over the replica, inside one.

    Args:
        function: the public caller to name in the error.
        grid: the mesh.
        variables: variables that several ranks hold.
        kinds: "value" and "gradient", or one of them.
    """
    if not variables:
        return None
    read = {"gradient": lambda variable: variable.gradient(0), "value": lambda variable: variable.values[0]}
    sums = [[checksum(np.ascontiguousarray(to_host(read[kind](v))).reshape(-1)) for kind in kinds] for v in variables]
    table = grid.replica.all_gather_int(np.ravel(sums).tolist()).reshape(-1, len(variables), len(kinds))
    for number, variable in enumerate(variables):
        part = variable.part
        assert part is not None
        for which, kind in enumerate(kinds):
            found = table[:, number, which]
            if (found != found[part.same]).any():
                variable.placement.told_apart = True
                got = by_rank({grid.replica_ranks[rank]: f"#{int(value):08x}" for rank, value in enumerate(found)})
                return _different(function, variable.name, kind, part.layout, got)
    return None


def _different(function: str, name: str, what: str, layout: Sequence[str | None], got: str) -> CollectiveMismatchError:
    remedy = (
        "Each rank of a replica must compute the same. If each has a share of it, sum it before the step: "
        'mesh.all_reduce("SUM", v.grad, mesh_axis="model")'
        if what == "gradient"
        else "It was changed on some ranks only: by a gradient, an assignment, a hyperparameter, or a memory error"
    )
    expected = f"the same {what} on the ranks of a replica that hold the same part, by its layout {tuple(layout)}"
    return CollectiveMismatchError(explain(function, name, expected=expected, got=got, remedy=remedy))
