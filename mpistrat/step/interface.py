"""The parts of a training step, one for each question that a strategy or an option answers in its own way.

An arena is a flat array. Each element has one owner, which updates it; holders, which have gradients of it; and readers, which
need the new weight. A step asks:

- How does the owner get the sum? `Sums`
- How do the readers get the weights? `Publish`
- In which form do numbers travel between nodes? `arena.wire.Wire`
- How do ranks add up numbers, such as squares, of what each of them updates? `Norms`
- When do nodes meet? `NodeRounds`
- What must the ranks of one replica hold alike? `Replica`
- How much of an arena is summed and updated at a time? `StepEngine`

`table.py` lists which parts the strategies and options have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from ..arena.arena import Arena
from ..arena.pieces import Range
from ..arena.reduction import Consume, Gradients

if TYPE_CHECKING:
    from ..arena.wire import Unsent

__all__ = [
    "NodeRounds",
    "Norms",
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
    """How much of an arena a step works on at a time: blocks that fit a cache, or all at once where each call is a kernel.

    Attributes:
        block: elements of the scratch memory.
        update: elements that are summed and updated in one call where nothing needs scratch memory.
        keep: elements that are kept, or squared, in one call.
        squares: returns the sum of the squares of a flat array.
        on_device: whether sums of squares of what is kept, and scales by them, stay where it lies.
    """

    block: int
    update: int
    keep: int
    squares: Callable[[Any], float]
    on_device: bool = False


class Work(Protocol):
    """What a step does on one arena, as its `Sums` see it.

    Attributes:
        arena: the arena.
        ranges: its elements that the step updates, equal on all ranks.
    """

    @property
    def arena(self) -> Arena: ...

    @property
    def ranges(self) -> Sequence[Range]: ...

    @property
    def gradients(self) -> Gradients: ...

    @property
    def unsent(self) -> Unsent | None:
        """What earlier messages of sums lacked, where that is sent later."""
        ...

    def add_up(self, arrays: Sequence[Any], consume: Consume) -> None:
        """Hand out flat arrays in place of their sum: what consumes them adds them up in the same pass."""
        ...

    def keep_in(self, memory: Any) -> None:
        """Know that the sums lie in memory of their own, `memory[low:high]`, which passes may overwrite."""
        ...


class Starter:
    """What becomes of gradients that an optimizer's program announces before its step: here nothing.

    Attributes:
        able: False once it is known that no sum can start early; the same on every rank.
        early: whether sums start early in this step, or are tried to; the same on every rank.
    """

    able: bool = False
    early: bool = False

    def __init__(self, placement: Any) -> None:
        """Serve one optimizer, for the variables of a placement."""

    def start(self, begun: Any, variables: Sequence[Any], due: bool) -> None:
        """Start to sum the gradients of variables, which `begun` has noted. Collective; `due`: as in `Replica.compare`."""

    def check_unsummed(self) -> None:
        """Do nothing if a step may take gradients that are equal on all replicas already.

        Raises:
            ValueError: it may not.
        """

    def note_step(self, begun: bool) -> None:
        """Note the end of a step, and whether something was begun in it. Collective."""

    def forget(self, variables: Sequence[Any]) -> None:
        """Forget what was started, of these variables. Every rank does it."""


class Sums(ABC):
    """How the owner of a block gets the sum of what all holders have of it."""

    #: Whether an error in the middle leaves messages between nodes under way.
    sends_ahead: bool = False

    @abstractmethod
    def load(self, begun: Any, replicas: Sequence[Any], key: tuple[int, ...]) -> None:
        """Take the gradients of each local replica; `begun` has those that were announced.

        Raises:
            ValueError, TypeError: gradients that do not fit.
        """

    @abstractmethod
    def enter(self, call: Any) -> None:
        """Begin a step, which is the collective `call`, and wait for sums that were begun before. Collective, inside one."""

    @abstractmethod
    def hand_out(self, work: Work, consume: Consume) -> None:
        """Call consume(low, high, sum) for all that this rank owns, in order. Collective, inside one.

        All ranks of the node have arrived; none may write a gradient before the next barrier.
        """


class Publish:
    """How the readers of an arena get what steps make of the weights: here from memory that the ranks of a node share.

    It says what the rule updates, and takes the result.

    Attributes:
        block: how many elements the rule updates at a time at most; None for any number.
        exact: whether the weights in memory are those that are meant.
    """

    block: int | None = None
    exact: bool = True

    def __init__(self, arena: Arena, ranges: Sequence[Range], slots: Any) -> None:
        """Serve element ranges of an arena, of which an optimizer has slots on this rank."""
        self.arena, self.ranges = arena, ranges

    def begin(self) -> None:
        """Begin to exchange what a step makes of the weights. Collective over peers."""

    def target(self, low: int, high: int) -> Any:
        """Return the weights of elements [low, high), which the rule updates in place."""
        return self.arena.values[low:high]

    def commit(self, low: int, high: int, target: Any) -> None:
        """Take what the rule made of `target(low, high)`. Blocks come in ascending order."""

    def meant(self, low: int, high: int) -> Any:
        """Return the weights that are meant, of any number of elements, in the dtype of sums or the arena's."""
        return self.arena.values[low:high]

    def finish(self) -> None:
        """Wait until the weights of all ranks are here. Collective over peers."""

    def leave(self) -> None:
        """Leave what is under way after an error."""


class NodeRounds:
    """When nodes meet: in every step, after which all have the same weights.

    Attributes:
        factor: what the sum of gradients is multiplied by.
        alike: whether all nodes have the same weights after each step.
    """

    factor: float = 1.0
    alike: bool = True

    def __init__(self, placement: Any) -> None:
        """Serve one optimizer, for the variables of a placement."""

    def check(self, variables: Sequence[Any]) -> None:
        """Do nothing if this optimizer may update variables.

        Raises:
            ContextError: on every rank, if it may not.
        """

    def compares(self, due: bool) -> bool:
        """Return whether a step compares the weights of nodes, if a comparison is due."""
        return due

    def enter(self, variables: Sequence[Any]) -> None:
        """Act before a step that may change the weights of variables."""

    def end_update(self) -> None:
        """Act after an update. Collective."""


class Replica:
    """The ranks that hold one replica: a single one, which has all of it.

    Attributes:
        whole: whether each rank's sums are of whole variables.
    """

    whole: bool = True

    def __init__(self, placement: Any, variables: Sequence[Any]) -> None:
        """Serve the steps of some variables."""

    def compare(self, detail: str, words: str, due: bool) -> None:
        """Compare the step over the replica, and if that is due, what its ranks hold alike. Collective over the replica.

        Args:
            detail, words: what ranks that step together compare of the step.
            due: whether to compare gradients and weights.

        Raises:
            CollectiveMismatchError: on every rank of the replica, when they differ.
        """

    def total(self, squares: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of squares of whole variables, of those of this rank's parts, the same bits on each rank.

        Collective over the replica.
        """
        return dict(squares)

    def refuse(self, number: int) -> None:
        """Act where sums are not finite in step `number`, and none of this rank's peers has such a number.

        Raises:
            FloatingPointError: other ranks of the replica have.
        """


def of_the_program(step: Any) -> Any:
    """Return a step as it is: what the program computes is done when the step begins."""
    return step


class Norms(ABC):
    """How ranks add up numbers of what each of them updates."""

    @abstractmethod
    def totals(self, columns: Sequence[np.ndarray], arenas: Sequence[Arena]) -> list[np.ndarray]:
        """Return the sums over all ranks of float64 numbers of each arena, the same bits on every rank.

        Collective, inside one.
        """

    @abstractmethod
    def all_finite(self, finite: bool) -> bool:
        """Return whether sums are finite on all ranks that step together, by what this one found. Collective, inside one."""

    @abstractmethod
    def counted(self, arena: Arena) -> list[int]:
        """Return the ranks whose counts of an arena's elements, added up, are those of all its sums."""


@final
@dataclass(frozen=True)
class StepParts:
    """The parts of a strategy's steps.

    Attributes:
        sums: how owners get sums.
        no_sums: how they get gradients that are equal on all replicas already.
        new_norms: returns how ranks add up norms.
        publish: returns how the readers of an arena get weights, for its element ranges and slots.
        engine_of: returns how much is updated at a time, for the flat array of an arena's weights.
        replica_of: returns the ranks of a replica, for variables.
        own_gradients: whether the gradients of replicas stay in memory.
    """

    sums: Sums
    no_sums: Sums
    new_norms: Callable[[], Norms]
    publish: Callable[[Arena, Sequence[Range], Any], Publish]
    engine_of: Callable[[Any], StepEngine]
    replica_of: Callable[[Sequence[Any]], Replica]
    own_gradients: bool
