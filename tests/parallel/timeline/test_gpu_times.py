"""The work of a GPU before a sum by NCCL is compute, and the others' cost is that of the rank whose GPU is late."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from tests.harness.gpu_stand_in import stand_in

SECONDS, STEPS = 0.05, 6


@pytest.fixture
def cupy(monkeypatch):
    yield from stand_in(monkeypatch)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_with_the_slow_gpu_is_named(cupy, slow):
    rank = MPI.COMM_WORLD.rank
    with ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{rank}"], cross_device_ops="NCCL") as strategy:

        def step():
            value = cupy.ones(4, np.float32)
            if rank == slow:
                cupy.cuda.get_current_stream().put(lambda: time.sleep(SECONDS), "kernel")  # the host does not wait
            return ms.get_replica_context().all_reduce("SUM", value)

        with cupy.cuda.Device(rank):
            strategy.run(step)
            begin = time.perf_counter()
            for _ in range(STEPS):
                assert strategy.run(step).get().tolist() == [2.0] * 4
            times = ms.timeline.times(strategy, seconds=time.perf_counter() - begin)
    assert times[slow].compute > 0.5 > times[1 - slow].compute
    assert times[1 - slow].communication > 0.5 > times[slow].communication
    assert times[slow].cost > 0.5 * SECONDS * STEPS > times[1 - slow].cost
