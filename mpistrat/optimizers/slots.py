"""The slots of an optimizer: for each arena and slot, one flat array of the elements that this rank updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from ..arena.arena import Arena
from ..arena.layout import Part, Receiver
from ..arena.pieces import BESIDE_WEIGHTS, PieceShare
from ..arena.reduction import block_of
from ..arena.values import move_like
from ..base.errors import explain
from ..base.files import PAGE
from ..base.partition import aligned_block
from ..comm.arrays import accumulation_dtype, array_module, as_array, on_device_of, to_host
from ..variables.placement import Placement, SlotsHere
from ..variables.variable import Variable
from .hyperparameters import AVERAGE
from .rule import UpdateRule

__all__ = [
    "ArenaSlots",
    "SlotStore",
    "gathered",
    "own_slots",
    "owners",
    "receiver_beside",
    "waiting_slots",
    "whole_slots",
]

_Stored = Callable[[int, int], Mapping[str, Any]]


def owners(arena: Arena) -> list[int]:
    """Return ranks that own all elements, each once: those of rank 0's memory domain, or of all domains with pieces.

    Rank 0's come first, one for each slice. Call it on all ranks.
    """
    group, slices = arena.group, len(arena.bounds())
    shared = group.environment.shared_memory and group.topology.size > 1
    found = []
    for domain in range(group.num_nodes if arena.sharded else 1):
        found += (list(group.topology.ranks_of_node(domain)) if shared else [domain])[:slices]
    return found


@final
class ArenaSlots:
    """The slots of this rank's elements of an arena, and scratch memory, which all steps on the arena share.

    Attributes:
        low, high: the elements: its slice, or its node's piece of it.
        arrays: a flat array for each slot, in the dtype in which the arena's gradients are summed.
        form: of the sums of its gradients between nodes.
    """

    def __init__(self, arena: Arena, names: Iterable[str], start: Mapping[str, float]) -> None:
        self.low, self.high = (arena.owned([(0, arena.size)]) or [(0, 0)])[0]
        self._arena, self._start = arena, start
        dtype = accumulation_dtype(arena.dtype)
        xp, size = array_module(arena.values), self.high - self.low
        self._kept: Any = None
        self.form = arena.form.of_steps()
        with on_device_of(arena.values):
            self.arrays = {name: xp.zeros(size, dtype) for name in names}
        self.restart(self.low, self.high)

    @functools.cached_property
    def scratch(self) -> list[Any]:
        """Four flat arrays of one block, in the dtype of the slots."""
        values = self._arena.values
        with on_device_of(values):
            dtype, size = accumulation_dtype(self._arena.dtype), min(block_of(values), self._arena.size)
            return [array_module(values).empty(size, dtype) for _ in range(4)]

    def restart(self, low: int, high: int) -> None:
        """Reset the slots of elements [low, high), which this rank must own, to their start values."""
        with on_device_of(self._arena.values):
            for name, array in self.of_range(low, high).items():
                array[...] = self._arena.values[low:high] if name == AVERAGE else self._start.get(name, 0.0)

    def kept(self) -> Any:
        """Return a flat array of the same elements, for sums between two passes."""
        if self._kept is None:
            block = self.scratch[0]
            with on_device_of(block):
                self._kept = array_module(block).empty(self.high - self.low, block.dtype)
        return self._kept

    def of_range(self, low: int, high: int) -> dict[str, Any]:
        """Return the slots of elements [low, high) of the arena, which this rank must own."""
        base = self.low
        return {name: array[low - base : high - base] for name, array in self.arrays.items()}

    def stored(self, low: int, high: int) -> dict[str, Any]:
        """Return the values for files of elements [low, high), which this rank must own."""
        return self.of_range(low, high) | self._arena.form.stored(low, high)


@final
class SlotStore:
    """All slots of one optimizer.

    Attributes:
        pending: slots of variables that the optimizer has not updated yet, by name of variable.
        rounds: the rounds of nodes, from `join` on.
    """

    def __init__(self, owner: UpdateRule) -> None:
        self.names, self._owner = owner.slot_names, owner
        self.pending: dict[str, dict[str, Any]] = {}
        self.rounds: Any = None
        self._arenas: dict[Arena, ArenaSlots] = {}

    def join(self, placement: Placement) -> None:
        """Serve the variables of a placement."""
        self.rounds = placement.steps.new_rounds()

    @property
    def alike(self) -> bool:
        """True if all nodes have equal slots."""
        return self.rounds is None or bool(self.rounds.alike)

    def end_round(self) -> None:
        """End a round of nodes, so that all have equal weights. Collective."""
        if self.rounds is not None:
            self.rounds.end()

    def reset(self) -> None:
        """Drop pending slots, and reset what belongs to no variable. Call it on every rank."""
        self.forget_gradients()
        self.pending.clear()
        if self.rounds is not None:
            self.rounds.reset()

    def of(self, arena: Arena) -> ArenaSlots:
        """Return the slots of an arena; the first call fixes its slices. Call it on all ranks."""
        slots = self._arenas.get(arena)
        if slots is None:
            slots = self._arenas[arena] = ArenaSlots(arena, self.names, self._owner._slot_start())
        return slots

    def in_files(self, variable: Variable) -> bool:
        """Return True if a variable has slots in files. Call it on all ranks."""
        return bool(self.stored_of(variable) or (self.rounds is not None and self.rounds.slot_names))

    def stored_of(self, variable: Variable) -> tuple[str, ...]:
        """Return the slot names of a variable in files. Call it on all ranks."""
        return self.names if variable.arena is None else (*self.names, *variable.arena.form.names)

    def forget_gradients(self) -> None:
        """Drop what is stored of sums of gradients that were refused, or belong to replaced weights."""
        for slots in self._arenas.values():
            slots.form.forget()

    def restart(self, variables: Iterable[Variable]) -> None:
        """Reset the slots of variables to their start values."""
        for variable in variables:
            arena, low = variable.arena, variable.offset
            if arena is not None and arena in self._arenas:
                for begin, end in arena.owned([(low, low + variable.size)]):
                    self._arenas[arena].restart(begin, end)

    def read(self, variable: Variable) -> dict[str, np.ndarray]:
        """Return a variable's slots on every rank, the first node's if nodes differ; of a divided one this rank's part.
        Collective.
        """
        return _whole(variable, self.stored_of(variable), self.of(_arena_of(variable)).stored)

    def here(
        self, variable: Variable, writers: Collection[int] | None, each_node: bool = False
    ) -> dict[str, list[tuple[int, Any]]]:
        """Return this rank's part of a variable's slots: element numbers and flat arrays, each element on one rank.

        If nodes have equal slots and all ranks write (None), each node yields whole pages of the file. Otherwise the first node
        yields all, or rank 0 if some ranks there do not write. Of pieces each rank yields its own, if all their owners write.
        With `each_node` all nodes yield all. Collective.
        """
        arena = _arena_of(variable)
        kept = self.of(arena)
        found = None
        if self.rounds is not None:
            found = self.rounds.slots_here(variable, arena, self.names, kept.of_range, writers, each_node)
        if found is not None:
            return found
        return _parts(variable, self.stored_of(variable), kept.stored, writers, each_node)

    def write(self, variable: Variable, values: Mapping[str, Any]) -> None:
        """Overwrite this rank's part of a variable's slots.

        What is stored beside weights may be absent: it is then not changed. It is ignored if the arena stores nothing: error
        feedback is at most a rounding of the last change.

        Raises:
            ValueError: names or shapes do not fit.
        """
        if self.rounds is not None:
            values = self.rounds.load(variable, _arena_of(variable), values)
        beside = {name: value for name, value in values.items() if name in BESIDE_WEIGHTS}
        values = own_slots(self.names, variable, values)
        arena, low, part = _arena_of(variable), variable.offset, variable.part
        values |= {name: value for name, value in beside.items() if name in arena.form.names}
        for name in values:
            array = as_array(values[name], "Optimizer.set_slots", name)
            if part is not None and array.shape == part.whole_shape:
                array = part.cut(array)
            if array.shape != variable.shape:
                expected, got = f"{name} of shape {variable.shape}", f"shape {tuple(array.shape)}"
                raise ValueError(explain("Optimizer.set_slots", variable.name, expected=expected, got=got))
            flat = array.reshape(-1)
            for begin, end in arena.owned([(low, low + variable.size)]):
                target = self.of(arena).stored(begin, end)[name]
                target[...] = move_like(flat[begin - low : end - low], target)

    def receiver(self, variable: Variable, name: str) -> Receiver:
        """Return this rank's receiver of a slot from a file. Call it on all ranks."""
        return _receiver(_arena_of(variable), variable, name, self.of(_arena_of(variable)).stored)

    def fill_pending(self, variables: Iterable[Variable]) -> None:
        """Write the pending slots of variables."""
        for variable in variables:
            values = self.pending.pop(variable.name, None)
            if values is not None:
                variable.placement.optimizers.write_slots(self._owner, variable, values)


def own_slots(names: Sequence[str], variable: Variable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the slots of these names, without what is stored beside weights.

    Raises:
        ValueError: the values have other names.
    """
    values = {name: value for name, value in values.items() if name not in BESIDE_WEIGHTS}
    if set(values) != set(names):
        expected, got = f"slots {', '.join(names) or '(none)'}", ", ".join(values) or "none"
        raise ValueError(explain("Optimizer.set_slots", variable.name, expected=expected, got=got))
    return values


def whole_slots(part: Part | None, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return whole slots, from each rank's part or the whole. Collective over the replica, if its ranks divide a variable."""
    if part is None:
        return dict(slots)
    return {
        name: array if array.shape == part.whole_shape else part.whole(to_host(array)) for name, array in slots.items()
    }


def receiver_beside(variable: Variable, name: str) -> Receiver:
    """Return this rank's receiver of what a file has stored beside a variable's weights. Call it on all ranks.

    It belongs to the weights and cannot wait for an optimizer's first step: the weights might be assigned before.
    """
    arena = variable.arena
    if arena is None or name not in arena.form.names:
        return Receiver([], lambda *_: None)
    return _receiver(arena, variable, name, arena.form.stored)


def _receiver(arena: Arena, variable: Variable, name: str, stored: _Stored) -> Receiver:
    offset = variable.offset

    def take(start: int, part: np.ndarray) -> None:
        target = stored(offset + start, offset + start + part.size)[name]
        target[...] = move_like(part, target)

    owned = arena.owned([(offset, offset + variable.size)])
    return Receiver([(begin - offset, end - offset) for begin, end in owned], take)


def waiting_slots(
    placement: Placement | None,
    name: str,
    slots: Mapping[str, Any],
    writers: Collection[int] | None,
    all_else: bool,
    each_node: bool,
) -> Iterator[SlotsHere]:
    """Yield this rank's part of a variable's pending slots, which all ranks of a node have whole.

    What is stored beside its weights is not pending, but files have it among the slots. Collective. See `Optimizer.slots_here`.
    """
    variable = None if placement is None else next((v for v in placement.variables if v.name == name), None)
    if placement is not None and placement.local_steps is not None and not each_node:
        from .node_slots import waiting_of_nodes

        slots = waiting_of_nodes(placement.group, name, slots)
    arrays = {slot: np.asarray(to_host(value)) for slot, value in slots.items()}
    here: dict[str, list[tuple[int, Any]]] = {slot: [(0, array)] if all_else else [] for slot, array in arrays.items()}
    shape, dtype = next(((array.shape, array.dtype) for array in arrays.values()), ((), np.dtype(np.float32)))
    form = None if variable is None or variable.arena is None else variable.arena.form
    beside = tuple(each for each in form.names if each not in here) if form is not None else ()
    if variable is not None and form is not None and beside:
        shape, dtype = variable.shape, accumulation_dtype(variable.dtype)
        here |= _parts(variable, beside, form.stored, writers, each_node)
    if here:
        yield name, shape, dtype, here


# parts of a variable's slots; `stored` returns this rank's slots of a range that it owns


def _sliced(
    arena: Arena, low: int, high: int, names: Iterable[str], stored: _Stored
) -> dict[str, list[tuple[int, Any]]]:
    """Return the slots of elements [low, high) in this rank's slice. Collective if it has pieces, inside one."""
    ranges, pieces, inter = arena.sliced([(low, high)]), arena.pieces([(low, high)]), arena.group.inter
    if pieces is None or inter is None:
        parts = [(begin, stored(begin, end)) for begin, end in ranges]
        return {name: [(begin, found[name]) for begin, found in parts] for name in names}
    result: dict[str, list[tuple[int, Any]]] = {name: [] for name in names}
    for first, end in ranges:
        for name in result:
            whole = np.empty(end - first, accumulation_dtype(arena.dtype))
            for begin, after in pieces[inter.rank]:
                whole[begin - first : after - first] = stored(begin, after)[name]
            share = PieceShare(inter, whole, pieces, first)
            share.ready(end)
            share.finish()
            result[name].append((first, whole))
    return result


def _whole(variable: Variable, names: Sequence[str], stored: _Stored) -> dict[str, np.ndarray]:
    """Return whole slots, on every rank; the first node's if nodes differ. Collective."""
    arena, low, high = _arena_of(variable), variable.offset, variable.offset + variable.size
    with arena.group.collective("optimizer.slots", variable.name, arena.dtype, variable.shape, names):
        return {name: gathered(arena, low, high, name, stored).reshape(variable.shape) for name in names}


def gathered(arena: Arena, low: int, high: int, name: str, stored: _Stored) -> np.ndarray:
    """Return the owners' values of elements [low, high) under a name, on every rank. Collective, inside one.

    The first node's values if nodes differ.
    """
    whole = np.zeros(high - low, accumulation_dtype(arena.dtype))
    for begin, part in _sliced(arena, low, high, (name,), stored)[name]:
        whole[begin - low : begin - low + part.size] = to_host(part)
    for root, (begin, end) in zip(owners(arena), arena.bounds(), strict=False):
        begin, end = max(begin, low), min(end, high)
        if begin < end:
            arena.group.broadcast(whole[begin - low : end - low], root)
    return whole


def _parts(
    variable: Variable, names: Sequence[str], stored: _Stored, writers: Collection[int] | None, each_node: bool
) -> dict[str, list[tuple[int, Any]]]:
    """Return this rank's part of slots. Collective. See `SlotStore.here`."""
    arena, first = _arena_of(variable), variable.offset
    group, size, low, high = arena.group, variable.size, 0, 0
    every, own = owners(arena), arena.sharded and not each_node
    if writers is not None and not set(every) <= set(writers):
        if not set(every[: len(arena.bounds())]) <= set(writers):
            whole, mine = _whole(variable, names, stored), group.topology.rank == 0
            return {name: [(0, array)] if mine else [] for name, array in whole.items()}
        own = False
    if arena.sharded and not own:
        detail = (names, each_node)
        with group.collective("optimizer.slots", variable.name, arena.dtype, variable.shape, detail):
            found = _sliced(arena, first, first + size, names, stored)
        mine = each_node or group.topology.rank in every[: len(arena.bounds())]
        return {name: [(begin - first, part) for begin, part in found[name]] if mine else [] for name in names}
    if own:
        high = size
    elif writers is not None:
        high = size if group.topology.rank in every else 0
    elif group.node.rank < len(arena.bounds()) and each_node:
        high = size
    elif group.node.rank < len(arena.bounds()):
        domain = group.topology.node_index if group.environment.shared_memory else group.topology.rank
        low, high = aligned_block(size, group.num_nodes, domain, PAGE // accumulation_dtype(arena.dtype).itemsize)
    owned = arena.owned([(first + low, first + high)]) if low < high else []
    parts = [(begin, stored(begin, end)) for begin, end in owned]
    return {name: [(begin - first, slots[name]) for begin, slots in parts] for name in names}


def _arena_of(variable: Variable) -> Arena:
    if variable.arena is None:
        expected, got = "a variable that can be trained", "an ON_READ variable"
        raise ValueError(explain("Optimizer.slots", variable.name, expected=expected, got=got))
    return variable.arena
