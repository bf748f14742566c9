"""Sums by NCCL that another rank never joins: the call ends with an error that names it, on the stand-in for CuPy.

Kernels of NCCL wait for ever then, and only an abort of the communicator ends them.
"""

import re
import shutil

import pytest

PROGRAM = """
import os, sys, time
from tests.models import honest_cupy
cupy = honest_cupy.install()
import numpy as np
import mpistrat as ms
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
strategy = ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{rank}"], cross_device_ops="NCCL")
limit = ms.CommunicationOptions(timeout_seconds=SECONDS)

def total(options=None):
    return strategy.reduce("SUM", cupy.asarray(np.ones(5, "f4")), axis=None, options=options).get().tolist()

def end(text):
    begin = time.monotonic()
    try:
        total(limit)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        cupy.cuda.get_current_stream().synchronize()  # no kernel of NCCL is left
    print(f"rank {rank} [{time.monotonic() - begin:.1f} s] {text}", flush=True)

with cupy.cuda.Device(rank):
    assert total() == [2.0] * 5
WHAT
"""
RANK_1 = """
    if rank == 1:
        def act(*arguments):
            WHAT
        honest_cupy.NcclCommunicator.allReduce = act
    end("no error")
    if rank == 0:
        end("no error")
"""


def run(mpi_run, what, seconds=2):
    """Run two ranks with a GPU each, and a time limit of a sum."""
    return mpi_run(PROGRAM.replace("SECONDS", f"{seconds}").replace("WHAT", what), 2, 40, env={"FAKE_GPUS": "2"})


def ends_of(result, rank):
    """What a rank printed of its calls: seconds and text."""
    return [(float(s), text) for s, text in re.findall(rf"rank {rank} \[([\d.]+) s\] (.*)", result.out[rank])]


def test_a_rank_leaves(mpi_run):
    result = run(mpi_run, RANK_1.replace("WHAT", "sys.exit(3)"))
    (seconds, text), (_, later) = ends_of(result, 0)
    assert text.startswith("PeerExitError: rank 1 left the program") and "reduce" in text and seconds < 2
    assert later.startswith("ClosedError") and "no longer be used" in later and "PeerExitError" in later


def test_a_gpu_is_late(mpi_run):
    """The GPU of rank 1 is busy for longer than the time limit. Rank 0 may have left when it finds its sum aborted."""
    what = """
    if rank == 1:
        cupy.cuda.get_current_stream().put(lambda: time.sleep(4), "kernel")
    end("no error")
    end("no error")
"""
    result = run(mpi_run, what, seconds=1)
    (seconds, text), (_, later) = ends_of(result, 0)
    assert text.startswith("CollectiveTimeoutError") and "rank 0 waited 1 s" in text and 1 <= seconds < 4
    assert later.startswith("ClosedError")
    (_, text), (_, later) = ends_of(result, 1)
    assert text.startswith(("PeerExitError: rank 0 left", "CollectiveTimeoutError")) and later.startswith("ClosedError")


def test_an_error_on_one_rank_that_continues(mpi_run):
    """The other one is in a sum that never ends: the job ends soon, and says what happened where."""
    what = "raise honest_cupy.NcclError(1, 'NCCL_ERROR_UNHANDLED_CUDA_ERROR: out of memory')"
    wait = """    if rank == 1:
        time.sleep(30)
    if rank == 0:"""
    text = RANK_1.replace("WHAT", what).replace("    if rank == 0:", wait)
    result = run(mpi_run, text, seconds=60)
    assert result.seconds < 15 and result.returncode
    ((_, own),) = ends_of(result, 1)
    assert own.startswith("NcclError: NCCL_ERROR_UNHANDLED_CUDA_ERROR")
    assert "can never end: an error ended" in result.err[0] and "out of memory" in result.err[0]


def test_an_error_that_nccl_reports(mpi_run):
    """As after an error of the network: each rank that sees it aborts its communicator."""
    what = """
    def reduce(self, *arguments, plain=honest_cupy.NcclCommunicator.allReduce):
        self.error = honest_cupy.NcclError(6, "NCCL_ERROR_REMOTE_ERROR: remote process exited")
        if rank == 0:
            plain(self, *arguments)
    honest_cupy.NcclCommunicator.allReduce = reduce
    end("no error")
    end("no error")
    """
    result = run(mpi_run, what)
    (seconds, text), (_, later) = ends_of(result, 0)
    assert text.startswith("NcclError: NCCL_ERROR_REMOTE_ERROR") and seconds < 2
    assert later.startswith("ClosedError") and "NCCL_ERROR_REMOTE_ERROR" in later


STEPS = """
import os, sys, time
from tests.models import honest_cupy
cupy = honest_cupy.install()
import numpy as np
import mpistrat as ms
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
strategy = ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{rank}"])
with strategy.scope():
    variable, optimizer = ms.Variable(np.zeros(300, np.float32), name="v"), ms.optimizers.Adam(0.1)

def step(number):
    variable.grad[...] = 1.0
    if number == 3 and rank == 1:
        fail()
    optimizer.apply_gradients([(variable.grad, variable)])

def fail():
    def act(*arguments):
        WHAT
    honest_cupy.NcclCommunicator.allReduce = act

try:
    for number in range(6):
        strategy.run(step, args=(number,))
except Exception as error:
    begin = time.monotonic()
    cupy.cuda.Device().synchronize()  # no kernel of NCCL is left
    print(f"rank {rank}: {type(error).__name__}: {error} [{time.monotonic() - begin:.0f} s]", flush=True)
    raise
print("not reached")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for the stand-in")
@pytest.mark.parametrize("memory", ["1", "0"], ids=["one node", "two nodes"])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("sys.exit(3)", "PeerExitError: rank 1 left the program"),
        ("raise honest_cupy.NcclError(1, 'NCCL_ERROR_UNHANDLED_CUDA_ERROR: out of memory')", "out of memory"),
    ],
    ids=["leaves", "fails"],
)
def test_a_rank_that_never_joins_a_steps_sums_is_named(mpi_run, memory, what, named):
    """The host of rank 0 does not wait for these sums, and no kernel of NCCL is left there."""
    env = {"FAKE_GPUS": "2", "MPISTRAT_SHARED_MEMORY": memory}
    result = mpi_run(STEPS.replace("WHAT", what), 2, 40, env=env)
    assert result.returncode != 0 and "not reached" not in result.stdout and result.seconds < 20
    assert named in result.stderr + result.stdout
