"""Restoring a checkpoint: everything is read and compared before a variable is written; a damaged file changes nothing.

It is read again to be taken: where that fails, the error says that variables have been changed in part.

Rank 0 finds out what is in the file. Then each rank reads what it takes of it, see `parts`: its part of its node's
variables, and the slots of the elements that it updates. What an optimizer gets that the program has not made yet, and what
lies on servers, all ranks take whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from ..base import log
from ..base.errors import explain
from ..base.text import printable
from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..optimizers.node_slots import OUTER_MOMENTUM, slots_for
from ..optimizers.slots import WIRE_RESIDUAL, residual_receiver
from ..variables import Placement, Receiver
from ..variables.kinds import receiver_of
from .extra import read_extra
from .file import CheckpointFile, from_rank_0, on_all
from .list import Form, key_of, link_of, locations, name_of
from .optimizer_states import OptimizerStates
from .reading import FileParts, Parts, Taken, read_own, send
from .safetensors import SafetensorsFile, is_safetensors
from .snapshot import SnapshotFile

__all__ = ["Restoring"]

StateFile = CheckpointFile | SafetensorsFile | SnapshotFile
Contents = dict[str, np.ndarray]  # name of slot → array


class _Taking(NamedTuple):
    """What a rank takes of a file.

    Attributes:
        arrays: all of it.
        whole: of this the slots that it takes whole, by number of an optimizer and name of a variable.
    """

    arrays: list[Taken]
    whole: dict[int, dict[str, Contents]]


@final
class Restoring:
    """Restores the variables and optimizers of one strategy."""

    def __init__(self, group: ProcessGroup, placement: Placement, states: OptimizerStates) -> None:
        self._group, self._placement, self._states = group, placement, states
        self._locations = locations(placement)

    def restore(
        self,
        path: str | os.PathLike[str],
        names: Mapping[str, str],
        strict: bool,
        opening: Callable[[], SnapshotFile] | None = None,
        root: int = 0,
    ) -> dict[str, Any]:
        """Read all variables and what optimizers keep; return what was added. Collective. See `Strategy.restore`.

        Args:
            path, names, strict: see there.
            opening: what opens the file on the root, where the path does not say it.
            root: the rank that reads.
        """
        group = self._group
        wanted: dict[str, Form] = {}
        for variable in self._placement.variables:
            where = self._locations[variable.name]
            wanted[where.name] = Form(where.box.shape, variable.dtype.name)
        there = _names_there(wanted, names)
        with contextlib.ExitStack() as stack:
            file: StateFile | None = None

            def look() -> dict[str, Any]:
                nonlocal file
                file = opened = _open(Path(path)) if opening is None else opening()
                stack.enter_context(opened)
                forms = opened.forms(map(key_of, there.values()))
                about = {"optimizers": opened.optimizers, "weights_only": opened.weights_only, "forms": forms}
                return {**about, "names": opened.names(), "places": opened.places(forms)}

            found = from_rank_0(group, "restore", path, look, root)
            forms = {key: Form(tuple(shape), dtype) for key, (shape, dtype) in found["forms"].items()}
            with_slots = {(int(key.split("/")[1]), link_of(key)) for key in forms if key.startswith("optimizers/")}
            numbers = self._states.numbers(found["optimizers"], {index for index, _ in with_slots})
            each = zip(numbers, enumerate(found["optimizers"]), strict=True)
            optimizers = {number: {**about, "index": index} for number, (index, about) in each if number is not None}
            left = _Misfits(wanted, there, forms)
            names_here = self._slots_taken(forms)
            strangers = {} if found["weights_only"] else self._strangers(optimizers, names_here)
            if strict and (left.problems or strangers):
                problems = "; ".join([*left.problems.values(), *strangers.values()])
                expected = "a file of this program's variables and optimizers"
                raise ValueError(explain("Strategy.restore", os.fspath(path), expected=expected, got=problems))
            forms = {key: form for key, form in forms.items() if left.fits(key) and names_here.get(key, key)}
            parts = self._own_parts(stack, found["places"], Path(path), opening)
            extra = self._compare(path, forms, file, parts, root)
            taking = self._taking(forms, there, optimizers, strangers, names_here)
            restarted = self._without_slots(forms, there, optimizers, with_slots)
            group.barrier("restore")  # nobody reads what is overwritten
            problem: Exception | None = None
            if parts is None:
                problem = send(group, root, None if file is None else file.read_array, taking.arrays)
            on_all(group, "restore", path, partial(_change, parts, taking.arrays, problem))
            group.barrier("restore")
        self._finish(taking, restarted)
        group.barrier("restore")  # no worker pushes to a server that has not got its part yet
        if not strict:
            dropped = self._states.drop_waiting()
            here = set(there.values())
            unused = [repr(name) for name in map(name_of, found["names"]) if name not in here]
            if group.topology.rank == 0:
                stays = [*left.problems.values(), *strangers.values()]
                unused += [f"optimizer {name!r}" for name in dropped]
                _say_what_is_left(os.fspath(path), stays, unused)
        return dict(read_extra(extra or {}))

    def _slots_taken(self, keys: Iterable[str]) -> dict[str, str]:
        """Return what this node's optimizers call the slots that they take of a file, by key, "" for what no node takes."""
        by_owner: dict[str, list[str]] = {}
        for key in keys:
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

    def _compare(
        self,
        path: str | os.PathLike[str],
        forms: Mapping[str, Form],
        file: StateFile | None,
        parts: Parts | None,
        root: int,
    ) -> Any:
        """Compare all that will be read with what was saved; return what was added. Collective."""
        topology = self._group.topology

        def compare() -> None:
            if parts is not None:
                parts.check(forms, topology.local_rank, topology.local_size)
            elif file is not None:
                for key, form in forms.items():
                    file.read_array(key, form)

        def extra() -> dict[str, Any]:
            assert file is not None
            return {"extra": file.extra()}

        on_all(self._group, "restore", path, compare)
        return from_rank_0(self._group, "restore", path, extra, root)["extra"]

    def _taking(
        self,
        forms: Mapping[str, Form],
        there: Mapping[str, str],
        optimizers: Mapping[int, Mapping[str, Any]],
        strangers: Collection[int],
        names_here: Mapping[str, str],
    ) -> _Taking:
        """Return what this rank takes of a file. Collective."""
        self._placement.apart.clear()  # a file has what nodes have alike
        known = self._begin_optimizers({n: about for n, about in optimizers.items() if n not in strangers})
        taking = _Taking(self._variables(forms, there), {})
        for number, about in optimizers.items():
            if number not in strangers:
                index, optimizer, whole = (
                    about["index"],
                    self._states.with_number(number),
                    taking.whole.setdefault(number, {}),
                )
                given = optimizer if number in known else None
                keys = [key for key in forms if key.startswith(f"optimizers/{index}/slots/")]
                found = self._slots(sorted(keys), forms, names_here, given, there, whole)
                taking.arrays.extend(Taken(key, forms[key], found.get(key, [])) for key in sorted(keys))
        return taking

    def _without_slots(
        self,
        forms: Mapping[str, Form],
        there: Mapping[str, str],
        optimizers: Mapping[int, Mapping[str, Any]],
        with_slots: Collection[tuple[int, str]],
    ) -> dict[int, list[Any]]:
        """Return the variables that are taken, but without slots of an optimizer: it had not updated them, by its number."""
        where = self._locations
        links = [(variable, key_of(there[where[variable.name].name])) for variable in self._placement.variables]
        taken = [(variable, link) for variable, link in links if f"variables/{link}" in forms]
        return {
            number: [variable for variable, link in taken if (about["index"], link) not in with_slots]
            for number, about in optimizers.items()
        }

    def _finish(self, taking: _Taking, restarted: Mapping[int, Sequence[Any]]) -> None:
        """Give what ranks took whole to what keeps it. Collective."""
        for array in taking.arrays:
            for receiver in array.receivers:
                receiver.finish()
        for number, slots in taking.whole.items():
            self._states.fill(number, slots, restarted[number])

    def _own_parts(
        self,
        stack: contextlib.ExitStack,
        places: Mapping[str, Any] | None,
        path: Path,
        opening: Callable[[], SnapshotFile] | None,
    ) -> Parts | None:
        """Return what each rank reads its parts from; None where not all find what the root has. Collective."""
        if places is None:
            return None
        parts: Parts | None = None
        with contextlib.suppress(OSError, ValueError, ImportError):
            if opening is not None:
                parts = opening()
            else:
                parts = stack.enter_context(contextlib.closing(FileParts(path, places)))
        with self._group.collective("restore", "parts"):
            return parts if self._group.agree(int(parts is not None), "min") else None

    def _begin_optimizers(self, numbered: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Give optimizers their numbers of steps; return the numbers of those that all ranks have. Collective.

        One that the program has dropped may be there still on some ranks, where Python has not removed it yet.
        """
        self._states.begin(numbered)
        self._states.give()
        with self._group.collective("restore", "optimizers", detail=len(numbered)):
            there = {number: self._states.with_number(number) is not None for number in sorted(numbered)}
            return {number for number, known in there.items() if self._group.agree(int(known), "min")}

    def _variables(self, forms: Mapping[str, Form], there: Mapping[str, str]) -> list[Taken]:
        """Return what this rank takes of the variables."""
        receivers: dict[str, list[Receiver]] = {}
        for variable in self._placement.variables:
            where = self._locations[variable.name]
            key = f"variables/{key_of(there[where.name])}"
            if key in forms:
                receivers.setdefault(key, []).append(where.box.receiver(receiver_of(variable)))
        return [Taken(key, forms[key], found) for key, found in receivers.items()]

    def _slots(
        self,
        keys: Iterable[str],
        forms: Mapping[str, Form],
        names_here: Mapping[str, str],
        optimizer: Any,
        there: Mapping[str, str],
        whole: dict[str, Contents],
    ) -> dict[str, list[Receiver]]:
        """Return what this rank takes of the slots of an optimizer, by key; those that it takes whole are in `whole`, too."""
        variables = {variable.name: variable for variable in self._placement.variables}
        sharded = {each.name: each.variables for each in self._placement.sharded}
        here = {name: own for own, name in there.items()}
        by_link: dict[str, dict[str, str]] = {}  # key of a slot, by link of the variable and name of the slot here
        for key in keys:
            if key in names_here:
                by_link.setdefault(link_of(key), {})[names_here[key]] = key
        found: dict[str, list[Receiver]] = {}
        for link, slots in by_link.items():
            name = here[name_of(link)]
            for variable in sharded.get(name) or (variables[name],):
                receivers = None if optimizer is None else optimizer._core.take_slots(variable, slots)
                if receivers is None:
                    whole[variable.name], receivers = _whole_slots(
                        variable, {s: forms[k].kind for s, k in slots.items()}
                    )
                box = self._locations[variable.name].box
                for slot, receiver in receivers.items():
                    found.setdefault(slots[slot], []).append(box.receiver(receiver))
        return found

    def _strangers(self, optimizers: Mapping[int, Mapping[str, Any]], names_here: Mapping[str, str]) -> dict[int, str]:
        """Return the texts of what does not fit the optimizers here, by number."""
        problems = {}
        for optimizer in self._states.registered:
            number = self._states.number_of(optimizer)
            saved = optimizers[number]["name"] if number in optimizers else None
            if saved is None:
                outside = self._placement.store is None and optimizer._core.number_in(self._placement) is None
                why = ": if made outside of strategy.scope(), it is in files after its first step" if outside else ""
                problems[number] = f"optimizer {optimizer.name!r} is not in it{why}"
            elif saved != optimizer.name:
                problems[number] = f"optimizer {number} is {saved!r} in it, here {optimizer.name!r}"
        for number, about in optimizers.items():
            one, settings = self._states.taking(number, about), about["settings"]
            other = self._states.instead_of(about) if one is None else None
            if other is not None:
                problems.setdefault(number, f"optimizer {number} is {about['name']!r} in it, here {other.name!r}")
            slots = set() if one is None else _slots_of(about["index"], names_here) - {frozenset(one.slot_names)}
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
    """Return the names of the slots that variables have by an optimizer of a file, as they are here."""
    found: dict[str, set[str]] = {}
    for key, name in names_here.items():
        owner, _, _ = key.rpartition("/")
        if owner.startswith(f"optimizers/{index}/slots/") and name not in ("", WIRE_RESIDUAL, OUTER_MOMENTUM):
            found.setdefault(owner, set()).add(name)
    return set(map(frozenset, found.values()))


def _change(parts: Parts | None, arrays: Sequence[Taken], problem: Exception | None) -> None:
    """Read what this rank takes, unless it was sent; raise what went wrong, and that it leaves no whole state."""
    try:
        if problem is not None:
            raise problem
        if parts is not None:
            read_own(parts, arrays)
    except Exception as error:
        left = "variables and optimizers have been changed in part: restore a file before you go on"
        raise OSError(printable(f"{type(error).__name__}: {error}; {left}")) from error


def _whole_slots(variable: Any, dtypes: Mapping[str, np.dtype]) -> tuple[Contents, dict[str, Receiver]]:
    """Return arrays for the slots of a variable, and what fills them; all but what belongs to its weights. All ranks call it."""
    kept = {slot: np.empty(variable.shape, dtype) for slot, dtype in dtypes.items() if slot != WIRE_RESIDUAL}
    receivers = {slot: Receiver.whole(array) for slot, array in kept.items()}
    if WIRE_RESIDUAL in dtypes:
        receivers[WIRE_RESIDUAL] = residual_receiver(variable)
    return kept, receivers


def _open(path: Path) -> StateFile:
    return SafetensorsFile(path) if is_safetensors(path) else CheckpointFile(path)


@final
class _Misfits:
    """What of a file does not fit the program's variables.

    Attributes:
        problems: texts, by the key in the file.
    """

    def __init__(self, wanted: Mapping[str, Form], there: Mapping[str, str], forms: Mapping[str, Form]) -> None:
        self.problems: dict[str, str] = {}
        self._left: set[str] = set()  # links of the variables that stay
        here = {name: own for own, name in there.items()}
        for name, own in wanted.items():
            link = key_of(there[name])
            form = forms.get(f"variables/{link}")
            called = f"{name!r}" if there[name] == name else f"{name!r}, {there[name]!r} there,"
            if form is None:
                self._add(f"variables/{link}", link, f"variable {called} is not in it")
            elif form != own:
                text = f"variable {called} is {form.dtype} {form.shape} in it, here {own.dtype} {own.shape}"
                self._add(f"variables/{link}", link, text)
        for key, form in forms.items():
            if key.startswith("optimizers/"):
                link = link_of(key)
                name = here[name_of(link)]
                slot = Form(wanted[name].shape, accumulation_dtype(wanted[name].kind).name)
                if form != slot and link not in self._left:
                    self.problems[key] = (
                        f"{key} is {form.dtype} {form.shape} in it, not {slot.dtype} {slot.shape} as slots of {name!r}"
                    )

    def _add(self, key: str, link: str, text: str) -> None:
        self.problems[key] = text
        self._left.add(link)

    def fits(self, key: str) -> bool:
        """Return whether an array of the file is taken."""
        return key not in self.problems and link_of(key) not in self._left


def _names_there(wanted: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return what each variable is called in the file.

    Raises:
        ValueError: names that no variable has, or that two would have.
    """
    known = list(wanted)
    there = {name: names.get(name, name) for name in known}
    unknown = [repr(name) for name in names if name not in there]
    twice = sorted({repr(name) for name in there.values() if list(there.values()).count(name) > 1}) if names else []
    if unknown or twice:
        expected = "names of variables here, each with a name of its own in the file"
        got = f"{', '.join(unknown)}, which none has" if unknown else f"{', '.join(twice)} for several variables"
        raise ValueError(explain("Strategy.restore", "map", expected=expected, got=got))
    return there


def _say_what_is_left(path: str, stays: Sequence[str], unused: Sequence[str]) -> None:
    """Log what a restore that is not strict has left."""
    stays = [f"stay as they are: {'; '.join(stays)}"] if stays else []
    told = [*stays, *([f"not used of it: {', '.join(unused)}"] if unused else [])]
    if told:
        log.logger.warning("Strategy.restore: %s: %s", path, ". ".join(told))
