"""A SLURM step's variables become tasks in the order of SLURM_PROCID."""

import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.cluster_resolver import SlurmClusterResolver
from mpistrat.errors import ClusterError


@pytest.fixture
def step(monkeypatch):
    """Set the variables of a step: all that SLURM set for the tests themselves, if it did, go."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI", "OMPI_COMM"))]:
        monkeypatch.delenv(name)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))

    return set_variables


def three_nodes(step, **more):
    step(PROCID=0, STEP_NUM_TASKS=3, STEP_NODELIST="t02n13,t02n41,t02n43", STEP_TASKS_PER_NODE="1(x3)")
    step(**more)


def test_all_tasks_are_workers(step):
    three_nodes(step)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]}
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://t02n13:8888"


def test_jobs_take_successive_tasks(step):
    three_nodes(step, PROCID=2)
    resolver = SlurmClusterResolver({"ps": 1, "worker": 2}, port_base=9000)
    assert resolver.cluster_spec() == {"ps": ["t02n13:9000"], "worker": ["t02n41:9000", "t02n43:9000"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("distribution", "order"),
    [
        ("block", "a0 a1 b0 b1 c0"),
        ("cyclic", "a0 b0 c0 a1 b1"),
        ("plane=2", "a0 a1 b0 b1 c0"),
        ("block:cyclic,Pack", "a0 a1 b0 b1 c0"),
        ("cyclic:block", "a0 b0 c0 a1 b1"),
    ],
)
def test_tasks_follow_the_distribution(step, distribution, order):
    step(PROCID=1, STEP_NUM_TASKS=5, STEP_NODELIST="a,b,c", STEP_TASKS_PER_NODE="2(x2),1", DISTRIBUTION=distribution)
    found = SlurmClusterResolver(port_base=0).cluster_spec().job_tasks("worker")
    assert [address.replace(":", "") for address in found] == order.split()


def test_hosts_keep_slurms_order(step):
    """node2 comes before node10, as SLURM counts them; sorted as text it would be the other way round."""
    step(PROCID=1, STEP_NUM_TASKS=2, STEP_NODELIST="node[2,10]", STEP_TASKS_PER_NODE="1(x2)", NODEID=1)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["node2:8888", "node10:8888"]}
    assert resolver.master() == "node10:8888"


def test_plane_size_in_its_own_variable(step):
    step(PROCID=0, STEP_NUM_TASKS=6, STEP_NODELIST="a,b", STEP_TASKS_PER_NODE="3(x2)", DISTRIBUTION="plane")
    step(DIST_PLANESIZE=2)
    found = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    assert [address[0] for address in found] == list("aabbab")


def test_tasks_per_node_as_an_argument(step):
    step(PROCID=0, STEP_NUM_TASKS=5, STEP_NODELIST="a,b,c")
    found = SlurmClusterResolver(tasks_per_node=2).cluster_spec().job_tasks("worker")
    assert [address[0] for address in found] == list("aabbc")


@pytest.mark.parametrize(
    ("variables", "jobs", "named"),
    [
        ({"STEP_NUM_TASKS": ""}, None, "SLURM_STEP_NUM_TASKS"),
        ({"STEP_NODELIST": ""}, None, "SLURM_STEP_NODELIST"),
        ({"PROCID": "x"}, None, "SLURM_PROCID"),
        ({"PROCID": "3"}, None, "SLURM_PROCID"),
        ({"STEP_NODELIST": "n[1-"}, None, "SLURM host list"),
        ({"STEP_NODELIST": "a,b"}, None, "2 hosts"),
        ({"STEP_NUM_TASKS": "4"}, None, "4 tasks"),
        ({"STEP_NUM_TASKS": "99999999999"}, None, "SLURM_STEP_NUM_TASKS"),
        ({"STEP_TASKS_PER_NODE": "1(x"}, None, "SLURM tasks per node"),
        ({"DISTRIBUTION": "arbitrary"}, None, "MPIClusterResolver"),
        ({"DISTRIBUTION": "plane=x"}, None, "SLURM_DISTRIBUTION"),
        ({"NODEID": "2"}, None, "SLURM_NODEID"),
        ({"GTIDS": "0,1"}, None, "SLURM_GTIDS"),
        ({}, {"worker": 2}, "3 tasks"),
        ({}, {"worker": 4, "ps": -1}, "-1"),
        ({}, ["worker"], "jobs"),
        ({}, {"trainer": 3}, "'trainer'"),
    ],
)
def test_contradictions_are_named(step, variables, jobs, named):
    three_nodes(step, **variables)
    with pytest.raises(ClusterError) as error:
        SlurmClusterResolver(jobs)
    assert named in str(error.value)


def het_step(step, **more):
    """As SLURM 22.05 sets it where the first component is on n2: lists by name, numbers by component."""
    step(STEP_NUM_TASKS=5, STEP_NODELIST="n[1-2]", STEP_TASKS_PER_NODE="2,3", HET_SIZE=2)
    step(JOB_NODELIST_HET_GROUP_0="n2", JOB_NODELIST_HET_GROUP_1="n1")
    step(**{"PROCID": 3, "NODEID": 1, "GTIDS": "3,4", **more})


@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_components_come_one_after_the_other(step, distribution):
    het_step(step, DISTRIBUTION=distribution)
    resolver = SlurmClusterResolver({"worker": 3, "ps": 2}, port_base=0)
    assert resolver.cluster_spec() == {"worker": ["n2:0", "n2:1", "n2:2"], "ps": ["n1:0", "n1:1"]}
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


def test_the_tasks_of_a_component_follow_the_distribution(step):
    step(STEP_NUM_TASKS=7, STEP_NODELIST="n[1-4]", STEP_TASKS_PER_NODE="2,1,2(x2)", HET_SIZE=2, DISTRIBUTION="cyclic")
    step(JOB_NODELIST_HET_GROUP_0="n[2-3]", JOB_NODELIST_HET_GROUP_1="n[1,4]", PROCID=0, NODEID=0, GTIDS=0)
    found = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    assert [address[:2] for address in found] == ["n2", "n3", "n3", "n1", "n4", "n1", "n4"]


def test_a_step_of_one_component(step):
    het_step(step, STEP_NUM_TASKS=2, STEP_NODELIST="n1", STEP_TASKS_PER_NODE="2", PROCID=1, NODEID=0, GTIDS="0,1")
    assert SlurmClusterResolver().cluster_spec() == {"worker": ["n1:8888", "n1:8889"]}


@pytest.mark.parametrize("size", ["2", "x", "1", "99999999999"])
def test_components_of_another_job_change_nothing(step, size):
    """A job that was submitted from a heterogeneous job inherits its variables."""
    three_nodes(step, HET_SIZE=size, JOB_NODELIST_HET_GROUP_0="t02n41", JOB_NODELIST_HET_GROUP_1="n1")
    assert SlurmClusterResolver().cluster_spec().job_tasks("worker")[0] == "t02n13:8888"


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_SIZE": "5", "PMI_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_RANK": "4", "PMIX_RANK": "4"},
        {"PMI_SIZE": "3", "PMI_RANK": "1"},
        {"PMIX_RANK": "2"},
    ],
)
def test_under_an_mpiexec_within_a_job_the_remedy_is_the_resolver_of_mpi(step, monkeypatch, variables):
    three_nodes(step)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match=r"an mpiexec within the job.*MPIClusterResolver"):
        SlurmClusterResolver()


def test_outside_a_step_the_remedy_is_srun(step):
    step(NTASKS=4, JOB_NODELIST="a,b")
    with pytest.raises(ClusterError, match="srun"):
        SlurmClusterResolver()


@settings(derandomize=True, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any),
    plane=st.integers(1, 5),
)
def test_every_task_has_a_place_of_its_own(counts, plane):
    variables = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_DISTRIBUTION": f"plane={plane}",
    }
    with mock.patch.dict(os.environ, variables):
        os.environ.pop("SLURM_NODEID", None)
        found = SlurmClusterResolver(port_base=0).cluster_spec().job_tasks("worker")
    assert sorted(found) == sorted(f"n{host + 1}:{k}" for host, count in enumerate(counts) for k in range(count))


NAMES = ["PROCID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "DISTRIBUTION", "NODEID", "GTIDS"]
NAMES += ["HET_SIZE", "JOB_NODELIST_HET_GROUP_0", "JOB_NODELIST_HET_GROUP_1"]
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.fixed_dictionaries({name: st.sampled_from(["1", "2", "n[1-2]", "1(x2)", "cyclic"]) | TEXT for name in NAMES}))
def test_no_text_raises_anything_else(values):
    with mock.patch.dict(os.environ, {f"SLURM_{name}": text for name, text in values.items()}):
        try:
            assert SlurmClusterResolver().cluster_spec()
        except ClusterError:
            pass
