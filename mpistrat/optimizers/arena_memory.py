"""The slots of optimizers next to the arenas of variables, and the numbers of optimizers whose replicas all step together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..comm.arrays import accumulation_dtype
from ..variables.placement import ORDINAL_STEP, OptimizerMemory, SlotsHere
from .slots import whole_slots

if TYPE_CHECKING:
    from .optimizer import Optimizer

__all__ = ["ArenaMemory"]

_ordinals = itertools.count(step=ORDINAL_STEP)


@final
class ArenaMemory(OptimizerMemory):
    """The memory of optimizers next to arenas. In files their numbers are in the order of their first steps.

    Args:
        placement: of the strategy; None for optimizers that have no strategy yet.
    """

    def __init__(self, placement: Any = None) -> None:
        self._placement = placement

    def next_ordinal(self) -> int:
        return next(_ordinals)

    def number_of(self, optimizer: Optimizer) -> int | None:
        return optimizer._core.number_in(self._placement)

    def made(self) -> Sequence[Any]:
        return [*self._placement.made]

    made_everywhere = made

    def numbers_made(self, names: Sequence[str], made: Sequence[int | None]) -> Sequence[int | None]:
        return made

    def free_number(self, number: int | None, taken: set[int | None], least: int = 0) -> int:
        """Return the first free number, and take it."""
        found = next(number for number in itertools.count(least) if number not in taken)
        taken.add(found)
        return found

    def make_step(self, optimizer: Optimizer, variables: Sequence[Any], left_out: Sequence[Any]) -> Any:
        step = optimizer._run_on(variables, [variable.name for variable in left_out])
        return self._placement.steps.in_order(step)

    def iterations(self, optimizer: Optimizer) -> int:
        return optimizer._core.calls

    def each_slots(self, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the whole slots of each variable, also of those not updated since `set_state`. Collective."""
        core = optimizer._core
        variables = [] if core.strategy is None else core.strategy.extended.placement.variables
        parts = {variable.name: variable.part for variable in variables}
        for name, slots in core.slots_of_parts():
            yield name, whole_slots(parts.get(name), slots)

    def slots_here(
        self, optimizer: Optimizer, writers: Collection[int] | None, all_else: bool, each_node: bool
    ) -> Iterator[SlotsHere]:
        core = optimizer._core
        yield from core.slots.waiting(writers, all_else, each_node)
        for variable in core.variables:
            if core.slots.in_files(variable):
                parts = core.slots.here(variable, writers, each_node)
                yield variable.name, variable.shape, accumulation_dtype(variable.dtype), parts

    def read_slots(self, optimizer: Optimizer, variable: Any) -> dict[str, Any]:
        core = optimizer._core
        if any(variable is known for known in core.variables):
            return core.slots.read(variable)
        waiting = core.slots.pending.get(variable.name, {}) if core.may_join(variable.placement.strategy) else {}
        return {name: np.array(array) for name, array in waiting.items() if name in optimizer.slot_names}

    def write_slots(self, optimizer: Optimizer, variable: Any, values: Mapping[str, Any]) -> None:
        optimizer._core.slots.write(variable, values)

    def forget_slots(self, optimizer: Optimizer, variables: Collection[Any] | None) -> None:
        core = optimizer._core
        core.slots.restart(core.variables if variables is None else variables)
