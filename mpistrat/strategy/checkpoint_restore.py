"""Reading a checkpoint: rank 0 reads and compares everything before a variable is written; a damaged file changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from .._util import log
from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..errors import explain
from ..optimizers.node_slots import slots_for
from ..variables import Placement
from ..variables.values import parse_dtype
from .checkpoint_file import CheckpointFile, FileRange, Form, from_rank_0, key_of, name_of, ranges_of
from .optimizer_states import OptimizerStates
from .safetensors_file import SUFFIX, SafetensorsFile
from .snapshot import SnapshotFile

__all__ = ["Restoring"]

StateFile = CheckpointFile | SafetensorsFile | SnapshotFile
Contents = dict[str, np.ndarray]  # path in the file → array


@final
class Restoring:
    """Restores the variables and optimizers of one strategy."""

    def __init__(self, group: ProcessGroup, placement: Placement, states: OptimizerStates) -> None:
        self._group, self._placement, self._states = group, placement, states

    def restore(
        self,
        path: str | os.PathLike[str],
        names: Mapping[str, str],
        strict: bool,
        opening: Callable[[], StateFile] | None = None,
        root: int = 0,
    ) -> dict[str, Any]:
        """Read all variables and what optimizers keep; return what was added. Collective. See `Strategy.restore`.

        Args:
            path, names, strict: see there.
            opening: what opens the file on the root, where the path does not say it.
            root: the rank that reads.
        """
        group, ranges = self._group, ranges_of(self._placement)
        wanted: dict[str, Form] = {}
        for variable in self._placement.variables:
            where = ranges.get(variable.name) or FileRange(variable.name, 0, variable.shape)
            wanted[where.name] = where.shape, variable.dtype.name
        there = _names_there(wanted, names)
        with contextlib.ExitStack() as stack:
            file: StateFile | None = None

            def look() -> dict[str, Any]:
                nonlocal file
                file = opened = _open(Path(path)) if opening is None else opening()
                stack.enter_context(opened)
                about = {"optimizers": opened.optimizers, "weights_only": opened.weights_only}
                return {**about, "forms": opened.forms(map(key_of, there.values())), "names": opened.names()}

            found = from_rank_0(group, "restore", path, look, root)
            forms: dict[str, Form] = {key: (tuple(shape), dtype) for key, (shape, dtype) in found["forms"].items()}
            optimizers = found["optimizers"]
            numbers = self._numbers(optimizers)
            left = _Misfits(wanted, there, forms)
            strangers = {} if found["weights_only"] else self._strangers(dict(zip(numbers, optimizers, strict=True)))
            if strict and (left.problems or strangers):
                problems = "; ".join([*left.problems.values(), *strangers.values()])
                expected = "a file of this program's variables and optimizers"
                raise ValueError(explain("Strategy.restore", os.fspath(path), expected=expected, got=problems))
            taken = self._slots_taken(forms)
            forms = {key: form for key, form in forms.items() if left.fits(key) and taken.get(key, key)}
            arrays: Contents = {}

            def read() -> dict[str, Any]:
                assert file is not None
                arrays.update((key, file.read(key, form)) for key, form in forms.items())
                return {"extra": file.extra()}

            extra = from_rank_0(group, "restore", path, read, root)["extra"]
        self._placement.apart.clear()  # a file has what nodes have alike
        for variable in self._placement.variables:
            where = ranges.get(variable.name) or FileRange(variable.name, 0, variable.shape)
            key = f"variables/{key_of(there[where.name])}"
            if key in forms:
                variable.load(_shared(group, root, key, arrays.get(key), forms[key], where.start, variable.shape))
        parts: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {
            whole.name: [(v.name, start, v.shape) for v, start in zip(whole.variables, whole.offsets, strict=True)]
            for whole in self._placement.sharded
        }
        here = {name: own for own, name in there.items()}
        for index, optimizer in enumerate(optimizers):
            prefix = f"optimizers/{index}/slots/"
            slots: dict[str, Contents] = {}
            for key in sorted(key for key in forms if key.startswith(prefix)):
                name = here[name_of(key.removeprefix(prefix).split("/")[0])]
                for part, start, shape in parts.get(name, [(name, 0, forms[key][0])]):
                    array = _shared(group, root, key, arrays.get(key), forms[key], start, shape)
                    if key in taken:
                        slots.setdefault(part, {})[taken[key]] = array
            if numbers[index] not in strangers:
                state = {"iterations": optimizer["iterations"], "slots": slots}
                self._states.restore(numbers[index], optimizer["name"], state, optimizer["made"])
        self._states.give()
        if not strict:
            dropped = self._states.drop_waiting()
            unused = [repr(name) for name in map(name_of, found["names"]) if name not in here]
            if group.topology.rank == 0:
                stays = [*left.problems.values(), *strangers.values()]
                unused += [f"optimizer {name!r}" for name in dropped]
                _say_what_is_left(os.fspath(path), stays, unused)
        return dict(extra or {})

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

    def _strangers(self, optimizers: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
        """Return what is wrong with the optimizers that have been applied here, by number."""
        problems = {}
        for optimizer in self._states.registered:
            number = self._states.number_of(optimizer)
            saved = optimizers[number]["name"] if number in optimizers else None
            if saved is None:
                problems[number] = f"optimizer {optimizer.name!r} is not in it"
            elif saved != optimizer.name:
                problems[number] = f"optimizer {number} is {saved!r} in it, here {optimizer.name!r}"
        return problems

    def _numbers(self, optimizers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the number by which this strategy knows each optimizer of a file."""
        store = self._placement.store
        if store is None:
            return list(range(len(optimizers)))
        made = [optimizer["made"] for optimizer in optimizers]
        if None not in made:
            return made
        return store.numbers_of_names([optimizer["name"] for optimizer in optimizers])  # another strategy's file


def _open(path: Path) -> StateFile:
    return SafetensorsFile(path) if path.suffix == SUFFIX else CheckpointFile(path)


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
        for name, (shape, dtype) in wanted.items():
            link = key_of(there[name])
            form = forms.get(f"variables/{link}")
            called = f"{name!r}" if there[name] == name else f"{name!r}, {there[name]!r} there,"
            if form is None:
                self._add(f"variables/{link}", link, f"variable {called} is not in it")
            elif form != (shape, dtype):
                text = f"variable {called} is {form[1]} {form[0]} in it, here {dtype} {shape}"
                self._add(f"variables/{link}", link, text)
        for key, form in forms.items():
            if key.startswith("optimizers/"):
                link = key.split("/")[3]
                name = here[name_of(link)]
                shape, dtype = wanted[name]
                slot = shape, accumulation_dtype(parse_dtype(dtype)).name
                if form != slot and link not in self._left:
                    self.problems[key] = (
                        f"{key} is {form[1]} {form[0]} in it, not {slot[1]} {slot[0]} as slots of {name!r}"
                    )

    def _add(self, key: str, link: str, text: str) -> None:
        self.problems[key] = text
        self._left.add(link)

    def fits(self, key: str) -> bool:
        """Return whether an array of the file is taken."""
        parts = key.split("/")
        return key not in self.problems and parts[1 if parts[0] == "variables" else 3] not in self._left


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


def _shared(
    group: ProcessGroup, root: int, key: str, array: np.ndarray | None, form: Form, start: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Return on every rank the rows of the root's array from `start` that make up that shape. Collective."""
    dtype = form[1]
    with group.collective("restore", key, dtype, shape, start):
        if array is None:
            value = np.empty(shape, parse_dtype(dtype))
        else:
            rows = array[start : start + shape[0]] if shape else array
            value = np.ascontiguousarray(rows).reshape(shape)
        group.broadcast(value, root)
    return value
