"""Chief, worker, ps and evaluator: the rules, and who has which number."""

import pytest

from mpistrat.cluster.roles import collective_leader, id_in_cluster, is_chief, validate, worker_count
from mpistrat.errors import ClusterError

FULL = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p0:1", "p1:1"], "evaluator": ["e:1"]}
WORKERS = {"worker": ["w0:1", "w1:1"]}


@pytest.mark.parametrize(
    ("cluster", "task", "chief", "number", "count", "leader"),
    [
        (FULL, ("chief", 0), True, 0, 3, "/job:chief/replica:0/task:0"),
        (FULL, ("worker", 0), False, 1, 3, "/job:chief/replica:0/task:0"),
        (FULL, ("worker", 1), False, 2, 3, "/job:chief/replica:0/task:0"),
        (FULL, ("evaluator", 0), True, 0, 1, ""),
        (WORKERS, ("worker", 0), True, 0, 2, "/job:worker/replica:0/task:0"),
        (WORKERS, ("worker", 1), False, 1, 2, "/job:worker/replica:0/task:0"),
        (WORKERS, ("evaluator", 0), True, 0, 1, ""),
        (WORKERS | {"master": ["m:1"]}, ("master", 0), True, 0, 3, "/job:master/replica:0/task:0"),
        (WORKERS | {"master": ["m:1"]}, ("worker", 0), False, 1, 3, "/job:master/replica:0/task:0"),
    ],
)
def test_table_of_tasks(cluster, task, chief, number, count, leader):
    assert is_chief(cluster, *task) is chief
    assert id_in_cluster(cluster, *task) == number
    assert worker_count(cluster, task[0]) == count
    assert collective_leader(cluster, *task) == leader


def test_a_sparse_job_has_dense_numbers():
    assert id_in_cluster({"chief": ["c:1"], "worker": {2: "a:1", 5: "b:1"}}, "worker", 5) == 2


def test_a_parameter_server_is_no_chief_and_has_no_number():
    assert is_chief(FULL, "ps", 0) is False
    with pytest.raises(ClusterError, match="ps"):
        id_in_cluster(FULL, "ps", 0)
    with pytest.raises(ClusterError, match="ps"):
        worker_count(FULL, "ps")


def test_an_empty_cluster_has_no_leader():
    assert collective_leader({}, "worker", 0) == ""


@pytest.mark.parametrize(
    ("cluster", "task", "named"),
    [
        ({"chief": ["a:1", "b:1"]}, (), "at most one chief"),
        ({"evaluator": ["a:1", "b:1"]}, (), "at most one evaluator"),
        ({"boss": ["a:1"]}, (), "'boss'"),
        ({"chief": ["a:1"], "master": ["b:1"]}, (), "at most one chief"),
        (WORKERS, ("trainer", 0), "'trainer'"),
        (WORKERS, ("chief", 0), "'chief'"),
        (WORKERS, ("worker", 2), "0 to 1"),
        (WORKERS, ("worker", -1), "-1"),
        ({"worker": []}, ("worker", 0), "it has none"),
    ],
)
def test_broken_rules_are_named(cluster, task, named):
    with pytest.raises(ValueError) as error:
        validate(cluster, *task)
    assert isinstance(error.value, ClusterError)
    assert named in str(error.value)
