"""Restoring a checkpoint. Everything is read and compared before any variable is written: a damaged file changes nothing.

The values are then read a second time. If that fails, the error reports that variables are partly changed.

Rank 0 reads the list of arrays. Then each rank reads its elements (see `reading`): its share of its node's variables, and the
slots of the elements that it updates. All ranks read the whole slots of optimizers that the program has not created yet, and of
variables on servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from ..arena.pieces import BESIDE_WEIGHTS
from ..base import log
from ..base.errors import explain
from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..optimizers.node_slots import OUTER_MOMENTUM, slots_for
from ..optimizers.slots import receiver_beside
from ..variables import Placement, Receiver
from ..variables.kinds import receiver_of
from .extra import read_extra
from .list import Form, key_of, link_of, locations, name_of
from .opened import OpenState
from .optimizer_states import OptimizerStates
from .snapshot import SnapshotFile

__all__ = ["Restoring"]


@final
class Restoring:
    """One restore of the variables and optimizers of a strategy.

    Its `forms` and receivers, by equal keys, correspond to the forms and slices of a save.
    """

    def __init__(
        self,
        group: ProcessGroup,
        placement: Placement,
        states: OptimizerStates,
        path: str,
        opening: Callable[[], SnapshotFile] | None,
        root: int,
    ) -> None:
        """Set up a restore.

        Args:
            group, placement, states: of the strategy.
            path: the file, or its description in errors.
            opening: opens the file on the root, if the path does not name it.
            root: the rank that reads.
        """
        self._group, self._placement, self._states, self._path = group, placement, states, path
        self._opened = OpenState(group, path, opening, root)
        self._locations = locations(placement)
        self._there: dict[str, str] = {}  # names in the file, by the program's names
        self._forms: dict[str, Form] = {}
        self._slot_names: dict[str, str] = {}  # the program's names, by keys of slots; "" for slots that no node takes
        self._optimizers: dict[int, dict[str, Any]] = {}  # by number
        self._restarted: dict[int, list[Any]] = {}  # variables that an optimizer had not updated, by its number
        self._receivers: dict[str, list[Receiver]] = {}  # of this rank, by key
        self._whole: dict[int, dict[str, dict[str, np.ndarray]]] = {}  # slots by optimizer's number, variable and name

    def restore(self, names: Mapping[str, str], strict: bool) -> dict[str, Any]:
        """Read all variables and optimizer states; return the program's `extra`. Collective. See `Strategy.restore`."""
        group, path = self._group, self._path
        wanted: dict[str, Form] = {}
        for variable in self._placement.variables:
            where = self._locations[variable.name]
            wanted[where.name] = Form(where.box.shape, variable.dtype.name)
        self._there = _names_there(wanted, names)
        with self._opened as opened:
            found = opened.look(self._there.values())
            self._forms = {key: Form(tuple(shape), dtype) for key, (shape, dtype) in found["forms"].items()}
            problems, strangers = self._compare_with_program(wanted, found, strict)
            opened.check(found["places"], self._forms)
            extra = opened.extra()
            known = self._begin_optimizers()
            self._take_variables()
            for number in self._optimizers:
                self._take_slots(number, known)
            opened.take(self._forms, self._receivers)
        self._finish()
        group.barrier("restore")  # no worker may push to a server that has not finished its restore
        if not strict:
            dropped = self._states.drop_waiting()
            here = set(self._there.values())
            unused = [repr(name) for name in map(name_of, found["names"]) if name not in here]
            if group.topology.rank == 0:
                unused += [f"optimizer {name!r}" for name in dropped]
                _log_what_is_left(path, [*problems.values(), *strangers.values()], unused)
        return dict(read_extra(extra or {}))

    # the contents of the file

    def _compare_with_program(
        self, wanted: Mapping[str, Form], found: Mapping[str, Any], strict: bool
    ) -> tuple[dict[str, str], dict[int, str]]:
        """Drop arrays that are not restored; return the texts of misfits, of arrays by key and of optimizers by number.

        Raises:
            ValueError: there is a misfit, and `strict`.
        """
        with_slots = {(int(key.split("/")[1]), link_of(key)) for key in self._forms if key.startswith("optimizers/")}
        self._optimizers = self._states.numbered(found["optimizers"], {index for index, _ in with_slots})
        problems = _misfits(wanted, self._there, self._forms)
        self._slot_names = self._slots_taken()
        strangers = {} if found["weights_only"] else self._strangers()
        if strict and (problems or strangers):
            expected, got = (
                "a file of this program's variables and optimizers",
                [*problems.values(), *strangers.values()],
            )
            raise ValueError(explain("Strategy.restore", self._path, expected=expected, got="; ".join(got)))
        self._forms = {
            key: form
            for key, form in self._forms.items()
            if not {key, f"variables/{link_of(key)}"} & problems.keys() and self._slot_names.get(key, key)
        }
        self._optimizers = {number: about for number, about in self._optimizers.items() if number not in strangers}
        links = [(variable, self._link(variable)) for variable in self._placement.variables]
        taken = [(variable, link) for variable, link in links if f"variables/{link}" in self._forms]
        for number, about in self._optimizers.items():
            self._restarted[number] = [one for one, link in taken if (about["index"], link) not in with_slots]
        return problems, strangers

    def _link(self, variable: Any) -> str:
        return key_of(self._there[self._locations[variable.name].name])

    def _slots_taken(self) -> dict[str, str]:
        """Return the names of this node's slots by key; "" for slots that no node takes."""
        by_owner: dict[str, list[str]] = {}
        for key in self._forms:
            if key.startswith("optimizers/"):
                owner, _, slot = key.rpartition("/")
                by_owner.setdefault(owner, []).append(name_of(slot))
        placement, found = self._placement, dict[str, str]()
        node = None if placement.local_steps is None else placement.group.node_index
        for owner, names in by_owner.items():
            if node is None:
                found.update((f"{owner}/{key_of(name)}", "") for name in names)
            found.update((f"{owner}/{key_of(name)}", here) for name, here in slots_for(names, node).items())
        return found

    # the elements of this rank

    def _begin_optimizers(self) -> set[int]:
        """Set the step counts of optimizers; return the numbers of those that all ranks have. Collective.

        An optimizer that the program has dropped may still exist on some ranks, until Python collects it.
        """
        self._placement.apart.clear()  # files have only values that are equal on all nodes
        self._states.begin(self._optimizers)
        self._states.give()
        with self._group.collective("restore", "optimizers", detail=len(self._optimizers)):
            there = {number: self._states.with_number(number) is not None for number in sorted(self._optimizers)}
            return {number for number, known in there.items() if self._group.agree(int(known), "min")}

    def _take_variables(self) -> None:
        for variable in self._placement.variables:
            key = f"variables/{self._link(variable)}"
            if key in self._forms:
                receiver = self._locations[variable.name].box.receiver(receiver_of(variable))
                self._receivers.setdefault(key, []).append(receiver)

    def _take_slots(self, number: int, known: set[int]) -> None:
        """Take the slots of an optimizer; record those that this rank takes whole."""
        optimizer = self._states.with_number(number) if number in known else None
        prefix, whole = f"optimizers/{self._optimizers[number]['index']}/slots/", self._whole.setdefault(number, {})
        variables = {variable.name: [variable] for variable in self._placement.variables}
        variables |= {each.name: each.variables for each in self._placement.sharded}
        here = {name: own for own, name in self._there.items()}
        by_link: dict[str, dict[str, str]] = {}  # key of a slot, by link of the variable and own name of the slot
        for key in sorted(key for key in self._forms if key.startswith(prefix)):
            self._receivers[key] = []
            if key in self._slot_names:
                by_link.setdefault(link_of(key), {})[self._slot_names[key]] = key
        for link, slots in by_link.items():
            for variable in variables[here[name_of(link)]]:
                receivers = None if optimizer is None else optimizer._core.take_slots(variable, slots)
                if receivers is None:
                    kinds = {slot: self._forms[key].kind for slot, key in slots.items()}
                    whole[variable.name], receivers = _whole_slots(variable, kinds)
                box = self._locations[variable.name].box
                for slot, receiver in receivers.items():
                    self._receivers[slots[slot]].append(box.receiver(receiver))

    def _finish(self) -> None:
        """Complete the receivers, and pass whole slots to optimizers. Collective."""
        for receivers in self._receivers.values():
            for receiver in receivers:
                receiver.finish()
        for number, slots in self._whole.items():
            self._states.fill(number, slots, self._restarted[number])

    def _strangers(self) -> dict[int, str]:
        """Return the texts of misfits of optimizers, by number."""
        problems, optimizers = dict[int, str](), self._optimizers
        for optimizer in self._states.registered:
            number = self._states.number_of(optimizer)
            saved = optimizers[number]["name"] if number in optimizers else None
            if saved is None:
                outside = self._placement.optimizers.number_of(optimizer) is None
                why = ": if made outside of strategy.scope(), it is in files after its first step" if outside else ""
                problems[number] = f"optimizer {optimizer.name!r} is not in it{why}"
            elif saved != optimizer.name:
                problems[number] = f"optimizer {number} is {saved!r} in it, here {optimizer.name!r}"
        for number, about in optimizers.items():
            one, settings = self._states.taking(number, about), about["settings"]
            other = self._states.instead_of(about) if one is None else None
            if other is not None:
                problems.setdefault(number, f"optimizer {number} is {about['name']!r} in it, here {other.name!r}")
            slots = set() if one is None else _slots_of(about["index"], self._slot_names) - {frozenset(one.slot_names)}
            if slots and number not in problems:
                there, here = (", ".join(sorted(names)) or "none" for names in (next(iter(slots)), one.slot_names))
                problems[number] = f"optimizer {one.name!r} has the slots {there} in it, here {here}"
            groups = 0 if one is None or settings is None else len(one.get_settings())
            if groups and len(settings) != groups and number not in problems:
                problems[number] = (
                    f"optimizer {one.name!r} has {len(settings)} groups of parameters in it, here {groups}"
                )
        return problems


def _slots_of(index: int, names_here: Mapping[str, str]) -> set[frozenset[str]]:
    """Return the sets of slot names that variables have by an optimizer of a file, in the program's names."""
    found: dict[str, set[str]] = {}
    for key, name in names_here.items():
        owner, _, _ = key.rpartition("/")
        if owner.startswith(f"optimizers/{index}/slots/") and name not in ("", *BESIDE_WEIGHTS, OUTER_MOMENTUM):
            found.setdefault(owner, set()).add(name)
    return set(map(frozenset, found.values()))


def _whole_slots(variable: Any, dtypes: Mapping[str, np.dtype]) -> tuple[dict[str, np.ndarray], dict[str, Receiver]]:
    """Return arrays for slots of a variable, and receivers for them and what is beside its weights. Call it on all ranks."""
    beside = BESIDE_WEIGHTS & dtypes.keys()
    kept = {slot: np.empty(variable.shape, dtype) for slot, dtype in dtypes.items() if slot not in beside}
    receivers = {slot: Receiver.whole(array) for slot, array in kept.items()}
    return kept, receivers | {slot: receiver_beside(variable, slot) for slot in beside}


def _misfits(wanted: Mapping[str, Form], there: Mapping[str, str], forms: Mapping[str, Form]) -> dict[str, str]:
    """Return the texts of arrays in the file that do not fit the program's variables, by key."""
    problems: dict[str, str] = {}
    here = {name: own for own, name in there.items()}
    for name, own in wanted.items():
        key = f"variables/{key_of(there[name])}"
        form = forms.get(key)
        called = f"{name!r}" if there[name] == name else f"{name!r}, {there[name]!r} there,"
        if form is None:
            problems[key] = f"variable {called} is not in it"
        elif form != own:
            problems[key] = f"variable {called} is {form.dtype} {form.shape} in it, here {own.dtype} {own.shape}"
    for key, form in forms.items():
        if key.startswith("optimizers/") and f"variables/{link_of(key)}" not in problems:
            name = here[name_of(link_of(key))]
            slot = Form(wanted[name].shape, accumulation_dtype(wanted[name].kind).name)
            if form != slot:
                text = f"{key} is {form.dtype} {form.shape} in it, not {slot.dtype} {slot.shape} as slots of {name!r}"
                problems[key] = text
    return problems


def _names_there(wanted: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each variable in the file.

    Raises:
        ValueError: no variable has one of the names, or two variables would get the same.
    """
    known = list(wanted)
    there = {name: names.get(name, name) for name in known}
    unknown = [repr(name) for name in names if name not in there]
    twice = sorted({repr(name) for name in there.values() if list(there.values()).count(name) > 1}) if names else []
    if unknown or twice:
        expected = "names of variables here, each with a name of its own in the file"
        got = f"{', '.join(unknown)}, which no variable has" if unknown else f"{', '.join(twice)} for several variables"
        raise ValueError(explain("Strategy.restore", "map", expected=expected, got=got))
    return there


def _log_what_is_left(path: str, stays: Sequence[str], unused: Sequence[str]) -> None:
    """Log what a restore that is not strict did not restore."""
    stays = [f"stay as they are: {'; '.join(stays)}"] if stays else []
    told = [*stays, *([f"unused in the file: {', '.join(unused)}"] if unused else [])]
    if told:
        log.logger.warning("Strategy.restore: %s: %s", path, ". ".join(told))
