"""An optimizer on whole variables of one process, each updated separately, for parameter servers."""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ...arena.reduction import BLOCK
from ...base import loops
from ...base.cores import available_cores
from ...base.errors import explain
from ...comm.arrays import accumulation_dtype, as_array, as_buffer
from ...optimizers.rule import BlockUpdate

if TYPE_CHECKING:
    from ...optimizers.optimizer import Optimizer

__all__ = ["LocalUpdates"]

_MOST_THREADS = 4  # per variable; more do not help, as memory limits
_SHARED = 16  # least number of blocks of a variable for several threads


def _nothing() -> None:
    """Do nothing between two blocks."""


@final
class LocalUpdates:
    """Updates of whole variables with their slots. Threads take turns.

    From the gradients of one process it computes the bits of `apply_gradients` there. Several threads update large variables,
    if this process has several cores: each takes the next block, so a thread without a core does not delay the others.
    `Optimizer.update` must be thread-safe for different blocks.

    Updates of rows do not change other rows and their slots, as in LazyAdam. Adam with a dense gradient differs: there the
    other rows keep moving by their momentum, and their slots decay. The same holds for every rule with a momentum or a mean,
    and for AdamW's decay, but not for SGD without momentum and Adagrad.

    Args:
        optimizer: its rule, rate and number of steps are used.
        between: called between two blocks of a large variable, by the thread that updates it.
    """

    def __init__(self, optimizer: Optimizer, between: Callable[[], object] = _nothing) -> None:
        self._optimizer, self._core, self._between = optimizer, optimizer._core, between
        self._turn = threading.RLock()
        self._scratch: dict[np.dtype, list[_Scratch]] = {}
        self._kept: dict[Any, _VariableState] = {}

    # steps

    @property
    def iterations(self) -> int:
        """The number of counted steps."""
        return self._optimizer.iterations

    def count_step(self) -> None:
        """Count a complete step."""
        self._core.started += 1

    # updates

    def dense(
        self,
        variable: Any,
        weights: np.ndarray,
        gradients: Sequence[np.ndarray],
        step: int,
        old: np.ndarray | None = None,
    ) -> None:
        """Update a variable by the sum of gradients, in their order.

        Args:
            variable: with `name`, `shape` and `dtype`; it has its own slots.
            weights: C-contiguous array of that shape and dtype; the result.
            gradients: arrays like it, which are not changed.
            step: number of the step, counted from 1.
            old: an array like it with the old weights; None if they are in `weights`.
        """
        flat, parts = weights.reshape(-1), [gradient.reshape(-1) for gradient in gradients]
        before = None if old is None or old is weights else old.reshape(-1)
        with self._turn:
            kept = self._begin(variable, step)
            if kept.empty is not None:
                kept.fill()
            if before is None and flat.size <= BLOCK:
                kept.update(kept.scratch, flat, kept.slots, parts)
                return
            blocks = iter(range(0, flat.size, BLOCK))  # shared by the threads

            def update(scratch: _Scratch, between: Callable[[], object] = _nothing) -> None:
                for low in blocks:
                    between()
                    high = low + BLOCK
                    target = flat[low:high]
                    if before is not None:
                        np.copyto(target, before[low:high])
                    kept.update_range(scratch, target, low, [part[low:high] for part in parts])

            others = self._others(kept, flat.size, step) if flat.size >= _SHARED * BLOCK else []
            working = [_helpers().submit(update, scratch) for scratch in others]
            update(kept.scratch, self._between)
            for thread in working:
                thread.result()

    def _others(self, kept: _VariableState, size: int, step: int) -> list[_Scratch]:
        """Return scratch memory for each of the helper threads."""
        scratches = self._scratch[kept.scratch.dtype]
        while len(scratches) < _threads():
            scratches.append(_Scratch(self._optimizer, kept.scratch.dtype))
        for scratch in scratches[1:]:
            scratch.rule.begin(step, self._core.rate_at(step))
        return scratches[1 : size // BLOCK]

    def rows(self, variable: Any, weights: np.ndarray, rows: np.ndarray, values: np.ndarray, step: int) -> None:
        """Update some rows of a variable only.

        Args:
            variable, weights, step: as for `dense`.
            rows: (k,) integers, each row once.
            values: their gradients, k rows, of the variable's dtype or of that in which its gradients are summed.
        """
        width = weights.size // max(len(weights), 1)
        with self._turn:
            kept = self._begin(variable, step, by_rows=True)
            kept.fill(rows)
            if not rows.size or not width:
                return
            values = values.reshape(-1, width)
            if width > BLOCK:
                for row, value in zip(rows.tolist(), values, strict=True):
                    kept.update_row(weights.reshape(-1), row, value)
                return
            table, count = weights.reshape(-1, width), BLOCK // width
            for low in range(0, rows.size, count):
                kept.update_rows(table, rows[low : low + count], values[low : low + count])

    def _begin(self, variable: Any, step: int, by_rows: bool = False) -> _VariableState:
        kept = self._known(variable) or self._add(variable, by_rows)
        kept.read_settings()
        kept.scratch.rule.begin(step, self._core.rate_at(step))
        return kept

    # slots

    def has_slots(self, variable: Any) -> bool:
        """Return whether a variable has slots: `slots` is not empty."""
        with self._turn:
            kept = self._known(variable)
            return kept is not None and bool(kept.slots)

    def slots(self, variable: Any) -> dict[str, np.ndarray]:
        """Return new arrays with a variable's slots, all after the same update; {} if it was never updated.

        Slots of 16-bit variables are float32.
        """
        with self._turn:
            kept = self._known(variable)
            if kept is None:
                return {}
            kept.fill()
            return {name: slot.reshape(variable.shape).copy() for name, slot in kept.slots.items()}

    def set_slots(self, variable: Any, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots.

        Args:
            variable: as for `dense`.
            values: arrays of the variable's shape, one for each of the optimizer's `slot_names`.

        Raises:
            ValueError: names or shapes do not fit.
        """
        function, names = "LocalUpdates.set_slots", self._optimizer.slot_names
        if set(values) != set(names):
            expected, got = f"slots {', '.join(names) or '(none)'}", ", ".join(values) or "none"
            raise ValueError(explain(function, variable.name, expected=expected, got=got))
        arrays = {name: as_array(values[name], function, name) for name in names}
        for name, array in arrays.items():
            if array.shape != variable.shape:
                expected, got = f"{name} of shape {variable.shape}", f"shape {tuple(array.shape)}"
                raise ValueError(explain(function, variable.name, expected=expected, got=got))
        with self._turn:
            kept = self._kept.get(variable) or self._add(variable)
            kept.fill()
            for name, array in arrays.items():
                kept.slots[name][...] = array.reshape(-1)

    def forget_slots(self, variables: Iterable[Any] | None) -> None:
        """Drop the slots of variables, None for all: they are reset to their start values."""
        with self._turn:
            for variable in list(self._kept) if variables is None else variables:
                self._kept.pop(variable, None)

    def _known(self, variable: Any) -> _VariableState | None:
        """Return the state of a variable, if there is one; the optimizer's pending slots are taken first."""
        waiting = self._core.slots.pending
        if waiting and variable.name in waiting:
            self.set_slots(variable, waiting.pop(variable.name))
        return self._kept.get(variable)

    def _add(self, variable: Any, by_rows: bool = False) -> _VariableState:
        dtype = np.dtype(variable.dtype)
        if dtype not in self._scratch:
            self._scratch[dtype] = [_Scratch(self._optimizer, dtype)]
        kept = self._kept[variable] = _VariableState(self._optimizer, variable, self._scratch[dtype][0], by_rows)
        return kept


@final
class _Scratch:
    """Scratch memory, for one thread and all variables of a dtype.

    Attributes:
        dtype: of the variables.
        rule: the optimizer's.
        weights: a block of the variables' dtype, allocated on first use.
        slots: for each slot a block of the dtype in which gradients are summed.
    """

    def __init__(self, optimizer: Optimizer, dtype: np.dtype) -> None:
        self.dtype, self._wide, self._names = dtype, accumulation_dtype(dtype), optimizer.slot_names
        self.rule = BlockUpdate(optimizer, dtype, lambda: [np.empty(BLOCK, self._wide) for _ in range(4)])
        self._blocks: tuple[np.ndarray, dict[str, np.ndarray]] | None = None

    def blocks(self, size: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return scratch memory for `size` weights and their slots."""
        if self._blocks is None:
            slots = {name: np.empty(BLOCK, self._wide) for name in self._names}
            self._blocks = np.empty(BLOCK, self.dtype), slots
        weights, slots = self._blocks
        return weights[:size], {name: block[:size] for name, block in slots.items()}


@final
class _VariableState:
    """The state of one variable on a server.

    Attributes:
        slots: flat arrays.
        scratch: memory shared with the other variables of its dtype.
        empty: True for rows whose slots are zeros and not yet their start values; None if there are none.
    """

    def __init__(self, optimizer: Optimizer, variable: Any, scratch: _Scratch, by_rows: bool) -> None:
        self.scratch, self._core, self._variable = scratch, optimizer._core, variable
        self._start = self._core.slot_start
        self._revision, self._decay, self._group = -1, 0.0, 0
        size, make = int(np.prod(variable.shape, dtype=np.int64)), _untouched if by_rows else np.zeros
        self.slots = {name: make(size, scratch.rule.block.dtype) for name in optimizer.slot_names}
        self.empty = np.ones(variable.shape[:1] or 1, np.bool_) if self._start else None

    def read_settings(self) -> None:
        """Read the variable's own settings, if the optimizer's numbers have changed."""
        core = self._core
        if core.revision != self._revision:
            self._revision = core.revision
            self._decay, self._group = core.decay_of(self._variable), core.group_of(self._variable)

    def fill(self, rows: np.ndarray | None = None) -> None:
        """Set slots to their start values where they have none yet: of some rows, or all."""
        if self.empty is None:
            return
        new = np.flatnonzero(self.empty) if rows is None else rows[self.empty[rows]]
        if new.size:
            for name, start in self._start.items():
                self.slots[name].reshape(len(self.empty), -1)[new] = start
        self.empty[new] = False
        if rows is None:
            self.empty = None

    def update(
        self, scratch: _Scratch, target: np.ndarray, slots: Mapping[str, np.ndarray], gradients: Sequence[np.ndarray]
    ) -> None:
        """Update a block of weights and its slots by the sum of gradients."""
        decays = ((0, target.size, self._decay),) if self._decay else ()
        scratch.rule.update(target, gradients, slots, decays, self._group)

    def update_range(self, scratch: _Scratch, target: np.ndarray, low: int, gradients: Sequence[np.ndarray]) -> None:
        """Update a block of the variable, at most BLOCK elements from `low` on."""
        high = low + target.size
        self.update(scratch, target, {name: slot[low:high] for name, slot in self.slots.items()}, gradients)

    def update_row(self, flat: np.ndarray, row: int, gradient: np.ndarray) -> None:
        """Update one row of a variable, larger than a block."""
        start = row * gradient.size
        for low in range(0, gradient.size, BLOCK):
            block = gradient[low : low + BLOCK]
            first = start + low
            self.update_range(self.scratch, flat[first : first + block.size], first, [block])

    def update_rows(self, table: np.ndarray, rows: np.ndarray, gradients: np.ndarray) -> None:
        """Update rows of a variable, at most a block: gather them and their slots, update, and scatter them."""
        shape = rows.size, table.shape[1]
        target, slots = self.scratch.blocks(shape[0] * shape[1])
        tables = {name: slot.reshape(table.shape) for name, slot in self.slots.items()}
        _fetch(table, rows, target.reshape(shape))
        for name, slot in slots.items():
            _fetch(tables[name], rows, slot.reshape(shape))
        self.update(self.scratch, target, slots, [gradients.reshape(-1)])
        table[rows] = target.reshape(shape)
        for name, slot in slots.items():
            tables[name][rows] = slot.reshape(shape)


def _fetch(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    if not loops.gather(as_buffer(out), as_buffer(table), rows):
        # All rows exist, so clipping changes none; the default mode makes one more copy.
        np.take(table, rows, axis=0, out=out, mode="clip")


@functools.cache
def _threads() -> int:
    return min(len(available_cores()), _MOST_THREADS)


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS - 1, "mpistrat-update")  # a thread starts when there is work for it


def _untouched(size: int, dtype: np.dtype) -> np.ndarray:
    """Return flat zeros that take memory only where they are touched: most rows of a large table never are.

    NumPy requests huge pages, of which a few rows would touch all.
    """
    memory = mmap.mmap(-1, max(size * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, size)
