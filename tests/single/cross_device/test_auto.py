import json
import logging

import numpy as np
import pytest

from mpistrat.comm.gpu import nccl_datatype_name
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.cross_device.auto import AutoAllReduce, Chooser, make_cross_device_ops
from mpistrat.cross_device.hierarchical import HierarchicalAllReduce, HierarchicalCopyAllReduce
from mpistrat.cross_device.mpi import MpiAllReduce
from mpistrat.cross_device.nccl import NcclAllReduce
from mpistrat.cross_device.to_one import ReductionToOneDevice
from mpistrat.errors import DeviceError, MissingDependencyError
from mpistrat.types import CommunicationImplementation


@pytest.fixture
def no_nccl(monkeypatch):
    monkeypatch.setattr("mpistrat.comm.gpu.nccl_available", lambda: "CuPy is not installed: pip install it")


def test_names():
    assert isinstance(make_cross_device_ops(), AutoAllReduce)
    assert isinstance(make_cross_device_ops("mpi"), MpiAllReduce)
    assert isinstance(make_cross_device_ops(CommunicationImplementation.HIERARCHICAL), HierarchicalAllReduce)
    own = ReductionToOneDevice()
    assert make_cross_device_ops(own) is own
    assert HierarchicalCopyAllReduce(num_packs=2).num_packs == 2
    with pytest.raises(ValueError, match=r"implementation: expected .*got 'gossip'"):
        make_cross_device_ops("gossip")


@pytest.mark.parametrize("kind", [HierarchicalAllReduce, NcclAllReduce])
def test_negative_number_of_packs(kind):
    with pytest.raises(ValueError, match="num_packs: expected >= 0, got -1"):
        kind(num_packs=-1)


def test_nccl_by_name_without_nccl_raises(no_nccl):
    for call in (NcclAllReduce, lambda: make_cross_device_ops("nccl")):
        with pytest.raises(MissingDependencyError, match=r"CuPy with NCCL.*pip install.*AUTO"):
            call()


def test_auto_without_nccl_falls_back_and_says_so_once(no_nccl, caplog):
    for _ in range(2):
        ops = AutoAllReduce()
        ops.bind(ProcessGroup.single())
        with caplog.at_level(logging.WARNING, "mpistrat"):
            assert isinstance(ops._algorithm("gpu", 1 << 20), HierarchicalAllReduce)
    assert caplog.text.count("not NCCL: CuPy is not installed") == 1


def test_nccl_types():
    names = {name: nccl_datatype_name(np.dtype(name)) for name in ("float16", "complex128", "int16", "bool")}
    assert names == {"float16": "NCCL_FLOAT16", "complex128": "NCCL_FLOAT64", "int16": None, "bool": None}


def test_device_of_reduction_to_one_device():
    assert ReductionToOneDevice("/device:CPU:0").reduce_to_device == "cpu:0"
    with pytest.raises(DeviceError):
        ReductionToOneDevice("tpu")


def test_an_object_without_a_strategy_says_so():
    with pytest.raises(RuntimeError, match="MpiAllReduce: expected an object of a strategy"):
        MpiAllReduce().reduce("sum", 1.0)


def test_an_object_belongs_to_one_strategy():
    ops, first = MpiAllReduce(), ProcessGroup.single()
    ops.bind(first)
    ops.bind(first)
    with pytest.raises(ValueError, match="another strategy"):
        ops.bind(ProcessGroup.single())
    first.close()
    ops.bind(ProcessGroup.single())


# The table

RULES = [
    {"device": "cpu", "nodes": "one", "below": 100, "algorithm": "MPI", "why": "small"},
    {"device": "cpu", "nodes": "one", "below": None, "algorithm": "HIERARCHICAL", "why": "large"},
    {"device": "cpu", "nodes": "several", "below": None, "algorithm": "MPI"},
    {"device": "gpu", "nodes": "one", "below": None, "algorithm": "NCCL"},
    {"device": "gpu", "nodes": "several", "below": None, "algorithm": "NCCL"},
]


def test_the_border_belongs_to_the_next_rule():
    chooser = Chooser({"rules": RULES})
    assert [chooser.choose("cpu", "one", n).algorithm for n in (0, 99, 100, 1 << 40)] == [
        "MPI",
        "MPI",
        "HIERARCHICAL",
        "HIERARCHICAL",
    ]
    assert chooser.choose("gpu", "several", 5).algorithm == "NCCL"


def test_the_table_that_ships_covers_every_case():
    chooser = Chooser()
    for device in ("cpu", "gpu"):
        for nodes in ("one", "several"):
            for nbytes in (0, 8, 1 << 16, 1 << 34):
                assert chooser.choose(device, nodes, nbytes).why


def test_it_prints_which_and_why():
    text = str(Chooser({"rules": RULES, "measured": "yesterday"}))
    for word in ("yesterday", "< 100", "any more", "HIERARCHICAL", "small", "NCCL"):
        assert word in text


def test_a_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"rules": RULES}))
    assert Chooser(path).choose("cpu", "one", 5).algorithm == "MPI"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"table\.json"):
        Chooser(path)
    with pytest.raises(FileNotFoundError):
        Chooser(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([], "a list named rules"),
        ({"rules": RULES[1:4]}, "rules for gpu, several"),
        ({"rules": RULES[:1] + RULES[2:]}, "last one null"),
        ({"rules": [{**RULES[0], "algorithm": "RING"}, *RULES[1:]]}, "rule 0.*RING"),
        ({"rules": [{**RULES[0], "below": -1}, *RULES[1:]]}, "below"),
        ({"rules": [{"device": "cpu"}, *RULES[1:]]}, "device, nodes, below"),
        ({"rules": [RULES[1], RULES[0], *RULES[2:]]}, "ascending"),
    ],
)
def test_wrong_tables(table, text):
    with pytest.raises(ValueError, match=text):
        Chooser({"rules": table} if isinstance(table, list) and table else table or {})
