"""Nested structures: order of leaves, rebuilding, and errors that name the place."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat._util import nest

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
    assert found == "{'a': Pair('left': {}, 'right': Point(*, *)), 'b': [*, (*)]}"
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
