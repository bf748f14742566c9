"""Device strings in every spelling, and which devices a rank takes."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mpistrat.base import devices
from mpistrat.base.log import once
from mpistrat.errors import DeviceError


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("cpu:0", "cpu:0"),
        ("CPU", "cpu:0"),
        ("GPU:3", "gpu:3"),
        ("/cpu:0", "cpu:0"),
        ("/gpu:1", "gpu:1"),
        ("/device:GPU:1", "gpu:1"),
        ("device:CPU:2", "cpu:2"),
        ("/job:worker/task:0/device:GPU:1", "gpu:1"),
        ("/job:localhost/replica:0/task:0/device:CPU:0", "cpu:0"),
        ("gpu:007", "gpu:7"),
    ],
)
def test_spellings(spelling, name):
    assert devices.canonical(spelling) == name
    kind, index = devices.parse(spelling)
    assert f"{kind}:{index}" == name


@pytest.mark.parametrize(
    "text", ["", "tpu:0", "cpu:", "cpu:-1", "gpu:x", "cpu:0 ", "//cpu:0", "gpu:9999999", "cpu:١", 3, None]
)
def test_malformed(text):
    with pytest.raises(DeviceError, match="such as 'cpu:0'"):
        devices.parse(text)


@pytest.fixture
def fake_cupy(monkeypatch):
    """A CuPy that sees so many GPUs."""

    def install(count, error=None):
        def get_device_count():
            if error:
                raise error
            return count

        cupy = ModuleType("cupy")
        cupy.__spec__ = SimpleNamespace(name="cupy")
        cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=get_device_count))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)


def test_without_cupy_there_is_the_cpu(no_cupy):
    assert devices.count_gpus() == 0
    assert devices.default_devices(0, 1) == ("cpu:0",)
    with pytest.raises(DeviceError, match=r"got 'gpu:0'.*CuPy is not installed: pip install"):
        devices.check_devices(["gpu:0"])


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_list_hides_every_gpu(fake_cupy, monkeypatch, value):
    fake_cupy(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert devices.count_gpus() == 0
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is empty"):
        devices.check_devices("gpu:0")


def test_a_missing_driver_is_no_gpu(fake_cupy):
    fake_cupy(0, RuntimeError("cudaErrorNoDevice"))
    assert devices.default_devices(0, 2) == ("cpu:0",)
    with pytest.raises(DeviceError, match="cudaErrorNoDevice"):
        devices.check_devices("gpu:0")


def test_a_rank_alone_takes_every_gpu(fake_cupy):
    fake_cupy(3)
    assert devices.default_devices(0, 1) == ("gpu:0", "gpu:1", "gpu:2")


def test_several_ranks_take_one_each(fake_cupy):
    fake_cupy(4)
    assert [devices.default_devices(rank, 4) for rank in range(4)] == [("gpu:0",), ("gpu:1",), ("gpu:2",), ("gpu:3",)]


def test_more_ranks_than_gpus_share_and_say_so_once(fake_cupy, caplog):
    fake_cupy(2)
    once.cache_clear()
    with caplog.at_level(logging.WARNING, "mpistrat"):
        assert [devices.default_devices(rank, 3) for rank in range(3)] == [("gpu:0",), ("gpu:1",), ("gpu:0",)]
        devices.default_devices(0, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "3 ranks on this node share 2 GPU(s): start as many ranks as GPUs"
    ]


def test_one_visible_gpu_is_device_0(fake_cupy, monkeypatch, caplog):
    fake_cupy(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    once.cache_clear()
    with caplog.at_level(logging.WARNING, "mpistrat"):
        assert devices.default_devices(0, 4) == devices.default_devices(3, 4) == ("gpu:0",)
    assert not caplog.records


def test_checked_devices_are_canonical(fake_cupy):
    fake_cupy(2)
    assert devices.check_devices(["/gpu:1", "CPU:3"]) == ("gpu:1", "cpu:3")
    assert devices.check_devices("CPU") == ("cpu:0",)
    assert devices.check_devices(("cpu:0", "cpu:1", "cpu:7")) == ("cpu:0", "cpu:1", "cpu:7")


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (["gpu:2"], "gpu:0 to gpu:1"),
        ([], "at least one device"),
        (None, "at least one device"),
        (5, "at least one device"),
        (["cpu:0", "/CPU:0"], "each device once"),
        (["cpu:0", "disk:0"], "'disk:0'"),
    ],
)
def test_refused_devices(fake_cupy, wanted, named):
    fake_cupy(2)
    with pytest.raises(DeviceError) as error:
        devices.check_devices(wanted, "MirroredStrategy")
    assert named in str(error.value)
    assert str(error.value).startswith("MirroredStrategy: devices")
