"""A training step on one arena: the elements it updates, their sums, and the sums it keeps between two passes."""

from __future__ import annotations

import functools
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
from ..comm.arrays import accumulation_dtype, to_host
from ..optimizers.core import OptimizerCore
from ..optimizers.hyperparameters import GRADIENT_SUM
from ..optimizers.rule import BlockUpdate, form_mean, multiply_spans
from ..optimizers.slots import gathered
from ..variables.variable import Variable
from .interface import StepEngine, StepParts

if TYPE_CHECKING:
    from .matrix_sums import MatrixSums
    from .on_device import DeviceSquares

__all__ = ["ArenaStep", "blocks_in_cache", "not_finite_of", "whole_arenas"]

_LARGE_BLOCK = 16 * BLOCK  # elements per call of a compiled loop

N = TypeVar("N", int, float)


@final
class ArenaStep:
    """The step on one arena.

    Attributes:
        squares: squares of kept sums, added up over this rank's elements: of each variable, or all under the first one's name.
        norms: squares of each variable's weights and update direction, by name and "weights" or "direction".
        matrices: row and column sums of each variable with matrices, in the slot that the rule factors, by name.
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
        # Variables are padded with zeros, which no rule changes, so neighbours form one range.
        ends = padded(arena, variables)
        self.ranges = merge(list(ends.items()))
        self._ends = ends
        self._spans = sorted((v.offset, ends[v.offset], v.name) for v in variables)
        self._offsets = {v.name: v.offset for v in variables}
        self._divided = any(v.part is not None and v.part.split for v in variables)
        self._core, self._optimizer, self._mean, self._each = core, core.optimizer, 0, False
        self._keeps = False  # True if sums are kept first in this step
        self._factor = 1.0
        self._slots, self._engine = core.slots.of(arena), parts.engine_of(arena.values)
        self._publish = parts.publish(arena, self.ranges, self._slots)
        self._kept: tuple[Any, int] | None = None  # the sums of this step, and the number of their first element
        self._formed = False  # whether they exist before `keep` is called
        self._device_squares: DeviceSquares | None = None
        self._rule = BlockUpdate(core.optimizer, arena.dtype, lambda: self._slots.scratch)
        self.read_settings()

    def read_settings(self) -> None:
        """Read the settings of each variable again, after the optimizer's numbers have changed."""
        core, ends = self._core, self._ends
        self._decays = _merged((v.offset, ends[v.offset], core.decay_of(v)) for v in self.variables)
        self._groups = _merged((v.offset, ends[v.offset], core.group_of(v)) for v in self.variables)

    @property
    def gradients(self) -> Any:
        return self._slots.form.applied(self.arena.gradients)  # never stored: referenced memory cannot be freed

    def refuse(self) -> None:
        """Drop what is stored of gradients that were refused."""
        self._slots.form.forget()

    def digest(self) -> int:
        """Return a digest of this rank's slice of the weights, in one pass."""
        total = 0
        for low, high in blocks(self.arena.sliced(self.ranges), self._engine.block):
            total = (total * 3 + quick_digest(self.arena.values[low:high])) & ((1 << 63) - 1)
        return total

    def begin(self, step: int, rate: float, number: int, two_passes: bool, factor: float) -> None:
        """Set the values that all blocks of update `step` share, in the `number`-th call.

        With `two_passes` sums are kept first. All sums are multiplied by the factor.
        """
        optimizer = self._optimizer
        self._forget_sums()
        self._mean = optimizer.gradient_accumulation_steps or 0  # calls per mean, 0 for no mean
        self._updates, self._keeps = not self._mean or self._core.updates_at(number), two_passes
        self._factor = factor
        self._rule.begin(step, rate, 1.0 if two_passes else factor, self._core.overflow)
        if two_passes:
            self._each = optimizer.clipnorm is not None or self._divided
            names = [name for _, _, name in self._spans]
            self.squares = dict.fromkeys(names if self._each else names[:1], 0.0)

    def begin_publish(self) -> None:
        """Start the exchange of new weights. Collective over peers."""
        self._publish.begin()

    def publish(self) -> None:
        """Wait for the weights of all nodes. Collective over peers."""
        self._forget_sums()
        self._publish.finish()

    def leave(self) -> None:
        """Cancel exchanges after an error."""
        self._forget_sums()
        self._publish.leave()

    def _forget_sums(self) -> None:
        self._kept, self._formed = None, False

    def add_up(self, arrays: Sequence[Any], consume: Consume) -> None:
        """Pass flat arrays in place of their sum: `consume` adds them up in the same pass."""
        if self._keeps and len(arrays) == 1 and self._kept is None and self._keeps_as_they_are():
            self._kept, self._formed = (arrays[0], 0), True
        for low, high in self._large_blocks:
            consume(low, high, [array[low:high] for array in arrays])

    def keep_in(self, memory: Any) -> None:
        """Use `memory[low:high]` as the sums; passes may overwrite it."""
        low, high = self._slots.low, self._slots.high
        self._kept, self._formed = (memory[low:high] if low < high else self._slots.scratch[0][:0], low), True

    @functools.cached_property
    def _large_blocks(self) -> list[tuple[int, int]]:
        """Return this rank's elements in blocks, large ones if the weights need no scratch memory."""
        return blocks(self.arena.owned(self.ranges), self._publish.block or self._engine.update)

    def take(self, low: int, high: int, gradient: Any) -> None:
        """Take the sum of elements [low, high), or a list of arrays to sum: update, or accumulate."""
        parts = gradient if isinstance(gradient, list) else [gradient]
        if self._updates:
            self._update(low, high, parts, (), self._mean)
        else:
            self._accumulate(low, high, parts)

    def average(self) -> None:
        """Update the averages of weights that have no gradient in this step."""
        for low, high in self._large_blocks:
            target = self._publish.target(low, high)
            self._rule.average(target, self._slots.of_range(low, high))
            self._publish.commit(low, high, target)

    def _update(self, low: int, high: int, parts: list[Any], scales: Sequence[Span], calls: int) -> None:
        if not self._groups:
            self._update_range(low, high, low, parts, scales, calls, 0)
            return
        at = low  # elements between the groups belong to group 0: padding, or its variables
        for begin, end, group in spans_within(self._groups, low, high):
            if at < low + begin:
                self._update_range(at, low + begin, low, parts, scales, calls, 0)
            self._update_range(low + begin, low + end, low, parts, scales, calls, group)
            at = low + end
        if at < high:
            self._update_range(at, high, low, parts, scales, calls, 0)

    def _update_range(
        self, low: int, high: int, first: int, parts: list[Any], scales: Sequence[Span], calls: int, group: int
    ) -> None:
        """Update elements [low, high); `parts` and `scales` start at element `first`."""
        target = self._publish.target(low, high)
        slots = self._slots.of_range(low, high)
        decays = spans_within(self._decays, low, high) if self._decays else ()
        if (low - first, high - first) != (0, len(parts[0])):
            parts = [part[low - first : high - first] for part in parts]
            scales = list(spans_within(scales, low - first, high - first))
        if self._engine.on_device:  # each GPU has its own memory
            parts = [move_like(part, target) for part in parts]
        self._rule.update(target, parts, slots, decays, group, scales, calls)
        self._publish.commit(low, high, target)

    def _accumulate(self, low: int, high: int, parts: list[Any]) -> None:
        slots, target = self._slots.of_range(low, high), self._publish.target(low, high)
        self._rule.accumulate(target, [move_like(part, target) for part in parts], slots)
        self._publish.commit(low, high, target)

    def keep(self, low: int, high: int, gradient: Any) -> None:
        """Keep a sum, or the mean of several steps, and add up its squares; the arguments are those of `take`.

        The gradients are not changed: they are the replica's own, and may be summed again.
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
        """True if `device_squares` has the sums of squares; `squares` is then empty."""
        return self._engine.on_device

    @property
    def may_skip(self) -> bool:
        """True if one kernel updates all weights on one GPU."""
        return self.on_device and len(self.arena.copies) == 1 and accumulation_dtype(self.arena.dtype).kind == "f"

    def kept_parts(self) -> list[Any]:
        """Return the kept sums, one flat array for each range."""
        kept, base = self._store()
        return [kept[low - base : high - base] for low, high in self.arena.owned(self.ranges)]

    def device_squares(self) -> tuple[DeviceSquares, Any]:
        """Return the sums of squares of the kept sums, in the order of `squares`, and the array they are computed from."""
        kept, base = self._store()
        if self._device_squares is None or self._device_squares.count != len(self.squares):
            from .on_device import DeviceSquares

            owned = [(low - base, high - base) for low, high in self.arena.owned(self.ranges)]
            each = [inside(owned, low - base, high - base) for low, high, _ in self._spans]
            self._device_squares = DeviceSquares(kept, each if self._each else [owned])
        return self._device_squares, kept

    def form_moments(self, scales: Mapping[str, float]) -> None:
        """Scale the kept sums, update the slot that the rule factors, and add up `matrices`."""
        from .matrix_sums import MatrixSums

        self.matrices = {v.name: MatrixSums(v.shape) for v in self.variables if v.ndim > 1}
        for low, high, gradient in self._kept_blocks(scales):
            self._rule.form_moments(gradient, self._slots.of_range(low, high))
            for matrix, flat, first in self._factored(low, high):
                matrix.add(flat, first)

    def factor(self) -> None:
        """Factor the slot by `matrices`, which hold the sums over all ranks."""
        for low, high in blocks(self.arena.owned(self.ranges), self._engine.block):
            for matrix, flat, first in self._factored(low, high):
                matrix.product(flat, first)

    def _factored(self, low: int, high: int) -> Iterator[tuple[MatrixSums, Any, int]]:
        """Yield the parts of the factored slot in elements [low, high): the matrices, the part, and its first element in them."""
        slot = self._slots.of_range(low, high)[self._optimizer._factored]
        for begin, end, name in spans_within(self._spans, low, high):
            if name in self.matrices:
                yield self.matrices[name], slot[begin:end], low + begin - self._offsets[name]

    def _kept_blocks(self, scales: Mapping[str, float]) -> Iterator[tuple[int, int, Any]]:
        """Yield the kept sums in blocks, scaled in place."""
        kept, base = self._store()
        for low, high in blocks(self.arena.owned(self.ranges), self._engine.block):
            gradient = kept[low - base : high - base]
            multiply_spans(gradient, self._scaled(low, high, scales))
            yield low, high, gradient

    def direct(self, scales: Mapping[str, float]) -> None:
        """Turn the scaled kept sums into the direction of the update, and add up `norms`."""
        self.norms = {(name, what): 0.0 for _, _, name in self._spans for what in ("weights", "direction")}
        for low, high, gradient in self._kept_blocks(scales):
            self._rule.direct(gradient, self._slots.of_range(low, high))
            weights = self._rule.widened(self._publish.target(low, high))
            for start, stop, name in spans_within(self._spans, low, high):
                self.norms[name, "weights"] += self._engine.squares(weights[start:stop])
                self.norms[name, "direction"] += self._engine.squares(gradient[start:stop])

    def whole_gradients(self, scales: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Return the scaled kept sums of all ranks, by variable. Collective, inside one."""
        for _ in self._kept_blocks(scales):
            pass
        kept, base = self._store()
        return self._wholes(lambda low, high: {"gradient": kept[low - base : high - base]}, "gradient")

    def whole_weights(self) -> dict[str, np.ndarray]:
        """Return the weights of each variable with their error feedback. Collective, inside one."""
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
        """Replace the kept sums by this rank's part of new weights."""
        kept, base = self._store()
        for v in self.variables:
            flat = np.asarray(weights[v.name]).reshape(-1)
            for low, high in self.arena.owned([(v.offset, v.offset + v.size)]):
                target = kept[low - base : high - base]
                target[...] = move_like(flat[low - v.offset : high - v.offset], target)

    def take_kept(self, scales: Mapping[str, float]) -> None:
        """Take the kept sums, as `take` does; an update scales them by variable."""
        kept, base = self._store()
        for low, high in self._large_blocks:
            gradient = kept[low - base : high - base]
            if not self._updates:
                self._accumulate(low, high, [gradient])
                continue
            self._update(low, high, [gradient], self._scaled(low, high, scales), 0)
            if self._mean:
                self._slots.of_range(low, high)[GRADIENT_SUM][...] = 0

    def _scaled(self, low: int, high: int, scales: Mapping[str, float]) -> list[Span]:
        """Return the spans of elements [low, high) with their scales: one scale, or one per variable."""
        if not scales:
            return []
        if self._spans[-1][2] not in scales:  # one for all
            spans = [(0, high - low, scales[self._spans[0][2]])]
        else:
            spans = [(begin, end, scales[name]) for begin, end, name in spans_within(self._spans, low, high)]
        return [span for span in spans if span[2] != 1]

    def not_finite(self) -> dict[str, int]:
        """Return the count of numbers that are not finite in this rank's part of each variable's sum."""
        kept, base = self._store()
        return {
            v.name: not_finite_of(
                *(kept[low - base : high - base] for low, high in self.arena.owned([(v.offset, v.offset + v.size)]))
            )
            for v in self.variables
        }

    def _keeps_as_they_are(self) -> bool:
        """Return True if a sum of one array can be that array itself: no pass changes it."""
        only_read = self._factor == 1 and not self._mean and set(self._core.passes) <= {"clip"}
        return only_read and not self._rule.narrow

    def _store(self) -> tuple[Any, int]:
        """Return the memory of kept sums, and the number of its first element in the arena."""
        if self._kept is None:
            self._kept = self._slots.kept(), self._slots.low
        return self._kept


def blocks_in_cache(values: Any) -> StepEngine:
    """Return the engine for weights on a CPU: blocks that fit in its cache."""
    return StepEngine(block=BLOCK, update=_LARGE_BLOCK, keep=BLOCK, squares=loops.squares)


def whole_arenas(values: Any) -> StepEngine:
    """Return the engine for weights on a GPU: whole arenas, as each call is a kernel."""
    from ..optimizers.kernels import squares

    return StepEngine(block=GPU_BLOCK, update=values.size, keep=values.size, squares=squares, on_device=True)


def not_finite_of(*arrays: Any) -> int:
    """Return the count of numbers that are not finite in some arrays."""
    return sum(int(array.size) - int(np.count_nonzero(np.isfinite(array))) for array in arrays)


def _merged(segments: Iterable[tuple[int, int, N]]) -> list[tuple[int, int, N]]:
    """Return the ranges whose number is not 0, in order, with equal neighbours merged."""
    merged: list[tuple[int, int, N]] = []
    for low, high, number in sorted(segments):
        if not number:
            continue
        if merged and merged[-1][1] == low and merged[-1][2] == number:
            merged[-1] = merged[-1][0], high, number
        else:
            merged.append((low, high, number))
    return merged
