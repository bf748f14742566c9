"""Nested structures: list, tuple, namedtuple, mapping and dataclass are nodes; everything else, None included, is a leaf."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .types import IndexedSlices

__all__ = ["flatten", "form", "is_nested", "map_children", "map_structure", "pack_like", "paths"]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, IndexedSlices))


@functools.lru_cache(maxsize=256)
def _makes_nodes(kind: type) -> bool:
    """Return True if instances are nodes. Cached, because checking each value costs more than all other work on a leaf."""
    return issubclass(kind, (list, tuple, Mapping)) or (
        dataclasses.is_dataclass(kind) and not issubclass(kind, IndexedSlices)
    )


def is_nested(value: Any) -> bool:
    """Return True if a value is a node of a structure rather than a leaf.

    Example:
        >>> is_nested([1]), is_nested(1)
        (True, False)
    """
    return _makes_nodes(type(value))  # type: ignore[arg-type]


def _children(node: Any) -> list[tuple[Any, Any]]:
    """Return key and child pairs; of mappings in sorted key order, so that ranks agree whatever the insertion order."""
    if type(node) is dict or isinstance(node, Mapping):
        try:
            return [(key, node[key]) for key in sorted(node)]
        except TypeError:  # incomparable keys: 1 and "a"
            return sorted(node.items(), key=lambda item: (type(item[0]).__name__, _key(item[0])))
    if _is_dataclass(node):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return list(enumerate(node))


def _fields(node: Any) -> tuple[str, ...] | None:
    """Return the field names of a namedtuple."""
    return getattr(node, "_fields", None) if isinstance(node, tuple) else None


def _key(key: Any) -> str:
    """Return a text of a key that is the same on every rank."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(key))


def _rebuild(node: Any, keys: list[Any], children: list[Any]) -> Any:
    """Return a copy of a node with other children and all its other attributes.

    Raises:
        TypeError: the class allows no such copy.
    """
    kind = type(node)
    if kind is dict:
        by_key = dict(zip(keys, children, strict=True))
        return {key: by_key[key] for key in node}
    if kind in (list, tuple):
        return kind(children)
    try:
        if isinstance(node, Mapping):
            return _mapping_like(node, dict(zip(keys, children, strict=True)))
        if isinstance(node, tuple):
            return _tuple_like(node, children)
        made = copy.copy(node)  # dataclasses.replace calls __init__, whose arguments may not be the fields
        if isinstance(node, list):
            made[:] = children
            return made
        for key, child in zip(keys, children, strict=True):
            object.__setattr__(made, key, child)
        return made
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        remedy = "Pass a dict, list or tuple, or give the class a __copy__ that copies its items"
        raise TypeError(f"cannot copy a {kind.__name__} with other values ({why}). {remedy}") from error


def _mapping_like(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(node, dict) or hasattr(type(node), "__copy__"):
        made = _with_items(node, items)
        if made is not None and _has_items(made, node, items):
            return made
    made = type(node)({key: items[key] for key in node})  # type: ignore[call-arg]
    if not _has_items(made, node, items) or _settings(made) != _settings(node):
        raise ValueError("its class does not preserve the items")
    return made


def _has_items(made: Mapping[Any, Any], node: Mapping[Any, Any], items: dict[Any, Any]) -> bool:
    """Return True if a mapping has the given items in the order of a node; computed items may differ."""
    kept = (key for key, value in items.items() if node[key] is node[key] and not is_nested(value))
    return list(made) == list(node) and all(_is_same(made[key], items[key]) for key in kept)


def _is_same(found: Any, value: Any) -> bool:
    if found is value:
        return True
    try:
        return np.array_equal(found, value) or np.array_equal(found, value, equal_nan=True)
    except Exception:  # not an array
        return False


def _with_items(node: Any, items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with other items; None if it cannot be copied or does not change."""
    try:
        made = copy.copy(node)
        if made is node:
            return None
        own = getattr(node, "__dict__", None)
        if own is node:  # items are attributes
            made.__dict__ = made
        elif own:
            vars(made).update((name, value) for name, value in own.items() if name not in vars(made))
        for key, value in items.items():
            made[key] = value
    except Exception:
        return None
    return made


def _settings(node: Any) -> dict[str, Any]:
    """Return the attributes with plain values; others cannot be equal in a new object."""
    own = getattr(node, "__dict__", {})
    return {name: value if isinstance(value, (str, int, float, type(None))) else ... for name, value in own.items()}


def _tuple_like(node: tuple[Any, ...], children: list[Any]) -> Any:
    kind = type(node)
    try:
        made = tuple.__new__(kind, children)  # regardless of its class's arguments
    except TypeError:  # of a class written in C
        try:
            return kind(children)
        except (TypeError, ValueError):  # it rejects other items, as torch.Size does arrays
            return tuple(children)
    getattr(made, "__dict__", {}).update(getattr(node, "__dict__", {}))
    return made


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of a structure, depth first.

    Example:
        >>> flatten({"b": [1, 2], "a": 3})
        [3, 1, 2]
    """
    if not is_nested(structure):
        return [structure]
    leaves: list[Any] = []
    for child in structure if type(structure) in (list, tuple) else [child for _, child in _children(structure)]:
        if is_nested(child):
            leaves += flatten(child)
        else:
            leaves.append(child)
    return leaves


def paths(structure: Any, prefix: str = "") -> list[str]:
    """Return a name for every leaf, in the order of `flatten`.

    Example:
        >>> paths({"a": 3, "b": [1, 2]})
        ["['a']", "['b'][0]", "['b'][1]"]
    """
    if not is_nested(structure):
        return [prefix]
    return [name for key, child in _children(structure) for name in paths(child, f"{prefix}[{key!r}]")]


def form(structure: Any) -> str:
    """Return the form of a structure without its leaves: keys, lengths and types, the same on every rank.

    Example:
        >>> form({"b": [1, 2], "a": 3})
        "{'a': *, 'b': [*, *]}"
    """
    if not is_nested(structure):
        return "*"
    if (
        type(structure) is dict
        and not any(map(is_nested, structure.values()))
        and all(type(k) is str for k in structure)
    ):
        return _form_of_names(tuple(structure))
    if isinstance(structure, Mapping) or _is_dataclass(structure):
        text = ", ".join([f"{_key(key)}: {form(child)}" for key, child in _children(structure)])
        return f"{{{text}}}" if isinstance(structure, Mapping) else f"{type(structure).__name__}({text})"
    names = _fields(structure)
    if names is not None:
        text = ", ".join([f"{name}: {form(child)}" for name, child in zip(names, structure, strict=True)])
        return f"{type(structure).__name__}({text})"
    text = ", ".join([form(child) for child in structure])
    return f"({text})" if isinstance(structure, tuple) else f"[{text}]"


@functools.lru_cache(maxsize=256)
def _form_of_names(names: tuple[str, ...]) -> str:
    """Return the form of a dict of leaves; cached, because reductions of metrics need it at every step."""
    return f"{{{', '.join([f'{name!r}: *' for name in sorted(names)])}}}"


def pack_like(structure: Any, leaves: list[Any]) -> Any:
    """Return a structure of the same form with other leaves, given in the order of `flatten`.

    Raises:
        ValueError: the number of leaves differs.

    Example:
        >>> pack_like({"b": [0, 0], "a": 0}, [3, 1, 2])
        {'b': [1, 2], 'a': 3}
    """
    iterator = iter(leaves)
    try:
        packed = _pack(structure, iterator)
    except StopIteration:
        raise ValueError(f"pack_like: leaves: expected {len(flatten(structure))}, got {len(leaves)}") from None
    if next(iterator, iterator) is not iterator:
        raise ValueError(f"pack_like: leaves: expected {len(flatten(structure))}, got {len(leaves)}")
    return packed


def _pack(structure: Any, leaves: Iterator[Any]) -> Any:
    if not is_nested(structure):
        return next(leaves)
    if type(structure) in (list, tuple):
        return type(structure)([_pack(child, leaves) for child in structure])
    children = _children(structure)
    packed = []
    for _, child in children:
        packed.append(_pack(child, leaves))
    return _rebuild(structure, [key for key, _ in children], packed)


def map_structure(function: Callable[..., Any], *structures: Any) -> Any:
    """Return the structure of `function` applied to corresponding leaves.

    Raises:
        ValueError: the structures differ, with the path.

    Example:
        >>> map_structure(lambda a, b: a + b, {"x": (1, 2)}, {"x": (10, 20)})
        {'x': (11, 22)}
    """
    return _map_alone(function, structures[0]) if len(structures) == 1 else _map(function, structures, "")


def map_children(function: Callable[[Any], Any], node: Any) -> Any:
    """Return a node with a function applied to each of its children.

    Example:
        >>> map_children(len, {"a": [1, 2], "b": [3]})
        {'a': 2, 'b': 1}
    """
    children = _children(node)
    return _rebuild(node, [key for key, _ in children], [function(child) for _, child in children])


def _map_alone(function: Callable[..., Any], structure: Any) -> Any:
    """Map a single structure, without comparison."""
    kind = type(structure)
    if not is_nested(structure):
        return function(structure)
    if kind is tuple or kind is list:
        return kind([_map_alone(function, child) for child in structure])
    children = _children(structure)
    return _rebuild(structure, [key for key, _ in children], [_map_alone(function, child) for _, child in children])


def _map(function: Callable[..., Any], structures: tuple[Any, ...], path: str) -> Any:
    first = structures[0]
    if not is_nested(first):
        for other in structures[1:]:
            if is_nested(other):
                raise ValueError(f"map_structure: at {path or 'the root'}: expected a leaf, got {type(other).__name__}")
        return function(*structures)
    children = [_children(s) if is_nested(s) else None for s in structures]
    keys = [key for key, _ in children[0] or []]
    for other, pairs in zip(structures[1:], children[1:], strict=True):
        found = None if pairs is None else [key for key, _ in pairs]
        here, there = (keys, found) if None in (_fields(first), _fields(other)) else (_fields(first), _fields(other))
        if found != keys or here != there:
            raise ValueError(
                f"map_structure: at {path or 'the root'}: expected {type(first).__name__} with {here}, "
                f"got {type(other).__name__} with {there}"
            )
    mapped = [
        _map(function, tuple(child for _, child in column), f"{path}[{column[0][0]!r}]")
        for column in zip(*(pairs or [] for pairs in children), strict=True)
    ]
    return _rebuild(first, keys, mapped)
