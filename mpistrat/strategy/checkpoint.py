"""All variables and all that optimizers keep, in one HDF5 file that any layout and any strategy can restore.

    /                 attributes format="mpistrat checkpoint", version=1
    /variables/NAME   one dataset each; the attribute dtype where HDF5 has no such type (bfloat16 as uint16)
    /optimizers/0     attributes name, iterations, and made, its number in the scope of the program or, with parameter
                      servers, in the program; slots/NAME/SLOT one dataset each

A ShardedVariable is one dataset too, and so are its slots: whoever restores it may have other shards, or none.

Rank 0 alone touches the file. It reads all of it before anything is written to a variable, so that a damaged file
changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..comm.process_group import ProcessGroup
from ..errors import explain
from ..variables.values import parse_dtype

if TYPE_CHECKING:
    from .extended import StrategyExtended

__all__ = ["restore", "save"]

FORMAT, VERSION = "mpistrat checkpoint", 1

Contents = dict[str, np.ndarray]  # path in the file → array
Form = tuple[tuple[int, ...], str]  # shape and dtype


def save(extended: StrategyExtended, path: str | os.PathLike[str]) -> None:
    """Write all variables and what optimizers keep, one array at a time. Collective. See `Strategy.save`."""
    group, problem = extended.process_group, ""
    with group.collective("save", detail=os.fspath(path)):
        pass
    optimizers = [kept.about() for kept in extended.optimizer_states.kept()]
    if group.topology.rank == 0:
        try:
            _write(Path(path), _contents(extended), optimizers)
        except _WriteError as error:
            problem = str(error)
    else:
        for _ in _contents(extended):  # collecting is collective; only rank 0 keeps anything
            pass
    with group.collective("saved", detail=os.fspath(path)):
        problem = group.all_gather_text(problem)[0]
    if problem:
        raise OSError(f"Strategy.save: {os.fspath(path)}: {problem}")


class _Place(NamedTuple):
    """Which rows of which dataset a variable is: all of its own, or as a part of a ShardedVariable some of that one's."""

    name: str
    start: int
    shape: tuple[int, ...]  # of the whole dataset


class _Piece(NamedTuple):
    """Rows of a dataset."""

    key: str
    shape: tuple[int, ...]  # of the whole dataset
    start: int
    array: np.ndarray | None  # None on ranks that do not write
    fill: float = 0  # what rows are that never come


def _places(extended: StrategyExtended) -> dict[str, _Place]:
    """Return where each part of a ShardedVariable lies, by its name."""
    return {
        part.name: _Place(whole.name, start, whole.shape)
        for whole in extended.placement.sharded
        for part, start in zip(whole.variables, whole.offsets, strict=True)
    }


def _contents(extended: StrategyExtended) -> Iterator[_Piece]:
    """Yield what is saved, one variable or one of its slots at a time. Collective."""
    places = _places(extended)
    for variable in extended.variables:  # reading ON_READ variables is collective
        name, start, shape = places.get(variable.name) or _Place(variable.name, 0, variable.shape)
        yield _Piece(f"variables/{_key(name)}", shape, start, variable.gathered())
    for index, (start_value, each) in enumerate(_slots(extended)):
        for part, slots in each:
            for slot, value in slots.items():
                array = np.asarray(value)
                name, start, shape = places.get(part) or _Place(part, 0, array.shape)
                key = f"optimizers/{index}/slots/{_key(name)}/{_key(slot)}"
                yield _Piece(key, shape, start, array, start_value)


def _slots(extended: StrategyExtended) -> Iterator[tuple[float, Iterable[tuple[str, Mapping[str, Any]]]]]:
    """Yield of each optimizer what slots begin with, and those of each variable, by its name; also of those that wait."""
    for kept in extended.optimizer_states.kept():
        yield kept.slot_start, kept.each_slots()


def restore(extended: StrategyExtended, path: str | os.PathLike[str]) -> None:
    """Read all variables and what optimizers keep. Collective. See `Strategy.restore`."""
    group = extended.process_group
    arrays: Contents = {}
    found: dict[str, Any] = {}
    with group.collective("restore", detail=os.fspath(path)):
        if group.topology.rank == 0:
            try:
                arrays, optimizers = _read(Path(path))
                found = {"optimizers": optimizers, "forms": {key: _form(array) for key, array in arrays.items()}}
            except FileNotFoundError:
                found = {"problem": f"no such file; the working directory is {os.getcwd()}"}
            except Exception as error:
                found = {"problem": f"{type(error).__name__}: {error}"}
        found = json.loads(group.all_gather_text(json.dumps(found) if group.topology.rank == 0 else "")[0])
    if "problem" in found:
        raise OSError(f"Strategy.restore: {os.fspath(path)}: {found['problem']}")
    forms: dict[str, Form] = {key: (tuple(shape), dtype) for key, (shape, dtype) in found["forms"].items()}
    numbers = _numbers(extended, found["optimizers"])
    _check(extended, os.fspath(path), forms, dict(zip(numbers, found["optimizers"], strict=True)))
    places = _places(extended)
    for variable in extended.variables:
        place = places.get(variable.name) or _Place(variable.name, 0, variable.shape)
        key = f"variables/{_key(place.name)}"
        variable.load(_shared(group, key, arrays.get(key), forms[key], place.start, variable.shape))
    parts: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {
        whole.name: [(v.name, start, v.shape) for v, start in zip(whole.variables, whole.offsets, strict=True)]
        for whole in extended.placement.sharded
    }
    for index, optimizer in enumerate(found["optimizers"]):
        prefix = f"optimizers/{index}/slots/"
        slots: dict[str, Contents] = {}
        for key in sorted(key for key in forms if key.startswith(prefix)):
            name, slot = map(_name, key.removeprefix(prefix).split("/"))
            for part, start, shape in parts.get(name, [(name, 0, forms[key][0])]):
                slots.setdefault(part, {})[slot] = _shared(group, key, arrays.get(key), forms[key], start, shape)
        state = {"iterations": optimizer["iterations"], "slots": slots}
        extended.optimizer_states.restore(numbers[index], optimizer["name"], state, optimizer["made"])
    extended.optimizer_states.give()


def _check(
    extended: StrategyExtended, path: str, forms: Mapping[str, Form], optimizers: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise ValueError, the same on every rank, unless the file has all that the program needs."""
    problems, places = [], _places(extended)
    for variable in extended.variables:
        place = places.get(variable.name) or _Place(variable.name, 0, variable.shape)
        form = forms.get(f"variables/{_key(place.name)}")
        wanted = (place.shape, variable.dtype.name)
        if place.start:  # it was said of the first part
            continue
        if form is None:
            problems.append(f"variable {place.name!r} is not in it")
        elif form != wanted:
            problems.append(f"variable {place.name!r} is {form[1]} {form[0]} in it, here {wanted[1]} {wanted[0]}")
    for optimizer in extended.optimizers:
        number = extended.optimizer_states.number_of(optimizer)
        name = optimizers[number]["name"] if number in optimizers else None
        if name is None:
            problems.append(f"optimizer {optimizer.name!r} is not in it")
        elif name != optimizer.name:
            problems.append(f"optimizer {number} is {name!r} in it, here {optimizer.name!r}")
    if problems:
        expected = "a file of this program's variables and optimizers"
        raise ValueError(explain("Strategy.restore", path, expected=expected, got="; ".join(problems)))


def _numbers(extended: StrategyExtended, optimizers: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number by which this strategy knows each optimizer of a file."""
    numbers = extended.placement.numbers
    if numbers is None:
        return list(range(len(optimizers)))
    made = [optimizer["made"] for optimizer in optimizers]
    if None not in made:
        return made
    found: list[int] = numbers.named([optimizer["name"] for optimizer in optimizers])  # another strategy's file
    return found


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


def _form(array: np.ndarray) -> Form:
    return tuple(array.shape), array.dtype.name


def _key(name: str) -> str:
    """A name as one link of HDF5, which cuts at slashes and takes "." for the group itself."""
    quoted = name.replace("%", "%25").replace("/", "%2F")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted


def _name(key: str) -> str:
    return key.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")


class _WriteError(Exception):
    """The file cannot be written; raised when everything was collected, since the other ranks take part in that."""


def _write(path: Path, contents: Iterator[_Piece], optimizers: Sequence[Mapping[str, Any]]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            _fill(beside, contents, optimizers)
            _flush(beside, os.O_RDONLY)
            os.replace(beside, path)
            _flush(path.parent, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, RuntimeError, ValueError) as error:  # what h5py raises
        for _ in contents:
            pass
        raise _WriteError(f"{type(error).__name__}: {error}") from error


def _fill(path: Path, contents: Iterator[_Piece], optimizers: Sequence[Mapping[str, Any]]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["format"], file.attrs["version"] = FORMAT, VERSION
        file.create_group("variables")
        for index, about in enumerate(optimizers):
            file.create_group(f"optimizers/{index}").attrs.update(about)
        for piece in contents:
            array = np.asarray(piece.array)
            as_bits = array.dtype.name == "bfloat16"
            if piece.key not in file:
                dtype = np.dtype(np.uint16) if as_bits else array.dtype
                file.create_dataset(piece.key, piece.shape, dtype, fillvalue=dtype.type(piece.fill))
                if as_bits:
                    file[piece.key].attrs["dtype"] = "bfloat16"
            rows = slice(piece.start, piece.start + len(array)) if array.ndim else ()
            file[piece.key][rows] = array.view(np.uint16) if as_bits else array


def _flush(path: Path, flags: int) -> None:
    """Have the disk keep a file, or the names in a folder."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[Contents, list[dict[str, Any]]]:
    import h5py

    arrays: Contents = {}

    def visit(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            array = np.asarray(item[()])
            arrays[key] = array.view(parse_dtype("bfloat16")) if item.attrs.get("dtype") == "bfloat16" else array

    with h5py.File(path, "r") as file:
        if file.attrs.get("format") != FORMAT or file.attrs.get("version") != VERSION:
            raise ValueError(f"expected a {FORMAT}, version {VERSION}, got another file")
        file.visititems(visit)
        kept = file.get("optimizers", {})
        optimizers = [
            {
                "name": str(about["name"]),
                "iterations": int(about["iterations"]),
                "made": int(about["made"]) if "made" in about else None,
            }
            for about in (kept[str(i)].attrs for i in range(len(kept)))
        ]
    return arrays, optimizers
