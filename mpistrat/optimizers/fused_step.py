"""One training step on arenas: sum the replicas' gradients and update the weights block by block, while both are in cache.

The ranks of a node arrive; each sums its slice of the gradients, all-reduces it with its peers on other nodes, and updates
its slice of the weights; the ranks leave together.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..comm.arrays import to_host
from ..comm.contract import by_rank
from ..cross_device.cross_device_ops import BLOCK
from ..errors import CollectiveMismatchError, explain
from ..partition import blocks, merge
from ..variables.arena import ALIGNMENT_BYTES, Arena
from ..variables.memory import move_like
from ..variables.values import checksum, quick_digest
from .block_update import BlockUpdate
from .gradients import Pairs, place_gradients
from .slots import SlotStore, owners
from .step import Step

if TYPE_CHECKING:
    from ..variables.variable import Variable
    from .optimizer import Optimizer

__all__ = ["FusedStep"]

Consume = Callable[[int, int, Any], None]


@final
class FusedStep(Step):
    """The step of one optimizer on one set of variables whose arenas all ranks of a node share."""

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Any,
        variables: Sequence[Variable],
        left_out: Sequence[str],
        slots: SlotStore,
    ) -> None:
        """Plan the step. Not collective, if done by all.

        Args:
            optimizer: whose rule it is.
            strategy: whose variables they are; opaque.
            variables: of one strategy, in the same order on every rank.
            left_out: names of variables that have no gradient.
            slots: the optimizer's.
        """
        self.strategy = strategy
        self._optimizer = optimizer
        self._variables, self._left_out = tuple(variables), tuple(left_out)
        self._constrained = [variable for variable in variables if variable.constraint is not None]
        placement = variables[0].placement
        self._group, self._ops = placement.group, placement.ops
        members: dict[Arena, list[Variable]] = {}
        for variable in variables:
            if variable.arena is not None and variable.size:
                members.setdefault(variable.arena, []).append(variable)
        self._parts = [_Part(optimizer, arena, some, slots) for arena, some in members.items()]
        self._taken = 0
        self.describe()

    def describe(self) -> None:
        """Say again what the ranks compare, after the optimizer's numbers have changed. Not collective."""
        names = ", ".join(variable.name for variable in self._variables)
        absent = f", not {', '.join(self._left_out)}" if self._left_out else ""
        decays = [self._optimizer.decay_of(variable) for variable in self._variables]
        decaying = f", decays {decays}" if any(decays) else ""
        number = self._optimizer.number_in(self._variables[0].placement)
        which = "" if number is None else f", the scope's optimizer {number}"
        self._detail = f"of {names}{absent} by {self._optimizer.describe()}{decaying}{which}"

    def place(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Lay the gradients that the local replicas handed over into the arenas. Not collective."""
        place_gradients(replicas, key)

    def run(self, aggregate: bool) -> None:
        """Take the step. Collective; in cross-replica context.

        Args:
            aggregate: whether gradients are summed over the replicas; else they are equal on all already.
        """
        optimizer, group, ops = self._optimizer, self._group, self._ops
        step, rate = optimizer.iterations + 1, optimizer.learning_rate
        detail = self._detail if aggregate else self._detail + ", without aggregation"
        words = f", step {step} at rate {rate!r}"
        due = self._taken % group.environment.check_every == 0
        self._taken += 1
        if due and not aggregate:
            words += f", gradients #{self._checksum_of_gradients():08x}"
        with group.collective("apply_gradients", detail=detail).stamp(words) as call:
            ops.call = call
            if due and group.num_nodes > 1:
                self._compare_nodes()
            for part in self._parts:
                part.begin(step, rate)
            if optimizer.global_clipnorm is None:
                for part in self._parts:
                    self._sum(part, aggregate, part.update)
            else:
                for part in self._parts:
                    self._sum(part, aggregate, part.keep)
                scale = self._scale(optimizer.global_clipnorm)
                for part in self._parts:
                    part.update_kept(scale)
            group.node.barrier(call)
        for variable in self._constrained:
            variable.apply_constraint(compare=due)

    def _checksum_of_gradients(self) -> int:
        """A checksum of gradients that are said to be equal on all replicas: those of the first local one."""
        return checksum(*(variable.gradient(0).reshape(-1) for variable in self._variables if variable.size))

    def _compare_nodes(self) -> None:
        """Check that all nodes hold the same weights. Collective, inside one; all ranks have arrived.

        Raises:
            CollectiveMismatchError: they do not; on every rank, with what each has of the variables that differ.
        """
        group = self._group
        mine = [part.digest() for part in self._parts]
        table = group.all_gather_int([-1 if group.slice_index is None else group.slice_index, *mine]).tolist()
        owned: dict[int, set[tuple[int, ...]]] = {}
        for index, *digests in table:
            owned.setdefault(index, set()).add(tuple(digests))
        if all(len(different) == 1 for index, different in owned.items() if index >= 0):
            return
        own = {variable.name: _shown(variable) for variable in self._variables}
        told = [json.loads(text) for text in group.all_gather_text(json.dumps(own))]
        texts = {
            rank: ", ".join(f"{name} {value}" for name, value in said.items() if {t[name] for t in told} != {value})
            for rank, said in enumerate(told)
        }
        remedy = (
            "Something that no description shows has changed the weights on some nodes only: a hyperparameter, a constraint, "
            "a gradient that was not summed, or the memory of a node. Restore the last checkpoint"
        )
        expected, got = "the same weights on all nodes", by_rank(texts)
        raise CollectiveMismatchError(explain("apply_gradients", "", expected=expected, got=got, remedy=remedy))

    def _sum(self, part: _Part, aggregate: bool, consume: Consume) -> None:
        if aggregate:
            self._ops.reduce_arena(part.gradients, part.ranges, consume)
        else:
            part.take_local(consume)

    def _scale(self, limit: float) -> float:
        """Return by what all gradients are multiplied, the same bits on every rank; NaN if any is not finite."""
        squares = np.array([part.square for part in self._parts])
        table = self._group.all_gather_int(squares.view(np.int64).tolist()).view(np.float64)
        total = sum(float(table[rank, index]) for index, part in enumerate(self._parts) for rank in owners(part.arena))
        if not math.isfinite(total):
            return math.nan
        return limit * min(1 / math.sqrt(total), 1 / limit) if total else 1.0


@final
class _Part:
    """One arena's part in a step."""

    def __init__(self, optimizer: Optimizer, arena: Arena, variables: Sequence[Variable], slots: SlotStore) -> None:
        self.arena = arena
        self.square = 0.0
        # Variables are padded with zeros, which every rule leaves as they are: what lies side by side is one range.
        unit = max(1, ALIGNMENT_BYTES // arena.dtype.itemsize)
        padded = {v.offset: min(-(-(v.offset + v.size) // unit) * unit, arena.size) for v in variables}
        self.ranges = merge(list(padded.items()))
        self._decays = _decays((v.offset, padded[v.offset], optimizer.decay_of(v)) for v in variables)
        self._slots = slots.of(arena)
        self._rule = BlockUpdate(optimizer, arena.dtype, self._slots.scratch)

    @property
    def gradients(self) -> Any:
        return self.arena.gradients  # never held: memory that somebody holds cannot be freed

    def digest(self) -> int:
        """Return a number that tells this rank's slice of the weights from others, by one pass over it. Not collective."""
        total = 0
        for low, high in blocks(self.arena.owned(self.ranges), BLOCK):
            total = (total * 3 + quick_digest(self.arena.values[low:high])) & ((1 << 63) - 1)
        return total

    def begin(self, step: int, rate: float) -> None:
        """Set what is the same for all blocks of a step. Not collective."""
        self.square = 0.0
        self._rule.begin(step, rate)

    def update(self, low: int, high: int, gradient: Any) -> None:
        """Update elements [low, high) by their gradient, which is overwritten. Not collective."""
        target = self.arena.values[low:high]
        slots, decays = self._slots.part(low, high), self._decays_of(low, high) if self._decays else ()
        self._rule.update(target, move_like(gradient, target), slots, decays)
        for copy in self.arena.copies[1:]:
            copy[low:high] = move_like(target, copy)

    def keep(self, low: int, high: int, gradient: Any) -> None:
        """Put a sum aside, and add the squares of its elements up. Not collective.

        It is kept in the owner's own gradient memory, which nobody else reads there.
        """
        kept, base = self._store()
        kept[low - base : high - base] = move_like(gradient, kept)
        self.square += float(gradient.dot(gradient))

    def update_kept(self, scale: float) -> None:
        """Update by what was kept, times `scale`. Not collective."""
        kept, base = self._store()
        for low, high in blocks(self.arena.owned(self.ranges), BLOCK):
            gradient = kept[low - base : high - base]
            if scale != 1:
                np.multiply(gradient, scale, out=gradient)
            self.update(low, high, gradient)

    def take_local(self, consume: Consume) -> None:
        """Hand out this rank's slice of the first local replica's gradients, as a reduction would. Not collective."""
        source, block = self.gradients.local[0], self._rule.block
        for low, high in blocks(self.arena.owned(self.ranges), BLOCK):
            block[: high - low] = source[low:high]
            consume(low, high, block[: high - low])

    def _store(self) -> tuple[Any, int]:
        """Return where sums are kept, and which element of the arena comes first there."""
        if not self._rule.narrow:
            return self.gradients.local[0], 0
        return self._slots.kept(), self._slots.low

    def _decays_of(self, low: int, high: int) -> Iterator[tuple[int, int, float]]:
        """Yield what decays of the elements [low, high), counted from `low`."""
        first = max(0, bisect_right(self._decays, (low, math.inf, 0.0)) - 1)
        for begin, end, decay in self._decays[first:]:
            if begin >= high:
                break
            if end > low:
                yield max(begin - low, 0), min(int(end), high) - low, decay


def _shown(variable: Variable) -> str:
    """Return by what a variable's value is told from others, in words. Not collective."""
    value = to_host(variable.array)
    odd = value.size - int(np.count_nonzero(np.isfinite(value)))
    return f"#{checksum(value.reshape(-1)):08x}" + f" with {odd} that are not finite" * bool(odd)


def _decays(segments: Iterable[tuple[int, int, float]]) -> list[tuple[int, float, float]]:
    """Return the element ranges whose weights decay, in order, neighbours of equal decay made one."""
    merged: list[tuple[int, float, float]] = []
    for low, high, decay in sorted(segments):
        if not decay:
            continue
        if merged and merged[-1][1] == low and merged[-1][2] == decay:
            merged[-1] = merged[-1][0], high, decay
        else:
            merged.append((low, high, decay))
    return merged
