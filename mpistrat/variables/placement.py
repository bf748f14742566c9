"""Placement of variables: the memory of a strategy's variables, and their reductions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np

from ..arena.arena import ArenaAllocator
from ..arena.layout import Box, Grid, Part
from ..base.errors import LayoutError, explain
from ..base.options import LocalSteps
from ..base.types import Quality, VariableAggregation, VariableSynchronization
from ..comm.process_group import ProcessGroup
from ..cross_device.ops import CrossDeviceOps

__all__ = ["ORDINAL_STEP", "Description", "OptimizerMemory", "Placement", "Target"]

ORDINAL_STEP = 4096  # distance of the numbers of optimizers; counts below it do not overlap

Target = tuple[Any, int, int]  # a flat array, and this rank's range of its elements


@final
@dataclass(frozen=True)
class Description:
    """The fixed properties of a variable, the same on every rank."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[Any], Any] | None
    beside: int | None = None  # the index of a variable to place it with
    part: Part | None = None  # of a whole array; `shape` is then that of the part
    per_worker: bool = False  # each worker has its own copy

    @property
    def box(self) -> Box:
        """The variable in its whole array."""
        return Box(self.shape) if self.part is None else self.part.box


class OptimizerMemory(Protocol):
    """The slots and counts of a strategy's optimizers, and their numbers: next to arenas, or on servers.

    Optimizers are opaque here.

    Attributes:
        not_whole: why variables are not whole on each node, for errors; "" if they may be.
    """

    not_whole: str = ""

    # numbers

    def next_ordinal(self) -> int:
        """Return the ordinal of the next optimizer created in the strategy's scope."""

    def number_of(self, optimizer: Any) -> int | None:
        """Return the number of an optimizer among those created; None if it was created elsewhere."""

    def made(self) -> Sequence[Any]:
        """Return the existing optimizers that the program may apply to the variables."""

    def made_everywhere(self) -> Sequence[Any]:
        """Return the optimizers created in the scope, the same on every rank."""

    def numbers_made(self, names: Sequence[str], made: Sequence[int | None]) -> Sequence[int | None]:
        """Return the numbers, as `number_of`, of the optimizers of a file, from their names and numbers there."""

    def free_number(self, number: int | None, taken: set[int | None], least: int = 0) -> int:
        """Return, and take, the number in files of an optimizer that has none; `number` as `number_of`."""

    # steps and slots

    def make_step(self, optimizer: Any, variables: Sequence[Any], left_out: Sequence[Any]) -> Any:
        """Return an `optimizers.rule.UpdateRun` of an optimizer on variables; those left out have no gradient."""

    def iterations(self, optimizer: Any) -> int:
        """Return the number of steps of an optimizer, the largest of any rank. Collective."""

    def each_slots(self, optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the whole slots of each variable that has some, one variable at a time. Collective."""

    def slots_here(
        self, optimizer: Any, writers: Collection[int] | None, all_else: bool, each_node: bool
    ) -> Iterator[SlotsHere]:
        """Yield this rank's part of the slots of each variable. Collective. See `optimizer_states.Kept.slots_here`."""

    def read_slots(self, optimizer: Any, variable: Any) -> dict[str, Any]:
        """Return a variable's slots, on every rank; {} if it was never updated. Collective."""

    def write_slots(self, optimizer: Any, variable: Any, values: Mapping[str, Any]) -> None:
        """Overwrite this rank's part of a variable's slots. Call it on every rank. See `SlotStore.write`."""

    def forget_slots(self, optimizer: Any, variables: Collection[Any] | None) -> None:
        """Reset the slots of variables, None for all, to their start values. Call it on every rank."""


# A variable's name and shape, the dtype of its slots, and this rank's elements of each slot: the number of the first one
# and a flat array.
SlotsHere = tuple[str, tuple[int, ...], np.dtype, dict[str, list[tuple[int, Any]]]]


@final
@dataclass(eq=False)
class Placement:
    """The memory of one strategy's variables, and their reductions.

    Args:
        group: the ranks whose replicas step together.
        ops: the reductions of values of those replicas.
        arenas: the memory of variables.
        strategy: the strategy, as in the frames of `context`; opaque here.
        creators: the ranks that create variables together.
        make: allocates a variable, and returns it with this rank's targets for its initial value. Collective, inside a
            collective.
        devices: one for each local replica.
        distributed: False for strategies with one replica (the default, OneDeviceStrategy): writes in replica context are not
            aggregated.
        first_worker: the first of the creators that has replicas.
        is_worker: whether this rank has replicas.
        store: the servers' store; None if all replicas step together.
        partitioner: returns the number of shards of a variable, see `partitioners`; default: one.
        grid: the ranks over which each replica is divided; None if it is not.
        replica: the ranks of this rank's replica, if they are several; and their numbers among all ranks, if it may be divided.

    Attributes:
        variables: every `Variable`, in the order of creation, the same on every rank.
        sharded: each `ShardedVariable` made of them.
        made: the optimizers created in the strategy's scope, in that order. Other ranks may name them after this rank's program
            has dropped them.
        apart: variables that nodes have updated separately since the last outer step, with the rounds they wait for.
        told_apart: whether an error has reported that weights differ that should be equal.
        steps: the factory of steps and rounds for optimizers; opaque here.
        optimizers: the slots, counts and numbers of optimizers.
        lacking: the qualities that the strategy has not, and in words what takes each away: an argument of it, or a noun.
    """

    group: ProcessGroup
    ops: CrossDeviceOps
    arenas: ArenaAllocator
    strategy: Any
    creators: ProcessGroup
    make: Callable[[Placement, Description], tuple[Any, list[Target]]]
    devices: Sequence[str] = ("cpu:0",)
    distributed: bool = True
    first_worker: int = 0
    is_worker: bool = True
    store: Any = None
    partitioner: Callable[..., Sequence[int]] | None = None
    grid: Grid | None = None
    replica: ProcessGroup | None = None
    replica_ranks: Sequence[int] = ()
    variables: list[Any] = field(default_factory=list)
    sharded: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    apart: dict[Any, Any] = field(default_factory=dict)
    lacking: dict[Quality, str] = field(default_factory=dict)
    told_apart: bool = False
    steps: Any = None
    optimizers: OptimizerMemory = field(init=False)
    _names: dict[str, int] = field(default_factory=dict)

    @property
    def local_steps(self) -> LocalSteps | None:
        """The options of local steps; None without them, and on one node."""
        found = self.arenas.step.local_steps
        assert not isinstance(found, int)
        return found

    def note_optimizer(self, optimizer: Any) -> int:
        """Register an optimizer created in the scope, and return its number there."""
        self.made.append(optimizer)  # not a weak reference: ranks would lose it at different times
        return len(self.made) - 1

    def lacks(self, *needed: Quality) -> str:
        """Return in words what takes one of the qualities away; "" if the strategy has them."""
        return next((self.lacking[quality] for quality in needed if quality in self.lacking), "")

    def require(self, function: str, quality: Quality, why: str) -> None:
        """Raise LayoutError unless the strategy has a quality that a function needs, `why` in words."""
        if lacking := self.lacks(quality):
            expected, remedy = f"one with {quality.value}", f"Leave {lacking.partition('=')[0]} out: {why}"
            raise LayoutError(
                explain(function, "strategy", expected=expected, got=f"one with {lacking}", remedy=remedy)
            )

    def unique_name(self, name: str) -> str:
        """Return the name, with "_1", "_2", ... if it is used. All ranks call it in the same order."""
        candidate = name
        while candidate in self._names:
            candidate = f"{name}_{self._names[name]}"
            self._names[name] += 1
        self._names[candidate] = 1
        return candidate

    def close(self) -> None:
        """Close every variable and free their memory, before the group's `close`."""
        for whole in self.sharded:
            whole._close()
        for variable in self.variables:
            variable._close()
        self.made.clear()
        if self.steps is not None:
            self.steps.close()
        self.arenas.close()
