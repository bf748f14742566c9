"""Checkpoints: all variables, what optimizers keep, and what the program adds, in one file for any layout and any strategy.

Only rank 0 reads and writes the file (`checkpoint_file`). It reads and compares everything before a variable is written, so
that a damaged file changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from .. import context
from .._util import log
from ..comm.agree import as_told, same, together
from ..comm.arrays import accumulation_dtype
from ..comm.process_group import ProcessGroup
from ..errors import CollectiveMismatchError, by_rank, explain
from ..variables import Placement
from ..variables.values import parse_dtype
from .checkpoint_file import CheckpointFile, DamagedError, DatasetSlice, Form, write_checkpoint
from .optimizer_states import OptimizerStates

__all__ = ["Checkpoint"]

_SHOWN = 200  # characters of what a rank has given
_mentioned: set[str] = set()  # variables in no file that the log has named

Contents = dict[str, np.ndarray]  # path in the file → array


class _FileRange(NamedTuple):
    """The rows of a dataset that a variable is: all of its own dataset, or some of a ShardedVariable's."""

    name: str
    start: int
    shape: tuple[int, ...]  # of the whole dataset


@final
class Checkpoint:
    """Saves and restores the variables and optimizers of one strategy."""

    def __init__(self, group: ProcessGroup, placement: Placement, states: OptimizerStates) -> None:
        self._group, self._placement, self._states = group, placement, states

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> None:
        """Write all variables and what optimizers keep, one array at a time. Collective. See `Strategy.save`."""
        group = self._group
        text = _agree_extra(group, path, extra)
        self._warn_of_unsaved()
        optimizers = [kept.about() for kept in self._states.kept()]
        slices = self._contents()
        with together(
            partial(group.exchange, "save", detail=f"{os.fspath(path)}, when rank 0 has written it"), as_told
        ):
            try:
                if group.topology.rank == 0:
                    write_checkpoint(Path(path), slices, optimizers, text)
            except (OSError, RuntimeError, ValueError) as error:  # what h5py raises
                raise OSError(f"Strategy.save: {os.fspath(path)}: {type(error).__name__}: {error}") from None
            finally:
                for _ in slices:  # collecting is collective; only rank 0 keeps anything, and only until it cannot
                    pass

    def _warn_of_unsaved(self) -> None:
        """Log the variables that no file has: those made outside of every scope."""
        outside = context.default_strategy()
        if outside is None or outside.extended.placement is self._placement:
            return
        names = [variable.name for variable in outside.extended.variables if variable.name not in _mentioned]
        _mentioned.update(names)
        if names:
            remedy = "make them in the scope, or pass their values: strategy.save(path, extra={…})"
            what = (
                f"variables made outside strategy.scope() are neither saved nor restored: {', '.join(map(repr, names))}"
            )
            log.once(logging.WARNING, f"{what}; {remedy}")

    def _ranges(self) -> dict[str, _FileRange]:
        """Return where each part of a ShardedVariable lies, by its name."""
        return {
            part.name: _FileRange(whole.name, start, whole.shape)
            for whole in self._placement.sharded
            for part, start in zip(whole.variables, whole.offsets, strict=True)
        }

    def _contents(self) -> Iterator[DatasetSlice]:
        """Yield what is saved, one variable or one of its slots at a time. Collective."""
        ranges = self._ranges()
        for variable in self._placement.variables:  # reading ON_READ variables is collective
            name, start, shape = ranges.get(variable.name) or _FileRange(variable.name, 0, variable.shape)
            yield DatasetSlice(f"variables/{_key(name)}", shape, start, variable.gathered())
        for index, (start_value, each) in enumerate(self._slots()):
            for part, slots in each:
                for slot, value in slots.items():
                    array = np.asarray(value)
                    name, start, shape = ranges.get(part) or _FileRange(part, 0, array.shape)
                    key = f"optimizers/{index}/slots/{_key(name)}/{_key(slot)}"
                    yield DatasetSlice(key, shape, start, array, start_value)

    def _slots(self) -> Iterator[tuple[float, Iterable[tuple[str, Mapping[str, Any]]]]]:
        """Yield the start value and the slots of each optimizer, by variable; also of optimizers that are not made yet."""
        for kept in self._states.kept():
            yield kept.slot_start, kept.each_slots()

    def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read all variables and what optimizers keep; return what was added. Collective. See `Strategy.restore`."""
        group, ranges = self._group, self._ranges()
        self._warn_of_unsaved()
        wanted: dict[str, Form] = {}
        for variable in self._placement.variables:
            where = ranges.get(variable.name) or _FileRange(variable.name, 0, variable.shape)
            wanted[where.name] = where.shape, variable.dtype.name
        with contextlib.ExitStack() as stack:
            file: CheckpointFile | None = None

            def look() -> dict[str, Any]:
                nonlocal file
                file = stack.enter_context(CheckpointFile(Path(path)))
                return {"optimizers": file.optimizers, "forms": file.forms(map(_key, wanted))}

            found = _from_rank_0(group, path, look)
            forms: dict[str, Form] = {key: (tuple(shape), dtype) for key, (shape, dtype) in found["forms"].items()}
            numbers = self._numbers(found["optimizers"])
            self._check(os.fspath(path), wanted, forms, dict(zip(numbers, found["optimizers"], strict=True)))
            arrays: Contents = {}

            def read() -> dict[str, Any]:
                assert file is not None
                arrays.update((key, file.read(key, form)) for key, form in forms.items())
                return {"extra": file.extra()}

            extra = _from_rank_0(group, path, read)["extra"]
        for variable in self._placement.variables:
            where = ranges.get(variable.name) or _FileRange(variable.name, 0, variable.shape)
            key = f"variables/{_key(where.name)}"
            variable.load(_shared(group, key, arrays.get(key), forms[key], where.start, variable.shape))
        parts: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {
            whole.name: [(v.name, start, v.shape) for v, start in zip(whole.variables, whole.offsets, strict=True)]
            for whole in self._placement.sharded
        }
        for index, optimizer in enumerate(found["optimizers"]):
            prefix = f"optimizers/{index}/slots/"
            slots: dict[str, Contents] = {}
            for key in sorted(key for key in forms if key.startswith(prefix)):
                name, slot = map(_name, key.removeprefix(prefix).split("/"))
                for part, start, shape in parts.get(name, [(name, 0, forms[key][0])]):
                    slots.setdefault(part, {})[slot] = _shared(group, key, arrays.get(key), forms[key], start, shape)
            state = {"iterations": optimizer["iterations"], "slots": slots}
            self._states.restore(numbers[index], optimizer["name"], state, optimizer["made"])
        self._states.give()
        return dict(extra or {})

    def _check(
        self,
        path: str,
        wanted: Mapping[str, Form],
        forms: Mapping[str, Form],
        optimizers: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Raise ValueError, the same on every rank, unless the file has all that the program needs."""
        problems = []
        for name, (shape, dtype) in wanted.items():
            form = forms.get(f"variables/{_key(name)}")
            if form is None:
                problems.append(f"variable {name!r} is not in it")
            elif form != (shape, dtype):
                problems.append(f"variable {name!r} is {form[1]} {form[0]} in it, here {dtype} {shape}")
        for key, form in forms.items():
            if key.startswith("optimizers/"):
                name = _name(key.split("/")[3])
                shape, dtype = wanted[name]
                slot = shape, accumulation_dtype(parse_dtype(dtype)).name
                if form != slot:
                    problems.append(f"{key} is {form[1]} {form[0]} in it, not {slot[1]} {slot[0]} as slots of {name!r}")
        for optimizer in self._states.registered:
            number = self._states.number_of(optimizer)
            saved = optimizers[number]["name"] if number in optimizers else None
            if saved is None:
                problems.append(f"optimizer {optimizer.name!r} is not in it")
            elif saved != optimizer.name:
                problems.append(f"optimizer {number} is {saved!r} in it, here {optimizer.name!r}")
        if problems:
            expected = "a file of this program's variables and optimizers"
            raise ValueError(explain("Strategy.restore", path, expected=expected, got="; ".join(problems)))

    def _numbers(self, optimizers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the number by which this strategy knows each optimizer of a file."""
        store = self._placement.store
        if store is None:
            return list(range(len(optimizers)))
        made = [optimizer["made"] for optimizer in optimizers]
        if None not in made:
            return made
        return store.numbers_of_names([optimizer["name"] for optimizer in optimizers])  # another strategy's file


def _agree_extra(group: ProcessGroup, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> str | None:
    """Return what the program adds as JSON. Collective.

    Raises:
        TypeError, ValueError: on every rank, for what JSON does not hold.
        CollectiveMismatchError: on every rank, when it is not the same on all.
    """
    exchange = partial(group.exchange, "save", detail=os.fspath(path))
    with together(exchange):
        text = None if extra is None else _json_of(extra)

    def differ(texts: Mapping[int, str]) -> CollectiveMismatchError:
        remedy = "Pass what all ranks have alike; of what each has of its own, all of it: strategy.gather"
        expected, got = "the same on every rank", by_rank(texts)
        return CollectiveMismatchError(explain("Strategy.save", "extra", expected=expected, got=got, remedy=remedy))

    same(exchange, text or "", differ, "none" if text is None else text[:_SHOWN] + "…" * (len(text) > _SHOWN))
    return text


def _json_of(extra: Mapping[str, Any]) -> str:
    given: object = extra
    if not isinstance(given, Mapping):
        expected = "a dict of what JSON holds"
        raise TypeError(explain("Strategy.save", "extra", expected=expected, got=f"a {type(given).__name__}"))
    return json.dumps(_plain(given, "extra"), sort_keys=True)


def _plain(value: Any, where: str) -> Any:
    """Return a value as JSON holds it; lists for tuples, Python's numbers for NumPy's."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):  # as v.numpy() returns it
        value = value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(explain("Strategy.save", where, expected="text for keys", got=repr(key)))
        return {key: _plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    expected = "numbers, text, True, False, None, and lists and dicts of them"
    remedy = "Pass int(v), float(v) or v.tolist() of a variable or an array; large ones are better variables"
    raise TypeError(explain("Strategy.save", where, expected=expected, got=f"a {type(value).__name__}", remedy=remedy))


def _from_rank_0(
    group: ProcessGroup, path: str | os.PathLike[str], read: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return on every rank what `read` returned on rank 0. Collective.

    Raises:
        OSError: on every rank, when it could not be read.
    """
    exchange = partial(group.exchange, "restore", detail=os.fspath(path))
    own: dict[str, Any] = {}
    with together(exchange, as_told):
        if group.topology.rank == 0:
            try:
                own = read()
            except Exception as error:
                raise OSError(f"Strategy.restore: {os.fspath(path)}: {_reason(error)}") from None
    found: dict[str, Any] = json.loads(exchange(json.dumps(own))[0])
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no such file; the working directory is {os.getcwd()}"
    return str(error) if isinstance(error, DamagedError) else f"{type(error).__name__}: {error}"


def _shared(
    group: ProcessGroup, key: str, array: np.ndarray | None, form: Form, start: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Return on every rank the rows of rank 0's array from `start` that make up that shape. Collective."""
    dtype = form[1]
    with group.collective("restore", key, dtype, shape, start):
        if array is None:
            value = np.empty(shape, parse_dtype(dtype))
        else:
            rows = array[start : start + shape[0]] if shape else array
            value = np.ascontiguousarray(rows).reshape(shape)
        group.broadcast(value, root=0)
    return value


def _key(name: str) -> str:
    """A name as one link of HDF5, which cuts at slashes and takes "." for the group itself."""
    quoted = name.replace("%", "%25").replace("/", "%2F")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted


def _name(key: str) -> str:
    return key.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")
