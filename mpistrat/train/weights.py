"""The weights of a strategy: its variables without the sums of metrics; and their values from a file, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import explain
from ..state.file import CheckpointFile
from ..state.list import key_of, locations, name_of

__all__ = ["METRIC", "assign_from_file", "expect_trainable", "weights_of"]

METRIC = "metric/"  # begins the names of metrics' sums


def weights_of(strategy: Any) -> list[Any]:
    """Return the variables of a strategy, in the order of their creation, without the sums of metrics."""
    return [variable for variable in strategy.extended.variables if not variable.name.startswith(METRIC)]


def assign_from_file(
    function: str, strategy: Any, path: str | os.PathLike[str], names: Mapping[str, str] | None = None
) -> None:
    """Assign values of a file of `Strategy.save` to variables. Collective; each rank reads the file.

    Args:
        function: in errors.
        strategy: of the variables.
        path: the file.
        names: the names in the file, by the names of the variables; default all weights under their own names.

    Raises:
        ValueError: the file does not have a variable, or with another shape or dtype.
        OSError: it cannot be read.
    """
    with CheckpointFile(Path(path)) as file:
        for variable, box, key, form in _in_file(function, strategy, file, path, names):
            whole = file.read_array(key, form)
            variable.assign(whole[tuple(slice(*limits) for limits in box.ranges)])


def expect_trainable(function: str, strategy: Any, path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless a file of `Strategy.save` has each trainable variable, with its shape and dtype. Local.

    Args:
        function: in errors.
        strategy: of the variables.
        path: the file.
    """
    where = locations(strategy.extended.placement)
    names = [where[variable.name].name for variable in weights_of(strategy) if variable.trainable]
    with CheckpointFile(Path(path)) as file:
        _in_file(function, strategy, file, path, {name: name for name in names})


def _in_file(
    function: str, strategy: Any, file: CheckpointFile, path: str | os.PathLike[str], names: Mapping[str, str] | None
) -> list[tuple[Any, Any, str, Any]]:
    """Return the wanted variables, and of each the box, the key in the file, and the form there. See `assign_from_file`."""
    where = locations(strategy.extended.placement)
    wanted = [(variable, where[variable.name]) for variable in weights_of(strategy)]
    if names is not None:
        wanted = [(variable, location) for variable, location in wanted if location.name in names]
    there = {location.name: location.name if names is None else names[location.name] for _, location in wanted}
    forms = file.forms(map(key_of, there.values()))
    found = []
    for variable, location in wanted:
        name = there[location.name]
        key = f"variables/{key_of(name)}"
        form, shape = forms.get(key), tuple(location.box.shape)
        if form is not None and tuple(form.shape) == shape and form.kind == variable.dtype:
            found.append((variable, location.box, key, form))
            continue
        known = f"only {', '.join(map(name_of, file.names()))}"
        got = known if form is None else f"shape {tuple(form.shape)} and dtype {form.dtype}"
        expected = f"{name!r} with shape {shape} and dtype {variable.dtype}"
        raise ValueError(explain(function, os.fspath(path), expected=expected, got=got))
    return found
