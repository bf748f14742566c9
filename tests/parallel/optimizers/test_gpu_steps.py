"""Training steps on GPUs, on the stand-in for CuPy: they give the CPU's bits, and do no more work than they must."""

import functools
import shutil

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from benchmarks.gpu.gpt2_shapes import GPT2
from mpistrat.arena import arena
from mpistrat.cross_device import nccl
from mpistrat.optimizers import device_scale
from mpistrat.optimizers.kernels import _step_dtype
from tests.harness.gpu_stand_in import stand_in
from tests.models import honest_cupy
from tests.single.base.test_loops import assert_same_bits

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for the stand-in"),
]

SMALLER = 256  # GPT-2 with so many times fewer elements, in blocks that are as much smaller
BLOCKS = 8
SHAPES = [(max(1, shape[0] // SMALLER), *shape[1:]) for shape in GPT2]


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, with a GPU for each rank."""
    monkeypatch.setattr(nccl, "GPU_BLOCK", nccl.GPU_BLOCK // SMALLER)
    yield from stand_in(monkeypatch)


def work_of_a_step(make, own_gradients: bool = False) -> tuple[dict[str, int], dict[str, float]]:
    """How often the third step does what, and what that reads and writes, in bytes of all gradients."""
    gpu = f"gpu:{MPI.COMM_WORLD.rank}"
    with ms.MultiWorkerMirroredStrategy(devices=[gpu]) as strategy:
        with strategy.scope():
            variables = [ms.Variable(np.zeros(shape, np.float32), name=f"v{i}") for i, shape in enumerate(SHAPES)]
            optimizer = make()
        gradients = [variable.gradient(0) for variable in variables]
        for gradient in gradients:
            gradient[...] = 1e-3
        if own_gradients:
            gradients = [gradient.copy() for gradient in gradients]
        for step in range(3):
            if step == 2:
                honest_cupy.M.counts.clear()
                honest_cupy.M.nbytes.clear()
            strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
        counts, nbytes = dict(honest_cupy.M.counts), dict(honest_cupy.M.nbytes)
        assert not honest_cupy.report()[0]
        size = 4 * sum(variable.size for variable in variables)
        return counts, {what: number / size for what, number in nbytes.items()}


def excluding(names: list[str]):
    def make():
        optimizer = ms.optimizers.AdamW(1e-3)
        optimizer.exclude_from_weight_decay(var_names=names)
        return optimizer

    return make


PLAIN = {
    "alone": lambda: ms.optimizers.AdamW(1e-3),
    "a scaled loss": lambda: ms.optimizers.AdamW(1e-3, loss_scale_factor=2.0**10),
    "clipped by value": lambda: ms.optimizers.AdamW(1e-3, clipvalue=1.0),
    "without decay of some": excluding([f"v{i}" for i, shape in enumerate(GPT2) if len(shape) == 1]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_adamw_takes_one_kernel_for_all_and_one_sum_for_each_block(cupy, name):
    """Weights, gradients and two slots are read or written once; nothing is copied; the host waits for nothing."""
    counts, nbytes = work_of_a_step(PLAIN[name])
    pieces = {1: 1, 2: BLOCKS}[MPI.COMM_WORLD.size]
    sums = pieces if MPI.COMM_WORLD.size > 1 else 0
    assert counts.pop("kernel") == pieces <= 20
    assert counts.pop("nccl", 0) == sums
    assert counts.pop("record", 0) <= 2 * min(1, sums)  # events before and behind the sums
    assert counts.pop("alloc", 0) == counts.pop("free", 0) == sums  # of a pool, as long as a block's update takes
    assert counts == {}
    assert nbytes["kernel"] < 4.05
    assert nbytes.get("nccl", 0) < 2.05  # the gradient and the sum


def test_gradients_of_the_programs_own_are_copied_once(cupy):
    counts, nbytes = work_of_a_step(PLAIN["alone"], own_gradients=True)
    pieces = {1: 1, 2: BLOCKS}[MPI.COMM_WORLD.size]
    assert counts["kernel"] == pieces + len(SHAPES)
    assert nbytes["kernel"] < 6.05


CLIPPED = {
    "global_clipnorm": ({"global_clipnorm": 1.0}, 1),
    "clipnorm": ({"clipnorm": 1.0}, 2),  # a launch has arguments for 128 variables with scales of their own
}


@pytest.mark.parametrize("name", CLIPPED)
def test_norms_stay_on_the_gpu(cupy, name):
    """Four kernels for all sums of squares, one for the scales, then the update: no number comes to the host."""
    settings, updates = CLIPPED[name]
    counts, nbytes = work_of_a_step(lambda: ms.optimizers.AdamW(1e-3, **settings))
    several = MPI.COMM_WORLD.size > 1
    assert counts["kernel"] == 5 + updates + (BLOCKS if several else 0)  # sums of several ranks are copied, to be kept
    assert counts["kernel"] <= 20
    assert counts.keys().isdisjoint({"wait", "copy to host"})
    assert counts.get("nccl", 0) == (BLOCKS if several else 0)
    assert nbytes["kernel"] < (7.5 if several else 5.5)


def test_numbers_that_must_be_finite_are_waited_for_once(cupy):
    counts, nbytes = work_of_a_step(lambda: ms.optimizers.AdamW(1e-3, check_numerics=True))
    several = MPI.COMM_WORLD.size > 1
    assert counts["kernel"] == 5 + (BLOCKS if several else 0)
    assert counts["wait"] <= 2  # for the copy to the host, through pinned memory
    assert counts["copy to host"] == 1
    assert nbytes["copy to host"] < 0.001


@pytest.mark.parametrize("settings", [{}, {"global_clipnorm": 1.0}], ids=["alone", "clipped"])
def test_a_loss_scale_stays_on_the_gpu(cupy, settings):
    """Sums are copied, divided, and decided about; the numbers of the step are stored for the update. The host asks nothing."""
    counts, nbytes = work_of_a_step(lambda: ms.optimizers.LossScaleOptimizer(ms.optimizers.AdamW(1e-3, **settings)))
    several = MPI.COMM_WORLD.size > 1
    assert counts["kernel"] == (BLOCKS if several else 1) + 4 + 5 * bool(settings) <= 20
    assert counts.get("nccl", 0) == (BLOCKS if several else 0)
    assert counts.keys() <= {"kernel", "nccl", "record", "alloc", "free"}  # no wait, no copy, and nothing from the host
    rows = 2 * device_scale.ROWS * _step_dtype("float32").itemsize  # all of them count, for one that is used
    size = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    assert nbytes["kernel"] - rows / size < (8.15 if settings else 7.05)


def trained(devices, dtype, make, to_array):
    """Weights and slots after four steps; of another gradient on each rank and replica."""
    with ms.MultiWorkerMirroredStrategy(devices=devices) as strategy:
        with strategy.scope():
            starts = [
                np.random.default_rng(i).normal(size=shape).astype(dtype) for i, shape in enumerate(((5, 301), (7,)))
            ]
            variables = [ms.Variable(start, name=f"v{i}") for i, start in enumerate(starts)]
            optimizer = make()

        def step(number):
            replica = ms.get_replica_context().replica_id_in_sync_group
            random, pairs = np.random.default_rng(10 * number + replica), []
            for variable in variables:
                variable.grad[...] = to_array(random.normal(size=variable.shape).astype(dtype))
                pairs.append((variable.grad, variable))
            optimizer.apply_gradients(pairs)

        for number in range(4):
            strategy.run(step, args=(number,))
        return [v.numpy() for v in variables] + [slot for v in variables for slot in optimizer.slots(v).values()]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ms.optimizers.AdamW(0.01, clipvalue=1.0),
        lambda: ms.optimizers.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
        ),
    ],
    ids=["adamw", "momentum"],
)
def test_a_step_gives_the_bits_of_the_cpu(cupy, make, dtype):
    rank = MPI.COMM_WORLD.rank
    expected = trained(["cpu:0"], dtype, make, lambda array: array)
    found = trained([f"gpu:{rank}"], dtype, make, cupy.asarray)
    assert not honest_cupy.report()[0]
    for mine, of_cpu in zip(found, expected, strict=True):
        assert_same_bits(mine, of_cpu)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ms.optimizers.AdamW(0.01, global_clipnorm=1.0),
        lambda: ms.optimizers.SGD(0.1, momentum=0.9, clipnorm=3.0, weight_decay=0.1),
        lambda: ms.optimizers.Adam(0.01, clipnorm=2.0, gradient_accumulation_steps=2),
        lambda: ms.optimizers.Lamb(0.01, global_clipnorm=1e-3),
        lambda: ms.optimizers.SGD(0.1, global_clipnorm=1e9),
    ],
    ids=["adamw", "each", "accumulated", "lamb", "within"],
)
def test_clipped_steps_give_the_numbers_of_the_cpu(cupy, make, dtype):
    expected = trained(["cpu:0"], dtype, make, lambda array: array)
    found = trained([f"gpu:{MPI.COMM_WORLD.rank}"], dtype, make, cupy.asarray)
    assert not honest_cupy.report()[0]
    for mine, of_cpu in zip(found, expected, strict=True):
        if MPI.COMM_WORLD.size == 1:
            assert_same_bits(mine, of_cpu)
        else:  # the CPU's ranks add up slices
            np.testing.assert_allclose(mine, of_cpu, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0])
def test_a_norm_that_is_not_finite_or_zero(cupy, value):
    """As on a CPU: NaN for all that the norm is of, and no step for zeros."""
    found = {}
    for device in ("cpu:0", f"gpu:{MPI.COMM_WORLD.rank}"):
        with ms.MultiWorkerMirroredStrategy(devices=[device]) as strategy:
            with strategy.scope():
                first, second = (ms.Variable(np.ones(5, np.float32), name=name) for name in "ab")
                optimizer = ms.optimizers.SGD(0.5, clipnorm=1.0)

            def step(optimizer, first, second):
                first.grad[...] = 0.25
                second.grad[...] = value
                optimizer.apply_gradients([(first.grad, first), (second.grad, second)])

            with np.errstate(invalid="ignore"):
                strategy.run(step, args=(optimizer, first, second))
            found[device[:3]] = first.numpy(), second.numpy()
    for mine, of_cpu in zip(found["gpu"], found["cpu"], strict=True):
        np.testing.assert_allclose(mine, of_cpu, rtol=1e-6)


def test_replicas_with_a_gpu_each_on_one_rank(cupy):
    if MPI.COMM_WORLD.size > 1:
        return  # each of its ranks would need two GPUs
    make = functools.partial(ms.optimizers.AdamW, 0.01, global_clipnorm=1.0)
    expected = trained(["cpu:0", "cpu:1"], "float32", make, lambda array: array)
    found = trained(["gpu:0", "gpu:1"], "float32", make, cupy.asarray)
    assert not honest_cupy.report()[0]
    for mine, of_cpu in zip(found, expected, strict=True):
        np.testing.assert_array_max_ulp(mine, of_cpu, 2)  # a norm's parts are added in other blocks


@pytest.mark.parametrize("frozen", [False, True])
def test_variables_take_little_more_memory_than_they_have(cupy, frozen, monkeypatch):
    """Memory of a GPU is taken where it is not used, too: at most a quarter, or a first slab."""
    first = 1 << 20
    monkeypatch.setattr(arena, "FIRST_SLAB", first)
    with ms.MultiWorkerMirroredStrategy(devices=[f"gpu:{MPI.COMM_WORLD.rank}"]) as strategy, strategy.scope():
        before = sum(memory.nbytes for memory in honest_cupy.M.memories.values())
        variables = []
        for _ in range(16 * 20):
            variables.append(ms.Variable(np.zeros(first // 64, np.float32), trainable=not frozen))
            taken = sum(memory.nbytes for memory in honest_cupy.M.memories.values()) - before
            needed = sum(4 * variable.size for variable in variables)
            copies = 1 if frozen else 2  # gradients
            assert needed * copies <= taken <= (needed + max(first, needed / 4) + arena.PAGE) * copies
        assert len(strategy.extended.placement.arenas.arenas) < 20
