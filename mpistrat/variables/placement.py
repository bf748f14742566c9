"""Placement of variables: where a strategy keeps them, and through what they are aggregated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.arena import ArenaAllocator
from ..arena.layout import Grid, Part
from ..base.errors import LayoutError, explain
from ..base.options import LocalSteps
from ..base.types import VariableAggregation, VariableSynchronization
from ..comm.process_group import ProcessGroup
from ..cross_device.ops import CrossDeviceOps

if TYPE_CHECKING:
    from ..arena.buckets import BucketSums

__all__ = ["ORDINAL_STEP", "Description", "Placement", "Store", "Target"]

ORDINAL_STEP = 4096  # between the numbers of optimizers that are counted together; so many counts don't overlap

Target = tuple[Any, int, int]  # a flat array, and the range of its elements that this rank stores


@final
@dataclass(frozen=True)
class Description:
    """What is fixed about a variable when it is made, the same on every rank."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[Any], Any] | None
    beside: int | None = None  # the index of the variable that it is placed with
    part: Part | None = None  # of a whole array, whose shape then is that of the part
    per_worker: bool = False  # each worker has a copy of its own


class Store(ABC):
    """What keeps the variables of a strategy elsewhere than in arenas, with what optimizers keep beside them.

    There not all replicas step together, and ranks use optimizers in different orders. So the store also gives optimizers
    their numbers, the same on every rank. Optimizers are opaque here.

    Attributes:
        group: all ranks of the strategy, which make variables together.
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
        """Return a new variable, and where this rank stores its initial value. Collective, inside a collective."""

    @abstractmethod
    def make_step(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Return an `optimizers.rule.UpdateRun` of an optimizer on variables."""

    @abstractmethod
    def next_ordinal(self) -> int:
        """Return the ordinal of the next optimizer that is made in the strategy's scope."""

    @abstractmethod
    def number_of(self, optimizer: Any) -> int:
        """Return the number by which files know an optimizer."""

    @abstractmethod
    def numbers_of_names(self, names: Sequence[str]) -> list[int]:
        """Return numbers for optimizers of a file that has only their names."""

    @abstractmethod
    def made(self) -> list[Any]:
        """Return the optimizers that the program has made and may apply to the variables."""

    @abstractmethod
    def each_slots(self, optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the slots of each variable that an optimizer has updated. Collective."""

    @abstractmethod
    def keeps(self, variable: Any) -> bool:
        """Return whether it keeps a variable, not each replica a value of its own."""

    @abstractmethod
    def value_here(self, variable: Any) -> Any:
        """Return a new array of a variable that lies on this rank; None on others."""

    @abstractmethod
    def slots_here(self, optimizer: Any, writers: Collection[int] | None, each_node: bool) -> Iterator[SlotsHere]:
        """Yield this rank's part of the slots of each variable. Collective. See `optimizer_states.Kept.slots_here`."""

    @abstractmethod
    def read_slots(self, optimizer: Any, variable: Any) -> dict[str, Any]:
        """Return new arrays with a variable's slots, on every rank. Collective."""

    @abstractmethod
    def write_slots(self, optimizer: Any, variable: Any, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots. Every rank must do it."""

    @abstractmethod
    def forget_slots(self, optimizer: Any, variables: Collection[Any] | None) -> None:
        """Forget the slots of variables that lie on this rank, None for all. Every rank must do it."""

    @property
    @abstractmethod
    def early(self) -> list[Any]:
        """The optimizers that were made in the scope and have taken no step on any rank, as all ranks have agreed."""

    @abstractmethod
    def iterations(self, optimizer: Any) -> int:
        """Return how many steps were taken with an optimizer, the largest number of any rank. Collective."""


# A variable's name and shape, the dtype of its slots, and of each slot the elements that are here: the first one's number
# and a flat array.
SlotsHere = tuple[str, tuple[int, ...], np.dtype, dict[str, list[tuple[int, Any]]]]


@final
@dataclass(eq=False)
class Placement:
    """Where the variables of one strategy live, and through what they are aggregated.

    Args:
        group: the ranks whose replicas step together.
        ops: how values of those replicas are reduced.
        arenas: where variables get their memory.
        strategy: the strategy, as the frames of `context` name it; opaque here.
        devices: one for each local replica.
        distributed: False for a strategy that has one replica by its nature (the default, OneDeviceStrategy): there a
            write in replica context needs no aggregation, and writes what it was given.
        store: what keeps variables, and what optimizers keep of them, where that is not the arenas.
        local_steps: how nodes train by themselves; None where they do not, and on one node.
        partitioner: returns into how many shards a variable is cut, see `partitioners`; default: none is cut.
        grid: the ranks over which each replica is divided; None where it is not.
        buckets: what sums gradients that are handed over; None where they stay.

    Attributes:
        variables: every `Variable`, in the order of creation, the same on every rank.
        sharded: each `ShardedVariable` that several of them are together.
        made: the optimizers that were made in the strategy's scope, in that order.
        apart: the variables that nodes have updated by themselves since the last outer step, and whose outer step they wait for.
        told_apart: whether an error has said that weights which should be equal differ.
        steps: what makes steps and rounds for optimizers; opaque here.
        optimizers: those counted by the store. Others may name them when this rank's program no longer holds them.
    """

    group: ProcessGroup
    ops: CrossDeviceOps
    arenas: ArenaAllocator
    strategy: Any
    devices: Sequence[str] = ("cpu:0",)
    distributed: bool = True
    store: Store | None = None
    local_steps: LocalSteps | None = None
    partitioner: Callable[..., Sequence[int]] | None = None
    grid: Grid | None = None
    buckets: BucketSums | None = None
    variables: list[Any] = field(default_factory=list)
    sharded: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    apart: dict[Any, Any] = field(default_factory=dict)
    told_apart: bool = False
    steps: Any = None
    _names: dict[str, int] = field(default_factory=dict)

    @property
    def creators(self) -> ProcessGroup:
        """The ranks that make variables together."""
        if self.store is not None:
            return self.store.group
        return self.group if self.grid is None else self.grid.world

    @property
    def first_worker(self) -> int:
        """The first of the creators that has replicas."""
        return 0 if self.store is None else self.store.first_worker

    @property
    def with_first_worker(self) -> bool:
        """Whether this rank's replicas step together with the first worker's."""
        return self.store is None or self.store.with_first_worker

    def note_optimizer(self, optimizer: Any) -> int:
        """Note an optimizer that is made in the scope, and return its number there."""
        self.made.append(optimizer)  # not by a weak reference: ranks would lose it at different times
        return len(self.made) - 1

    def require_kept_gradients(self, function: str) -> None:
        """Do nothing where variables keep their gradients, as what adapts a framework needs it.

        Raises:
            LayoutError: they are handed over.
        """
        if self.buckets is not None:
            got, remedy = (
                "one with sharded_gradients=True",
                "Leave sharded_gradients out: gradients lie in the framework's arrays",
            )
            expected = "a strategy that keeps gradients until the step"
            raise LayoutError(explain(function, "strategy", expected=expected, got=got, remedy=remedy))

    def unique_name(self, name: str) -> str:
        """Return the name, with "_1", "_2", ... where it was given before. All ranks call it alike."""
        candidate = name
        while candidate in self._names:
            candidate = f"{name}_{self._names[name]}"
            self._names[name] += 1
        self._names[candidate] = 1
        return candidate

    def close(self) -> None:
        """Close every variable and free their memory. Comes before the group's `close`."""
        for whole in self.sharded:
            whole._close()
        for variable in self.variables:
            variable._close()
        self.optimizers.clear()
        self.made.clear()
        if self.buckets is not None:
            self.buckets.close()
        self.arenas.close()
