"""The weights of a strategy: its variables without the sums of metrics; and their values from a file, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import explain
from ..state.file import CheckpointFile
from ..state.list import key_of, locations, name_of

__all__ = ["METRIC", "assign_from_file", "weights_of"]

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
    where = locations(strategy.extended.placement)
    wanted = [(variable, where[variable.name]) for variable in weights_of(strategy)]
    if names is not None:
        wanted = [(variable, location) for variable, location in wanted if location.name in names]
    there = {location.name: location.name if names is None else names[location.name] for _, location in wanted}
    with CheckpointFile(Path(path)) as file:
        forms = file.forms(map(key_of, there.values()))
        for variable, location in wanted:
            name = there[location.name]
            form, shape = forms.get(f"variables/{key_of(name)}"), tuple(location.box.shape)
            if form is None:
                got = f"only {', '.join(map(name_of, file.names()))}"
            elif tuple(form.shape) != shape or form.kind != variable.dtype:
                got = f"shape {tuple(form.shape)} and dtype {form.dtype}"
            else:
                continue
            expected = f"{name!r} with shape {shape} and dtype {variable.dtype}"
            raise ValueError(explain(function, os.fspath(path), expected=expected, got=got))
        for variable, location in wanted:
            key = f"variables/{key_of(there[location.name])}"
            whole = file.read_array(key, forms[key])
            variable.assign(whole[tuple(slice(*limits) for limits in location.box.ranges)])
