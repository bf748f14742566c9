"""regroup and select_replica are each other's inverse; identical leaves are not wrapped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.base.distributed_values import DistributedValues, Mirrored, PerReplica, regroup, select_replica

trees = st.recursive(st.just(None), lambda c: st.lists(c, min_size=1, max_size=3) | st.tuples(c, c), max_leaves=6)


def _fill(tree: object, replica: int, counter: list[int]) -> object:
    if isinstance(tree, (list, tuple)):
        return type(tree)(_fill(child, replica, counter) for child in tree)
    counter[0] += 1
    return (replica, counter[0]).__repr__()


@given(trees, st.integers(2, 4))
def test_select_inverts_regroup(tree: object, replicas: int) -> None:
    values = [_fill(tree, replica, [0]) for replica in range(replicas)]
    grouped = regroup(values)
    assert [select_replica(i, grouped) for i in range(replicas)] == values


def test_identical_objects_and_single_replicas_are_not_wrapped() -> None:
    shared = object()
    assert regroup([shared, shared]) is shared
    assert regroup([1]) == 1
    assert isinstance(regroup([[1], [2]], Mirrored)[0], Mirrored)


def test_regroup_refuses_different_forms() -> None:
    with pytest.raises(ValueError, match="expected list"):
        regroup([[1, 2], [1]])


def test_a_value_for_no_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        PerReplica([])
    assert issubclass(PerReplica, DistributedValues)


def test_several_values_are_no_array_and_no_number():
    for wrong in (np.asarray, float, lambda values: values + np.ones(2)):
        with pytest.raises(TypeError, match=r"PerReplica of 2\. .*strategy\.reduce"):
            wrong(PerReplica([1.0, 2.0]))
