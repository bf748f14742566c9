"""Ranks with GPUs that call Optimizer.begin for other variables, in another order, or not at all: an error on all, soon.

Their GPUs may be in sums that never end. The program runs on the stand-in for CuPy.
"""

import shutil

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++, which compiles the kernels for the stand-in"
)

PROGRAM = """
import sys, time
from tests.models import honest_cupy
cupy = honest_cupy.install()
import numpy as np
import mpistrat as ms
from mpi4py import MPI
from mpistrat.arena import arena
from mpistrat.cross_device import nccl

arena.FIRST_SLAB, nccl.GPU_BLOCK = 1 << 16, 64
with ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{MPI.COMM_WORLD.rank}"]) as strategy:
    with strategy.scope():
        variables = [ms.Variable(np.zeros(size, np.float32), name=f"v{size}") for size in (64, 128)]
        optimizer = ms.optimizers.Adam(0.1)

    def step(number):
        odd = number == 2 and strategy.rank == 1
        ways = {"others": [[1 - odd]], "another order": [[0, 1][:: 1 - 2 * odd]], "nothing": [[]] if odd else [[1]]}
        for chosen in ways[sys.argv[1]]:
            for i in chosen:
                optimizer.begin([variables[i]])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    try:
        for number in range(4):
            strategy.run(step, args=(number,))
    except ms.errors.CollectiveMismatchError:
        cupy.cuda.Device().synchronize()
        print("no kernel is left on the GPU of rank", strategy.rank, flush=True)
        time.sleep(4)  # until the other rank has printed it, too
        raise
print("not reached")
"""


@pytest.mark.parametrize("memory", ["1", "0"])  # "0": as if each rank were a node
@pytest.mark.parametrize("fault", ["others", "another order", "nothing"])
def test_ranks_announce_other_gradients(mpi_run, fault, memory):
    env = {"FAKE_GPUS": "2", "MPISTRAT_SHARED_MEMORY": memory}
    result = mpi_run(["-c", PROGRAM, fault], 2, timeout=40, env=env)
    assert result.returncode != 0 and "not reached" not in result.stdout
    assert "CollectiveMismatchError" in result.stderr and "announced: v" in result.stderr
    if memory == "1":
        assert all(f"no kernel is left on the GPU of rank {rank}" in text for rank, text in enumerate(result.out))


GOES_ON = """
    except ms.errors.CollectiveMismatchError:
        start = time.monotonic()
        try:
            strategy.run(step, args=(3,))
        except ms.errors.ClosedError as error:
            print("closed after", time.monotonic() - start, error, flush=True)
        time.sleep(6)  # no rank leaves the program
"""


def test_a_rank_does_not_wait_for_one_whose_sums_were_aborted(mpi_run):
    """Rank 1 has started no sum, so only rank 0's NCCL is aborted, a second after the error. Both refuse the next step, rank 1
    after its own sum had a second, too."""
    head, tail = PROGRAM.split("    except ms.errors")[0], PROGRAM.split("        raise\n")[1]
    result = mpi_run(["-c", head + GOES_ON.lstrip("\n") + tail, "nothing"], 2, timeout=40, env={"FAKE_GPUS": "2"})
    assert result.returncode == 0, result
    for text in result.out:
        words = text.split("closed after ")[1]
        assert float(words.split()[0]) < 4 and "can no longer be used" in words, result
