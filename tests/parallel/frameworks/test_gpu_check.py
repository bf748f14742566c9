"""benchmarks/gpu/check.py with PyTorch, JAX and Keras, on the stand-in for CuPy."""

import pytest

from tests.parallel.cross_device.test_gpu_check import run_check

pytest.importorskip("torch")


@pytest.mark.parametrize("only", ["torch,jax", "feed,perf", "dist", "jobs"])
def test_the_check_finds_no_fault_on_the_stand_in(mpi, tmp_path, only):
    out, failed = run_check(mpi, tmp_path, only, seconds=300)
    assert failed == 0 and " 0 failed" in out, out[-6000:]
