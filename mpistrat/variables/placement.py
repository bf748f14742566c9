"""Placement of variables: the memory of a strategy's variables, and their reductions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from ..arena.arena import ArenaAllocator
from ..arena.layout import Grid, Part
from ..base.errors import LayoutError, explain
from ..base.options import LocalSteps
from ..base.types import VariableAggregation, VariableSynchronization
from ..comm.process_group import ProcessGroup
from ..cross_device.ops import CrossDeviceOps

__all__ = ["ORDINAL_STEP", "Description", "Placement", "Store", "Target"]

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


class Store(ABC):
    """The memory of variables and optimizer state outside of arenas.

    Not all replicas step together there, and ranks use optimizers in different orders. So the store also numbers optimizers,
    equally on every rank. Optimizers are opaque here.

    Attributes:
        group: all ranks of the strategy, which create variables together.
        first_worker: the first of them that has replicas.
        with_first_worker: whether this rank's replicas step together with that one's.
        is_worker: whether this rank has replicas.
    """

    group: ProcessGroup
    first_worker: int
    with_first_worker: bool
    is_worker: bool

    @abstractmethod
    def make(self, placement: Placement, what: Description) -> tuple[Any, list[Target]]:
        """Return a new variable, and this rank's targets for its initial value. Collective, inside a collective."""

    @abstractmethod
    def make_step(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Return an `optimizers.rule.UpdateRun` of an optimizer on variables."""

    @abstractmethod
    def next_ordinal(self) -> int:
        """Return the ordinal of the next optimizer created in the strategy's scope."""

    @abstractmethod
    def number_of(self, optimizer: Any) -> int:
        """Return the number of an optimizer in files."""

    @abstractmethod
    def numbers_of_names(self, names: Sequence[str]) -> list[int]:
        """Return numbers for the optimizers of a file that has only their names."""

    @abstractmethod
    def made(self) -> list[Any]:
        """Return the optimizers that the program has created and may apply to the variables."""

    @abstractmethod
    def each_slots(self, optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the slots of each variable that an optimizer has updated. Collective."""

    @abstractmethod
    def keeps(self, variable: Any) -> bool:
        """Return True for a variable in the store, False if each replica has its own value."""

    @abstractmethod
    def value_here(self, variable: Any) -> Any:
        """Return a new array of a variable on this rank; None on other ranks."""

    @abstractmethod
    def slots_here(self, optimizer: Any, writers: Collection[int] | None, each_node: bool) -> Iterator[SlotsHere]:
        """Yield this rank's part of the slots of each variable. Collective. See `optimizer_states.Kept.slots_here`."""

    @abstractmethod
    def read_slots(self, optimizer: Any, variable: Any) -> dict[str, Any]:
        """Return new arrays with a variable's slots, on every rank. Collective."""

    @abstractmethod
    def write_slots(self, optimizer: Any, variable: Any, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots. Call it on every rank."""

    @abstractmethod
    def forget_slots(self, optimizer: Any, variables: Collection[Any] | None) -> None:
        """Drop the slots of variables on this rank; None for all. Call it on every rank."""

    @property
    @abstractmethod
    def early(self) -> list[Any]:
        """The optimizers created in the scope that have taken no step on any rank, agreed on by all ranks."""

    @abstractmethod
    def iterations(self, optimizer: Any) -> int:
        """Return the number of steps of an optimizer, the largest of any rank. Collective."""


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
        devices: one for each local replica.
        distributed: False for strategies with one replica (the default, OneDeviceStrategy): writes in replica context are not
            aggregated.
        store: the memory of variables and optimizer state, if not the arenas.
        partitioner: returns the number of shards of a variable, see `partitioners`; default: one.
        grid: the ranks over which each replica is divided; None if it is not.

    Attributes:
        variables: every `Variable`, in the order of creation, the same on every rank.
        sharded: each `ShardedVariable` made of them.
        made: the optimizers created in the strategy's scope, in that order.
        apart: variables that nodes have updated separately since the last outer step, with the rounds they wait for.
        told_apart: whether an error has reported that weights differ that should be equal.
        steps: the factory of steps and rounds for optimizers; opaque here.
        optimizers: those counted by the store. Other ranks may name them after this rank's program has dropped them.
    """

    group: ProcessGroup
    ops: CrossDeviceOps
    arenas: ArenaAllocator
    strategy: Any
    devices: Sequence[str] = ("cpu:0",)
    distributed: bool = True
    store: Store | None = None
    partitioner: Callable[..., Sequence[int]] | None = None
    grid: Grid | None = None
    variables: list[Any] = field(default_factory=list)
    sharded: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    apart: dict[Any, Any] = field(default_factory=dict)
    told_apart: bool = False
    steps: Any = None
    _names: dict[str, int] = field(default_factory=dict)

    @property
    def local_steps(self) -> LocalSteps | None:
        """The options of local steps; None without them, and on one node."""
        found = self.arenas.step.local_steps
        assert not isinstance(found, int)
        return found

    @property
    def creators(self) -> ProcessGroup:
        """The ranks that create variables together."""
        if self.store is not None:
            return self.store.group
        return self.group if self.grid is None else self.grid.world

    @property
    def first_worker(self) -> int:
        """The first of the creators that has replicas."""
        return 0 if self.store is None else self.store.first_worker

    @property
    def with_first_worker(self) -> bool:
        """True if this rank's replicas step together with the first worker's."""
        return self.store is None or self.store.with_first_worker

    def note_optimizer(self, optimizer: Any) -> int:
        """Register an optimizer created in the scope, and return its number there."""
        self.made.append(optimizer)  # not a weak reference: ranks would lose it at different times
        return len(self.made) - 1

    def require_kept_gradients(self, function: str) -> None:
        """Raise LayoutError if gradients are submitted early: framework adapters need gradients that stay."""
        if self.arenas.step.sharded_gradients:
            got, remedy = (
                "one with sharded_gradients=True",
                "Leave sharded_gradients out: gradients lie in the framework's arrays",
            )
            expected = "a strategy that keeps gradients until the step"
            raise LayoutError(explain(function, "strategy", expected=expected, got=got, remedy=remedy))

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
        self.optimizers.clear()
        self.made.clear()
        if self.steps is not None:
            self.steps.close()
        self.arenas.close()
