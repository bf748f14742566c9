"""Which strategy fits where, what other names there are, and what show_config shows."""

import pytest

import mpistrat as ms
from mpistrat.cluster import Topology
from mpistrat.errors import LayoutError
from mpistrat.strategy.assemble import (
    CENTRAL_STORAGE,
    MIRRORED,
    MULTI_WORKER_MIRRORED,
    ONE_DEVICE,
    PARAMETER_SERVER,
    check_layout,
)
from tests.harness.strategies import without_mpi

# Where → TensorFlow's name → the one here. "" is the package itself.
ALIASES = {
    "": {
        "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
        "CollectiveCommunication": "CommunicationImplementation",
        "CollectiveHints": "CommunicationOptions",
        "experimental_set_strategy": "set_strategy",
    },
    "Strategy": {
        "experimental_distribute_dataset": "distribute_dataset",
        "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
        "experimental_distribute_values_from_function": "distribute_values_from_function",
        "experimental_local_results": "local_results",
        "experimental_run_v2": "run",
        "unwrap": "local_results",
    },
    "ParameterServerStrategy": {"experimental_run_v2": "run"},
}


@pytest.mark.parametrize(
    ("kind", "node_of", "fitting"),
    [
        (ONE_DEVICE, [0], None),
        (ONE_DEVICE, [0, 0], "MirroredStrategy, CentralStorageStrategy, MultiWorkerMirroredStrategy"),
        (ONE_DEVICE, [0, 1], "MultiWorkerMirroredStrategy"),
        (MIRRORED, [0, 0, 0], None),
        (MIRRORED, [0, 0, 1], "MultiWorkerMirroredStrategy"),
        (CENTRAL_STORAGE, [0, 0], None),
        (CENTRAL_STORAGE, [0, 1], "MultiWorkerMirroredStrategy"),
        (MULTI_WORKER_MIRRORED, [0, 1, 1, 2], None),
    ],
)
def test_check_layout(kind, node_of, fitting):
    topology = Topology(0, node_of, [1] * len(node_of), ["cpu:0"])
    if fitting is None:
        check_layout(kind, topology)
        return
    nodes = max(node_of) + 1
    with pytest.raises(
        LayoutError, match=f"got {len(node_of)} ranks on {nodes} node.* What fits: {fitting}(; or One.*COMM_SELF.*)?$"
    ):
        check_layout(kind, topology)


def test_a_parameter_server_alone_is_told_how_to_start():
    with pytest.raises(LayoutError, match=r"at least 2 ranks, got 1 .*mpistrat run -n 3 --ps 1 .*OneDeviceStrategy"):
        check_layout(PARAMETER_SERVER, Topology(0, [0], [1], ["cpu:0"]))


def test_aliases_are_the_same_thing():
    for where, table in ALIASES.items():
        holder = getattr(ms, where) if where else ms
        for alias, name in table.items():
            assert getattr(holder, alias) is getattr(holder, name), (where, alias)
    with without_mpi(2) as strategy:
        found = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        assert strategy.experimental_local_results(found) == (0, 1)
        assert strategy.extended.call_for_each_replica(lambda x: x, args=(found,)).values == (0, 1)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'TPUStrategy'"):
        ms.TPUStrategy  # noqa: B018


def test_show_config_without_a_strategy(capsys):
    text = ms.show_config()
    assert capsys.readouterr().out == text + "\n"
    for word in ("mpistrat", "numpy", "compiled loops", "MPISTRAT_ABORT_AFTER", "all-reduce algorithms"):
        assert word in text


def test_show_config_with_a_strategy(capsys, monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "7")
    with without_mpi(2) as strategy:
        text = ms.show_config(strategy)
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("MPISTRAT"))
    assert rows["MPISTRAT_CHECK_EVERY"] == "7 (set)"
    assert "devices cpu:0, cpu:1" in text
    assert "2 replicas on 1 ranks" in text
