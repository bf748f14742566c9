"""Settings of optimizers in files: attributes that a program may change between steps, as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..base.errors import explain

__all__ = ["NO_JSON", "as_attribute", "as_json", "changed", "check_groups", "group_settings", "saved_settings"]

# Public attributes that are not settings: fixed at creation, or without effect on numbers.
_UNSAVED = frozenset(("name", "slot_names", "use_ema", "gradient_accumulation_steps", "check_numerics"))
NO_JSON = object()


def saved_settings(thing: object, without: Collection[str]) -> dict[str, Any]:
    """Return the public attributes of an object that JSON can hold, except some."""
    own = {name: as_json(value) for name, value in vars(thing).items() if name[:1] != "_"}
    return {n: value for n, value in own.items() if value is not NO_JSON and n not in _UNSAVED and n not in without}


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of any library, also an array without dimensions."""
    if isinstance(value, (bool, int, float)):
        return True
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # torch's dtypes have no kind
    return getattr(value, "ndim", None) == 0 and hasattr(value, "item") and kind in "biuf"


def as_json(value: Any) -> Any:
    """Return a value as JSON holds it, a number for an array without dimensions; `NO_JSON` for other values."""
    if value is None or isinstance(value, str):
        return value
    if _is_number(value):
        return value.item() if hasattr(value, "item") else value
    if isinstance(value, (list, tuple)):
        items = [as_json(item) for item in value]
        return NO_JSON if any(item is NO_JSON for item in items) else items
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        entries = {name: as_json(item) for name, item in value.items()}
        return NO_JSON if any(item is NO_JSON for item in entries.values()) else entries
    return NO_JSON


def group_settings(group: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """Return the entries of a group of another library's optimizer that JSON can hold, except some."""
    found = {name: as_json(value) for name, value in group.items() if name not in without}
    return {name: value for name, value in found.items() if value is not NO_JSON}


def changed(now: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new settings that an optimizer has with another value."""
    return {name: value for name, value in new.items() if name in now and now[name] != value}


def as_attribute(value: Any, now: Any) -> Any:
    """Return a saved value in the attribute's current type: a tuple, or a number of NumPy."""
    if isinstance(now, tuple) and isinstance(value, list):
        others = now if len(now) == len(value) else (None,) * len(value)
        return tuple(as_attribute(item, other) for item, other in zip(value, others, strict=True))
    if isinstance(now, np.generic) and _is_number(value):
        return type(now)(value)
    return value


def check_groups(name: str, settings: Sequence[Any], groups: int) -> None:
    """Raise ValueError unless there are settings for each group of an optimizer."""
    if len(settings) != groups:
        expected, got = f"settings of {groups} groups of parameters", f"of {len(settings)}"
        remedy = "Create the optimizer with the groups of the saved state"
        raise ValueError(explain("Optimizer.set_settings", name, expected=expected, got=got, remedy=remedy))
