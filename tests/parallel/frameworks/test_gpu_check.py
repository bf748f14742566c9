"""benchmarks/gpu/check.py with PyTorch, JAX and Keras, on the stand-in for CuPy."""

import pytest

from tests.parallel.cross_device.test_gpu_check import run_check

pytest.importorskip("torch")


@pytest.mark.parametrize("only", ["torch,jax", "feed,perf", "dist", "jobs"])
def test_the_check_finds_no_fault_on_the_stand_in(mpi, tmp_path, only):
    out, failed = run_check(mpi, tmp_path, only, seconds=300)
    lines = [line for line in out.splitlines() if line.startswith(("FAIL", "CRASH", "HANG"))]
    known = [line for line in lines if "torch.bfloat16_module" in line]  # NumPy's DLPack has no bfloat16; a GPU has
    assert len(lines) == len(known) and failed == len(set(known)) // 2 + len(known) % 2, out[-6000:]
