"""What one training step does on one arena: which elements it updates, with what, and what it keeps between two passes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from .._util.buffers import BufferPool
from .._util.partition import blocks, merge
from ..cross_device.arena import BLOCK, Consume
from ..cross_device.encoded import EncodedShare
from ..cross_device.pieces import PieceShare
from ..cross_device.wire import Unsent
from ..variables.arena import ALIGNMENT_BYTES, Arena
from ..variables.values import move_like, quick_digest
from ..variables.variable import Variable
from .hyperparameters import GRADIENT_SUM
from .rule import BlockUpdate, Rule
from .slots import SlotStore

__all__ = ["ArenaStep", "not_finite_of"]

T = TypeVar("T")
N = TypeVar("N", int, float)


@final
class ArenaStep:
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
        self._share: PieceShare | EncodedShare | None = None  # of the weights, while a step goes on
        self._messages = BufferPool(kept=16)
        self._rule = BlockUpdate(optimizer, arena.dtype, self._slots.scratch)

    @property
    def gradients(self) -> Any:
        return self.arena.gradients  # never kept: memory with references cannot be freed

    @property
    def unsent(self) -> Unsent | None:
        """What was not sent of the gradients, where that is to follow."""
        return self._slots.unsent

    def forget_unsent(self) -> None:
        """Forget what was not sent of the gradients: they are refused."""
        self._slots.forget_unsent()

    def digest(self) -> int:
        """Return a digest of this rank's slice of the weights, by one pass over it."""
        total = 0
        for low, high in blocks(self.arena.sliced(self.ranges), BLOCK):
            total = (total * 3 + quick_digest(self.arena.values[low:high])) & ((1 << 63) - 1)
        return total

    def begin(self, step: int, rate: float, number: int, two_passes: bool) -> None:
        """Set what is the same for all blocks of update `step`, in the `number`-th call; keep sums first with `two_passes`."""
        optimizer = self._optimizer
        self._mean = optimizer.gradient_accumulation_steps or 0  # of so many calls, 0 for no mean
        self._number, self._updates = number, optimizer.updates_at(number)
        self._rule.begin(step, rate)
        if two_passes:
            self._each, self._apart = optimizer.clipnorm is not None, optimizer.check_numerics
            names = [name for _, _, name in self._spans]
            self.squares = dict.fromkeys(names if self._each else names[:1], 0.0)

    def begin_share(self) -> None:
        """Begin to exchange what this step makes of the weights, where each node updates a piece. Collective over peers."""
        pieces, inter = self.arena.pieces(self.ranges), self.arena.group.inter
        if pieces is not None and inter is not None and self._optimizer.changes_weights(self._number):
            wire, residual = self.arena.wire, self._slots.residual
            if wire is None or residual is None:
                self._share = PieceShare(inter, self.arena.values, pieces)
            else:
                work = self._slots.scratch[0]
                self._share = EncodedShare(inter, self.arena.values, pieces, residual, wire, work, self._messages)

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
        target = self._meant(low, high)
        slots, decays = self._slots.of_range(low, high), self._decays_of(low, high) if self._decays else ()
        self._rule.update(target, move_like(gradient, target), slots, decays, group)
        self._set_meant(low, high, target)
        if self._mean:
            slots[GRADIENT_SUM][...] = 0

    def _accumulate(self, low: int, high: int, gradient: Any) -> None:
        slots = self._slots.of_range(low, high)
        np.add(slots[GRADIENT_SUM], move_like(gradient, slots[GRADIENT_SUM]), out=slots[GRADIENT_SUM])
        target = self._meant(low, high)
        self._rule.average(target, slots)
        self._set_meant(low, high, target)
        self._publish(low, high)

    def _meant(self, low: int, high: int) -> Any:
        """Return weights for the rule: themselves, or a copy with what was not sent of them."""
        target, residual = self.arena.values[low:high], self._slots.residual
        if residual is None:
            return target
        meant = self._slots.scratch[2][: high - low]  # free, as these weights are not 16-bit
        np.add(target, residual.of(low, high), out=meant)
        return meant

    def _set_meant(self, low: int, high: int, meant: Any) -> None:
        """Note what the rule made of weights: what is to be sent of them, if they do not have it already."""
        if self._slots.residual is not None:
            with np.errstate(invalid="ignore"):
                np.subtract(meant, self.arena.values[low:high], out=self._slots.residual.of(low, high))

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
            v.name: not_finite_of(
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


def not_finite_of(*arrays: Any) -> int:
    """Return how many numbers of some arrays are not finite."""
    return sum(int(array.size) - int(np.count_nonzero(np.isfinite(array))) for array in arrays)


def _inside(spans: Sequence[tuple[int, Any, T]], low: int, high: int) -> Iterator[tuple[int, int, T]]:
    """Yield what of sorted spans lies in the elements [low, high), counted from `low`."""
    first = max(0, bisect_right(spans, low, key=lambda span: span[0]) - 1)
    for begin, end, what in spans[first:]:
        if begin >= high:
            break
        if end > low:
            yield max(begin - low, 0), min(int(end), high) - low, what


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
