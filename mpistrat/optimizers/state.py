"""What an optimizer keeps between steps, as files have it: the number of steps, settings, and slots."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arena.layout import Receiver
from ..arena.values import checksum
from ..base import log
from ..base.errors import explain
from ..comm.arrays import accumulation_dtype, as_array, to_host
from ..variables.placement import SlotsHere, Store
from ..variables.sharded import ShardedVariable
from ..variables.variable import Variable
from .hyperparameters import AVERAGE
from .rule import Rule
from .settings import as_attribute, changed, check_groups, saved_settings
from .slots import SlotStore, whole_slots

__all__ = ["StatefulRule"]


class StatefulRule(Rule):
    """A rule with the state of an `Optimizer`: what it keeps of which variables, and how files write and read that."""

    name: str
    _slots: SlotStore
    _variables: list[Variable]
    _strategy: Any
    _made_in: Store | None
    _slots_words: str

    @property
    def pending_slots(self) -> dict[str, dict[str, Any]]:
        """Slots of `set_state` for variables that were not updated since, by name of variable."""
        return self._slots.pending

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that were updated or restored so far, in that order."""
        return tuple(self._variables)

    def join(self, strategy: Any) -> None:
        """Serve the variables of a strategy from now on; strategies and the first step do it.

        Raises:
            ValueError: it serves another strategy.
        """
        if self._strategy is None:
            strategy.extended.register_optimizer(self)
            self._strategy = strategy
            self._slots.join(strategy.extended.placement)
        elif strategy is not self._strategy:
            expected, got = "the strategy of the earlier steps", "another one"
            remedy = "Make an optimizer for each strategy"
            raise ValueError(explain("apply_gradients", self.name, expected=expected, got=got, remedy=remedy))

    def may_join(self, strategy: Any) -> bool:
        """Return whether it serves no other strategy."""
        return self._strategy is None or self._strategy is strategy

    def finalize_variable_values(self, var_list: Iterable[Variable | ShardedVariable]) -> None:
        """Overwrite variables with the averages of their weights, at the end of training with `use_ema`. Collective.

        Variables that were never updated stay as they are.

        Raises:
            ValueError: the optimizer keeps no averages.
        """
        if not self.use_ema:
            expected, got = "an optimizer with use_ema=True", "one without"
            raise ValueError(explain("Optimizer.finalize_variable_values", self.name, expected=expected, got=got))
        for variable in var_list:
            average = self.slots(variable).get(AVERAGE)
            if average is not None:
                part = None if isinstance(variable, ShardedVariable) else variable.part
                variable.assign((average if part is None else part.cut(average)).astype(variable.dtype))

    def slots(self, variable: Variable | ShardedVariable) -> dict[str, np.ndarray]:
        """Return new arrays with a variable's slots, whole, on the host; {} if it was never updated. Collective.

        After `restore` they are those of the file, also before the first step. Slots of 16-bit variables are float32. A
        ShardedVariable has slots when one of its parts has; those of other parts are as before their first update. Slots of a
        variable that is divided by a layout are whole, too.
        """
        if isinstance(variable, ShardedVariable):
            parts = [(part, self.slots(part)) for part in variable.variables]
            names = self.slot_names if any(slots for _, slots in parts) else ()
            return {name: np.concatenate([self._part_of(part, slots, name) for part, slots in parts]) for name in names}
        if variable.placement.store is None and not any(variable is known for known in self._variables):
            waiting = self._slots.pending.get(variable.name, {}) if self.may_join(variable.placement.strategy) else {}
            known = {name: np.array(array) for name, array in waiting.items() if name in self.slot_names}
            return whole_slots(variable.part, known)
        return whole_slots(variable.part, self._slots.read(variable))

    def _part_of(self, part: Variable, slots: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        """Return a slot of a part of a ShardedVariable; its start, where the part was never updated."""
        if slots:
            return slots[name]
        return np.full(part.shape, self.slot_start.get(name, 0.0), accumulation_dtype(part.dtype))

    def set_slots(self, variable: Variable | ShardedVariable, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots; each rank takes its part. Every rank must do it.

        Args:
            variable: of the strategy that this optimizer serves.
            values: arrays of the variable's shape, or of the whole's if it has a layout; one for each of `slot_names`.

        Raises:
            ValueError: names or shapes do not fit; the optimizer serves another strategy.
        """
        if isinstance(variable, ShardedVariable):
            cut = {name: variable.cut(value, "Optimizer.set_slots") for name, value in values.items()}
            for index, part in enumerate(variable.variables):
                self.set_slots(part, {name: rows[index] for name, rows in cut.items()})
            return
        self.join(variable.placement.strategy)
        self._slots.write(variable, values)
        self._slots.pending.pop(variable.name, None)
        given = {name: to_host(as_array(values[name], "Optimizer.set_slots", name)) for name in self.slot_names}
        wholes = whole_slots(variable.part, given)  # what is compared, by the ranks of a replica, too
        mine = checksum(*(np.ascontiguousarray(array).reshape(-1) for array in wholes.values()))
        self._slots_words = f", slots set #{zlib.crc32(f'{self._slots_words} {variable.name} {mine}'.encode()):08x}"
        self._describe_steps()
        if not any(variable is known for known in self._variables):
            self._variables.append(variable)

    # settings

    def get_settings(self) -> list[dict[str, Any]]:
        """Return the numbers that a program may change, one dict for each group of variables with numbers of its own.

        These are the public attributes that hold numbers or texts, or lists and dicts of them, and "learning_rate": None where
        a schedule or a callable computes it. Files and snapshots have them. An optimizer of this package has one group.

        Example:
            >>> ms.optimizers.SGD(0.1, momentum=0.9).get_settings()[0]["momentum"]
            0.9
        """
        given = self.given_learning_rate
        return [{"learning_rate": None if callable(given) else given, **saved_settings(self, self._unsaved)}]

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Take the settings that `get_settings` returned. Every rank must call it with the same.

        A schedule or a callable is code of the program, so it is not replaced by a number. Where only one of this optimizer and
        the settings has a number as its learning rate, a warning reports that the learning rate stays.

        Raises:
            ValueError: another number of groups.
        """
        check_groups(self.name, settings, 1)
        now = self.get_settings()[0]
        for name, value in changed(now, settings[0]).items():
            if name != "learning_rate":
                setattr(self, name, as_attribute(value, getattr(self, name)))
            elif value is not None and now[name] is not None:
                self.learning_rate = value
            else:
                what = ("a schedule", f"the number {value}") if now[name] is None else (f"{now[name]}", "a schedule")
                text = f"optimizer {self.name!r} keeps {what[0]} as its learning_rate: the saved state has {what[1]}"
                log.once(logging.WARNING, f"{text}. Set optimizer.learning_rate to continue with another one")

    # state

    def get_state(self) -> dict[str, Any]:
        """Return {"iterations": int, "settings": as `get_settings`, "slots": {name of variable: {name of slot: array}}}.

        Collective. Where gradients are accumulated, "iterations" counts the calls of `apply_gradients`. What `set_state` gave
        for variables that were not updated since is in it.
        """
        return {"iterations": self._iterations, "settings": self.get_settings(), "slots": dict(self.each_slots())}

    def early_state(self) -> dict[str, Any]:
        """Return the state of an optimizer that has taken no step, as `get_state` does. Local."""
        slots = {name: dict(values) for name, values in self._slots.pending.items()}
        return {"iterations": self._iterations, "settings": self.get_settings(), "slots": slots}

    def each_slots(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield each variable's name with its slots, as `slots` gives them, one variable at a time. Collective.

        What `set_state` gave for variables that were not updated since is among them.
        """
        store = self._store()
        if store is not None:
            yield from store.each_slots(self)
            return
        strategy = self._strategy
        variables = [] if strategy is None else strategy.extended.placement.variables
        parts = {variable.name: variable.part for variable in variables}
        for name, slots in self.slots_of_parts():
            yield name, whole_slots(parts.get(name), slots)

    def slots_of_parts(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield what `each_slots` does, but of what a replica's ranks divide this rank's part. Collective; for files.

        What waits for a first update may be whole.
        """
        yield from self._slots.pending.items()
        for variable in self._variables:
            if self._slots.stored_of(variable):
                yield variable.name, self._slots.read(variable)

    def slots_here(
        self, writers: Collection[int] | None, all_else: bool, each_node: bool = False
    ) -> Iterator[SlotsHere]:
        """Yield this rank's part of the slots of each variable, each element on one rank; for files. Collective.

        Args:
            writers: the ranks that write; None for all, among whom nodes divide what they have alike.
            all_else: whether this rank gives what all ranks have alike: what waits for the first update.
            each_node: whether the ranks of each node give all.
        """
        store = self._store()
        if store is not None:
            yield from store.slots_here(self, writers, each_node)
            return
        yield from self._slots.waiting(writers, all_else, each_node)
        for variable in self._variables:
            if not self._slots.stored_of(variable) and self._slots.outer is None:
                continue
            parts = self._slots.here(variable, writers, each_node)
            yield variable.name, variable.shape, accumulation_dtype(variable.dtype), parts

    def all_iterations(self) -> int:
        """Return the number of calls that all ranks made, together where they step together. Collective."""
        store = self._store()
        return self._iterations if store is None else store.iterations(self)

    def _store(self) -> Store | None:
        """The store of the slots, where these are not beside arenas."""
        return self._made_in if self._strategy is None else self._strategy.extended.placement.store

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take the state that `get_state` returned, on any layout. Every rank must call it with the same.

        Slots of variables that this optimizer has not updated yet are kept until it does; those of variables that are not in the
        state become what they are before the first step. Settings stay as they are where the state has none.

        Raises:
            ValueError: slots of another optimizer, or of variables of another shape; settings of other groups.
        """
        self.set_counts(state["iterations"], state.get("settings"))
        self.restart_slots(None)
        self.fill_slots(state["slots"])

    def set_counts(self, iterations: int, settings: Sequence[Mapping[str, Any]] | None) -> None:
        """Set the number of calls, and settings if there are any; forget what waits for a step. Every rank must call it."""
        self._iterations = self._counted_from = int(iterations)
        if settings is not None:
            before = self.get_settings()
            self.set_settings(settings)
            pairs = zip(before, self.get_settings(), strict=True)
            for number, (old, new) in enumerate(pairs):
                for name, value in changed(old, new).items():
                    group = f" of group {number}" if len(before) > 1 else ""
                    log.once(
                        logging.INFO, f"optimizer {self.name!r}: {name}{group} is {value} as saved, not {old[name]}"
                    )
        self._describe_steps()
        self._slots.forget_unsent()
        self._slots.pending.clear()
        if self._slots.outer is not None:
            self._slots.outer.reset()

    def restart_slots(self, variables: Collection[Variable] | None) -> None:
        """Give the slots of variables, None for all, the values that they have before the first step. All ranks call it."""
        store = self._store()
        if store is not None:
            store.forget_slots(self, variables)
        else:
            self._slots.restart(self._variables if variables is None else variables)

    def fill_slots(self, slots: Mapping[str, Mapping[str, Any]]) -> None:
        """Overwrite the slots of variables, by name, now or at their first update. Every rank must call it."""
        self._slots.pending.update((name, dict(values)) for name, values in slots.items() if values)
        self._slots.fill_pending(self._variables)

    def take_slots(self, variable: Variable, names: Collection[str]) -> dict[str, Receiver] | None:
        """Return what this rank takes of a variable's slots that are read from a file, by name. All ranks call it.

        None where they must be given whole, to `set_state`: they are others, or kept elsewhere, or averages, which begin with
        the weights of the first step, or nodes train by themselves.
        """
        if self._store() is not None or self._slots.outer is not None or variable.arena is None or self.use_ema:
            return None
        if set(names) != set(self._slots.stored_of(variable)):
            return None
        if not any(variable is known for known in self._variables):
            self._variables.append(variable)
        return {name: self._slots.receiver(variable, name) for name in names}
