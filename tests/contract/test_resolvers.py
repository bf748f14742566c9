"""The contract of all cluster resolvers. A new resolver adds one entry to RESOLVERS."""

import json
import os
from types import SimpleNamespace

import pytest

import mpistrat as ms
from mpistrat.cluster import ClusterSpec
from mpistrat.cluster.spec import validate
from mpistrat.cluster_resolver import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    MPIClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_NODEID": "1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}


def kubernetes():
    """Two pods, c of ps and a, b of worker, as Kubernetes' own client gives them."""

    def pods(label_selector):
        names = "c" if label_selector == "job=ps" else "ba"
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase="Running", host_ip=f"host-{name}")
                )
                for name in names
            ]
        )

    client = SimpleNamespace(list_pod_for_all_namespaces=pods)
    resolver = KubernetesClusterResolver({"worker": ["job=worker"], "ps": ["job=ps"]}, 1, "", client)
    resolver.task_type, resolver.task_id = "worker", 1
    return resolver


def gce():
    """Two instances of one group, as Google's library gives them."""

    def answer(value):
        return SimpleNamespace(execute=lambda: value)

    def instance(project, zone, instance):
        return answer({"networkInterfaces": [{"networkIP": f"10.0.0.{instance}"}]})

    pages = {"items": [{"instance": "https://gce/instances/2"}, {"instance": "https://gce/instances/1"}]}
    groups = SimpleNamespace(listInstances=lambda **_: answer(pages), listInstances_next=lambda **_: None)
    service = SimpleNamespace(instanceGroups=lambda: groups, instances=lambda: SimpleNamespace(get=instance))
    return GCEClusterResolver("project", "zone", "group", 1, task_id=1, rpc_layer="", service=service)


def union():
    return UnionResolver(
        SimpleClusterResolver(ClusterSpec({"worker": CLUSTER["worker"]}), "b:1", "worker", 1),
        SimpleClusterResolver(ClusterSpec({"ps": CLUSTER["ps"]})),
    )


# The environment variables that a resolver reads, and a function that makes it. It must describe two workers and, where its
# source can, a parameter server, and this process must be worker 1.
RESOLVERS = {
    "simple": ({}, lambda: SimpleClusterResolver(ClusterSpec(CLUSTER), "b:1", "worker", 1)),
    "tf_config": (TF_CONFIG, TFConfigClusterResolver),
    "slurm": (SLURM, lambda: SlurmClusterResolver({"worker": 2, "ps": 1})),
    "union": ({}, union),
    "kubernetes": ({}, kubernetes),
    "gce": ({}, gce),
    "sagemaker": (SAGEMAKER, SageMakerClusterResolver),
}


LAUNCHERS = ("SLURM_", "PMI", "OMPI_COMM_", "TF_CONFIG")


def set_up(entry, monkeypatch):
    """Set an entry's variables, and no others of launchers, which pytest itself may have; return its function."""
    variables, function = entry
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return function


@pytest.fixture(params=RESOLVERS)
def make(request, monkeypatch):
    return set_up(RESOLVERS[request.param], monkeypatch)


def test_of_every_resolver(monkeypatch):
    found = {MPIClusterResolver}  # on ranks, below
    for entry in RESOLVERS.values():
        with monkeypatch.context() as patch:
            found.add(type(set_up(entry, patch)()))
    public = {getattr(ms.cluster_resolver, name) for name in ms.cluster_resolver.__all__}
    assert found == {each for each in public if issubclass(each, ClusterResolver) and each is not ClusterResolver}


def check_contract(make):
    """The contract, for a resolver of two workers and perhaps a server. Collective where the resolver is."""
    resolver = make()
    assert isinstance(resolver, ClusterResolver)
    spec = resolver.cluster_spec()
    assert isinstance(spec, ClusterSpec)
    assert spec == make().cluster_spec() == resolver.cluster_spec()
    assert {job: spec.num_tasks(job) for job in spec.jobs} in ({"worker": 2, "ps": 1}, {"worker": 2})
    validate(spec, resolver.task_type, resolver.task_id)
    own = spec.task_address(resolver.task_type, resolver.task_id)
    assert resolver.master() == own
    assert resolver.rpc_layer == ""
    assert resolver.environment == ""
    assert resolver.master(rpc_layer="grpc") == f"grpc://{own}"
    for job in spec.jobs:
        for index in spec.task_indices(job):
            assert resolver.master(job, index) == spec.task_address(job, index)
            assert resolver.master(job, index, rpc_layer="mpi") == f"mpi://{spec.task_address(job, index)}"
    with pytest.raises(ValueError):
        resolver.master("worker", 2)
    with pytest.raises(ValueError):
        resolver.master("chief", 0)
    accelerators = resolver.num_accelerators()
    assert all(isinstance(kind, str) and count > 0 for kind, count in accelerators.items())
    check_settable(resolver)


def check_settable(resolver):
    job = resolver.cluster_spec().jobs[-1]
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "ab"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "ab")
    validate(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    assert resolver.master(job, 0) == f"ab://{resolver.cluster_spec().task_address(job, 0)}"
    assert resolver.master(job, 0, rpc_layer="test") == f"test://{resolver.cluster_spec().task_address(job, 0)}"


def test_contract(make):
    check_contract(make)
    assert (make().task_type, make().task_id) == ("worker", 1)


def test_no_accelerators_without_a_gpu(make, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make().num_accelerators() == {}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("jobs", [{"worker": 2, "ps": 1}, {"worker": [2, 0], "ps": [1]}], ids=["counts", "lists"])
def test_contract_of_the_mpi_resolver(jobs):
    check_contract(lambda: MPIClusterResolver(jobs=jobs))


@pytest.mark.ranks(1, 2, 4)
def test_mpi_ranks_are_workers_by_default():
    from mpi4py import MPI

    resolver = MPIClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == MPI.COMM_WORLD.size
    assert (resolver.task_type, resolver.task_id) == ("worker", MPI.COMM_WORLD.rank)
    assert resolver.master() == MPI.Get_processor_name()
