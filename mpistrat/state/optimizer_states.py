"""The optimizers of a strategy: their numbers in files, and restored states of optimizers not created yet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ..base.errors import explain
from ..optimizers.slots import waiting_slots
from ..variables.placement import SlotsHere

if TYPE_CHECKING:
    from ..variables import Placement

__all__ = ["Kept", "OptimizerStates"]


class _Restored(NamedTuple):
    """The restored state of an optimizer not created yet. `made` is its number in the scope of the program that saved it."""

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
            yield from self.optimizer._core.slots_here(writers, all_else, each_node)
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
        if self._placement.store is not None:
            return self._placement.store.number_of(optimizer)
        own = (optimizer._core.number_in(self._placement), optimizer.name)
        for number, waiting in self._restored.items():
            if own[0] is not None and (waiting.made, waiting.name) == own:
                return number
        taken = set(self._numbers.values())
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def number_of(self, optimizer: Any) -> int:
        """Return the number in files of a registered optimizer."""
        return self._numbers[id(optimizer)]

    def kept(self) -> list[Kept]:
        """Return the states for files: of registered optimizers, not yet used restored ones, and those of the scope without a
        step.
        """
        placement, store = self._placement, self._placement.store
        found = {}
        for one in self.registered:
            number = self.number_of(one)
            made = number if store else one._core.number_in(placement)
            found[number] = Kept(one.name, made, one, None, placement)
        for number, (name, state, made) in self._restored.items():
            found[number] = Kept(name, number if store else made, None, state, placement)
        free = (number for number in itertools.count() if number not in found)
        waiting = {(kept.made, kept.name) for kept in found.values()}
        for one in self._early():
            number, made = (store.number_of(one),) * 2 if store else (next(free), one._core.number_in(placement))
            if (made, one.name) not in waiting:
                found[number] = Kept(one.name, made, one, one._core.early_state(), placement)
        return [found[number] for number in sorted(found)]

    def _early(self) -> list[Any]:
        """Return the optimizers created in the scope that have taken no step, the same on every rank."""
        store, strategy = self._placement.store, self._placement.strategy
        if store is not None:
            return store.early
        known = set(map(id, self.registered))
        return [one for one in self._placement.made if id(one) not in known and one._core.may_join(strategy)]

    def numbers(self, optimizers: Sequence[Mapping[str, Any]], begun: Collection[int]) -> list[int | None]:
        """Return the number here of each optimizer of a file; None if it is not restored.

        Optimizers created in the scope are identified by that number, others by their order. One without a step is restored
        only into the optimizer created with its number.

        Args:
            optimizers: of the file.
            begun: the indices of those that have slots.
        """
        store, names = self._placement.store, [about["name"] for about in optimizers]
        made: list[int | None] = [about["made"] for about in optimizers]
        if store is not None:
            known = {(store.number_of(one), one.name) for one in store.made()}
            found: list[int | None] = [*(store.numbers_of_names(names) if None in made else made)]
        else:
            here = {one._core.number_in(self._placement): self.number_of(one) for one in self.registered}
            known = {(one._core.number_in(self._placement), one.name) for one in self._early()}
            found = [None if number is None else here.get(number) for number in made]
            taken = {*found, *self._numbers.values()}
            for index, own in enumerate(zip(made, names, strict=True)):
                if found[index] is None and own in known:
                    found[index] = _first_free(index, taken)
        numbers: list[int | None] = []
        taken = set(found)
        for index, (number, own) in enumerate(zip(found, zip(made, names, strict=True), strict=True)):
            early = own[0] is not None and optimizers[index]["iterations"] == 0 and index not in begun
            if early and (number is None or (store is not None and own not in known)):
                numbers.append(None)
            else:
                numbers.append(_first_free(0, taken) if number is None else number)
        return numbers

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
                    self._restored[number] = _Restored(about["name"], state, about["made"])
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
        return self.with_number(number) or self._find(number, _Restored(about["name"], {}, about["made"]))

    def instead_of(self, about: Mapping[str, Any]) -> Any:
        """Return the optimizer created with the number of another one in a file; None if that may still be created."""
        store, new = self._placement.store, list(self._made())
        if about["made"] is None or any(one.name == about["name"] for one in new):
            return None
        numbers = ((store.number_of(one) if store else one._core.number_in(self._placement), one) for one in new)
        return next((one for number, one in numbers if number == about["made"]), None)

    def give(self) -> None:
        """Give existing optimizers their restored states. Call it on all ranks."""
        with self._lock:
            strategy = self._placement.strategy
            for number in sorted(self._restored):
                optimizer = self._find(number, self._restored[number])
                if optimizer is not None:
                    optimizer._core.join(strategy)

    def drop_waiting(self) -> list[str]:
        """Drop restored states of optimizers not created, and return their names."""
        with self._lock:
            names = [waiting.name for waiting in self._restored.values()]
            self._restored.clear()
            return names

    def _find(self, number: int, waiting: _Restored) -> Any:
        """Return the existing optimizer that certainly gets a state; None if there is none."""
        new = [one for one in self._made() if one.name == waiting.name]
        store = self._placement.store
        if store is not None:
            found = (one for one in new if store.number_of(one) == number)
        elif waiting.made is not None:
            found = (one for one in new if one._core.number_in(self._placement) == waiting.made)
        else:  # a file without these numbers: only a unique name identifies
            alike = [other for other in self._restored.values() if other.name == waiting.name]
            found = (one for one in new if len(new) == len(alike) == 1)
        return next(found, None)

    def _made(self) -> Iterator[Any]:
        """Return the optimizers that exist and are not registered."""
        store, strategy = self._placement.store, self._placement.strategy
        made = self._placement.made if store is None else store.made()
        known = set(map(id, self.registered))
        return (one for one in made if id(one) not in known and one._core.may_join(strategy))


def _first_free(least: int, taken: set[int | None]) -> int:
    """Return the first free number, and take it."""
    found = next(number for number in itertools.count(least) if number not in taken)
    taken.add(found)
    return found
