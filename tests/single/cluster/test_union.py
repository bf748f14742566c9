"""Several resolvers as one: nobody overwrites, and task 0 is a task."""

import pytest

from mpistrat.cluster import ClusterSpec
from mpistrat.cluster_resolver import SimpleClusterResolver, UnionClusterResolver, UnionResolver
from mpistrat.errors import ClusterError


def simple(cluster, *arguments, **named):
    return SimpleClusterResolver(ClusterSpec(cluster), *arguments, **named)


def test_both_names_are_one_class():
    assert UnionClusterResolver is UnionResolver


def test_jobs_of_both():
    union = UnionResolver(simple({"ps": ["p:1"]}), simple({"worker": ["w:1"]}))
    assert union.cluster_spec() == {"ps": ["p:1"], "worker": ["w:1"]}


def test_lists_follow_each_other():
    union = UnionResolver(simple({"worker": ["a:1", "b:1"]}), simple({"worker": ["c:1"]}))
    assert union.cluster_spec() == {"worker": ["a:1", "b:1", "c:1"]}


def test_sparse_tasks_keep_their_indices():
    union = UnionResolver(simple({"worker": {3: "d:1"}}), simple({"worker": ["a:1", "b:1"]}))
    assert union.cluster_spec() == {"worker": {0: "a:1", 1: "b:1", 3: "d:1"}}


def test_an_empty_job_makes_no_list_sparse():
    union = UnionResolver(simple({"worker": []}), simple({"worker": ["a:1"]}), simple({"worker": ["b:1"]}))
    assert union.cluster_spec() == {"worker": ["a:1", "b:1"]}


def test_a_later_resolver_does_not_overwrite():
    union = UnionResolver(simple({"worker": {1: "a:1"}}), simple({"worker": ["x:1", "b:1"]}))
    with pytest.raises(ClusterError, match=r"task 1 at 'a:1' and at 'b:1'"):
        union.cluster_spec()


def test_the_first_resolver_speaks_for_all():
    first = simple({"worker": ["a:1"]}, "lead:1", "worker", 0, "cloud", {"GPU": 3}, "grpc")
    union = UnionResolver(first, simple({"worker": ["b:1"]}, "other:1", "ps", 4, "none", {"GPU": 9}, "mpi"))
    assert (union.task_type, union.task_id) == ("worker", 0)
    assert union.environment == "cloud"
    assert union.num_accelerators() == {"GPU": 3}
    assert union.rpc_layer == "grpc"
    assert union.master() == "grpc://lead:1"
    assert union.master("worker", 1) == "grpc://b:1"


def test_task_zero_overrides_the_first_resolver():
    union = UnionResolver(simple({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=1), task_id=0)
    assert union.task_id == 0
    union.task_id = 1
    assert union.task_id == 1


def test_only_resolvers_are_united():
    with pytest.raises(ClusterError, match="at least one"):
        UnionResolver()
    with pytest.raises(ClusterError, match="a ClusterSpec"):
        UnionResolver(ClusterSpec({}))
    with pytest.raises(ClusterError, match="a dict"):
        SimpleClusterResolver({"worker": ["a:1"]})
    with pytest.raises(ClusterError, match="task_id"):
        simple({}, task_id="0")
