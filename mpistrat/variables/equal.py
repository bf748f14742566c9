"""Comparison of values that ranks must share: the weights of nodes, and equal parts on the ranks of a mesh's replica."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ..arena.arena import Arena
from ..arena.values import checksum
from ..base import partition
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..comm.arrays import to_host
from ..comm.process_group import ProcessGroup
from .placement import Placement
from .variable import Variable

__all__ = ["different_copies", "different_nodes", "different_weights"]

_NAMED = 5  # variables of each rank in an error


def different_weights(function: str, placement: Placement) -> CollectiveMismatchError | None:
    """Return the error of weights that must be equal and are not, the same on every rank; None if all are equal.

    Each rank passes once over its share of the memory. Collective over all ranks, unless they are of one node without a mesh.

    Args:
        function: the public caller to name in the error.
        placement: of the strategy; variables on servers have no copies.
    """
    kept = [variable for variable in placement.variables if variable.arena is not None]
    if not kept:
        return None
    group, variables = placement.group, [variable for variable in kept if variable.size]
    error = None
    if group.num_nodes > 1:
        with group.collective("compare weights", function):
            arenas = dict.fromkeys(variable.arena for variable in variables)
            error = different_nodes(function, group, variables, [_share(group, arena) for arena in arenas])
    replica = placement.steps.parts.replica_of(variables)
    if replica.whole:
        return error
    error = replica.different(function) or error
    texts = list(filter(None, placement.creators.exchange("compare weights", str(error or ""), function)))
    placement.told_apart |= bool(texts)  # on other ranks too: all close in the same way
    return CollectiveMismatchError(texts[0]) if texts else None


def _share(group: ProcessGroup, arena: Arena) -> int:
    """Return a checksum of this rank's share of an arena; a node's ranks have all of it, in the same shares on each node."""
    if group.slice_index is None:
        return 0
    low, high = partition.aligned_bounds(arena.used, group.slices)[group.slice_index]
    return checksum(arena.values[low:high])


def different_nodes(
    function: str, group: ProcessGroup, variables: Sequence[Variable], numbers: Sequence[int]
) -> CollectiveMismatchError | None:
    """Return the error of weights that differ between nodes, with each rank's values; None if all are equal.

    Collective, inside one; all ranks have arrived.

    Args:
        function: the public caller to name in the error.
        group: the ranks.
        variables: the candidates for the error.
        numbers: digests of this rank's share of the weights.
    """
    expected = "the same weights on all nodes"
    return None if group.nodes_alike(numbers) else _different_weights(function, group, variables, expected)


def different_copies(
    function: str, group: ProcessGroup, variables: Sequence[Variable], numbers: Sequence[int]
) -> CollectiveMismatchError | None:
    """Return the error as in `different_nodes`, if each rank has a copy of all weights. Collective, inside one."""
    table = group.all_gather_int(numbers)
    expected = "the same weights on all ranks"
    return None if (table == table[0]).all() else _different_weights(function, group, variables, expected)


def _different_weights(
    function: str, group: ProcessGroup, variables: Sequence[Variable], expected: str
) -> CollectiveMismatchError:
    """Return the error of weights that differ between nodes or ranks. Collective, inside one."""
    variables[0].placement.told_apart = True
    own = {variable.name: _shown(variable) for variable in variables}
    shown = [json.loads(text) for text in group.all_gather_text(json.dumps(own))]
    names = [name for name in own if len({mine[name] for mine in shown}) > 1]
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    texts = {
        rank: ", ".join(f"{name} {mine[name]}" for name in names[:_NAMED]) + more for rank, mine in enumerate(shown)
    }
    remedy = (
        "The weights were changed on some ranks only, by something that ranks do not compare: a hyperparameter, a constraint, "
        "a gradient that was not summed, a write into their memory, or the memory of a node. Restore the last checkpoint"
    )
    return CollectiveMismatchError(explain(function, "", expected=expected, got=by_rank(texts), remedy=remedy))


def _shown(variable: Variable) -> str:
    """Return a variable's checksum, and the count of its numbers that are not finite, as text."""
    value = to_host(variable.values[0])
    odd = value.size - int(np.count_nonzero(np.isfinite(value)))
    return f"#{checksum(value.reshape(-1)):08x}" + f" with {odd} that are not finite" * bool(odd)
