"""The optimizers of a strategy: their numbers in files, and what was restored for them."""

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
    """The state of an optimizer that is not known yet. `made` is its number in the scope of the program that saved it."""

    name: str
    state: dict[str, Any]
    made: int | None


@final
@dataclass(frozen=True)
class Kept:
    """What a file holds of one optimizer.

    Attributes:
        name: of the optimizer.
        made: its number in the scope of the program; None where it was made outside.
        optimizer: the optimizer; None where the program has not made it yet.
        state: what waits for its first step; None where it has taken one.
        placement: of the strategy.
    """

    name: str
    made: int | None
    optimizer: Any
    state: Mapping[str, Any] | None
    placement: Placement

    def about(self) -> dict[str, Any]:
        """Return its numbers in a file. Collective."""
        if self.state is None:
            one = self.optimizer
            iterations, settings = one._core.all_iterations(), one.get_settings()
        else:
            iterations, settings = self.state["iterations"], self.state.get("settings")
        about = {"name": self.name, "iterations": iterations, "made": self.made, "settings": settings}
        return {name: value for name, value in about.items() if value is not None}

    def start_of(self, slot: str) -> float:
        """Return what a slot is where there is none."""
        return 0.0 if self.optimizer is None else self.optimizer._core.slot_start.get(slot, 0.0)

    def slots_here(
        self, writers: Collection[int] | None, all_else: bool, each_node: bool = False
    ) -> Iterator[SlotsHere]:
        """Yield for each variable this rank's part of its slots, each element on one rank. Collective.

        Where replicas are divided over ranks, each rank gives all that the variable has there: whoever writes it takes a share.

        Args:
            writers: the ranks that write; None for all, among whom nodes divide what they have alike.
            all_else: whether this rank gives what all ranks have alike.
            each_node: whether the ranks of each node give all.
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
    """Knows the optimizers of a strategy, and what waits for those that are yet to be made.

    A file lists optimizers in the order of their first steps, and says of those that were made in the scope which one
    each was: these get their states when they are restored, the others at their first step. With parameter servers the number
    in files is the one by which the program makes them.

    Attributes:
        registered: those that were applied or restored, in that order, the same on every rank.
    """

    def __init__(self, placement: Placement) -> None:
        self.registered: list[Any] = []
        self._placement = placement
        self._lock = threading.RLock()  # a server's thread registers optimizers while its program restores them
        self._numbers: dict[int, int] = {}  # by id of the optimizer
        self._restored: dict[int, _Restored] = {}

    def register(self, optimizer: Any) -> None:
        """Note an optimizer, and give it what was restored for it.

        Raises:
            ValueError: that belongs to another optimizer.
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
        """Return the number by which files know an optimizer that was registered."""
        return self._numbers[id(optimizer)]

    def kept(self) -> list[Kept]:
        """Return what files hold of each optimizer: registered ones, states that wait, and early ones of the scope."""
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
        """The optimizers that were made in the scope and have taken no step, the same on every rank."""
        store, strategy = self._placement.store, self._placement.strategy
        if store is not None:
            return store.early
        known = set(map(id, self.registered))
        return [one for one in self._placement.made if id(one) not in known and one._core.may_join(strategy)]

    def numbers(self, optimizers: Sequence[Mapping[str, Any]], begun: Collection[int]) -> list[int | None]:
        """Return the number by which this strategy knows each optimizer of a file; None for one that is not taken.

        One that was made in the scope is known by its number there, others by their order. One that had taken no step is only
        taken by the optimizer that was made as that number.

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
        """Take what a file has of optimizers by number, but for their slots; it replaces what was restored before.

        One that is not known yet gets its state when it is applied. Done by all ranks alike.
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
        """Take slots of an optimizer that `begin` was called for, by name of variable. Done by all ranks alike.

        Args:
            number: of the optimizer.
            slots: whole.
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
        """Return the registered optimizer that files know by a number; None where there is none."""
        return next((one for one in self.registered if self.number_of(one) == number), None)

    def taking(self, number: int, about: Mapping[str, Any]) -> Any:
        """Return the optimizer that takes what a file has under a number; None where the program has not made it."""
        return self.with_number(number) or self._find(number, _Restored(about["name"], {}, about["made"]))

    def instead_of(self, about: Mapping[str, Any]) -> Any:
        """Return what the program has made in the place of an optimizer of a file; None if that may be made yet."""
        store, new = self._placement.store, list(self._made())
        if about["made"] is None or any(one.name == about["name"] for one in new):
            return None
        numbers = ((store.number_of(one) if store else one._core.number_in(self._placement), one) for one in new)
        return next((one for number, one in numbers if number == about["made"]), None)

    def give(self) -> None:
        """Give those that the program has made already what was restored for them. Done by all ranks alike."""
        with self._lock:
            strategy = self._placement.strategy
            for number in sorted(self._restored):
                optimizer = self._find(number, self._restored[number])
                if optimizer is not None:
                    optimizer._core.join(strategy)

    def drop_waiting(self) -> list[str]:
        """Forget what was restored for optimizers that the program has not made, and return their names."""
        with self._lock:
            names = [waiting.name for waiting in self._restored.values()]
            self._restored.clear()
            return names

    def _find(self, number: int, waiting: _Restored) -> Any:
        """The optimizer that will get a state for certain, if it was made."""
        new = [one for one in self._made() if one.name == waiting.name]
        store = self._placement.store
        if store is not None:
            found = (one for one in new if store.number_of(one) == number)
        elif waiting.made is not None:
            found = (one for one in new if one._core.number_in(self._placement) == waiting.made)
        else:  # a file without these numbers: only a name that is there once identifies
            alike = [other for other in self._restored.values() if other.name == waiting.name]
            found = (one for one in new if len(new) == len(alike) == 1)
        return next(found, None)

    def _made(self) -> Iterator[Any]:
        """The optimizers that were made, and not registered."""
        store, strategy = self._placement.store, self._placement.strategy
        made = self._placement.made if store is None else store.made()
        known = set(map(id, self.registered))
        return (one for one in made if id(one) not in known and one._core.may_join(strategy))


def _first_free(least: int, taken: set[int | None]) -> int:
    """Return the first number that is not taken, and take it."""
    found = next(number for number in itertools.count(least) if number not in taken)
    taken.add(found)
    return found
