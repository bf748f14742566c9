"""What a strategy hands to its variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from ..comm.process_group import ProcessGroup
from ..cross_device.ops import CrossDeviceOps
from .arena import ArenaAllocator

if TYPE_CHECKING:
    from .sharded import ShardedVariable
    from .variable import Description, Variable

__all__ = ["ORDINAL_STEP", "Placement", "Target"]

ORDINAL_STEP = 4096  # between the numbers of optimizers that are counted together; so many counts don't meet

Target = tuple[Any, int, int]  # a flat array, and the range of its elements that this rank stores
Make = Callable[["Placement", "Description"], tuple["Variable", list[Target]]]


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
        world: all ranks of the strategy, where not all replicas step together.
        make: returns a variable and where this rank stores its initial value; collective over `creators`, inside a
            collective. Default: in the arenas.
        make_step: takes an optimizer and variables, and returns an `optimizers.rule.UpdateRun`; default a `FusedStep`.
        ordinals: counts the optimizers that are made in the strategy's scope, where the ranks must have one name for each.
        numbers: knows the numbers of optimizers in files, where ranks meet optimizers in different orders: `of(optimizer)`,
            and `named(names)`, for files that have none.
        slots: reads and writes what optimizers keep, where that is not beside the arenas.
        first_worker: the first of the ranks of `world` that have replicas; its copies of ON_READ variables are saved.
        partitioner: says into how many shards a variable is cut, see `partitioners`; default: none is cut.

    Attributes:
        variables: all of them, in the order of creation, the same on every rank.
        sharded: those that several of the variables are together.
        made: the optimizers that were made in the strategy's scope, in that order.
        optimizers: those counted by `ordinals`. Others may name them when this rank's program has let go of them.
    """

    group: ProcessGroup
    ops: CrossDeviceOps
    arenas: ArenaAllocator
    strategy: Any
    devices: Sequence[str] = ("cpu:0",)
    distributed: bool = True
    world: ProcessGroup | None = None
    make: Make | None = None
    make_step: Callable[..., Any] | None = None
    ordinals: Iterator[int] | None = None
    numbers: Any = None
    slots: Any = None
    first_worker: int = 0
    partitioner: Callable[..., Sequence[int]] | None = None
    variables: list[Variable] = field(default_factory=list)
    sharded: list[ShardedVariable] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    made: list[weakref.ref[Any]] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)

    @property
    def creators(self) -> ProcessGroup:
        """The ranks that make variables together."""
        return self.world or self.group

    def note_optimizer(self, optimizer: Any) -> int:
        """Note an optimizer that is made in the scope, and return its number there."""
        self.made.append(weakref.ref(optimizer))
        return len(self.made) - 1

    def unique_name(self, name: str) -> str:
        """Return the name, with "_1", "_2", ... where it was given before. All ranks call it alike."""
        candidate = name
        while candidate in self._names:
            candidate = f"{name}_{self._names[name]}"
            self._names[name] += 1
        self._names[candidate] = 1
        return candidate

    def close(self) -> None:
        """Close every variable and let go of their memory. Comes before the group's `close`."""
        for whole in self.sharded:
            whole.close()
        for variable in self.variables:
            variable.close()
        self.optimizers.clear()
        self.arenas.close()
