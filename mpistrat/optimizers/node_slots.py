"""Slots of nodes with local steps in files: each node's under its own name, and the momentum of outer steps.

The first node's slots have the usual names, so every strategy can restore them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arena.arena import Arena
from ..comm.arrays import accumulation_dtype, to_host
from ..comm.process_group import ProcessGroup
from ..variables.variable import Variable

__all__ = ["OUTER_MOMENTUM", "node_slots_here", "slots_for", "waiting_of_nodes"]

OUTER_MOMENTUM = "@outer_momentum"
_NODE = "@node"

Parts = list[tuple[int, Any]]


def _name(slot: str, node: int) -> str:
    return f"{slot}{_NODE}{node}" if node else slot


def slots_for(names: Iterable[str], node: int | None) -> dict[str, str]:
    """Return the slots of a file that a node takes, with their names here; more nodes reuse them round-robin.

    Args:
        names: of slots in the file.
        node: None if nodes have equal slots.

    Example:
        >>> slots_for(["momentum", "momentum@node1", "@outer_momentum"], 3)
        {'@outer_momentum': '@outer_momentum', 'momentum@node1': 'momentum'}
    """
    known = set(names)
    plain = sorted(name for name in known if _NODE not in name)
    if node is None:
        return {name: name for name in plain if name != OUTER_MOMENTUM}
    count = 1 + max((int(name.rpartition(_NODE)[2]) for name in known if _NODE in name), default=0)
    return {_name(slot, 0 if slot == OUTER_MOMENTUM else node % count): slot for slot in plain}


def node_slots_here(
    variable: Variable,
    arena: Arena,
    names: Sequence[str],
    of_range: Callable[[int, int], Mapping[str, Any]],
    momentum_of_slice: Callable[[], Parts],
    writers: Collection[int] | None,
    each_node: bool,
) -> dict[str, Parts]:
    """Return this rank's part of a variable's slots of all nodes. Collective. See `SlotStore.here`.

    With `each_node`: of this rank's node, under plain names.

    Args:
        names: of the slots of the inner optimizer.
        of_range: returns this rank's slots of elements that it owns.
        momentum_of_slice: returns the outer momentum in this rank's slice; collective over peers.
    """
    group, first, node = arena.group, variable.offset, arena.group.node_index
    owned = [(low - first, of_range(low, high)) for low, high in arena.owned([(first, first + variable.size)])]
    mine: dict[str, Parts] = {name: [(low, slots[name]) for low, slots in owned] for name in names}
    every = {rank for n in range(group.num_nodes) for rank in group.ranks_of(n)[: len(arena.bounds())]}
    with group.collective("optimizer.slots", variable.name, arena.dtype, variable.shape, (tuple(names), each_node)):
        momentum = momentum_of_slice()
        if each_node:
            return {**mine, OUTER_MOMENTUM: momentum}
        found: dict[str, Parts] = {}
        all_write = writers is None or every <= set(writers)
        for name, parts in [*mine.items(), (OUTER_MOMENTUM, momentum)]:
            for n in range(1 if name == OUTER_MOMENTUM else group.num_nodes):
                if all_write:
                    found[_name(name, n)] = parts if n == node else []
                else:
                    whole = _whole(variable, arena, parts, n)
                    found[_name(name, n)] = [(0, whole)] if group.topology.rank == 0 else []
    return found


def _whole(variable: Variable, arena: Arena, parts: Parts, node: int) -> np.ndarray:
    """Return a slot of a node, whole, on every rank. Collective, inside one."""
    group, first, end = arena.group, variable.offset, variable.offset + variable.size
    whole = np.zeros(variable.size, accumulation_dtype(arena.dtype))
    if node == group.node_index:
        for low, part in parts:
            whole[low : low + part.size] = to_host(part)
    for root, (low, high) in zip(group.ranks_of(node), arena.bounds(), strict=False):
        low, high = max(low, first), min(high, end)
        if low < high:
            group.broadcast(whole[low - first : high - first], root)
    return whole


def waiting_of_nodes(group: ProcessGroup, name: str, slots: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the pending slots of all nodes, on every rank. Collective."""
    found: dict[str, np.ndarray] = {}
    with group.collective("optimizer.slots", name, detail=tuple(slots)):
        for slot, value in slots.items():
            for node in range(1 if slot == OUTER_MOMENTUM else group.num_nodes):
                copy = found[_name(slot, node)] = np.array(to_host(value))
                group.broadcast(copy, group.ranks_of(node)[0])
    return found
