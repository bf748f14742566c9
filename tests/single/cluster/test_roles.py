"""Chief, worker, ps and evaluator: the rules, and who has which number."""

import pytest

from mpistrat.cluster.spec import validate, worker_count
from mpistrat.errors import ClusterError

FULL = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p0:1", "p1:1"], "evaluator": ["e:1"]}
WORKERS = {"worker": ["w0:1", "w1:1"]}


@pytest.mark.parametrize(
    ("cluster", "job", "count"),
    [
        (FULL, "chief", 3),
        (FULL, "worker", 3),
        (FULL, "evaluator", 1),
        (WORKERS, "worker", 2),
        (WORKERS, "evaluator", 1),
    ],
)
def test_how_many_train_with_a_task(cluster, job, count):
    assert worker_count(cluster, job) == count


def test_with_a_parameter_server_nobody_trains():
    with pytest.raises(ClusterError, match="ps"):
        worker_count(FULL, "ps")


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
