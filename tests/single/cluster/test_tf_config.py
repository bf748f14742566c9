"""TF_CONFIG is understood as TensorFlow does, and whatever stands in it raises nothing but ClusterError."""

import json
import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.cluster_resolver import TFConfigClusterResolver
from mpistrat.errors import ClusterError

CONFIG = {
    "cluster": {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222", "worker2:2222"]},
    "task": {"type": "ps", "index": 0},
    "rpc_layer": "grpc",
    "environment": "cloud",
}


def resolve(config, **arguments):
    text = config if isinstance(config, str) else json.dumps(config)
    with mock.patch.dict(os.environ, {"TF_CONFIG": text}):
        return TFConfigClusterResolver(**arguments)


def test_the_whole_table():
    resolver = resolve(CONFIG)
    assert resolver.cluster_spec().as_dict() == CONFIG["cluster"]
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.rpc_layer == "grpc"
    assert resolver.environment == "cloud"
    assert resolver.master() == "grpc://ps0:2222"
    assert resolver.master("worker", 1) == "grpc://worker1:2222"
    assert resolver.master("worker", 1, rpc_layer="mpi") == "mpi://worker1:2222"


def test_arguments_override():
    resolver = resolve(CONFIG, task_type="worker", task_id=0, rpc_layer="mpi", environment="here")
    assert resolver.master() == "mpi://worker0:2222"
    assert resolver.environment == "here"


def test_attributes_may_be_set():
    resolver = resolve(CONFIG)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "test"
    assert resolver.master() == "test://worker2:2222"


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"cluster": {}}', '{"cluster": null}'])
def test_nothing_given_is_an_empty_cluster(text):
    resolver = resolve(text)
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (None, None, "", "")


def test_unset_is_an_empty_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert not TFConfigClusterResolver().cluster_spec()


def test_a_lone_task_has_nobody_to_connect_to():
    config = {"cluster": {"worker": ["worker0:2222"]}, "task": {"type": "worker", "index": 0}, "rpc_layer": "grpc"}
    assert resolve(config).master() == ""


def test_a_sparse_cluster_and_an_index_in_quotes():
    resolver = resolve({"cluster": {"worker": {"1": "w1:1", "7": "w7:1"}}, "task": {"type": "worker", "index": "7"}})
    assert resolver.cluster_spec().task_indices("worker") == [1, 7]
    assert (resolver.task_id, resolver.master()) == (7, "w7:1")


def test_the_chief_may_be_called_master_as_in_tensorflow_1():
    config = {"cluster": {"master": ["m:1"], "worker": ["w:1"]}, "task": {"type": "master", "index": 0}}
    assert (resolve(config).task_type, resolve(config).master()) == ("master", "m:1")


def test_an_evaluator_is_a_cluster_of_its_own():
    resolver = resolve({"cluster": CONFIG["cluster"], "task": {"type": "evaluator", "index": 0}})
    assert resolver.task_type == "evaluator"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "JSON"),
        ("worker0:2222", "JSON"),
        ("[1, 2]", "a JSON object"),
        ('"text"', "a JSON object"),
        ("[" * 100_000, "JSON"),
        ('{"task": {"index": ' + "9" * 6000 + "}}", "TF_CONFIG"),
        ('{"task": {"index": ' + "9" * 30 + "}}", "31 bits"),
        ({"cluster": ["a:1"]}, "cluster"),
        ({"cluster": {"master": ["a:1"], "chief": ["b:1"]}}, "at most one chief"),
        ({"cluster": {"chief": ["a:1", "b:1"]}}, "at most one chief"),
        ({"cluster": {"evaluator": ["a:1", "b:1"]}}, "at most one evaluator"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "'a:1' for worker 0 and worker 1"),
        ({"cluster": {"worker": ["a:1"], "ps": ["a:1"]}}, "'a:1' for worker 0 and ps 0"),
        ({"cluster": {"worker": [7]}}, "7"),
        ({"cluster": {"worker": {"4000000000": "a:1"}}}, "4000000000"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}, "0 to 1"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "'ps'"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "boss", "index": 0}}, "'boss'"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": ["worker"], "index": 0}}, "task_type"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": True}}, "True"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}, "-1"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0.0}}, "0.0"),
        ({"cluster": {"worker": ["a:1"]}, "task": 3}, "task"),
        ({"rpc_layer": 3}, "rpc_layer"),
        ({"environment": []}, "environment"),
    ],
)
def test_mistakes_are_named(config, named):
    with pytest.raises(ClusterError) as error:
        resolve(config)
    assert "TF_CONFIG" in str(error.value)
    assert named in str(error.value)
    assert len(str(error.value)) < 1000


# What an environment variable can hold: no NUL, no lone surrogate.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.sampled_from(["worker", "ps", "a:1"]))
JSON = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))
JOBS = st.dictionaries(st.sampled_from(["chief", "worker", "ps", "evaluator", "", "x"]), JSON, max_size=4)
TASK = st.fixed_dictionaries({}, optional={"type": JSON, "index": JSON})
CONFIGS = st.fixed_dictionaries(
    {}, optional={"cluster": JOBS | JSON, "task": TASK | JSON, "rpc_layer": JSON, "environment": JSON}
)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.one_of(TEXT, JSON.map(json.dumps), CONFIGS.map(json.dumps)))
def test_no_text_raises_anything_else(text):
    try:
        resolver = resolve(text)
    except ClusterError:
        return
    assert repr(resolver.cluster_spec())
