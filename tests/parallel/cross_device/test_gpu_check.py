"""benchmarks/gpu/check.py on the stand-in for CuPy: every path to a GPU, with the order of its work, on one GPU and on two."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_check(mpi, tmp_path, only, gpus=1, cupy=14, seconds=120):
    """Return what the check printed, and its exit status: the number of items that failed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("MPIEXEC", "CUDA_VISIBLE_DEVICES")},
        "GPU_CHECK_FAKE": str(ROOT / "tests/models/honest_cupy.py"),
        "FAKE_GPUS": str(gpus),
        "FAKE_CUPY": str(cupy),
        "OUT": str(tmp_path),
        "MPIEXEC": shlex.join(mpi.command(1)[:-2]),
    }
    command = [mpi.python, str(ROOT / "benchmarks/gpu/check.py"), "--budget", str(seconds), "--only", only]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=seconds + 30)
    return done.stdout, done.returncode


CASES = [
    pytest.param("arrays,ops,feed", 1, 14, id="one GPU"),
    pytest.param("vars", 1, 14, id="variables"),
    pytest.param("ops,feed", 2, 13, id="CuPy 13"),
    pytest.param("ranks", 1, 14, id="two ranks on one GPU"),
    pytest.param("ranks", 2, 14, id="two ranks with a GPU each"),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles kernels for the stand-in")
@pytest.mark.parametrize("only, gpus, cupy", CASES)
def test_the_check_finds_no_fault_on_the_stand_in(mpi, tmp_path, only, gpus, cupy):
    out, failed = run_check(mpi, tmp_path, only, gpus, cupy)
    assert failed == 0 and " passed, 0 failed" in out, out[-6000:]


@pytest.mark.ranks(1)
def test_a_replica_that_cannot_have_its_gpu_raises(monkeypatch):
    """Its thread must hand the error to the step, which waits for it."""
    import mpistrat as ms
    from mpistrat.strategy import replica_threads

    def refuse(device):
        if device == "cpu:1":
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(replica_threads, "use_device", refuse)
    with (
        ms.MirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        strategy.run(lambda: 1)
