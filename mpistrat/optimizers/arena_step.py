"""What one training step does on one arena: which elements it updates, with what, and what it keeps between two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from ..arena.arena import Arena, padded
from ..arena.arithmetic import combine
from ..arena.pieces import PieceShare, summed_blocks
from ..arena.reduction import BLOCK, Consume, block_of, network_chunk
from ..arena.values import move_like, quick_digest
from ..arena.wire import Unsent
from ..base import loops
from ..base.buffers import BufferPool
from ..base.partition import blocks, merge, spans_within
from ..comm.arrays import all_reduce, is_gpu, on_device_of, to_host
from ..variables.variable import Variable
from . import kernels
from .core import OptimizerCore
from .hyperparameters import GRADIENT_SUM
from .kernels import Span
from .rule import BlockUpdate, form_mean, multiply_spans
from .slots import gathered

if TYPE_CHECKING:
    from ..arena.early import EarlyMemory
    from ..arena.encoded import EncodedShare
    from .matrix_sums import MatrixSums

__all__ = ["LARGE_BLOCK", "ArenaStep", "not_finite_of"]

LARGE_BLOCK = 16 * BLOCK  # elements that a compiled loop sums and updates at a time
N = TypeVar("N", int, float)


@final
class ArenaStep:
    """What a step does on one arena.

    Attributes:
        squares: of sums that were kept, added up over what this rank updates: of each variable, or all under one's name.
        norms: squares of each variable's weights and of the direction of its update, under its name and "weights" or "direction".
        matrices: by name of a variable with matrices, sums of their rows and columns, in the slot that the rule factors.
    """

    def __init__(self, core: OptimizerCore, arena: Arena, variables: Sequence[Variable]) -> None:
        self.arena, self.variables = arena, variables
        self.squares: dict[str, float] = {}
        self.norms: dict[tuple[str, str], float] = {}
        self.matrices: dict[str, MatrixSums] = {}
        # Variables are padded with zeros, which every rule leaves as they are: what lies side by side is one range.
        ends = padded(arena, variables)
        self.ranges = merge(list(ends.items()))
        self._ends = ends
        self._spans = sorted((v.offset, ends[v.offset], v.name) for v in variables)
        self._offsets = {v.name: v.offset for v in variables}
        self._divided = any(v.part is not None and v.part.split for v in variables)
        self._core, self._optimizer, self._mean, self._each = core, core.optimizer, 0, False
        self._factor = 1.0
        self._slots, self._block = core.slots.of(arena), block_of(arena.values)
        self._on_gpu = is_gpu(arena.values)
        self._sum_of_squares = kernels.squares if self._on_gpu else loops.squares
        self._kept: tuple[Any, int] | None = None  # the sums of this step, and which element comes first there
        self._formed = False  # whether they are there before `keep` is called
        self._share: PieceShare | EncodedShare | None = None  # of the weights, while a step goes on
        self._messages = BufferPool(kept=16)
        self._rule = BlockUpdate(core.optimizer, arena.dtype, lambda: self._slots.scratch)
        self.read_settings()

    def read_settings(self) -> None:
        """Read the settings that each variable has of its own, after the optimizer's numbers have changed."""
        core, ends = self._core, self._ends
        self._decays = _merged((v.offset, ends[v.offset], core.decay_of(v)) for v in self.variables)
        self._groups = _merged((v.offset, ends[v.offset], core.group_of(v)) for v in self.variables)

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
        for low, high in blocks(self.arena.sliced(self.ranges), self._block):
            total = (total * 3 + quick_digest(self.arena.values[low:high])) & ((1 << 63) - 1)
        return total

    def begin(self, step: int, rate: float, number: int, two_passes: bool, factor: float) -> None:
        """Set what is the same for all blocks of update `step`, in the `number`-th call.

        With `two_passes` sums are kept first. All sums are multiplied by the factor.
        """
        optimizer = self._optimizer
        self._forget_sums()
        self._mean = optimizer.gradient_accumulation_steps or 0  # of so many calls, 0 for no mean
        self._number, self._updates = number, self._core.updates_at(number)
        self._factor = factor
        self._rule.begin(step, rate, 1.0 if two_passes else factor)
        if two_passes:
            self._each = optimizer.clipnorm is not None or self._divided
            names = [name for _, _, name in self._spans]
            self.squares = dict.fromkeys(names if self._each else names[:1], 0.0)

    def begin_share(self) -> None:
        """Begin to exchange what this step makes of the weights, where each node updates a piece. Collective over peers."""
        pieces, inter = self.arena.pieces(self.ranges), self.arena.group.inter
        if pieces is not None and inter is not None and self._core.changes_weights(self._number):
            wire, residual = self.arena.wire, self._slots.residual
            if wire is None or residual is None:
                self._share = PieceShare(inter, self.arena.values, pieces)
            else:
                from ..arena.encoded import EncodedShare

                work = self._slots.scratch[0]
                self._share = EncodedShare(inter, self.arena.values, pieces, residual, wire, work, self._messages)

    def finish_share(self) -> None:
        """Wait until the weights of all nodes are here."""
        self._forget_sums()
        if self._share is not None:
            self._share.finish()
            self._share = None  # memory with references cannot be freed

    def leave_share(self) -> None:
        """Leave what is under way after an error."""
        self._forget_sums()
        if self._share is not None:
            self._share.leave()
            self._share = None

    def _forget_sums(self) -> None:
        self._kept, self._formed = None, False

    def sum(self, arrays: Sequence[Any], consume: Consume) -> None:
        """Hand out what this rank updates of gradients whose sum it needs, as a reduction would: the parts instead of the sum."""
        if len(arrays) == 1 and self._kept is None and self._keeps_as_they_are():
            self._kept, self._formed = (arrays[0], 0), True
        for low, high in self._large_blocks():
            consume(low, high, [array[low:high] for array in arrays])

    def take_sums(self, memory: EarlyMemory, consume: Consume) -> None:
        """Hand out sums that are in memory, in the blocks in which a reduction hands them out; `keep` writes over them.

        Of an arena that every node sums whole they are the node's, and become those of all. Collective over peers.
        """
        low, high = self._slots.low, self._slots.high
        self._kept, self._formed = (memory[low:high] if low < high else self._slots.scratch[0][:0], low), True
        dtype, inter = self._slots.scratch[0].dtype, self.arena.group.inter
        if not self.arena.sharded:
            if inter is not None:
                for low, high in blocks(self.arena.owned(self.ranges), network_chunk(dtype)):
                    all_reduce(inter, memory[low:high])
            self.sum([memory], consume)
            return
        for low, high in summed_blocks(self.arena.owned(self.ranges), self.arena.group.num_nodes, dtype, BLOCK):
            consume(low, high, memory[low:high])

    def _large_blocks(self) -> list[tuple[int, int]]:
        """Return what this rank updates in blocks: on a GPU the whole, on CPUs large ones where scratch memory has no copies."""
        large = self.arena.size if self._on_gpu else LARGE_BLOCK
        return blocks(self.arena.owned(self.ranges), large if self._slots.residual is None else BLOCK)

    def take(self, low: int, high: int, gradient: Any) -> None:
        """Take the sum of elements [low, high), or a list of what is to be summed: update, or add to what is accumulated."""
        parts = gradient if isinstance(gradient, list) else [gradient]
        if self._updates:
            self._update(low, high, parts, (), self._mean)
        else:
            self._accumulate(low, high, parts)

    def average(self) -> None:
        """Update the averages of weights that have no gradient in this step."""
        for low, high in self._large_blocks():
            target = self._meant(low, high)
            self._rule.average(target, self._slots.of_range(low, high))
            self._set_meant(low, high, target)
            self._publish(low, high)

    def _update(self, low: int, high: int, parts: list[Any], scales: Sequence[Span], calls: int) -> None:
        at = low  # elements between the groups' are of group 0: padding, or variables of it
        for begin, end, group in spans_within(self._groups, low, high) if self._groups else ():
            if at < low + begin:
                self._update_range(at, low + begin, low, parts, scales, calls, 0)
            self._update_range(low + begin, low + end, low, parts, scales, calls, group)
            at = low + end
        if at < high:
            self._update_range(at, high, low, parts, scales, calls, 0)
        self._publish(low, high)

    def _update_range(
        self, low: int, high: int, first: int, parts: list[Any], scales: Sequence[Span], calls: int, group: int
    ) -> None:
        """Update elements [low, high) by parts, and scales, that begin with element `first`."""
        target = self._meant(low, high)
        slots = self._slots.of_range(low, high)
        decays = spans_within(self._decays, low, high) if self._decays else ()
        if (low - first, high - first) != (0, len(parts[0])):
            parts = [part[low - first : high - first] for part in parts]
            scales = list(spans_within(scales, low - first, high - first))
        self._rule.update(target, [move_like(part, target) for part in parts], slots, decays, group, scales, calls)
        self._set_meant(low, high, target)

    def _accumulate(self, low: int, high: int, parts: list[Any]) -> None:
        slots, target = self._slots.of_range(low, high), self._meant(low, high)
        self._rule.accumulate(target, [move_like(part, target) for part in parts], slots)
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

    def _publish(self, low: int, high: int) -> None:
        """Write what changed to the other local devices, or have it sent to other nodes."""
        if self._share is not None:
            self._share.ready(high)
        for copy in self.arena.copies[1:]:
            with on_device_of(copy):
                copy[low:high] = move_like(self.arena.values[low:high], copy)

    def keep(self, low: int, high: int, gradient: Any) -> None:
        """Keep a sum, or the mean of several steps, and add up the squares of its elements; takes what `take` takes.

        Gradients stay as they are: they are the replica's own, and may be summed again.
        """
        parts, (kept, base) = gradient if isinstance(gradient, list) else [gradient], self._store()
        for begin, end in [(low, high)] if self._on_gpu else blocks([(low, high)], self._block):
            sums = kept[begin - base : end - base]
            if not self._formed:
                combine(np.add, [move_like(part[begin - low : end - low], sums) for part in parts], sums)
            if self._factor != 1:
                multiply_spans(sums, [(0, sums.size, self._factor)])
            if self._mean and self._updates:
                form_mean(sums, self._slots.of_range(begin, end)[GRADIENT_SUM], self._mean)
            if not self._each:
                self.squares[self._spans[0][2]] += self._sum_of_squares(sums)
                continue
            for start, stop, name in spans_within(self._spans, begin, end):
                self.squares[name] += self._sum_of_squares(sums[start:stop])

    def form_moments(self, scales: Mapping[str, float]) -> None:
        """Multiply what was kept by its scales, update the slot that the rule factors by it, and add up `matrices`."""
        from .matrix_sums import MatrixSums

        self.matrices = {v.name: MatrixSums(v.shape) for v in self.variables if v.ndim > 1}
        for low, high, gradient in self._kept_blocks(scales):
            self._rule.form_moments(gradient, self._slots.of_range(low, high))
            for matrix, flat, first in self._factored(low, high):
                matrix.add(flat, first)

    def factor(self) -> None:
        """Factor the slot by `matrices`, which have the sums over all ranks."""
        for low, high in blocks(self.arena.owned(self.ranges), self._block):
            for matrix, flat, first in self._factored(low, high):
                matrix.product(flat, first)

    def _factored(self, low: int, high: int) -> Iterator[tuple[MatrixSums, Any, int]]:
        """Yield the parts of the factored slot in elements [low, high): of which matrices, and from which of their elements."""
        slot = self._slots.of_range(low, high)[self._optimizer._factored]
        for begin, end, name in spans_within(self._spans, low, high):
            if name in self.matrices:
                yield self.matrices[name], slot[begin:end], low + begin - self._offsets[name]

    def _kept_blocks(self, scales: Mapping[str, float]) -> Iterator[tuple[int, int, Any]]:
        """Yield what was kept in blocks, times its scales: it is multiplied in place."""
        kept, base = self._store()
        for low, high in blocks(self.arena.owned(self.ranges), self._block):
            gradient = kept[low - base : high - base]
            multiply_spans(gradient, self._scaled(low, high, scales, self._each))
            yield low, high, gradient

    def direct(self, scales: Mapping[str, float]) -> None:
        """Make of what was kept, times its scales, the direction of the update, and add up `norms`."""
        self.norms = {(name, what): 0.0 for _, _, name in self._spans for what in ("weights", "direction")}
        for low, high, gradient in self._kept_blocks(scales):
            self._rule.direct(gradient, self._slots.of_range(low, high))
            weights = self._rule.widened(self._meant(low, high))
            for start, stop, name in spans_within(self._spans, low, high):
                self.norms[name, "weights"] += self._sum_of_squares(weights[start:stop])
                self.norms[name, "direction"] += self._sum_of_squares(gradient[start:stop])

    def whole_gradients(self, scales: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Return what all ranks kept of each variable, times its scales. Collective, inside one."""
        for _ in self._kept_blocks(scales):
            pass
        kept, base = self._store()
        return self._wholes(lambda low, high: {"gradient": kept[low - base : high - base]}, "gradient")

    def whole_weights(self) -> dict[str, np.ndarray]:
        """Return the weights of each variable, with what was not sent of them. Collective, inside one."""
        values, residual = self.arena.values, self._slots.residual
        if residual is not None:
            return self._wholes(lambda low, high: {"weights": values[low:high] + residual.of(low, high)}, "weights")
        dtype = self._slots.scratch[0].dtype
        return {
            v.name: np.asarray(to_host(values[v.offset : v.offset + v.size]), dtype).reshape(v.shape)
            for v in self.variables
        }

    def _wholes(self, stored: Callable[[int, int], Mapping[str, Any]], name: str) -> dict[str, np.ndarray]:
        low, high = self.ranges[0][0], self.ranges[-1][1]
        flat = gathered(self.arena, low, high, name, stored)
        return {v.name: flat[v.offset - low : v.offset - low + v.size].reshape(v.shape) for v in self.variables}

    def keep_weights(self, weights: Mapping[str, Any]) -> None:
        """Keep this rank's part of new weights in place of what was kept."""
        kept, base = self._store()
        for v in self.variables:
            flat = np.asarray(weights[v.name]).reshape(-1)
            for low, high in self.arena.owned([(v.offset, v.offset + v.size)]):
                target = kept[low - base : high - base]
                target[...] = move_like(flat[low - v.offset : high - v.offset], target)

    def take_kept(self, scales: Mapping[str, float]) -> None:
        """Take what was kept, as `take` does, times the scale of each variable where this is an update."""
        kept, base = self._store()
        each = self._each or self._optimizer._scales_by_norms
        for low, high in self._large_blocks():
            gradient = kept[low - base : high - base]
            if not self._updates:
                self._accumulate(low, high, [gradient])
                continue
            self._update(low, high, [gradient], self._scaled(low, high, scales, each), 0)
            if self._mean:
                self._slots.of_range(low, high)[GRADIENT_SUM][...] = 0

    def _scaled(self, low: int, high: int, scales: Mapping[str, float], each: bool) -> list[Span]:
        """Return which of the elements [low, high) are multiplied by what: by one scale, or each variable's."""
        if not scales:
            return []
        if not each:
            spans = [(0, high - low, scales[self._spans[0][2]])]
        else:
            spans = [(begin, end, scales[name]) for begin, end, name in spans_within(self._spans, low, high)]
        return [span for span in spans if span[2] != 1]

    def not_finite(self) -> dict[str, int]:
        """Return how many numbers of this rank's part of each variable's sum are not finite."""
        kept, base = self._store()
        return {
            v.name: not_finite_of(
                *(kept[low - base : high - base] for low, high in self.arena.owned([(v.offset, v.offset + v.size)]))
            )
            for v in self.variables
        }

    def _keeps_as_they_are(self) -> bool:
        """Return whether a sum of one part is that part, and no pass changes it: then it needs no memory of its own."""
        changed = self._factor != 1 or self._mean or self._optimizer._scales_by_norms or self._optimizer._on_wholes
        return not (changed or self._rule.narrow)

    def _store(self) -> tuple[Any, int]:
        """Return where sums are kept, and which element of the arena comes first there."""
        if self._kept is None:
            self._kept = self._slots.kept(), self._slots.low
        return self._kept


def not_finite_of(*arrays: Any) -> int:
    """Return how many numbers of some arrays are not finite."""
    return sum(int(array.size) - int(np.count_nonzero(np.isfinite(array))) for array in arrays)


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
