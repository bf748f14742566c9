"""Nested structures: order of leaves, rebuilding, and errors that name the place."""

from __future__ import annotations

import collections.abc
import dataclasses
import time
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.base import nest

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


structures = st.recursive(
    st.integers() | st.none(),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.dictionaries(st.text(max_size=3), child, max_size=3),
        st.tuples(child, child),
        st.builds(Point, child, child),
        st.builds(Pair, child, child),
    ),
    max_leaves=12,
)


@given(structures)
def test_flatten_then_pack_is_identity(structure: Any) -> None:
    leaves = nest.flatten(structure)
    packed = nest.pack_like(structure, leaves)
    assert packed == structure
    assert type(packed) is type(structure)
    assert len(nest.paths(structure)) == len(leaves)


@given(structures)
def test_map_structure_visits_leaves_in_flatten_order(structure: Any) -> None:
    seen: list[Any] = []
    nest.map_structure(seen.append, structure)
    assert seen == nest.flatten(structure)


@dataclasses.dataclass(frozen=True)
class Made:
    """Its fields are no arguments of its `__init__`, as in a module of equinox."""

    inner: Any

    def __init__(self, size: int) -> None:
        object.__setattr__(self, "inner", Pair(size, None))


def test_a_dataclass_with_an_init_of_its_own() -> None:
    made = Made(3)
    twice = nest.map_structure(lambda leaf: leaf and 2 * leaf, [made])[0]
    assert (type(twice), twice.inner, made.inner) == (Made, Pair(6, None), Pair(3, None))


def test_mappings_flatten_by_key_and_keep_their_order() -> None:
    assert nest.flatten({"b": 1, "a": 2}) == [2, 1]
    assert list(nest.map_structure(lambda v: v, {"b": 1, "a": 2})) == ["b", "a"]


def test_the_form_is_keys_lengths_and_types() -> None:
    found = nest.form({"b": [1, (2,)], "a": Pair({}, Point(1, 2))})
    assert found == "{'a': Pair('left': {}, 'right': Point(x: *, y: *)), 'b': [*, (*)]}"
    assert nest.form({"b": 1, "a": None}) == "{'a': *, 'b': *}"
    assert nest.form(3) == "*"


def test_keys_that_do_not_compare_have_one_order_too() -> None:
    one, other = {1: "x", "a": "y", None: "z"}, {None: "z", "a": "y", 1: "x"}
    assert nest.flatten(one) == nest.flatten(other)
    assert nest.form(one) == nest.form(other)


def test_map_structure_names_the_place_of_a_difference() -> None:
    with pytest.raises(ValueError, match=r"at \['a'\]: expected list with \[0, 1\], got list with \[0\]"):
        nest.map_structure(lambda a, b: a, {"a": [1, 2]}, {"a": [1]})
    with pytest.raises(ValueError, match=r"at \['a'\]: expected a leaf, got list"):
        nest.map_structure(lambda a, b: a, {"a": 1}, {"a": [1]})


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_pack_like_counts_leaves(leaves: list[int]) -> None:
    with pytest.raises(ValueError, match=f"expected 2, got {len(leaves)}"):
        nest.pack_like([0, 0], leaves)


class WithUnit(dict[str, Any]):
    """Its constructor takes other arguments than items."""

    def __init__(self, unit: str, **items: Any) -> None:
        super().__init__(**items)
        self.unit = unit


class Attributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Encoding(collections.UserDict[str, Any]):
    """It has more than items, as the encodings of tokenizers."""

    def __init__(self, items: Mapping[str, Any], encodings: Any = None) -> None:
        super().__init__(items)
        self.encodings = encodings


class Frozen(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


class Named(list[Any]):
    name = ""


class Both(tuple[Any, ...]):
    """Its constructor takes its items one by one."""

    name: str

    def __new__(cls, a: Any, b: Any) -> Both:
        return super().__new__(cls, (a, b))


class Doubled(Point):
    """Its constructor computes one of its fields."""

    note: str

    def __new__(cls, x: Any) -> Doubled:
        return super().__new__(cls, x, 2 * x)


def named(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def others(value: Any) -> dict[str, Any]:
    """Return all that a node has besides its items."""
    found = {"factory": getattr(value, "default_factory", None)}
    known = getattr(value, "__dict__", {})
    return found | {name: known[name] for name in known if name != "data" and known is not value}


@pytest.mark.parametrize(
    "node",
    [
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.defaultdict(list, {"b": 1, "a": 2}),
        collections.Counter(b=1, a=2),
        WithUnit("m", b=1, a=2),
        Attributes(b=1, a=2),
        named(Attributes(b=1, a=2), c=3),
        Encoding({"b": 1, "a": 2}, encodings="kept"),
        Frozen(b=1, a=2),
        types.MappingProxyType({"b": 1, "a": 2}),
        named(Named([1, 2]), name="kept"),
        named(Both(1, 2), name="kept"),
        named(Doubled(1), note="kept"),
        time.gmtime(0),
    ],
    ids=lambda node: type(node).__name__,
)
def test_a_node_of_any_class_keeps_all_but_its_leaves(node: Any) -> None:
    before, leaves = repr(node), nest.flatten(node)
    found = nest.map_structure(lambda leaf: leaf + 0.5, [node, {"inner": node}])
    for twice in (found[0], found[1]["inner"]):
        assert type(twice) is type(node) and others(twice) == others(node)
        assert nest.flatten(twice) == [leaf + 0.5 for leaf in leaves]
        assert list(twice) == (list(node) if isinstance(node, Mapping) else nest.flatten(twice))
        if isinstance(node, Attributes):
            assert (twice.a, twice.b) == (2.5, 1.5)
    assert repr(node) == before
    assert type(nest.pack_like(node, leaves)) is type(node) and nest.pack_like(node, leaves) == node


class Store(MutableMapping[str, Any]):
    """Made empty: there is no copy of it with other items."""

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Scaled(Store):
    """Made with more than items."""

    def __init__(self, items: Mapping[str, Any], scale: float = 1.0) -> None:
        self._items, self.scale = dict(items), scale


def test_a_class_without_such_a_copy_is_refused_by_name() -> None:
    store = Store()
    store["a"] = 1
    for node, why in ((store, "takes 1 positional"), (Scaled({"a": 1}, 3.0), "does not preserve the items")):
        with pytest.raises(TypeError, match=rf"cannot copy a {type(node).__name__} with other values \(.*{why}"):
            nest.map_structure(lambda leaf: 2 * leaf, {"x": node})
        assert dict(node) == {"a": 1}
    twice = nest.map_structure(lambda leaf: 2 * leaf, Scaled({"a": 1}))
    assert type(twice) is Scaled and dict(twice) == {"a": 2}


class Doubling(collections.UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, 2 * value)


class Lower(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key.lower(), value)


class Arrays(collections.UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, np.asarray(value))


def test_a_mapping_that_changes_what_is_set_is_refused():
    with pytest.raises(TypeError, match="cannot copy a Doubling .*does not preserve the items"):
        nest.map_structure(lambda leaf: leaf + 1, Doubling(a=1.0))
    assert dict(nest.map_structure(lambda leaf: leaf + 1, Lower({"A": 1}))) == {"A": 2}
    made = nest.map_structure(lambda leaf: float(leaf) + 1, Arrays(a=1.0, b=np.nan))
    assert made["a"] == 2 and np.isnan(made["b"])


def test_namedtuples_differ_where_their_fields_do():
    other = collections.namedtuple("Point", ["y", "x"])
    assert nest.form([Point(1, (2,))]) == "[Point(x: *, y: (*))]"
    assert nest.form(Point(1, 2)) != nest.form(other(1, 2))
    with pytest.raises(ValueError, match=r"at \['p'\]: expected Point with \('x', 'y'\), got Point with \('y', 'x'\)"):
        nest.map_structure(lambda a, b: a, {"p": Point(1, 2)}, {"p": other(1, 2)})
    assert nest.map_structure(lambda a, b: a + b, Point(1, 2), (3, 4)) == Point(4, 6)


class Computed(collections.abc.Mapping):
    """Computes its items anew each time."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return np.asarray([self._items[key]])

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def test_a_mapping_that_computes_its_items_is_copied():
    made = nest.map_structure(lambda array: array * 2, Computed({"a": 1, "b": 2}))
    assert type(made) is Computed and made["b"].tolist() == [[4]]
