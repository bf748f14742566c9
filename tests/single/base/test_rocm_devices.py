"""A CuPy for AMD's GPUs, on the stand-in: its arrays are found, and the variables that hide or share out GPUs are known."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from tests.models import honest_cupy
cupy = honest_cupy.install()
{}
"""


def on_rocm(program, **variables):
    """Return what a program prints as JSON where the stand-in is one for AMD's GPUs."""
    import os

    environment = {**os.environ, "FAKE_ROCM": "1", "FAKE_GPUS": "2", **variables}
    command = [sys.executable, "-c", PROGRAM.format(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_arrays_are_on_the_gpu_though_they_have_no_array_interface():
    found = on_rocm(
        "from mpistrat.comm.arrays import array_module, is_gpu, to_host\n"
        "from mpistrat.comm.gpu_support import uses_rocm\n"
        "class Other:\n"
        "    def __dlpack_device__(self): return 10, 0\n"
        "x = cupy.arange(3.0)\n"
        "print(json.dumps([hasattr(x, '__cuda_array_interface__'), is_gpu(x), is_gpu(Other()), array_module(x) is cupy,"
        " to_host(x).tolist(), uses_rocm()]))"
    )
    assert found == [False, True, True, True, [0, 1, 2], True]


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize(("value", "second"), [("1", ["gpu:0"]), ("0,1", ["gpu:1"]), ("", ["cpu:0"])])
def test_variables_that_show_gpus(name, value, second):
    """The second of two ranks: with one visible GPU it takes that, and nothing warns of shared ones."""
    found = on_rocm(
        "from mpistrat.base.devices import _find_gpus, bus_ids, default_devices\n"
        "print(json.dumps([default_devices(1, 2), bus_ids(), _find_gpus()[1]]))",
        **{name: value},
    )
    devices, buses, reason = found
    assert devices == second
    assert buses == [f"0000:0{number}:00.0" for number in value.split(",") if number]
    assert reason == ("" if value else f"{name} is empty and hides every GPU: unset it, or list the GPUs in it")


def test_a_step_compiles_its_kernel_by_amds_compiler():
    """hiprtc refuses --fmad=false."""
    found = on_rocm(
        "import numpy as np, mpistrat as ms\n"
        "with ms.MultiWorkerMirroredStrategy(devices=['gpu:0', 'gpu:1']) as strategy:\n"
        "    with strategy.scope():\n"
        "        v, optimizer = ms.Variable(np.ones(4, np.float32)), ms.optimizers.SGD(0.5)\n"
        "    def step():\n"
        "        v.grad[...] = 1\n"
        "        optimizer.apply_gradients([(v.grad, v)])\n"
        "    strategy.run(step)\n"
        "    print(json.dumps([v.numpy().tolist(), honest_cupy.M.counts['nccl'], list(honest_cupy.report()[0])]))"
    )
    assert found == [[0.0] * 4, 2, []]
