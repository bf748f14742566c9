"""ClusterSpec does what TensorFlow documents for tf.train.ClusterSpec."""

from types import SimpleNamespace

import pytest

from mpistrat.cluster import ClusterSpec
from mpistrat.errors import ClusterError

WORKERS = ["worker0.example.com:2222", "worker1.example.com:2222", "worker2.example.com:2222"]
SERVERS = ["ps0.example.com:2222", "ps1.example.com:2222"]


def test_dense_jobs_of_the_documentation():
    spec = ClusterSpec({"worker": WORKERS, "ps": SERVERS})
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 3
    assert spec.task_indices("ps") == [0, 1]
    assert spec.task_address("worker", 2) == "worker2.example.com:2222"
    assert spec.job_tasks("ps") == SERVERS
    assert spec.as_dict() == {"worker": WORKERS, "ps": SERVERS}


def test_sparse_job_of_the_documentation():
    spec = ClusterSpec({"worker": {1: "worker1.example.com:2222"}, "ps": SERVERS})
    assert spec.num_tasks("worker") == 1
    assert spec.task_indices("worker") == [1]
    assert spec.job_tasks("worker") == [None, "worker1.example.com:2222"]
    assert spec.as_dict() == {"worker": {1: "worker1.example.com:2222"}, "ps": SERVERS}


def test_a_dict_of_dense_indices_becomes_a_list():
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"]}
    assert spec == ClusterSpec({"worker": ["a:1", "b:1"]})


def test_cluster_def_is_sorted_by_job_and_task():
    spec = ClusterSpec({"worker": {3: "d:1", 1: "b:1"}, "ps": ["p:1"]})
    assert spec.as_cluster_def() == {
        "job": [{"name": "ps", "tasks": {0: "p:1"}}, {"name": "worker", "tasks": {1: "b:1", 3: "d:1"}}]
    }
    assert list(spec.as_cluster_def()["job"][1]["tasks"]) == [1, 3]


@pytest.mark.parametrize("cluster", [{"worker": {1: "w:1"}, "ps": ["a:1", "b:1"]}, {"worker": []}, {}])
def test_a_cluster_def_makes_the_spec_that_it_came_from(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec.as_cluster_def()) == spec
    jobs = [
        SimpleNamespace(name=job, tasks=dict(enumerate(spec.job_tasks(job)))) for job in ("ps",) if job in spec.jobs
    ]
    assert ClusterSpec(SimpleNamespace(job=jobs)) == ({"ps": ["a:1", "b:1"]} if jobs else {})  # as protocol buffers do


def test_a_job_may_be_called_job():
    assert ClusterSpec({"job": ["a:1"]}).as_dict() == {"job": ["a:1"]}
    assert ClusterSpec({"job": {2: "a:1"}}).as_dict() == {"job": {2: "a:1"}}


def test_equality_truth_and_text():
    spec = ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    assert spec == ClusterSpec(spec)
    assert spec == ClusterSpec({"ps": ["b:1"], "worker": ["a:1"]})
    assert spec != ClusterSpec({"ps": ["b:2"], "worker": ["a:1"]})
    assert spec == {"worker": ["a:1"], "ps": ["b:1"]}
    assert spec != 3
    assert spec
    assert not ClusterSpec({})
    assert repr(spec) == "ClusterSpec({'ps': ['b:1'], 'worker': ['a:1']})"


def test_a_copy_does_not_share_its_tasks():
    source = {"worker": ["a:1"]}
    spec = ClusterSpec(source)
    source["worker"].append("b:1")
    spec.as_dict()["worker"].append("c:1")
    spec.as_cluster_def()["job"][0]["tasks"][1] = "d:1"
    assert spec.num_tasks("worker") == 1


def test_a_job_without_tasks():
    spec = ClusterSpec({"worker": []})
    assert spec.num_tasks("worker") == 0
    assert spec.job_tasks("worker") == []
    assert spec.as_dict() == {"worker": {}}


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_an_unknown_job_is_a_value_error_that_names_it(method):
    with pytest.raises(ValueError, match="No such job in cluster: 'chief'"):
        getattr(ClusterSpec({"worker": WORKERS}), method)("chief")


def test_an_unknown_task_is_a_value_error_that_names_it():
    with pytest.raises(ValueError, match="No task with index 3 in job 'worker'"):
        ClusterSpec({"worker": WORKERS}).task_address("worker", 3)
    with pytest.raises(ValueError, match="No such job"):
        ClusterSpec({"worker": WORKERS}).task_address("ps", 0)


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        (["a:1"], "a list"),
        (None, "a NoneType"),
        ({"worker": "a:1"}, "'worker'"),
        ({"worker": 3}, "'worker'"),
        ({"worker": [3]}, "3 for task 0"),
        ({"worker": [""]}, "task 0"),
        ({"worker": {-1: "a:1"}}, "-1"),
        ({"worker": {"x": "a:1"}}, "'x'"),
        ({"worker": {True: "a:1"}}, "bool"),
        ({"worker": {10**9: "a:1"}}, "1000000000"),
        ({"worker": {10**5000: "a:1"}}, "int"),
        ({"worker": {1: "a:1", "1": "b:1"}}, "task 1 twice"),
        ({3: ["a:1"]}, "3"),
    ],
)
def test_wrong_forms_are_named(cluster, named):
    with pytest.raises(ClusterError) as error:
        ClusterSpec(cluster)
    assert named in str(error.value)
