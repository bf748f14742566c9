"""The parts of a training step that strategies and options implement.

An arena is a flat array. Each element has one owner, which updates it; holders, which have gradients of it; and readers, which
need the new weight.

- `Sums`: how the owner gets the sum
- `Publish`: how the readers get the weights
- `arena.pieces.NodeForm`: the form of numbers between nodes
- `Norms`: sums over ranks, such as of squares of their elements
- `NodeRounds`: when nodes meet
- `Replica`: the values that the ranks of one replica share
- `StepEngine`: the elements summed and updated at a time

`table.py` lists the parts of each strategy and option.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from ..arena.arena import Arena
from ..arena.pieces import Range
from ..arena.reduction import Consume, Gradients
from ..base.devices import parse
from ..base.errors import CollectiveMismatchError, DeviceError, explain
from ..base.options import StepOptions
from ..optimizers.begun import elsewhere
from ..optimizers.gradients import in_place

__all__ = [
    "NodeRounds",
    "Norms",
    "OptionCheck",
    "Publish",
    "Range",
    "Replica",
    "Starter",
    "StepEngine",
    "StepParts",
    "Sums",
    "Work",
    "of_the_program",
]


@final
@dataclass(frozen=True)
class StepEngine:
    """The elements a step works on at a time: blocks that fit a cache, or everything if each call is a kernel.

    Attributes:
        block: elements of the scratch memory.
        update: elements summed and updated in one call, if no scratch memory is needed.
        keep: elements kept, or squared, in one call.
        squares: returns the sum of the squares of a flat array.
        on_device: whether sums of squares, and scales by them, stay on the GPU.
    """

    block: int
    update: int
    keep: int
    squares: Callable[[Any], float]
    on_device: bool = False


class Work(Protocol):
    """The step on one arena, as its `Sums` see it.

    Attributes:
        arena: the arena.
        ranges: the elements that the step updates, equal on all ranks.
    """

    @property
    def arena(self) -> Arena: ...

    @property
    def ranges(self) -> Sequence[Range]: ...

    @property
    def gradients(self) -> Gradients: ...

    def add_up(self, arrays: Sequence[Any], consume: Consume) -> None:
        """Pass flat arrays in place of their sum: `consume` adds them up in the same pass."""
        ...

    def keep_in(self, memory: Any) -> None:
        """Use `memory[low:high]` as the sums; passes may overwrite it."""
        ...


@final
@dataclass(frozen=True)
class OptionCheck:
    """A new strategy, as the checks of its options see it.

    Attributes:
        function: the strategy's name in errors.
        step: the options.
        all_nodes, nodes: the nodes of all ranks, and of those that step together.
        devices: of this rank.
        algorithm, sums_pieces: the class of the reductions, and whether it can sum what nodes divide.
        ordered: whether sums are in the order of `replicas`.
    """

    function: str
    step: StepOptions
    all_nodes: int
    nodes: int
    rank: int
    devices: Sequence[str]
    algorithm: str
    sums_pieces: bool
    ordered: bool

    def require_cpus(self, option: str, remedy: str = "") -> None:
        """Raise DeviceError if this rank has GPUs."""
        if any(parse(device)[0] != "cpu" for device in self.devices):
            expected, got = "variables on CPUs", f"devices {', '.join(self.devices)}"
            raise DeviceError(explain(self.function, option, expected=expected, got=got, remedy=remedy, rank=self.rank))


class Starter:
    """The handling of gradients that the program announces before the step. This one does nothing.

    Attributes:
        able: False once no sum can start early; the same on every rank.
        early: whether sums start early in this step, or on trial; the same on every rank.
        least_bytes: of gradients that start together; fewer wait for the step.
    """

    able: bool = False
    early: bool = False
    least_bytes: int = 0

    def __init__(self, placement: Any) -> None:
        """Create the starter of one optimizer, for the variables of a placement."""

    def start(self, variables: Sequence[Any], due: bool) -> None:
        """Start to sum the gradients of announced variables. Collective; `due`: as in `Replica.compare`."""

    def kept(self, variables: Sequence[Any]) -> Sequence[Any]:
        """Return the variables whose gradients stay in memory until the step."""
        return variables

    def require(self, variable: Any, replica: int, gradient: Any) -> None:
        """Raise ValueError unless a gradient is the one that was announced of a local replica."""
        if not in_place(gradient, variable.gradient(replica)):
            raise elsewhere(variable.name)

    def check_unsummed(self) -> None:
        """Raise ValueError unless a step may take gradients that are already equal on all replicas."""

    def note_step(self) -> None:
        """Record the end of a step. Collective."""

    def forget(self, variables: Sequence[Any]) -> None:
        """Drop the started sums of these variables. Call it on every rank."""


class Sums(ABC):
    """The sums of all holders' gradients, for the owner of each block."""

    #: Whether an error leaves messages between nodes in flight.
    sends_ahead: bool = False

    @abstractmethod
    def load(self, core: Any, replicas: Sequence[Any], key: tuple[int, ...]) -> None:
        """Take the gradients of each local replica, for a step of the optimizer with a core.

        Raises:
            ValueError, TypeError: gradients that do not fit.
        """

    @abstractmethod
    def enter(self, call: Any) -> None:
        """Enter a step, which is the collective `call`, and wait for sums started before. Collective, inside one."""

    def close(self) -> None:  # noqa: B027
        """Free memory, before the arenas are closed."""

    @abstractmethod
    def hand_out(self, work: Work, consume: Consume) -> None:
        """Call consume(low, high, sum) for all elements that this rank owns, in order. Collective, inside one.

        All ranks of the node have arrived; no rank may write a gradient before the next barrier.
        """


class Publish:
    """The publishing of new weights to an arena's readers. This one uses memory that the ranks of a node share.

    It returns the memory that the rule updates, and takes the result.

    Attributes:
        block: the largest number of elements per update; None for any.
        exact: whether the weights in memory are exact, without error feedback.
    """

    block: int | None = None
    exact: bool = True

    def __init__(self, arena: Arena, ranges: Sequence[Range], slots: Any) -> None:
        """Serve element ranges of an arena, for an optimizer's slots on this rank."""
        self.arena, self.ranges = arena, ranges

    def begin(self) -> None:
        """Start the exchange of a step's new weights. Collective over peers."""

    def target(self, low: int, high: int) -> Any:
        """Return the weights of elements [low, high), which the rule updates in place."""
        return self.arena.values[low:high]

    def commit(self, low: int, high: int, target: Any) -> None:
        """Take the updated `target(low, high)`. Blocks come in ascending order."""

    def meant(self, low: int, high: int) -> Any:
        """Return the exact weights of any number of elements, in the dtype of sums or the arena's."""
        return self.arena.values[low:high]

    def finish(self) -> None:
        """Wait for the weights of all ranks. Collective over peers."""

    def leave(self) -> None:
        """Cancel exchanges after an error."""


class NodeRounds:
    """The steps in which nodes meet: all of them, so all nodes have equal weights.

    Attributes:
        factor: multiplies the sum of gradients.
        alike: whether all nodes have equal weights after each step.
        slot_names: the slots that it adds to those of each variable in files.
    """

    factor: float = 1.0
    alike: bool = True
    slot_names: tuple[str, ...] = ()

    def __init__(self, placement: Any) -> None:
        """Create the rounds of one optimizer, for the variables of a placement."""

    def check(self, variables: Sequence[Any]) -> None:
        """Raise ContextError, on every rank, if this optimizer may not update the variables."""

    def compares(self, due: bool) -> bool:
        """Return whether a step compares the weights of nodes, given that a comparison is due."""
        return due

    def enter(self, variables: Sequence[Any]) -> None:
        """Prepare a step that may change the weights of variables."""

    def end_update(self) -> None:
        """Count an update. Collective."""

    def end(self) -> None:
        """End the round now, if one has started, so that all nodes have equal weights. Collective."""

    def reset(self) -> None:
        """Reset the slots that it adds."""

    def load(self, variable: Any, arena: Arena, slots: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take its own slots of a variable, and return the others."""
        return slots

    def slots_here(self, variable: Any, arena: Arena, *rest: Any) -> dict[str, list[tuple[int, Any]]] | None:
        """Return this rank's part of a variable's slots if nodes have different ones, else None. Collective."""


class Replica:
    """The ranks of one replica. This one is a single rank with the whole replica.

    Attributes:
        whole: whether each rank's sums are of whole variables.
    """

    whole: bool = True

    def __init__(self, placement: Any, variables: Sequence[Any]) -> None:
        """Create the replica for steps of some variables."""

    def compare(self, detail: str, words: str, due: bool) -> None:
        """Compare the step over the replica, and if due, the values its ranks share. Collective over the replica.

        Args:
            detail, words: descriptions of the step that its ranks compare.
            due: whether to compare gradients and weights.

        Raises:
            CollectiveMismatchError: on every rank of the replica: they differ.
        """

    def different(self, function: str) -> CollectiveMismatchError | None:
        """Return the error of shared values that differ; None if they are equal. Collective over the replica."""
        return None

    def total(self, squares: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of squares of whole variables from those of this rank's parts, the same bits on each rank.

        Collective over the replica.
        """
        return dict(squares)

    def refuse(self, number: int) -> None:
        """Raise FloatingPointError if only other ranks of the replica have the numbers that are not finite in step `number`."""


def of_the_program(step: Any) -> Any:
    """Return a step unchanged: the program's computation is done when the step starts."""
    return step


class Norms(ABC):
    """Sums over ranks of numbers of their elements."""

    @abstractmethod
    def totals(self, columns: Sequence[np.ndarray], arenas: Sequence[Arena]) -> list[np.ndarray]:
        """Return the sums over all ranks of float64 numbers of each arena, the same bits on every rank.

        Collective, inside one.
        """

    @abstractmethod
    def all_finite(self, finite: bool) -> bool:
        """Return whether sums are finite on all ranks that step together. Collective, inside one."""

    @abstractmethod
    def counted(self, arena: Arena) -> list[int]:
        """Return the ranks whose counts of an arena's elements add up to those of all its sums."""


@final
@dataclass(frozen=True)
class StepParts:
    """The parts of a strategy's steps.

    Attributes:
        sums: the sums for owners.
        no_sums: the same for gradients that are already equal on all replicas.
        new_norms: returns the norms.
        publish: returns the publishing of an arena, for its element ranges and slots.
        engine_of: returns the engine for the flat array of an arena's weights.
        replica_of: returns the ranks of a replica, for variables.
    """

    sums: Sums
    no_sums: Sums
    new_norms: Callable[[], Norms]
    publish: Callable[[Arena, Sequence[Range], Any], Publish]
    engine_of: Callable[[Any], StepEngine]
    replica_of: Callable[[Sequence[Any]], Replica]
