"""The optimizers of a strategy: their numbers in files, and restored states of optimizers not created yet."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ..base.errors import explain
from ..optimizers.slots import waiting_slots
from ..variables.placement import OptimizerMemory, SlotsHere

if TYPE_CHECKING:
    from ..variables import Placement

__all__ = ["Kept", "OptimizerStates"]


class _Restored(NamedTuple):
    """The restored state of an optimizer not created yet. `made` is the number of the optimizer that is created for it."""

    name: str
    state: dict[str, Any]
    made: int | None


@final
@dataclass(frozen=True)
class Kept:
    """The state of one optimizer in a file.

    Attributes:
        name: of the optimizer.
        made: its number in the scope of the program; None if made outside.
        optimizer: the optimizer; None if the program has not created it yet.
        state: the state before its first step; None afterwards.
        placement: of the strategy.
    """

    name: str
    made: int | None
    optimizer: Any
    state: Mapping[str, Any] | None
    placement: Placement

    def about(self) -> dict[str, Any]:
        """Return its numbers and settings for a file. Collective."""
        if self.state is None:
            one = self.optimizer
            iterations, settings = one._core.all_iterations(), one.get_settings()
        else:
            iterations, settings = self.state["iterations"], self.state.get("settings")
        about = {"name": self.name, "iterations": iterations, "made": self.made, "settings": settings}
        return {name: value for name, value in about.items() if value is not None}

    def start_of(self, slot: str) -> float:
        """Return the start value of a slot."""
        return 0.0 if self.optimizer is None else self.optimizer._core.slot_start.get(slot, 0.0)

    def slots_here(
        self, writers: Collection[int] | None, all_else: bool, each_node: bool = False
    ) -> Iterator[SlotsHere]:
        """Yield this rank's slots of each variable, each element on one rank. Collective.

        If replicas are divided over ranks, each rank yields all its elements of the variable, and `Writers` divides them.

        Args:
            writers: the ranks that write; None for all, which divide equal copies of nodes.
            all_else: whether this rank yields undivided values that all ranks have.
            each_node: whether the ranks of each node yield all.
        """
        waiting = None if self.state is None else self.state["slots"].items()
        if self.placement.grid is not None:
            for name, slots in self.optimizer._core.slots_of_parts() if waiting is None else waiting:
                yield from waiting_slots(None, name, slots, writers, True, each_node)
            return
        if waiting is None:
            yield from self.placement.optimizers.slots_here(self.optimizer, writers, all_else, each_node)
            return
        for name, slots in waiting:
            yield from waiting_slots(self.placement, name, slots, writers, all_else, each_node)


@final
class OptimizerStates:
    """The optimizers of a strategy, and the restored states of optimizers not created yet.

    A file lists optimizers in the order of their first steps, with the creation number of those created in the scope. These get
    their states on restore, the others at their first step. With parameter servers the number in files is the creation number.

    Attributes:
        registered: optimizers that were applied or restored, in that order, the same on every rank.
    """

    def __init__(self, placement: Placement) -> None:
        self.registered: list[Any] = []
        self._placement = placement
        self._lock = threading.RLock()  # a server's thread registers optimizers while its program restores them
        self._numbers: dict[int, int] = {}  # by id of the optimizer
        self._restored: dict[int, _Restored] = {}

    def register(self, optimizer: Any) -> None:
        """Register an optimizer, and give it its restored state.

        Raises:
            ValueError: that state belongs to another optimizer.
        """
        with self._lock:
            if any(known is optimizer for known in self.registered):
                return
            number = self._new_number(optimizer)
            waiting = self._restored.get(number)
            if waiting is not None and waiting.name != optimizer.name:
                expected = f"{waiting.name!r} as optimizer {number}, as in the file that was restored"
                raise ValueError(explain("Strategy.restore", "", expected=expected, got=repr(optimizer.name)))
            self.registered.append(optimizer)
            self._numbers[id(optimizer)] = number
            if waiting is not None:
                optimizer.set_state(waiting.state)
                del self._restored[number]

    def _new_number(self, optimizer: Any) -> int:
        own = (self._memory.number_of(optimizer), optimizer.name)
        for number, waiting in self._restored.items():
            if own[0] is not None and (waiting.made, waiting.name) == own:
                return number
        return self._memory.free_number(own[0], {*self._numbers.values()})

    @property
    def _memory(self) -> OptimizerMemory:
        return self._placement.optimizers

    def number_of(self, optimizer: Any) -> int:
        """Return the number in files of a registered optimizer."""
        return self._numbers[id(optimizer)]

    def kept(self) -> list[Kept]:
        """Return the states for files: of registered optimizers, not yet used restored ones, and those of the scope without a
        step.
        """
        placement, memory, found = self._placement, self._memory, dict[int, Kept]()
        for one in self.registered:
            found[self.number_of(one)] = Kept(one.name, memory.number_of(one), one, None, placement)
        for number, (name, state, made) in self._restored.items():
            found[number] = Kept(name, made, None, state, placement)
        waiting, taken = {(kept.made, kept.name) for kept in found.values()}, set[int | None](found)
        for one in self._new(memory.made_everywhere()):
            made = memory.number_of(one)
            number = memory.free_number(made, taken)
            if (made, one.name) not in waiting:
                found[number] = Kept(one.name, made, one, one._core.early_state(), placement)
        return [found[number] for number in sorted(found)]

    def _new(self, optimizers: Iterable[Any]) -> list[Any]:
        """Return those that are not registered, here or with another strategy."""
        known, strategy = set(map(id, self.registered)), self._placement.strategy
        return [one for one in optimizers if id(one) not in known and one._core.may_join(strategy)]

    def numbered(self, optimizers: Sequence[Mapping[str, Any]], begun: Collection[int]) -> dict[int, dict[str, Any]]:
        """Return the optimizers of a file that are restored, by their numbers here.

        Optimizers created in the scope are identified by that number, others by their order. One without a step is restored
        only into the optimizer created with its number.

        Args:
            optimizers: of the file; the result adds the `index` of each there, and the number of the optimizer that was
                `created` for it.
            begun: the indices of those that have slots.
        """
        memory, names = self._memory, [about["name"] for about in optimizers]
        made = memory.numbers_made(names, [about["made"] for about in optimizers])
        here = {memory.number_of(one): self.number_of(one) for one in self.registered}
        known = {(memory.number_of(one), one.name) for one in self._new(memory.made())}
        found = [None if number is None else here.get(number) for number in made]
        taken = {*found, *self._numbers.values()}
        for index, own in enumerate(zip(made, names, strict=True)):
            if found[index] is None and own in known:
                found[index] = memory.free_number(own[0], taken, index)
        numbered, taken = dict[int, dict[str, Any]](), set(found)
        for index, (about, created, number) in enumerate(zip(optimizers, made, found, strict=True)):
            early = created is not None and about["iterations"] == 0 and index not in begun
            if number is not None or not early:
                number = memory.free_number(created, taken) if number is None else number
                numbered[number] = {**about, "created": created, "index": index}
        return numbered

    def begin(self, numbered: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the state of optimizers except their slots, by number; it replaces restored states. Call it on all ranks.

        An optimizer not created yet gets its state when it is applied.
        """
        with self._lock:
            self._restored.clear()
            for number, about in numbered.items():
                optimizer = self.with_number(number)
                if optimizer is None:
                    state = {"iterations": about["iterations"], "settings": about["settings"], "slots": {}}
                    self._restored[number] = _Restored(about["name"], state, about["created"])
                else:
                    optimizer._core.set_counts(about["iterations"], about["settings"])

    def fill(self, number: int, slots: Mapping[str, Any], restarted: Collection[Any]) -> None:
        """Take slots of an optimizer after `begin`, by name of variable. Call it on all ranks.

        Args:
            number: of the optimizer.
            slots: whole arrays.
            restarted: variables of which the file has no slots.
        """
        with self._lock:
            optimizer = self.with_number(number)
            if optimizer is not None:
                optimizer._core.restart_slots(restarted)
                optimizer._core.fill_slots(slots)
            else:
                self._restored[number].state["slots"].update(slots)

    def with_number(self, number: int) -> Any:
        """Return the registered optimizer of a number in files; None if there is none."""
        return next((one for one in self.registered if self.number_of(one) == number), None)

    def taking(self, number: int, about: Mapping[str, Any]) -> Any:
        """Return the optimizer that takes the state of a number in a file; None if not created."""
        return self.with_number(number) or self._find(_Restored(about["name"], {}, about["created"]))

    def instead_of(self, about: Mapping[str, Any]) -> Any:
        """Return the optimizer created with the number of another one in a file; None if that may still be created."""
        new = self._new(self._memory.made())
        if about["made"] is None or any(one.name == about["name"] for one in new):
            return None
        return next((one for one in new if self._memory.number_of(one) == about["made"]), None)

    def give(self) -> None:
        """Give existing optimizers their restored states. Call it on all ranks."""
        with self._lock:
            strategy = self._placement.strategy
            for number in sorted(self._restored):
                optimizer = self._find(self._restored[number])
                if optimizer is not None:
                    optimizer._core.join(strategy)

    def drop_waiting(self) -> list[str]:
        """Drop restored states of optimizers not created, and return their names."""
        with self._lock:
            names = [waiting.name for waiting in self._restored.values()]
            self._restored.clear()
            return names

    def _find(self, waiting: _Restored) -> Any:
        """Return the existing optimizer that certainly gets a state; None if there is none."""
        new = [one for one in self._new(self._memory.made()) if one.name == waiting.name]
        if waiting.made is not None:
            found = (one for one in new if self._memory.number_of(one) == waiting.made)
        else:  # a file without these numbers: only a unique name identifies
            alike = [other for other in self._restored.values() if other.name == waiting.name]
            found = (one for one in new if len(new) == len(alike) == 1)
        return next(found, None)
