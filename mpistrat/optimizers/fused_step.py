"""One training step on arenas: sum the replicas' gradients and update the weights block by block, while both are in cache.

The ranks of a node arrive; each sums its slice of the gradients, all-reduces it with its peers on other nodes, and updates
its slice of the weights; the ranks leave together. Or, where the arena is sharded, peers sum and update a piece of the slice
each, and exchange the new weights.
"""

from __future__ import annotations

import contextlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from .._util.partition import blocks, merge
from ..cluster.world import is_loss
from ..comm.arrays import all_reduce, to_host
from ..cross_device.arena import BLOCK, Consume
from ..cross_device.pieces import PieceShare
from ..errors import ClosedError, CollectiveMismatchError, by_rank, explain
from ..variables.arena import ALIGNMENT_BYTES, Arena
from ..variables.values import checksum, move_like, quick_digest
from ..variables.variable import Variable
from .gradients import Pairs, load_gradients
from .hyperparameters import GRADIENT_SUM
from .rule import BlockUpdate, Rule, UpdateRun
from .slots import SlotStore, owners

__all__ = ["FusedStep"]

T = TypeVar("T")
N = TypeVar("N", int, float)


@final
class FusedStep(UpdateRun):
    """The step of one optimizer on one set of variables whose arenas all ranks of a node share."""

    def __init__(
        self,
        optimizer: Rule,
        strategy: Any,
        variables: Sequence[Variable],
        left_out: Sequence[str],
        slots: SlotStore,
        number: int | None,
    ) -> None:
        """Plan the step, of variables in the same order on every rank. All ranks make it.

        `left_out` are names of variables without a gradient, `number` is the optimizer's in the strategy's scope, if made there.
        """
        self.strategy = strategy
        self._optimizer, self._number = optimizer, number
        self._variables, self._left_out = tuple(variables), tuple(left_out)
        self._constrained = [variable for variable in variables if variable.constraint is not None]
        placement = variables[0].placement
        self._group, self._ops = placement.group, placement.ops
        members: dict[Arena, list[Variable]] = {}
        for variable in variables:
            if variable.arena is not None and variable.size:
                members.setdefault(variable.arena, []).append(variable)
        self._arena_steps = [_ArenaStep(optimizer, arena, some, slots) for arena, some in members.items()]
        self._taken = 0
        self.describe()

    def describe(self) -> None:
        """Describe anew what the ranks compare, after the optimizer's numbers have changed."""
        names = ", ".join(variable.name for variable in self._variables)
        absent = f", not {', '.join(self._left_out)}" if self._left_out else ""
        decays = [self._optimizer.decay_of(variable) for variable in self._variables]
        decaying = f", decays {decays}" if any(decays) else ""
        optimizer = self._optimizer
        clips = optimizer.clipnorm is not None or optimizer.global_clipnorm is not None
        self._two_passes = clips or optimizer.check_numerics
        self._every, self._rate_words = self._group.environment.check_every, (0.0, "0.0")
        which = "" if self._number is None else f", the scope's optimizer {self._number}"
        self._detail = f"of {names}{absent} by {self._optimizer.describe()}{decaying}{which}"

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Copy the local replicas' gradients into the arenas."""
        load_gradients(replicas, key)

    def run(self, aggregate: bool) -> None:
        """Take the step. Collective; in cross-replica context."""
        optimizer, group = self._optimizer, self._group
        number, rate = optimizer.calls + 1, optimizer.learning_rate
        detail = self._detail if aggregate else self._detail + ", without aggregation"
        if self._rate_words[0] != rate:  # a number takes longer to write than to compare
            self._rate_words = rate, repr(rate)
        words = f", step {number} at rate {self._rate_words[1]}"
        due = self._taken % self._every == 0
        self._taken += 1
        if due and not aggregate:
            words += f", gradients #{self._checksum_of_gradients():08x}"
        with group.collective("apply_gradients", detail=detail).stamp(words) as call:
            self._ops.call = call
            if due and group.num_nodes > 1:
                self._compare_nodes()
            for step in self._arena_steps:
                step.begin(optimizer.iterations + 1, rate, number, self._two_passes)
            scales: dict[str, float] = {}
            if self._two_passes:
                with np.errstate(over="ignore"), self._exchanges():  # of squares; sums are checked below
                    for step in self._arena_steps:
                        self._sum(step, aggregate, step.keep)
                scales = self._scales(number)
            with self._exchanges():
                for step in self._arena_steps:
                    step.begin_share()
                    if self._two_passes:
                        step.take_kept(scales)
                    else:
                        self._sum(step, aggregate, step.take)
                for step in self._arena_steps:
                    step.finish_share()
            group.node.barrier(call)
        for variable in self._constrained:
            variable.apply_constraint(compare=due)

    @contextlib.contextmanager
    def _exchanges(self) -> Iterator[None]:
        """Refuse the next collectives after an error in it: a later step would take messages that are under way for its own."""
        try:
            yield
        except BaseException as error:
            for step in self._arena_steps:
                step.leave_share()
            ahead = self._ops.sends_ahead and self._group.num_nodes > 1
            ahead = ahead or any(step.arena.sharded for step in self._arena_steps)
            if ahead and self._group.monitor.refusal is None and not is_loss(error):  # that is told again by itself
                why = f"an error in a step left messages between nodes under way: {type(error).__name__}: {error}"
                self._group.monitor.refusal = ClosedError(f"the strategy is of no more use, {why}")
            raise

    def _checksum_of_gradients(self) -> int:
        """A checksum of gradients that should be equal on all replicas: those of the first local one."""
        return checksum(*(variable.gradient(0).reshape(-1) for variable in self._variables if variable.size))

    def _compare_nodes(self) -> None:
        """Check that all nodes hold the same weights. Collective, inside one; all ranks have arrived.

        Raises:
            CollectiveMismatchError: they do not; on every rank, with what each has of the variables that differ.
        """
        group = self._group
        if group.nodes_alike([step.digest() for step in self._arena_steps]):
            return
        own = {variable.name: _shown(variable) for variable in self._variables}
        shown = [json.loads(text) for text in group.all_gather_text(json.dumps(own))]
        texts = {
            rank: ", ".join(f"{name} {value}" for name, value in mine.items() if {t[name] for t in shown} != {value})
            for rank, mine in enumerate(shown)
        }
        remedy = (
            "Something that no description shows has changed the weights on some nodes only: a hyperparameter, a constraint, "
            "a gradient that was not summed, or the memory of a node. Restore the last checkpoint"
        )
        expected, got = "the same weights on all nodes", by_rank(texts)
        raise CollectiveMismatchError(explain("apply_gradients", "", expected=expected, got=got, remedy=remedy))

    def _sum(self, step: _ArenaStep, aggregate: bool, consume: Consume) -> None:
        if aggregate:
            self._ops.reduce_arena(step.gradients, step.ranges, consume)
        else:
            step.take_local(consume)

    def _scales(self, number: int) -> dict[str, float]:
        """Return the factors of the gradients of each variable, the same bits on every rank; NaN for what is not finite.

        Raises:
            FloatingPointError: on every rank, for what is not finite, with `check_numerics`.
        """
        optimizer = self._optimizer
        squares = np.array([square for step in self._arena_steps for square in step.squares.values()])
        in_pieces = np.array([step.arena.sharded for step in self._arena_steps for _ in step.squares])
        if in_pieces.any() and self._group.inter is not None:
            squares[in_pieces] = _over_nodes(self._group.inter, squares[in_pieces])
        sums: dict[str, float] = {}
        column = iter(self._group.of_first_node(squares).T.tolist())
        for step in self._arena_steps:
            count = len(step.arena.bounds())
            sums.update((name, sum(each[:count])) for name, each in zip(step.squares, column, strict=False))
        if optimizer.check_numerics and not all(map(math.isfinite, sums.values())):
            self._refuse_numbers(number)
        if optimizer.clipnorm is not None:
            return {name: _scale(total, optimizer.clipnorm) for name, total in sums.items()}
        limit = optimizer.global_clipnorm
        scale = 1.0 if limit is None else _scale(sum(sums.values()), limit)
        return dict.fromkeys(sums, scale)

    def _refuse_numbers(self, number: int) -> None:
        """Raise with the ranks whose gradients are not finite, if any: squares may be infinite where no gradient is. Collective.

        Raises:
            FloatingPointError: on every rank.
        """
        own = {
            variable.name: _not_finite(*(variable.gradient(i).reshape(-1) for i in range(len(step.gradients.local))))
            for step in self._arena_steps
            for variable in step.variables
        }
        summed = {name: count for step in self._arena_steps for name, count in step.not_finite().items()}
        counted = [json.loads(text) for text in self._group.all_gather_text(json.dumps([own, summed]))]
        for variable in self._variables:
            counts = {rank: mine[variable.name] for rank, (mine, _) in enumerate(counted) if mine.get(variable.name)}
            ranks = [] if variable.arena is None else owners(variable.arena)
            overflown = sum(counted[rank][1].get(variable.name, 0) for rank in ranks)
            if not counts and not overflown:
                continue
            got = by_rank({rank: f"{count} that are not" for rank, count in counts.items()})
            got = got or f"{overflown} that are not in the sum over all replicas, of finite ones on each"
            remedy = "Look at the loss and the learning rate; no variable was changed by this step"
            expected, got = "finite numbers", f"{got}, of {variable.size}, in step {number}"
            raise FloatingPointError(
                explain("apply_gradients", variable.name, expected=expected, got=got, remedy=remedy)
            )


def _over_nodes(inter: Any, numbers: np.ndarray) -> np.ndarray:
    """Return the sums of float64 numbers over the peers of other nodes. Collective over `inter`."""
    total = np.array(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        all_reduce(inter, total)
    return total


def _scale(total: float, limit: float) -> float:
    if not math.isfinite(total):
        return math.nan
    return limit * min(1 / math.sqrt(total), 1 / limit) if total else 1.0


def _not_finite(*arrays: Any) -> int:
    return sum(int(array.size) - int(np.count_nonzero(np.isfinite(array))) for array in arrays)


@final
class _ArenaStep:
    """What a step does on one arena."""

    def __init__(self, optimizer: Rule, arena: Arena, variables: Sequence[Variable], slots: SlotStore) -> None:
        self.arena, self.variables = arena, variables
        self.squares: dict[str, float] = {}
        # Variables are padded with zeros, which every rule leaves as they are: what lies side by side is one range.
        unit = max(1, ALIGNMENT_BYTES // arena.dtype.itemsize)
        padded = {v.offset: min(-(-(v.offset + v.size) // unit) * unit, arena.size) for v in variables}
        self.ranges = merge(list(padded.items()))
        self._decays = _merged((v.offset, padded[v.offset], optimizer.decay_of(v)) for v in variables)
        self._groups = _merged((v.offset, padded[v.offset], optimizer.group_of(v)) for v in variables)
        self._padding = sorted((v.offset + v.size, padded[v.offset], v.name) for v in variables)
        self._spans = sorted((v.offset, padded[v.offset], v.name) for v in variables)
        self._optimizer, self._mean, self._each, self._apart = optimizer, 0, False, False
        self._slots = slots.of(arena)
        self._share: PieceShare | None = None  # of the weights, while a step goes on
        self._rule = BlockUpdate(optimizer, arena.dtype, self._slots.scratch)

    @property
    def gradients(self) -> Any:
        return self.arena.gradients  # never kept: memory with references cannot be freed

    def digest(self) -> int:
        """Return a digest of this rank's slice of the weights, by one pass over it."""
        total = 0
        for low, high in blocks(self.arena.sliced(self.ranges), BLOCK):
            total = (total * 3 + quick_digest(self.arena.values[low:high])) & ((1 << 63) - 1)
        return total

    def begin(self, step: int, rate: float, number: int, two_passes: bool) -> None:
        """Set what is the same for all blocks of update `step`, in the `number`-th call; keep sums first with `two_passes`."""
        optimizer = self._optimizer
        several = optimizer.gradient_accumulation_steps
        self._mean = several or 0  # of so many calls, 0 for no mean
        self._updates = several is None or number % several == 0
        self._rule.begin(step, rate)
        if two_passes:
            self._each, self._apart = optimizer.clipnorm is not None, optimizer.check_numerics
            names = [name for _, _, name in self._spans]
            self.squares = dict.fromkeys(names if self._each else names[:1], 0.0)

    def begin_share(self) -> None:
        """Begin to exchange what this step makes of the weights, where each node updates a piece. Collective over peers."""
        pieces, inter = self.arena.pieces(self.ranges), self.arena.group.inter
        changes = self._updates or self._optimizer.ema_overwrite_frequency is not None
        if pieces is not None and inter is not None and changes:
            self._share = PieceShare(inter, self.arena.values, pieces)

    def finish_share(self) -> None:
        """Wait until the weights of all nodes are here."""
        if self._share is not None:
            self._share.finish()
            self._share = None  # memory with references cannot be freed

    def leave_share(self) -> None:
        """Leave what is under way after an error."""
        if self._share is not None:
            self._share.leave()
            self._share = None

    def take(self, low: int, high: int, gradient: Any) -> None:
        """Take the sum of elements [low, high), which is overwritten: update, or add to what is accumulated."""
        if self._mean:
            if not self._updates:
                self._accumulate(low, high, gradient)
                return
            self._form_mean(low, high, gradient)
        self._update(low, high, gradient)

    def _update(self, low: int, high: int, gradient: Any) -> None:
        if not self._groups:
            self._update_range(low, high, gradient, 0)
        else:  # elements between the groups' are of group 0: padding, or variables of it
            at = low
            for begin, end, group in _inside(self._groups, low, high):
                if at < low + begin:
                    self._update_range(at, low + begin, gradient[at - low : begin], 0)
                self._update_range(low + begin, low + end, gradient[begin:end], group)
                at = low + end
            if at < high:
                self._update_range(at, high, gradient[at - low :], 0)
        self._publish(low, high)

    def _update_range(self, low: int, high: int, gradient: Any, group: int) -> None:
        target = self.arena.values[low:high]
        slots, decays = self._slots.of_range(low, high), self._decays_of(low, high) if self._decays else ()
        self._rule.update(target, move_like(gradient, target), slots, decays, group)
        if self._mean:
            slots[GRADIENT_SUM][...] = 0

    def _accumulate(self, low: int, high: int, gradient: Any) -> None:
        slots = self._slots.of_range(low, high)
        np.add(slots[GRADIENT_SUM], move_like(gradient, slots[GRADIENT_SUM]), out=slots[GRADIENT_SUM])
        self._rule.average(self.arena.values[low:high], slots)
        self._publish(low, high)

    def _form_mean(self, low: int, high: int, gradient: Any) -> None:
        np.add(gradient, move_like(self._slots.of_range(low, high)[GRADIENT_SUM], gradient), out=gradient)
        np.divide(gradient, self._mean, out=gradient)

    def _publish(self, low: int, high: int) -> None:
        """Write what changed to the other local devices, or have it sent to other nodes."""
        if self._share is not None:
            self._share.ready(high)
        for copy in self.arena.copies[1:]:
            copy[low:high] = move_like(self.arena.values[low:high], copy)

    def keep(self, low: int, high: int, gradient: Any) -> None:
        """Keep a sum, or the mean of several steps, and add up the squares of its elements.

        It is kept in the owner's gradient memory, which no other rank reads there, unless gradients are still needed.
        """
        if self._mean and self._updates:
            self._form_mean(low, high, gradient)
        kept, base = self._store()
        kept[low - base : high - base] = move_like(gradient, kept)
        if not self._each:
            self.squares[self._spans[0][2]] += float(gradient.dot(gradient))
            return
        for begin, end, name in _inside(self._spans, low, high):
            part = gradient[begin:end]
            self.squares[name] += float(part.dot(part))

    def take_kept(self, scales: Mapping[str, float]) -> None:
        """Take what was kept, as `take` does, times the scale of each variable where this is an update."""
        kept, base = self._store()
        for low, high in blocks(self.arena.owned(self.ranges), BLOCK):
            gradient = kept[low - base : high - base]
            if not self._updates:
                self._accumulate(low, high, gradient)
                continue
            if not self._each:
                self._multiply(gradient, scales[self._spans[0][2]])
            else:
                for begin, end, name in _inside(self._spans, low, high):
                    self._multiply(gradient[begin:end], scales[name])
            self._update(low, high, gradient)
            for begin, end, _ in _inside(self._padding, low, high):
                gradient[begin:end] = 0  # rules overwrite gradients, and the next norm must not count what lies there

    def _multiply(self, gradient: Any, scale: float) -> None:
        if scale != 1:
            np.multiply(gradient, scale, out=gradient)

    def not_finite(self) -> dict[str, int]:
        """Return how many numbers of this rank's part of each variable's sum are not finite."""
        kept, base = self._store()
        return {
            v.name: _not_finite(
                *(kept[low - base : high - base] for low, high in self.arena.owned([(v.offset, v.offset + v.size)]))
            )
            for v in self.variables
        }

    def take_local(self, consume: Consume) -> None:
        """Hand out this rank's slice of the first local replica's gradients, as a reduction would."""
        source, block = self.gradients.local[0], self._rule.block
        for low, high in blocks(self.arena.owned(self.ranges), BLOCK):
            block[: high - low] = source[low:high]
            consume(low, high, block[: high - low])

    def _store(self) -> tuple[Any, int]:
        """Return where sums are kept, and which element of the arena comes first there."""
        if not self._rule.narrow and not self._apart:
            return self.gradients.local[0], 0
        return self._slots.kept(), self._slots.low

    def _decays_of(self, low: int, high: int) -> Iterator[tuple[int, int, float]]:
        return _inside(self._decays, low, high)


def _inside(spans: Sequence[tuple[int, Any, T]], low: int, high: int) -> Iterator[tuple[int, int, T]]:
    """Yield what of sorted spans lies in the elements [low, high), counted from `low`."""
    first = max(0, bisect_right(spans, low, key=lambda span: span[0]) - 1)
    for begin, end, what in spans[first:]:
        if begin >= high:
            break
        if end > low:
            yield max(begin - low, 0), min(int(end), high) - low, what


def _shown(variable: Variable) -> str:
    """Return a checksum of a variable's value, and how many numbers in it are not finite, in words."""
    value = to_host(variable.array)
    odd = value.size - int(np.count_nonzero(np.isfinite(value)))
    return f"#{checksum(value.reshape(-1)):08x}" + f" with {odd} that are not finite" * bool(odd)


def _merged(segments: Iterable[tuple[int, int, N]]) -> list[tuple[int, int, N]]:
    """Return the element ranges whose number is not 0, in order, neighbours of equal numbers made one."""
    merged: list[tuple[int, int, N]] = []
    for low, high, number in sorted(segments):
        if not number:
            continue
        if merged and merged[-1][1] == low and merged[-1][2] == number:
            merged[-1] = merged[-1][0], high, number
        else:
            merged.append((low, high, number))
    return merged
