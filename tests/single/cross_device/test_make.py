import logging

import numpy as np
import pytest

from mpistrat.comm import nccl
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.cross_device.auto_all_reduce import AutoAllReduce
from mpistrat.cross_device.hierarchical_all_reduce import HierarchicalAllReduce, HierarchicalCopyAllReduce
from mpistrat.cross_device.make import make_cross_device_ops
from mpistrat.cross_device.mpi_all_reduce import MpiAllReduce
from mpistrat.cross_device.nccl_all_reduce import NcclAllReduce
from mpistrat.cross_device.reduction_to_one_device import ReductionToOneDevice
from mpistrat.errors import DeviceError, MissingDependencyError
from mpistrat.types import CommunicationImplementation


@pytest.fixture
def no_nccl(monkeypatch):
    for module in ("mpistrat.comm.nccl", "mpistrat.cross_device.auto_all_reduce"):
        monkeypatch.setattr(f"{module}.nccl_available", lambda: "CuPy is not installed: pip install it")


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
    with pytest.raises(ValueError, match="num_packs: expected ≥ 0, got -1"):
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
            assert isinstance(ops._algorithm("gpu", 1 << 20), MpiAllReduce)
    assert caplog.text.count("not NCCL: CuPy is not installed") == 1


def test_nccl_types():
    names = {name: nccl.nccl_datatype_name(np.dtype(name)) for name in ("float16", "complex128", "int16", "bool")}
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
