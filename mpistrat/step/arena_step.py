"""What one training step does on one arena: which elements it updates, with what, and what it keeps between two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from ..arena.arena import Arena, padded
from ..arena.arithmetic import combine
from ..arena.reduction import BLOCK, GPU_BLOCK, Consume
from ..arena.values import move_like, quick_digest
from ..base import loops
from ..base.loops import Span
from ..base.partition import blocks, inside, merge, spans_within
from ..comm.arrays import to_host
from ..optimizers.core import OptimizerCore
from ..optimizers.hyperparameters import GRADIENT_SUM
from ..optimizers.rule import BlockUpdate, form_mean, multiply_spans
from ..optimizers.slots import gathered
from ..variables.variable import Variable
from .interface import StepEngine, StepParts

if TYPE_CHECKING:
    from ..arena.wire import Unsent
    from .matrix_sums import MatrixSums
    from .on_device import DeviceSquares

__all__ = ["ArenaStep", "blocks_in_cache", "not_finite_of", "whole_arenas"]

_LARGE_BLOCK = 16 * BLOCK  # elements that a compiled loop sums and updates at a time

N = TypeVar("N", int, float)


@final
class ArenaStep:
    """What a step does on one arena.

    Attributes:
        squares: of sums that were kept, added up over what this rank updates: of each variable, or all under one's name.
        norms: squares of each variable's weights and of the direction of its update, under its name and "weights" or "direction".
        matrices: by name of a variable with matrices, sums of their rows and columns, in the slot that the rule factors.
    """

    def __init__(
        self,
        core: OptimizerCore,
        arena: Arena,
        variables: Sequence[Variable],
        parts: StepParts,
    ) -> None:
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
        self._slots, self._engine = core.slots.of(arena), parts.engine_of(arena.values)
        self._publish = parts.publish(arena, self.ranges, self._slots)
        self._kept: tuple[Any, int] | None = None  # the sums of this step, and which element comes first there
        self._formed = False  # whether they are there before `keep` is called
        self._device_squares: DeviceSquares | None = None
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
        for low, high in blocks(self.arena.sliced(self.ranges), self._engine.block):
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

    def begin_publish(self) -> None:
        """Begin to exchange what this step makes of the weights, if it changes them. Collective over peers."""
        if self._core.changes_weights(self._number):
            self._publish.begin()

    def publish(self) -> None:
        """Wait until the weights of all nodes are here. Collective over peers."""
        self._forget_sums()
        self._publish.finish()

    def leave(self) -> None:
        """Leave what is under way after an error."""
        self._forget_sums()
        self._publish.leave()

    def _forget_sums(self) -> None:
        self._kept, self._formed = None, False

    def add_up(self, arrays: Sequence[Any], consume: Consume) -> None:
        """Hand out flat arrays in place of their sum: what consumes them adds them up in the same pass."""
        if len(arrays) == 1 and self._kept is None and self._keeps_as_they_are():
            self._kept, self._formed = (arrays[0], 0), True
        for low, high in self._large_blocks():
            consume(low, high, [array[low:high] for array in arrays])

    def keep_in(self, memory: Any) -> None:
        """Know that the sums lie in memory of their own, `memory[low:high]`, which passes may overwrite."""
        low, high = self._slots.low, self._slots.high
        self._kept, self._formed = (memory[low:high] if low < high else self._slots.scratch[0][:0], low), True

    def _large_blocks(self) -> list[tuple[int, int]]:
        """Return what this rank updates in blocks, large ones where the weights need no scratch memory."""
        return blocks(self.arena.owned(self.ranges), self._publish.block or self._engine.update)

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
            target = self._publish.target(low, high)
            self._rule.average(target, self._slots.of_range(low, high))
            self._publish.commit(low, high, target)

    def _update(self, low: int, high: int, parts: list[Any], scales: Sequence[Span], calls: int) -> None:
        at = low  # elements between the groups' are of group 0: padding, or variables of it
        for begin, end, group in spans_within(self._groups, low, high) if self._groups else ():
            if at < low + begin:
                self._update_range(at, low + begin, low, parts, scales, calls, 0)
            self._update_range(low + begin, low + end, low, parts, scales, calls, group)
            at = low + end
        if at < high:
            self._update_range(at, high, low, parts, scales, calls, 0)

    def _update_range(
        self, low: int, high: int, first: int, parts: list[Any], scales: Sequence[Span], calls: int, group: int
    ) -> None:
        """Update elements [low, high) by parts, and scales, that begin with element `first`."""
        target = self._publish.target(low, high)
        slots = self._slots.of_range(low, high)
        decays = spans_within(self._decays, low, high) if self._decays else ()
        if (low - first, high - first) != (0, len(parts[0])):
            parts = [part[low - first : high - first] for part in parts]
            scales = list(spans_within(scales, low - first, high - first))
        self._rule.update(target, [move_like(part, target) for part in parts], slots, decays, group, scales, calls)
        self._publish.commit(low, high, target)

    def _accumulate(self, low: int, high: int, parts: list[Any]) -> None:
        slots, target = self._slots.of_range(low, high), self._publish.target(low, high)
        self._rule.accumulate(target, [move_like(part, target) for part in parts], slots)
        self._publish.commit(low, high, target)

    def keep(self, low: int, high: int, gradient: Any) -> None:
        """Keep a sum, or the mean of several steps, and add up the squares of its elements; takes what `take` takes.

        Gradients stay as they are: they are the replica's own, and may be summed again.
        """
        parts, (kept, base) = gradient if isinstance(gradient, list) else [gradient], self._store()
        for begin, end in blocks([(low, high)], self._engine.keep):
            sums = kept[begin - base : end - base]
            if not self._formed:
                combine(np.add, [move_like(part[begin - low : end - low], sums) for part in parts], sums)
            if self._factor != 1:
                multiply_spans(sums, [(0, sums.size, self._factor)])
            if self._mean and self._updates:
                form_mean(sums, self._slots.of_range(begin, end)[GRADIENT_SUM], self._mean)
            if self._engine.on_device:
                continue
            if not self._each:
                self.squares[self._spans[0][2]] += self._engine.squares(sums)
                continue
            for start, stop, name in spans_within(self._spans, begin, end):
                self.squares[name] += self._engine.squares(sums[start:stop])

    @property
    def on_device(self) -> bool:
        """Whether `device_squares` has the sums of squares, and `squares` has none."""
        return self._engine.on_device

    def device_squares(self) -> tuple[DeviceSquares, Any]:
        """Return what adds up the squares of what was kept, in the order of the names of `squares`, and the array of it."""
        kept, base = self._store()
        if self._device_squares is None or self._device_squares.count != len(self.squares):
            from .on_device import DeviceSquares

            owned = [(low - base, high - base) for low, high in self.arena.owned(self.ranges)]
            each = [inside(owned, low - base, high - base) for low, high, _ in self._spans]
            self._device_squares = DeviceSquares(kept, each if self._each else [owned])
        return self._device_squares, kept

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
        for low, high in blocks(self.arena.owned(self.ranges), self._engine.block):
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
        for low, high in blocks(self.arena.owned(self.ranges), self._engine.block):
            gradient = kept[low - base : high - base]
            multiply_spans(gradient, self._scaled(low, high, scales))
            yield low, high, gradient

    def direct(self, scales: Mapping[str, float]) -> None:
        """Make of what was kept, times its scales, the direction of the update, and add up `norms`."""
        self.norms = {(name, what): 0.0 for _, _, name in self._spans for what in ("weights", "direction")}
        for low, high, gradient in self._kept_blocks(scales):
            self._rule.direct(gradient, self._slots.of_range(low, high))
            weights = self._rule.widened(self._publish.target(low, high))
            for start, stop, name in spans_within(self._spans, low, high):
                self.norms[name, "weights"] += self._engine.squares(weights[start:stop])
                self.norms[name, "direction"] += self._engine.squares(gradient[start:stop])

    def whole_gradients(self, scales: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Return what all ranks kept of each variable, times its scales. Collective, inside one."""
        for _ in self._kept_blocks(scales):
            pass
        kept, base = self._store()
        return self._wholes(lambda low, high: {"gradient": kept[low - base : high - base]}, "gradient")

    def whole_weights(self) -> dict[str, np.ndarray]:
        """Return the weights of each variable, with what was not sent of them. Collective, inside one."""
        if not self._publish.exact:
            return self._wholes(lambda low, high: {"weights": self._publish.meant(low, high)}, "weights")
        values = self.arena.values
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
        for low, high in self._large_blocks():
            gradient = kept[low - base : high - base]
            if not self._updates:
                self._accumulate(low, high, [gradient])
                continue
            self._update(low, high, [gradient], self._scaled(low, high, scales), 0)
            if self._mean:
                self._slots.of_range(low, high)[GRADIENT_SUM][...] = 0

    def _scaled(self, low: int, high: int, scales: Mapping[str, float]) -> list[Span]:
        """Return which of the elements [low, high) are multiplied by what: by one scale, or each variable's."""
        if not scales:
            return []
        if self._spans[-1][2] not in scales:  # one for all
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
        only_read = self._factor == 1 and not self._mean and set(self._core.passes) <= {"clip"}
        return only_read and not self._rule.narrow

    def _store(self) -> tuple[Any, int]:
        """Return where sums are kept, and which element of the arena comes first there."""
        if self._kept is None:
            self._kept = self._slots.kept(), self._slots.low
        return self._kept


def blocks_in_cache(values: Any) -> StepEngine:
    """Return the engine for weights on a CPU: blocks that stay in its cache."""
    return StepEngine(block=BLOCK, update=_LARGE_BLOCK, keep=BLOCK, squares=loops.squares)


def whole_arenas(values: Any) -> StepEngine:
    """Return the engine for weights on a GPU, where each call is a kernel: all of a flat array at once."""
    from ..optimizers.kernels import squares

    return StepEngine(block=GPU_BLOCK, update=values.size, keep=values.size, squares=squares, on_device=True)


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
