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

# TensorFlow's name → the one here.
MOVED = {
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
    "CollectiveCommunication": "CommunicationImplementation",
    "CollectiveHints": "CommunicationOptions",
    "experimental_set_strategy": "set_strategy",
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


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_names_of_tensorflow_are_in_tf(old, new):
    assert getattr(ms.tf, old) is getattr(ms, new)
    with pytest.warns(DeprecationWarning, match=rf"mpistrat\.{old} is mpistrat\.tf\.{old} now"):
        assert getattr(ms, old) is getattr(ms, new)


def test_methods_under_the_names_of_tensorflow():
    with without_mpi(2) as strategy:
        with pytest.warns(
            DeprecationWarning, match=r"write distribute_values_from_function, or ms\.tf\.experimental_"
        ) as told:
            found = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        assert told[0].filename == __file__ and len(told) == 1
        for name in ("experimental_local_results", "unwrap"):
            assert getattr(ms.tf, name)(strategy, found) == (0, 1)
            with pytest.warns(DeprecationWarning, match="local_results"):
                assert getattr(strategy, name)(found) == (0, 1)
        with pytest.warns(DeprecationWarning, match="write run"):
            assert strategy.experimental_run_v2(lambda x: x, args=(found,)).values == (0, 1)
        assert strategy.extended.call_for_each_replica(lambda x: x, args=(found,)).values == (0, 1)


@pytest.mark.parametrize("of", [lambda strategy: strategy, lambda strategy: strategy.extended])
def test_a_method_that_does_not_exist(of):
    with without_mpi() as strategy, pytest.raises(AttributeError, match="has no attribute 'redcue'") as raised:
        of(strategy).redcue  # noqa: B018
    assert raised.value.name == "redcue"  # by which Python finds "Did you mean"


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
