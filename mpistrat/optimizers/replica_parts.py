"""What a step does where a replica is divided over ranks: these compare what must be equal, and add up norms of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from ..comm.arrays import to_host
from ..errors import CollectiveMismatchError, by_rank, explain
from ..variables.layout import Grid
from ..variables.values import checksum
from ..variables.variable import Variable

__all__ = ["ReplicaParts"]

_STEP = "apply_gradients"


@final
class ReplicaParts:
    """The ranks of a replica, in the step of an optimizer on some variables."""

    def __init__(self, grid: Grid, variables: Sequence[Variable]) -> None:
        self._grid, self._group = grid, grid.replica
        self._parts = {variable.name: variable.part for variable in variables if variable.part is not None}
        self._variables = [
            v for v in variables if v.part is not None and len(v.part.holders) < self._group.topology.size
        ]

    def compare(self, detail: str, words: str, due: bool) -> None:
        """Compare the step over the replica, and if that is due, what its ranks hold alike. Collective over the replica.

        Args:
            detail, words: what ranks that step together compare of the step.
            due: whether to compare gradients and weights.

        Raises:
            CollectiveMismatchError: on every rank of the replica, when they differ.
        """
        if self._group.topology.size == 1:
            return
        with self._group.collective(_STEP, detail=f"{detail}, in a replica").stamp(words):
            if due and self._variables:
                self._compare_values()

    def _compare_values(self) -> None:
        sums = [[_sum(v.gradient(0)), _sum(v.array)] for v in self._variables]
        table = self._group.all_gather_int(np.ravel(sums).tolist()).reshape(-1, len(sums), 2)
        for number, variable in enumerate(self._variables):
            part = variable.part
            assert part is not None
            for which, what in enumerate(("gradient", "value")):
                found = table[:, number, which]
                if (found != found[part.same]).any():
                    ranks = self._grid.replica_ranks
                    got = by_rank({ranks[r]: f"#{int(value):08x}" for r, value in enumerate(found)})
                    raise _different(variable.name, what, part.layout, got)

    def total(self, squares: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of squares of whole variables, of those of this rank's parts, the same bits on each. Collective over
        the replica."""
        if self._group.topology.size == 1:
            return dict(squares)
        mine = np.array(list(squares.values()), np.float64)
        with self._group.collective(_STEP, "squares", detail=len(squares)):
            table = self._group.all_gather_int(mine.view(np.int64).tolist()).view(np.float64)
        return {name: sum(table[self._parts[name].holders, number].tolist()) for number, name in enumerate(squares)}


def _sum(array: np.ndarray) -> int:
    return checksum(np.ascontiguousarray(to_host(array)).reshape(-1))


def _different(name: str, what: str, layout: Sequence[str | None], got: str) -> CollectiveMismatchError:
    remedy = (
        "Each rank of a replica must compute it alike. Where each has a share of it, sum it before the step: "
        'mesh.all_reduce(v.grad, "model")'
        if what == "gradient"
        else "Something has changed it on some ranks only: an assignment, a hyperparameter, the memory of a node"
    )
    expected = f"the same {what} on the ranks of a replica that hold the same part, by its layout {tuple(layout)}"
    return CollectiveMismatchError(explain(_STEP, name, expected=expected, got=got, remedy=remedy))
