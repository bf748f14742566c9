"""Functions that get arrays of one GPU while another one is current, on the stand-in for CuPy: where and when they work."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena.arithmetic import arithmetic
from mpistrat.arena.values import move_like
from mpistrat.base.types import ReduceOp
from mpistrat.comm.gpu import _KEPT, DeviceCopy
from mpistrat.cross_device.flat import device_sum
from mpistrat.cross_device.gather import _divide, _join
from mpistrat.cross_device.values import beside
from mpistrat.doctor.transfers import _arrays_on_gpus
from mpistrat.optimizers.kernels import squares
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy

ROWS = np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, with two GPUs, of which GPU 0 is current; work in a wrong place or order fails the test."""
    yield from stand_in(monkeypatch)
    honest_cupy.drain()
    assert honest_cupy.report()[0] == {}


def on(cupy, number, array=ROWS):
    with cupy.cuda.Device(number):
        return cupy.asarray(array)


@pytest.mark.parametrize("gpu", [0, 1])
def test_results_are_on_the_gpu_of_the_arrays(cupy, gpu):
    mine, other = on(cupy, gpu), on(cupy, 1 - gpu)
    mean = arithmetic(ReduceOp.MEAN, np.dtype(np.float32), 2)
    for found, expected in (
        (device_sum([mine, other], mean), 2 * ROWS),
        (_join([mine, other], 0), np.concatenate([ROWS, ROWS])),
        (_divide(on(cupy, gpu), mean), ROWS / 2),
        (beside(ROWS, mine), ROWS),
    ):
        assert found.device.id == gpu and found.get().tolist() == expected.tolist()
    assert squares(mine.reshape(-1)) == np.square(ROWS).sum()


def test_a_copy_is_read_before_its_source_changes(cupy):
    """Also on a stream of the program, which CUDA does not order with the other GPU's."""
    source, target = on(cupy, 1), on(cupy, 0)
    with cupy.cuda.Stream(non_blocking=True):
        copy = move_like(source, target)
        with cupy.cuda.Device(1):
            source[...] = 7
        assert copy.device.id == 0 and copy.get().tolist() == ROWS.tolist()


@pytest.mark.parametrize("gpu", [0, 1])
def test_memory_of_copies_is_used_again_after_all_work_with_it(cupy, gpu):
    """With more arrays at once than the copier keeps, so that some memory goes back to the pool."""
    copier, totals = DeviceCopy(gpu), []
    for wave in range(3):
        arrays = [copier.finish(copier.start(ROWS + wave)) for _ in range(_KEPT + 3)]
        with cupy.cuda.Device(gpu):
            totals += [array + array for array in arrays]
        unread = [copier.start(ROWS) for _ in range(_KEPT + 3)]  # as at the end of a loop that reads ahead
        del arrays, unread
        copier.reclaim()
    for number, total in enumerate(totals):
        assert total.get().tolist() == (2 * (ROWS + number // (_KEPT + 3))).tolist()


@pytest.mark.parametrize("gpu", [0, 1])
def test_memory_of_a_step_is_on_the_gpu_of_the_weights(cupy, gpu):
    with ms.OneDeviceStrategy(f"gpu:{gpu}") as strategy, strategy.scope():
        v, optimizer = ms.Variable(ROWS), ms.optimizers.SGD(0.5)
        slots = optimizer._core.slots.of(v.arena)
        with cupy.cuda.Device(1 - gpu):
            assert [array.device.id for array in (*slots.scratch, slots.kept())] == 5 * [gpu]


@pytest.mark.parametrize("how", ["MPI", "HIERARCHICAL"])
def test_sums_that_mpi_makes_are_on_the_gpu_of_the_gradients(cupy, how):
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:1", "gpu:0"], cross_device_ops=how) as strategy:
        with strategy.scope():
            v, optimizer = ms.Variable(ROWS.astype(np.float16)), ms.optimizers.SGD(0.5)

        def step():
            v.grad[...] = 1
            optimizer.apply_gradients([(v.grad, v)])

        with cupy.cuda.Device(0):
            strategy.run(step)
        assert v.numpy().tolist() == (ROWS - 0.5 * 2).tolist()


def test_the_doctor_fills_the_gpu_of_each_replica(cupy):
    with ms.MirroredStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        arrays = _arrays_on_gpus(strategy.extended.process_group)
        assert [(array.device.id, float(array.get()[-1])) for array in arrays] == [(0, 1.0), (1, 2.0)]
