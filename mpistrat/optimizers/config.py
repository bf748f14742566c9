"""Optimizers and schedules as plain dicts, and back: `get_config` and `from_config`, in Keras's form.

A dict has the arguments of the class by name, as JSON holds them. A schedule or optimizer inside is a dict of its own with
`class_name` and `config`.

Source: keras.optimizers of Keras 3. Dicts that Keras made are read as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ..base.errors import explain
from .settings import NO_JSON, as_json

__all__ = ["attributes_of", "config_of", "made_from"]

T = TypeVar("T")


def config_of(thing: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name as JSON holds them.

    Args:
        thing: the optimizer or schedule, for errors.
        arguments: each argument's value.

    Raises:
        TypeError: JSON cannot hold a value.
    """
    return {name: _entry(thing, name, value) for name, value in arguments.items()}


def _entry(thing: object, name: str, value: Any) -> Any:
    if hasattr(value, "get_config"):
        return {"class_name": type(value).__name__, "config": value.get_config()}
    entry = as_json(value)
    if entry is NO_JSON:
        function, got = f"{type(thing).__name__}.get_config", f"{type(value).__name__} {value!r:.60}"
        remedy = (
            "Take a schedule of ms.optimizers.schedules for a rate that changes, or override get_config and from_config"
        )
        raise TypeError(explain(function, name, expected="numbers, text, or a schedule", got=got, remedy=remedy))
    return entry


def attributes_of(thing: Any, common: Iterable[str]) -> dict[str, Any]:
    """Return the values of a constructor's arguments: the attributes of the same names.

    Args:
        thing: whose class has the constructor.
        common: the names that `**settings` stands for.

    Raises:
        TypeError: there is no such attribute.
    """
    parameters = list(inspect.signature(type(thing).__init__).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if any(each.kind == each.VAR_KEYWORD for each in parameters):
        names += [name for name in common if name not in names]
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        function, remedy = f"{type(thing).__name__}.get_config", "Override get_config and from_config"
        expected = f"an attribute for each argument of {type(thing).__name__}"
        raise TypeError(explain(function, "", expected=expected, got=f"none named {missing[0]!r}", remedy=remedy))
    return {name: getattr(thing, name) for name in names}


def made_from(kind: type[T], config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None) -> T:
    """Return an object made of the arguments in a dict.

    Args:
        kind: its class.
        config: what `config_of` returned, or Keras's `get_config`.
        custom_objects: classes of the program by name, for the objects inside.

    Raises:
        ValueError: the class of an object inside is not known.
        TypeError: an argument that the class does not have.
    """
    return kind(**{name: _made(kind, name, value, custom_objects or {}) for name, value in config.items()})


def _made(kind: type, argument: str, value: Any, custom_objects: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping) or "class_name" not in value:
        return value
    name = value["class_name"]
    found = custom_objects.get(name)
    for module in (".schedules", "..optimizers"):
        public = import_module(module, __package__)
        found = found or (getattr(public, name) if name in public.__all__ else None)
    if found is None:
        function, remedy = f"{kind.__name__}.from_config", f"Pass custom_objects={{{name!r}: {name}}}"
        raise ValueError(explain(function, argument, expected="a known class", got=repr(name), remedy=remedy))
    inside = (
        {"custom_objects": custom_objects}
        if "custom_objects" in inspect.signature(found.from_config).parameters
        else {}
    )
    return found.from_config(value["config"], **inside)
