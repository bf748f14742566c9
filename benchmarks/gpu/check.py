#!/usr/bin/env python3
"""Check mpistrat on a machine with a GPU: every path to it in a good order, PASS or FAIL each, and the numbers that matter.

    make gpu-check                                        # or: python benchmarks/gpu/check.py; about 5 minutes
    python benchmarks/gpu/check.py --only torch,feed      # some groups or items; --list shows them
    GPU_CHECK_FAKE=tests/models/honest_cupy.py python benchmarks/gpu/check.py     # without a GPU, on the stand-in for CuPy

mpistrat, CuPy and mpi4py must be installed, with an MPI whose mpiexec is on PATH (or in $MPIEXEC). PyTorch, JAX, optax and Keras
are checked where they are. Each group of items is a process of its own; a group on 2 ranks starts one job for each item. An item
that raises, crashes its process or hangs costs that item only. A table and a JSON file ($OUT/gpu_check.json, else
./gpu_check.json) come last. The exit status is the number of items that failed (at most 100).

On a machine with one GPU both ranks have the same. Then NCCL between ranks cannot be checked: it takes a GPU for each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from gpt2_shapes import GPT2

FAKE = os.environ.get("GPU_CHECK_FAKE", "")
HERE = Path(__file__).resolve()
ITEMS: dict[str, tuple[str, int, int, object]] = {}  # name -> group, ranks, seconds, function


class Skip(Exception):
    pass


def item(group: str, seconds: int = 60, ranks: int = 1):
    def add(function):
        ITEMS[f"{group}.{function.__name__}"] = (group, ranks, seconds, function)
        return function

    return add


def tell(line: str) -> None:
    """A line in one piece: ranks share the pipe."""
    sys.stdout.flush()
    os.write(1, f"\n{line}\n".encode())


RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
RANKS = int(os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))


def note(key: str, value: float, unit: str = "") -> None:
    if RANK == 0:
        tell(f"@@NUM {key} {value:.6g} {unit}")


def say(text: object) -> None:
    print(f"    {text}" if RANK == 0 else f"    (rank {RANK}) {text}", flush=True)


# ---------------------------------------------------------------------------------------------------- helpers of items


def cp():
    import cupy

    return cupy


def torch_():
    try:
        import torch
    except ImportError:
        raise Skip("no torch") from None
    if not FAKE and not torch.cuda.is_available():
        raise Skip("torch sees no GPU")
    return torch


def tdev() -> str:
    return "cpu" if FAKE else "cuda"


def sync() -> None:
    if FAKE:
        cp().cuda.Device().synchronize()
    else:
        cp().cuda.runtime.deviceSynchronize()


def timed(function, repeat: int = 5, warm: int = 2) -> float:
    """Median seconds, the device idle before and after."""
    for _ in range(warm):
        function()
    found = []
    for _ in range(repeat):
        sync()
        start = time.perf_counter()
        function()
        sync()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def close(got, expected, rtol=1e-6, atol=1e-7, what="") -> None:
    import numpy as np

    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or not np.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True):
        worst = (
            float(np.max(np.abs(got.astype("f8") - expected.astype("f8"))))
            if got.shape == expected.shape and got.size
            else -1
        )
        raise AssertionError(
            f"{what}: worst difference {worst:g}; got {got.ravel()[:4]}, expected {expected.ravel()[:4]}"
        )


SMALL = bool(FAKE)
if SMALL:
    GPT2 = [(501, 76), *[(76,), (76, 230), (230,), (300, 310)] * 2, (76,)]


def size_of(shapes) -> int:
    total = 0
    for shape in shapes:
        n = 1
        for d in shape:
            n *= d
        total += n
    return total


@contextlib.contextmanager
def group_of(name: str):
    """A CrossDeviceOps of a name, bound to all ranks."""
    from mpistrat.base.devices import use_device
    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup
    from mpistrat.cross_device.auto import make_cross_device_ops

    with Topology.create(devices=None if RANKS > 1 else ["gpu:0"]) as topology:
        use_device(topology.devices[0])
        group = ProcessGroup.create(topology, Environment(abort_after=60.0))
        ops = make_cross_device_ops(name)
        ops.bind(group)
        yield ops
        ops.close()
        group.close()


def gpt2_module(torch):
    """GPT-2 of 124 M parameters in plain torch, for the step's own time."""
    n, F = torch.nn, torch.nn.functional
    width, heads, layers, words, length = (76, 2, 2, 501, 64) if SMALL else (768, 12, 12, 50257, 1024)

    class Block(n.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = n.LayerNorm(width), n.LayerNorm(width)
            self.qkv, self.proj = n.Linear(width, 3 * width), n.Linear(width, width)
            self.up, self.down = n.Linear(width, 4 * width), n.Linear(4 * width, width)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
            x = x + self.proj(y)
            return x + self.down(F.gelu(self.up(self.ln2(x))))

    class Gpt(n.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = n.Embedding(words, width), n.Embedding(length, width)
            self.blocks = n.ModuleList(Block() for _ in range(layers))
            self.ln = n.LayerNorm(width)

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return F.linear(self.ln(x), self.wte.weight)

    torch.manual_seed(0)
    return Gpt().to(tdev()), words, length


def mlp_of(torch, dtype=None):
    torch.manual_seed(0)
    n = torch.nn
    return n.Sequential(n.Linear(10, 16), n.Tanh(), n.Linear(16, 3)).to(dtype or torch.float64).to(tdev())


def rows_of(torch, dtype=None, seed=0, count=8):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=generator)
    return x.to(dtype or torch.float64).to(tdev()), y.to(tdev())


@contextlib.contextmanager
def torch_context(same_stream: bool = True):
    """On the imaginary GPU torch computes on the CPU: in the order of the null stream, or in none."""
    if not FAKE:
        yield
        return
    import honest_cupy

    with honest_cupy.torch_mode(same_stream):
        yield


def distributed(torch, strategy, module, optimizer=None, **more):
    import mpistrat as ms

    if FAKE:
        importlib.import_module("mpistrat.torch.distribute_model")._device_of = lambda strategy: "cpu"
    with strategy.scope():
        return ms.torch.distribute(module, optimizer, **more)


# ------------------------------------------------------------------------------------------------------ env: what is here


@item("env")
def versions():
    import platform

    import numpy

    say(f"python {platform.python_version()}, numpy {numpy.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    for name in ("cupy", "torch", "jax", "mpi4py", "h5py", "ml_dtypes", "optax", "keras", "mpistrat"):
        try:
            module = importlib.import_module(name)
            say(f"{name} {getattr(module, '__version__', '?')} from {getattr(module, '__file__', '?')}")
        except Exception as error:
            say(f"{name}: {type(error).__name__}: {error}")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,uuid,driver_version,memory.total,mig.mode.current,compute_mode", "--format=csv"],
            capture_output=True, text=True, timeout=30)  # fmt: skip
        say(shown.stdout.strip() or shown.stderr.strip())


@item("env")
def compiled_loops():
    from mpistrat.base import loops

    instructions, reason = loops.used()
    say(f"{instructions or 'none'} {reason}")
    if not instructions:
        raise Skip(f"NumPy in their place: {reason}")


@item("env")
def mpi():
    from mpi4py import MPI

    from mpistrat.comm.gpu_support import ask, uses_rocm

    say(MPI.Get_library_version().strip().splitlines()[0])
    say(f"thread level {MPI.Query_thread()} (3 is MULTIPLE); CUDA-aware: {ask(amd=uses_rocm())}")


@item("env")
def cupy_and_gpus():
    cupy = cp()
    from mpistrat.base.devices import count_gpus, default_devices, gpu_identities

    found, reason = gpu_identities()
    say(f"{count_gpus()} GPUs: {found} {reason}")
    assert count_gpus() >= 1
    assert all(len(uuid) == 40 and uuid.startswith("GPU-") for uuid, _ in found), found
    say(f"default devices: alone {default_devices(0, 1)}, rank 1 of 2 {default_devices(1, 2)}")
    a = cupy.arange(10, dtype="f4")
    assert float((a * 2).sum()) == 90.0


@item("env")
def nccl_here():
    from mpistrat.comm.gpu import nccl_available

    reason = nccl_available()
    if reason:
        raise AssertionError(f"nccl_available() says {reason!r}")
    from cupy.cuda import nccl

    if hasattr(nccl, "get_version"):
        say(f"NCCL {nccl.get_version()}, built with {nccl.get_build_version()}")
    names = ("NCCL_SUM", "NCCL_FLOAT16", "NCCL_FLOAT32", "NCCL_FLOAT64", "NCCL_INT64", "NCCL_UINT8", "NCCL_BFLOAT16")
    say({name: getattr(nccl, name, "not there") for name in names})


@item("env")
def calls_exist():
    """Every name of CuPy that mpistrat uses, or would use."""
    if FAKE:
        raise Skip("on a GPU only")
    cupy = cp()
    missing = []
    names = (
        "ndarray", "asarray", "array", "empty", "zeros", "full", "concatenate", "ascontiguousarray", "copyto",
        "from_dlpack", "add", "add.at", "cuda.Device", "cuda.Stream", "cuda.Event", "cuda.get_current_stream",
        "cuda.alloc", "cuda.alloc_pinned_memory", "cuda.UnownedMemory", "cuda.MemoryPointer",
        "cuda.runtime.getDeviceCount", "cuda.runtime.getDeviceProperties", "cuda.runtime.deviceGetPCIBusId",
        "cuda.nccl.get_unique_id", "cuda.nccl.groupStart", "cuda.nccl.groupEnd",
        "cuda.nccl.NcclCommunicator.allReduce", "cuda.nccl.NcclCommunicator.destroy",
        "cuda.nccl.NcclCommunicator.abort", "cuda.nccl.NcclCommunicator.check_async_error",
        "cuda.nccl.NcclCommunicator.reduceScatter", "cuda.nccl.NcclCommunicator.allGather", "cuda.ExternalStream",
        "ElementwiseKernel", "RawKernel",
    )  # fmt: skip
    for path in names:
        value = cupy
        try:
            for name in path.split("."):
                value = getattr(value, name)
        except AttributeError:
            missing.append(path)
    if missing:
        raise AssertionError(f"not in this CuPy: {', '.join(missing)}")


# ------------------------------------------------------------------------------------------- arrays: conversion and copies


@item("arrays")
def as_array_of_cupy_and_back():
    import numpy as np

    from mpistrat.comm.arrays import array_module, as_array, is_gpu, to_host

    cupy = cp()
    for dtype in ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "c8", "c16", "?"):
        for shape in ((), (0,), (3,), (2, 3), (1000, 7)):
            host = (np.arange(int(np.prod(shape)), dtype="f8") % 2).reshape(shape).astype(dtype)
            array = cupy.asarray(host)
            assert is_gpu(array) and array_module(array) is cupy, (dtype, shape)
            assert as_array(array) is array or as_array(array).data.ptr == array.data.ptr
            close(to_host(array), host, what=f"{dtype} {shape}")
            if len(shape) == 2:
                close(to_host(array.T), host.T, what=f"transposed {dtype}")
    cupy.cuda.get_current_stream().synchronize()


@item("arrays")
def as_array_of_torch():
    torch = torch_()
    from mpistrat.comm.arrays import as_array, is_gpu, to_host

    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64):
        tensor = torch.arange(12, device=tdev()).reshape(3, 4).to(dtype)
        array = as_array(tensor)
        assert FAKE or is_gpu(array), dtype
        close(to_host(array), tensor.cpu().numpy(), what=str(dtype))
        close(to_host(as_array(tensor.t())), tensor.t().cpu().numpy(), what=f"{dtype} transposed")


@item("arrays")
def as_array_of_torch_bfloat16():
    torch = torch_()
    from mpistrat.comm.arrays import as_array, is_bfloat16, to_host

    tensor = torch.arange(12, device=tdev()).to(torch.bfloat16)
    array = as_array(tensor)
    assert is_bfloat16(array.dtype), array.dtype
    close(to_host(array).astype("f4"), tensor.float().cpu().numpy())


@item("arrays")
def torch_of_array():
    torch = torch_()
    from mpistrat.torch.tensors import tensor_of

    cupy = cp()
    for dtype in ("f2", "f4", "f8", "i4", "i8", "u1"):
        array = cupy.asarray([1, 2, 3], dtype=dtype)
        tensor = tensor_of(array)
        assert tensor.data_ptr() == array.data.ptr and (FAKE or tensor.is_cuda)
        tensor += 1
        if not FAKE:
            torch.cuda.synchronize()
        assert array.get().tolist() == [2, 3, 4], dtype
    tensor_of(cupy.empty((0, 3), "f4"))  # memory without elements


@item("arrays")
def arrays_of_jax():
    jax = importlib.import_module("jax") if importlib.util.find_spec("jax") else None
    if jax is None:
        raise Skip("no jax")
    if not FAKE and jax.default_backend() != "gpu":
        raise Skip(f"jax computes on {jax.default_backend()}")
    from mpistrat.comm.arrays import as_array, to_host
    from mpistrat.jax.arrays import memory_of, of_memory

    cupy = cp()
    leaf = jax.numpy.arange(6.0)
    close(to_host(as_array(jax.block_until_ready(leaf))), [0, 1, 2, 3, 4, 5])
    array = cupy.arange(6, dtype="f4")
    back = of_memory(array)
    assert back.unsafe_buffer_pointer() == array.data.ptr, "JAX made a copy"
    close(to_host(memory_of(back, array)), [0, 1, 2, 3, 4, 5])


@item("arrays")
def arithmetic_falls_back():
    """combine, finish, squares, not_finite on CuPy arrays: the compiled loops must decline without an error left behind."""
    import numpy as np

    from mpistrat.arena.arithmetic import arithmetic, combine, finish
    from mpistrat.base import loops
    from mpistrat.base.types import ReduceOp
    from mpistrat.step.arena_step import not_finite_of

    cupy = cp()
    rng = np.random.default_rng(0)
    for dtype in ("f2", "f4", "f8"):
        parts = [rng.normal(size=70_000).astype(dtype) for _ in range(3)]
        how = arithmetic(ReduceOp.MEAN, np.dtype(dtype), 3)
        out = cupy.empty(70_000, how.accumulate)
        combine(how.ufunc, [cupy.asarray(p) for p in parts], out)
        close(finish(out, how).get(), np.mean([p.astype(how.accumulate) for p in parts], axis=0).astype(dtype), 1e-3)
        values = rng.normal(size=70_001).astype(how.accumulate)
        close(loops.squares(cupy.asarray(values)), loops.squares(values), 1e-5)
    assert not_finite_of(cupy.asarray([1.0, np.nan, np.inf])) == 2


@item("arrays")
def device_copy():
    from collections import deque

    import numpy as np

    from mpistrat.comm.gpu import DeviceCopy

    copy = DeviceCopy(0)
    n = 1 << 12 if FAKE else 1 << 20
    started = deque([copy.start(np.full(n, 0.0))])
    sums = []
    for step in range(20):
        copy.reclaim()
        started.append(copy.start(np.full(n, step + 1.0)))
        sums.append((copy.finish(started.popleft()) * 1.0).sum())
    assert [float(total) for total in sums] == [step * float(n) for step in range(20)]


@item("arrays")
def loans():
    from mpistrat.comm.gpu import lend

    cupy = cp()
    array = cupy.arange(5, dtype="f4")
    lent, reference = lend(array)
    assert lent.data.ptr == array.data.ptr and reference() is not None
    view = lent[1:3]
    del lent
    assert reference() is not None, "a view must keep the loan alive"
    del view
    assert reference() is None, "the loan is still there"


# --------------------------------------------------------------------------------------------- ops: reductions, one rank


def _ops(name):
    import numpy as np

    cupy = cp()
    with group_of(name) as ops:
        size, rank = ops.group.topology.num_replicas, ops.group.topology.rank
        for dtype in ("f2", "f4", "f8", "i4", "i8", "c8"):
            for shape in ((), (0,), (5, 7), (100_003,)):
                base = (np.arange(np.prod(shape, dtype=int)) % 50).reshape(shape)
                mine = cupy.asarray((base + rank).astype(dtype))
                total = ops.reduce("sum", mine)
                assert isinstance(total, cupy.ndarray) and total.dtype == np.dtype(dtype), (type(total), dtype)
                close(total.get(), (base * size + size * (size - 1) / 2).astype(dtype), what=f"{name} {dtype} {shape}")
                close(ops.reduce("mean", mine).get(), base + (size - 1) / 2, 1e-3, what=f"{name} mean {dtype} {shape}")
                if dtype not in ("c8",) and shape:
                    close(ops.reduce("max", mine).get(), base + size - 1, what=f"{name} max {dtype}")
        pairs = [(cupy.full(n, rank + 1.0, "f4"), None) for n in (3, 10_000, 5)]
        for result in ops.batch_reduce("sum", pairs):
            assert (result.get() == size * (size + 1) / 2).all()
        assert ops.gather(cupy.full(rank + 1, rank)).get().tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert ops.broadcast(cupy.full(3, rank), root=size - 1).get().tolist() == [size - 1] * 3


for _name in ("mpi", "hierarchical", "nccl", "auto"):

    def _make(name):
        def reductions():
            _ops(name)

        reductions.__name__ = f"reductions_{name}"
        return reductions

    item("ops")(_make(_name))


@item("ops")
def nccl_communicator():
    from mpistrat.comm.gpu import NcclCommunicator

    cupy = cp()
    with group_of("mpi") as ops:
        start = time.perf_counter()
        with NcclCommunicator(ops.group, [0]) as communicator:
            note("NCCL init, 1 rank", time.perf_counter() - start, "s")
            array = cupy.arange(1000, dtype="f4")
            communicator.all_reduce([array])
            close(array.get(), range(1000))
        try:
            communicator.all_reduce([array])
        except Exception as error:
            assert type(error).__name__ == "ClosedError", error
        else:
            raise AssertionError("no error after close()")


# --------------------------------------------------------------------------------------------- vars: variables, optimizers


@item("vars")
def a_variable():
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    with ms.OneDeviceStrategy("gpu:0") as strategy, strategy.scope():
        for dtype in ("float32", "float64", "float16", "int32", "bool"):
            v = ms.Variable(np.ones((3, 4), dtype), name=f"v_{dtype}")
            assert isinstance(v.array, cupy.ndarray) and v.array.dtype == np.dtype(dtype)
            v.assign(np.full((3, 4), 2).astype(dtype))
            close(v.numpy(), np.full((3, 4), 2).astype(dtype))
        w = ms.Variable(np.zeros(5, "f4"), name="w")
        w.assign_add(cupy.ones(5, "f4"))
        w.assign_sub([0.5] * 5)
        close((w * 2 + 1).get(), [2] * 5)
        w.scatter_add(ms.IndexedSlices(np.ones(2, "f4"), np.array([1, 1])))
        close(w.numpy(), [0.5, 2.5, 0.5, 0.5, 0.5])
        close(np.tanh(w).get(), np.tanh(w.numpy()))
        say(repr(w))


def _rules():
    import mpistrat as ms

    o = ms.optimizers
    return {
        "SGD": lambda: o.SGD(0.1), "momentum": lambda: o.SGD(0.1, momentum=0.9, nesterov=True), "Adam": lambda: o.Adam(0.01),
        "AdamW": lambda: o.AdamW(0.01), "amsgrad": lambda: o.Adam(0.01, amsgrad=True), "Adagrad": lambda: o.Adagrad(0.1),
        "RMSProp": lambda: o.RMSProp(0.01, momentum=0.5, centered=True), "Adadelta": lambda: o.Adadelta(1.0),
        "Adamax": lambda: o.Adamax(0.01), "Nadam": lambda: o.Nadam(0.01), "Ftrl": lambda: o.Ftrl(0.1),
        "Lion": lambda: o.Lion(0.01),
        "Lamb": lambda: o.Lamb(0.01), "Adafactor": lambda: o.Adafactor(0.01), "clipvalue": lambda: o.SGD(0.1, clipvalue=0.3),
        "clipnorm": lambda: o.SGD(0.1, clipnorm=0.5), "global_clipnorm": lambda: o.Adam(0.01, global_clipnorm=0.5),
        "ema": lambda: o.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
        "accumulate": lambda: o.Adam(0.01, gradient_accumulation_steps=2), "check": lambda: o.Adam(0.01, check_numerics=True),
    }  # fmt: skip


def _train(device, rule, dtype="f4", steps=4):
    import numpy as np

    import mpistrat as ms

    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape).astype(dtype) for shape in ((70, 1000), (7,), (3, 5))]
    with ms.OneDeviceStrategy(device) as strategy:
        with strategy.scope():
            variables = [ms.Variable(a, name=f"v{i}") for i, a in enumerate(start)]
            optimizer = _rules()[rule]()

        def step(number):
            rng = np.random.default_rng(number + 1)
            pairs = []
            for v in variables:
                gradient = rng.normal(size=v.shape).astype(dtype)
                v.grad[...] = cp().asarray(gradient) if device != "cpu:0" else gradient
                pairs.append((v.grad, v))
            optimizer.apply_gradients(pairs)

        for number in range(steps):
            strategy.run(step, args=(number,))
        return [v.numpy() for v in variables], {k: v for x in variables[:1] for k, v in optimizer.slots(x).items()}


@item("vars", 120)
def optimizers_equal_the_cpu():
    import numpy as np

    failed = []
    for rule in _rules():
        try:
            (got, slots), (expected, kept) = _train("gpu:0", rule), _train("cpu:0", rule)
            for a, b in zip(got, expected, strict=True):
                close(a, b, 2e-5, 2e-6, rule)
            for name in kept:
                close(slots[name], kept[name], 2e-4, 2e-5, f"{rule} slot {name}")
        except Exception as error:
            failed.append(rule)
            say(f"{rule}: {type(error).__name__}: {error}")
            say("".join(traceback.format_exc(limit=-4)))
    del np
    if failed:
        raise AssertionError(f"{len(failed)} of {len(_rules())} rules: {', '.join(failed)}")


def _ulps(a, b) -> int:
    """The largest difference of two arrays in units of the last place; any NaN is as good as another."""
    import numpy as np

    kind = {2: np.int16, 4: np.int32, 8: np.int64}[a.itemsize]
    nan = (a != a) & (b != b)
    bits = [np.ascontiguousarray(array).view(kind) for array in (a, b)]
    ordered = [np.where(each < 0, np.iinfo(kind).min - each, each) for each in bits]
    least, most = np.minimum(*ordered), np.maximum(*ordered)
    return int(np.where(nan, 0, most.view(f"u{a.itemsize}") - least.view(f"u{a.itemsize}")).max(initial=0))


@item("vars", 120)
def kernels_equal_the_cpu():
    """One kernel for each rule and dtype: weights and slots after four steps, within two units of the last place."""
    import numpy as np

    dtypes: list = ["f4"] if FAKE else ["f4", "f8", "f2"]  # on the stand-in g++ compiles each
    if not FAKE and importlib.util.find_spec("ml_dtypes"):
        dtypes.append(np.dtype(importlib.import_module("ml_dtypes").bfloat16))
    norms = ("Lamb", "Adafactor", "clipnorm", "global_clipnorm", "check")  # take more passes
    worst: dict[str, int] = {}
    for rule in _rules():
        for dtype in dtypes if rule not in norms else ():
            (got, slots), (expected, kept) = _train("gpu:0", rule, dtype), _train("cpu:0", rule, dtype)
            pairs = [*zip(got, expected, strict=True), *((slots[name], kept[name]) for name in kept)]
            worst[f"{rule} {np.dtype(dtype).name}"] = max(_ulps(a, b) for a, b in pairs)
    note("rules and dtypes with the CPU's bits", sum(not ulps for ulps in worst.values()), f"of {len(worst)}")
    failed = {name: ulps for name, ulps in worst.items() if ulps > 2}
    if failed:
        raise AssertionError(f"more than 2 units in the last place: {failed}")


@item("vars")
def narrow_weights():
    got, _ = _train("gpu:0", "Adam", "f2")
    expected, _ = _train("cpu:0", "Adam", "f2")
    for a, b in zip(got, expected, strict=True):
        close(a, b, 2e-3, 2e-3)


@item("vars")
def bfloat16_weights():
    import numpy as np

    ml_dtypes = importlib.import_module("ml_dtypes")
    got, _ = _train("gpu:0", "Adam", ml_dtypes.bfloat16)
    expected, _ = _train("cpu:0", "Adam", ml_dtypes.bfloat16)
    for a, b in zip(got, expected, strict=True):
        close(a.astype(np.float32), b.astype(np.float32), 2e-2, 2e-2)


@item("vars")
def save_and_restore():
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    with tempfile.TemporaryDirectory() as folder, ms.OneDeviceStrategy("gpu:0") as strategy:
        with strategy.scope():
            v = ms.Variable(np.arange(6.0, dtype="f4"), name="v")
            optimizer = ms.optimizers.Adam(0.1)

        def step():
            v.grad[...] = cupy.ones(6, "f4")
            optimizer.apply_gradients([(v.grad, v)])

        strategy.run(step)
        kept, slots = v.numpy(), optimizer.slots(v)
        strategy.save(f"{folder}/c.h5", extra={"step": 1})
        strategy.run(step)
        assert strategy.restore(f"{folder}/c.h5") == {"step": 1}
        close(v.numpy(), kept)
        for name, array in slots.items():
            close(optimizer.slots(v)[name], array, what=name)


@item("vars")
def steps_on_a_stream_of_torchs_own():
    """What is assigned before a step, and read after it, is in order with the step; so are gradients on that stream."""
    torch = torch_()
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    for make, expected in ((lambda: ms.optimizers.SGD(0.5), 6.5), (lambda: ms.optimizers.Adam(0.5), 6.5)):
        with ms.OneDeviceStrategy("gpu:0") as strategy:
            with strategy.scope():
                v, optimizer = ms.Variable(np.ones(1000, "f4"), name="v"), make()
            gradient = cupy.zeros(1000, "f4")
            sync()

            def step(optimizer=optimizer, v=v, gradient=gradient):
                optimizer.apply_gradients([(gradient, v)])

            side = contextlib.nullcontext() if FAKE else torch.cuda.stream(torch.cuda.Stream())
            with side, torch_context(False):
                stream = torch.cuda.current_stream()
                own = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)
                with own:
                    gradient[...] = 1
                v.assign(np.full(1000, 7, "f4"))
                strategy.run(step)
                with own:
                    gradient[...] = 5  # of the next step
                    seen = v.storage(0)[:1000] + 0
                    close(seen.get(), np.full(1000, expected), 1e-5)
                close(v.numpy(), np.full(1000, expected), 1e-5)


@item("vars")
def sparse_gradients():
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    with ms.OneDeviceStrategy("gpu:0") as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros((4, 2), "f4"), name="v")
            optimizer = ms.optimizers.SGD(1.0)
        rows = ms.IndexedSlices(cupy.ones((3, 2), "f4"), cupy.asarray([1, 1, 3]), (4, 2))
        strategy.run(lambda: optimizer.apply_gradients([(rows, v)]))
        close(v.numpy(), [[0, 0], [-2, -2], [0, 0], [-1, -1]])


@item("vars")
def the_numpy_cupy_page():
    """The perceptron of docs/frameworks/numpy_cupy.md, on the GPU, equals the CPU."""
    import numpy as np

    import mpistrat as ms

    def train(device):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(400, 20)).astype(np.float32)
        y = np.eye(4, dtype=np.float32)[x[:, :4].argmax(1)]
        with ms.MultiWorkerMirroredStrategy(devices=[device]) as strategy:
            with strategy.scope():
                w = ms.Variable(rng.normal(size=(20, 4), scale=0.2), name="w", dtype="float32")
                b = ms.Variable(np.zeros(4, "float32"), name="b")
                optimizer = ms.optimizers.AdamW(1e-2, global_clipnorm=1.0)

            def step(x, y):
                logits = x @ w.array + b.array
                p = np.exp(logits - logits.max(axis=1, keepdims=True))
                p /= p.sum(axis=1, keepdims=True)
                delta = (p - y) / ms.context.global_batch_size()
                np.matmul(x.T, delta, out=w.grad)
                delta.sum(axis=0, out=b.grad)
                optimizer.apply_gradients([(w.grad, w), (b.grad, b)])
                return ms.nn.compute_average_loss(-(y * np.log(p + 1e-9)).sum(axis=1))

            data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).shuffle(seed=1).batch(96))
            for _ in range(2):
                for batch in data:
                    loss = strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
            return float(loss), w.numpy()

    (loss, got), (expected_loss, expected) = train("gpu:0"), train("cpu:0")
    close(got, expected, 1e-3, 1e-4)
    close(loss, expected_loss, 1e-3)


# ------------------------------------------------------------------------------------------------------------- torch


def _fit(torch, module, optimizer, steps=5, stream=None, dtype=None, heavy=False, **call):
    x, y = rows_of(torch, dtype)
    for _ in range(steps):
        with stream() if stream else contextlib.nullcontext():
            optimizer.zero_grad()
            out = module(x)
            if heavy:  # the gradient comes late
                filler = torch.randn(2048, 2048, device=tdev())
                for _ in range(8):
                    filler = filler @ filler * 1e-3
                out = out + 0 * filler.sum().to(out.dtype)
            torch.nn.functional.cross_entropy(out.double(), y).backward()
            optimizer.step(**call)
    if not FAKE:
        torch.cuda.synchronize()  # what follows is on another stream
    return [p.detach().cpu().clone() for p in module.parameters()]


def _alone(torch, module, make):
    """The weights of a copy of a module that one process has trained on all rows. `make` makes its optimizer of parameters."""
    import copy

    alone = copy.deepcopy(module)
    return _fit(torch, alone, make(alone.parameters()))


def _fit_half(torch, model, optimizer) -> None:
    """Train as `_fit`, on this rank's half of the rows."""
    x, y = rows_of(torch)
    mine = slice(RANK * 4, RANK * 4 + 4)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()


def _same_weights(got, reference, atol=1e-10) -> None:
    for a, b in zip(got, reference, strict=True):
        close(a.detach().cpu().numpy(), b.numpy(), 1e-9, atol)


def _adamw(parameters):
    return torch_().optim.AdamW(parameters, lr=1e-2)


def _torch_equals(torch, make, dtype=None, tolerance=1e-9, stream=None, heavy=False, **more):
    import copy

    import mpistrat as ms

    module = mlp_of(torch, dtype)
    alone = copy.deepcopy(module)
    reference = _fit(torch, alone, make(alone.parameters()), dtype=dtype)
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy:
        with torch_context():
            module, optimizer = distributed(torch, strategy, module, make(module.parameters()), **more)
        with torch_context(stream is None):
            got = _fit(torch, module, optimizer, stream=stream, dtype=dtype, heavy=heavy)
    for a, b in zip(got, reference, strict=True):
        close(a.double().numpy(), b.double().numpy(), tolerance, tolerance)


def _torch_item(name, make, **options):
    def equals():
        torch = torch_()
        _torch_equals(torch, lambda p: make(torch, p), **options)

    equals.__name__ = name
    item("torch")(equals)


_torch_item("sgd", lambda t, p: t.optim.SGD(p, lr=0.1))
_torch_item("momentum", lambda t, p: t.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.0 if FAKE else 0.2))
_torch_item("adamw", lambda t, p: t.optim.AdamW(p, lr=1e-2, amsgrad=True))
_torch_item("adagrad", lambda t, p: t.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1))
_torch_item("nadam", lambda t, p: t.optim.NAdam(p, lr=1e-2))

_torch_item("adafactor", lambda t, p: t.optim.Adafactor(p, lr=1e-2))


@item("torch")
def lbfgs_calls_its_closure():
    """The closure computes on the GPU with copies of the parameters, which the line search moves."""
    import copy

    import mpistrat as ms

    torch = torch_()
    x, y = rows_of(torch, None)

    def search(module, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(x).double(), y)
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(3)]
        return losses, [p.detach().cpu().clone() for p in module.parameters()]

    def make(parameters):
        return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")

    module = mlp_of(torch, None)
    alone = copy.deepcopy(module)
    expected_losses, expected = search(alone, make(alone.parameters()))
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module, optimizer = distributed(torch, strategy, module, make(module.parameters()))
        losses, got = search(module, optimizer)
    for a, b in zip(
        [*losses, *(p.double().numpy() for p in got)],
        [*expected_losses, *(p.double().numpy() for p in expected)],
        strict=True,
    ):
        close(a, b, 1e-6, 1e-6)


@item("torch")
def adamw_that_asked_for_fused():
    torch = torch_()
    _torch_equals(torch, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=not FAKE), tolerance=1e-7)


@item("torch")
def bfloat16_module():
    torch = torch_()
    _torch_equals(torch, lambda p: torch.optim.SGD(p, lr=0.1), torch.bfloat16, tolerance=3e-2)


@item("torch")
def float16_module():
    torch = torch_()
    _torch_equals(torch, lambda p: torch.optim.SGD(p, lr=0.1), torch.float16, tolerance=3e-3)


@item("torch")
def on_a_stream_of_its_own():
    """A loop under `with torch.cuda.stream(...)`: CuPy works on the null stream, which does not wait for torch's streams."""
    torch = torch_()
    if FAKE:
        stream = contextlib.nullcontext
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        stream = lambda: torch.cuda.stream(side)  # noqa: E731
    _torch_equals(torch, lambda p: torch.optim.SGD(p, lr=0.1), stream=stream, heavy=not FAKE)


@item("torch")
def sync_batch_norm():
    torch = torch_()
    import mpistrat as ms

    n = torch.nn
    torch.manual_seed(0)
    module = n.Sequential(n.Linear(10, 6), n.BatchNorm1d(6), n.Linear(6, 3)).double().to(tdev())
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module, optimizer = distributed(
            torch, strategy, module, torch.optim.SGD(module.parameters(), lr=0.1), sync_batch_norm=True
        )
        _fit(torch, module, optimizer)
        assert all(p.device.type == tdev() for p in module.parameters())


@item("torch")
def batch_norm_and_max_norm():
    torch = torch_()
    import mpistrat as ms

    n = torch.nn
    torch.manual_seed(0)
    module = n.Sequential(n.Linear(10, 6), n.BatchNorm1d(6), n.Linear(6, 3)).double().to(tdev())
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module, optimizer = distributed(
            torch, strategy, module, torch.optim.Adam(module.parameters(), lr=0.1), max_norm=0.1
        )
        _fit(torch, module, optimizer)
        module.eval()


@item("torch")
def state_of_module_and_optimizer():
    torch = torch_()
    import mpistrat as ms

    module = mlp_of(torch)
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module, optimizer = distributed(torch, strategy, module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        _fit(torch, module, optimizer)
        weights = {k: v.clone() for k, v in module.state_dict().items()}
        state = optimizer.state_dict()
        kept = [t for s in state["state"].values() for t in s.values() if torch.is_tensor(t) and t.ndim]
        say(f"state_dict: weights on {next(iter(weights.values())).device}, state on {kept[0].device}")
        _fit(torch, module, optimizer, steps=2)
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for name, tensor in module.state_dict().items():
            close(tensor.cpu().numpy(), weights[name].cpu().numpy(), what=name)


@item("torch")
def optimizer_with_state_on_the_gpu():
    """Distribute an optimizer that has taken steps in plain torch: its state is on the GPU."""
    torch = torch_()
    import mpistrat as ms

    module = mlp_of(torch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    _fit(torch, module, optimizer, steps=2)
    plain = optimizer.state_dict()
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module, optimizer = distributed(torch, strategy, module, optimizer)
        _fit(torch, module, optimizer, steps=1)
        optimizer.load_state_dict(plain)


@item("torch", 120)
def compiled():
    torch = torch_()
    if FAKE:
        raise Skip("on a GPU only")
    import mpistrat as ms

    module = mlp_of(torch)
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy:
        module, optimizer = distributed(torch, strategy, module, torch.optim.SGD(module.parameters(), lr=0.1))
        faster = torch.compile(module, mode="reduce-overhead")  # CUDA graphs
        _fit(torch, faster, optimizer, steps=4)


@item("torch")
def gradients_for_our_optimizers():
    torch = torch_()
    import mpistrat as ms

    module = mlp_of(torch)
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module = distributed(torch, strategy, module)
        with strategy.scope():
            optimizer = ms.optimizers.SGD(0.1)
        x, y = rows_of(torch)

        def step():
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.apply_gradients(ms.torch.gradients(module))

        before = [p.detach().cpu().clone() for p in module.parameters()]
        strategy.run(step)
        assert any((a != b.detach().cpu()).any() for a, b in zip(before, module.parameters(), strict=True))


# --------------------------------------------------------------------------------------------------------------- jax


@item("jax", 120)
def a_tree_equals_plain_jax():
    import numpy as np

    if not importlib.util.find_spec("jax") or not importlib.util.find_spec("optax"):
        raise Skip("no jax or optax")
    import jax
    import jax.numpy as jnp
    import optax

    import mpistrat as ms

    if FAKE:
        importlib.import_module("mpistrat.jax.distribute").backend = lambda: "gpu"
    elif jax.default_backend() != "gpu":
        raise Skip(f"jax computes on {jax.default_backend()}")
    rng = np.random.default_rng(0)
    tree = {"w": jnp.asarray(rng.normal(size=(10, 3)), "float32"), "b": jnp.zeros(3, "float32")}
    x, y = jnp.asarray(rng.normal(size=(8, 10)), "float32"), jnp.asarray(rng.integers(0, 3, 8))
    grad = jax.jit(jax.grad(lambda p: optax.softmax_cross_entropy_with_integer_labels(x @ p["w"] + p["b"], y).mean()))
    for name, ours in (("ours", lambda: None), ("optax", lambda: optax.adamw(1e-2))):
        theirs = optax.adamw(1e-2) if name == "optax" else optax.sgd(0.1)
        alone, state = tree, theirs.init(tree)
        for _ in range(4):
            updates, state = theirs.update(grad(alone), state, alone)
            alone = optax.apply_updates(alone, updates)
        with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy:
            with strategy.scope():
                transformation = ours()
                if transformation is None:
                    params, optimizer = ms.jax.distribute(tree), ms.optimizers.SGD(0.1)
                else:
                    params, optimizer = ms.jax.distribute(tree, transformation)
            for _ in range(4):
                params = ms.jax.apply(optimizer, grad(params), params)
            for key in tree:
                close(np.array(params[key]), np.array(alone[key]), 1e-4, 1e-5, f"{name} {key}")
            del params


# -------------------------------------------------------------------------------------------------------------- feed


@item("feed", 90)
def prefetch_overlaps():
    """Batches of 64 MiB: the copy alone, the computation alone, both with the package's prefetch."""
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    rows, width, steps = (64, 64, 8) if FAKE else (4096, 4096, 24)
    x = np.random.default_rng(0).random((rows * steps, width), np.float32)
    note("prefetch: batch", rows * width * 4 / 2**20, "MiB")
    weights = cupy.asarray(np.random.default_rng(1).random((width, width), np.float32))

    def compute(batch):
        out = batch
        for _ in range(1 if FAKE else 4):
            out = out @ weights * 1e-4 if not FAKE else out * 1e-4
        return out

    with ms.OneDeviceStrategy("gpu:0") as strategy:

        def epoch(work, **options):
            data = strategy.distribute_dataset(ms.data.from_arrays(x).batch(rows), ms.InputOptions(**options))
            sync()
            start = time.perf_counter()
            total = None
            for batch in data:
                total = work(batch)
            sync()
            return time.perf_counter() - start, total

        epoch(compute)
        copies, _ = epoch(lambda batch: batch)
        both, _ = epoch(compute)
        host, _ = epoch(lambda batch: compute(cupy.asarray(batch)), fetch_to_device=False)
        fixed = cupy.asarray(x[:rows])
        alone = timed(lambda: compute(fixed)) * steps
    note("prefetch: copies alone", copies / steps * 1e3, "ms a step")
    note("prefetch: computing alone", alone / steps * 1e3, "ms a step")
    note("prefetch: both", both / steps * 1e3, "ms a step")
    note("prefetch: both, without fetch_to_device", host / steps * 1e3, "ms a step")
    note("prefetch: hidden part of the copies", (copies + alone - both) / max(min(copies, alone), 1e-9), "(1 is all)")


@item("feed", 60)
def torch_reads_batches_on_a_stream_of_its_own():
    """A batch's memory must not be written again while a stream that CuPy does not know still reads it."""
    torch = torch_()
    import numpy as np

    import mpistrat as ms

    rows, width = (5, 40) if FAKE else (1024, 1024)
    x = np.arange(60, dtype="f4").repeat(rows)[:, None] + np.zeros((1, width), "f4")
    with ms.OneDeviceStrategy("gpu:0") as strategy, torch_context(False):
        side = contextlib.nullcontext() if FAKE else torch.cuda.stream(torch.cuda.Stream())
        heavy = None if FAKE else torch.randn(4096, 4096, device="cuda")
        means = []
        with side:
            for batch in strategy.distribute_dataset(ms.data.from_arrays(x).batch(rows)):
                late = torch.from_dlpack(batch)
                if heavy is not None:
                    for _ in range(4):  # so that the batch is read late
                        heavy = heavy @ heavy * 1e-3
                    late = late + 0 * heavy[0, 0]
                means.append(late.mean())
                del batch, late
        if not FAKE:
            torch.cuda.synchronize()
        got = [float(mean) for mean in means]
    close(got, range(60), 1e-3, 1e-3)


@item("feed", 90)
def jax_reads_batches_late():
    """The same of JAX, whose streams are never CuPy's: does it keep what it was given until a computation has read it?"""
    import numpy as np

    if FAKE or not importlib.util.find_spec("jax"):
        raise Skip("on a GPU with JAX only")
    import jax

    import mpistrat as ms

    if jax.default_backend() != "gpu":
        raise Skip(f"jax computes on {jax.default_backend()}")
    rows, width = 1024, 1024
    x = np.arange(60, dtype="f4").repeat(rows)[:, None] + np.zeros((1, width), "f4")
    key = jax.random.normal(jax.random.key(0), (4096, 4096))

    @jax.jit
    def late(heavy, batch):
        for _ in range(4):
            heavy = heavy @ heavy * 1e-3
        return heavy, (batch + 0 * heavy[0, 0]).mean()

    means = []
    with ms.OneDeviceStrategy("gpu:0") as strategy:
        for batch in strategy.distribute_dataset(ms.data.from_arrays(x).batch(rows)):
            key, mean = late(key, jax.dlpack.from_dlpack(batch))
            means.append(mean)
            del batch
    close([float(mean) for mean in means], range(60), 1e-3, 1e-3)


# ------------------------------------------------------------------------------------------------------- perf: one rank


def _kernels(work) -> int:
    """How many kernels and copies a call makes on the GPU."""
    torch = torch_()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(1 for event in found.events() if "cuda" in str(event.device_type).lower())


@item("perf", 60)
def ceilings():
    import numpy as np

    cupy = cp()
    n = 1 << 16 if FAKE else 1 << 28
    a, b = cupy.zeros(n, "u1" if FAKE else "f4"), cupy.zeros(n, "u1" if FAKE else "f4")
    note("device copy", 2 * a.nbytes / timed(lambda: b.__setitem__(slice(None), a)) / 1e9, "GB/s read+write")
    if FAKE:
        return
    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(1 << 28), np.uint8, 1 << 28).view("f4")
    c = a[: host.size]
    note("host to device, pinned", host.nbytes / timed(lambda: c.set(host)) / 1e9, "GB/s")
    note("device to host, pinned", host.nbytes / timed(lambda: c.get(out=host)) / 1e9, "GB/s")
    pageable = np.ones(1 << 26, "f4")
    note("cupy.asarray of pageable memory", pageable.nbytes / timed(lambda: cupy.asarray(pageable)) / 1e9, "GB/s")
    from mpistrat.comm.arrays import to_host

    note("mpistrat to_host", c.nbytes / timed(lambda: to_host(c)) / 1e9, "GB/s")


@item("perf", 60)
def python_overhead():
    """What one call costs the host, on arrays of 64 K elements: the block of a step."""
    import numpy as np

    cupy = cp()
    a, b, c = (cupy.ones(1 << 16, "f4") for _ in range(3))

    def many(call, count=200 if FAKE else 2000):
        call()  # compiles the kernel
        sync()
        start = time.perf_counter()
        for _ in range(count):
            call()
        sync()
        return (time.perf_counter() - start) / count * 1e6

    note("np.add on CuPy arrays", many(lambda: np.add(a, b, out=c)), "us a call")
    note("cupy.add", many(lambda: cupy.add(a, b, out=c)), "us a call")
    note("slice assignment", many(lambda: c.__setitem__(slice(None), a)), "us a call")
    note("slicing", many(lambda: a[10:100]), "us a call")
    torch = torch_()
    note("torch.from_dlpack", many(lambda: torch.from_dlpack(a)), "us a call")
    t = torch.ones(1 << 16, device=tdev())
    note("torch add_", many(lambda: t.add_(1.0)), "us a call")
    note("stream.synchronize, idle", many(lambda: cupy.cuda.get_current_stream().synchronize()), "us a call")


@item("perf", 90)
def nccl_one_rank():
    from mpistrat.comm.gpu import NcclCommunicator

    cupy = cp()
    with group_of("mpi") as ops, NcclCommunicator(ops.group, [0]) as communicator:
        for size in (1 << 10, 1 << 16) if FAKE else (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30):
            array = cupy.zeros(size // 4, "f4")
            seconds = timed(lambda array=array: communicator.all_reduce([array]))
            note(f"NcclCommunicator.all_reduce, 1 rank, {size:,} B", seconds * 1e6, "us")
            del array


def _arena_step(make, label, count=3):
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    with ms.OneDeviceStrategy("gpu:0") as strategy:
        with strategy.scope():
            variables = [ms.Variable(np.zeros(shape, "f4"), name=f"v{i}") for i, shape in enumerate(GPT2)]
            optimizer = make()

        def step():
            optimizer.apply_gradients([(v.gradient(0), v) for v in variables])

        for v in variables:
            v.gradient(0)[...] = cupy.full(v.shape, 1e-3, "f4")
        seconds = timed(lambda: strategy.run(step), count, 1)
        note(f"{label}, {size_of(GPT2):,} parameters", seconds * 1e3, "ms a step")
        if FAKE:
            return 0
        launches = _kernels(lambda: strategy.run(step))
        note(f"{label}: kernels and copies", launches, "a step")
        return launches


@item("perf", 120)
def step_of_our_adamw():
    import mpistrat as ms

    launches = _arena_step(lambda: ms.optimizers.AdamW(1e-3), "ms.optimizers.AdamW")
    assert launches <= 20, f"{launches} kernels and copies: one for each of its arenas was to be expected"
    _arena_step(lambda: ms.optimizers.AdamW(1e-3, global_clipnorm=1.0), "the same with global_clipnorm", 2)


@item("perf", 120)
def step_of_torch_distribute():
    """optimizer.step() alone, of parameters like GPT-2's with gradients, against torch's own optimizers on the same GPU."""
    torch = torch_()
    import mpistrat as ms

    def module():
        made = torch.nn.Module()
        made.p = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape, device=tdev())) for shape in GPT2)
        return made

    def grads(m):
        sum((p * 1e-3).sum() for p in m.p).backward()

    for label, more in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
        if FAKE and label == "fused":
            continue
        plain = module()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, **more)
        grads(plain)
        note(f"torch AdamW {label}", timed(optimizer.step) * 1e3, "ms a step")
        del plain, optimizer
    with ms.OneDeviceStrategy("gpu:0") as strategy, torch_context():
        m = module()
        m, optimizer = distributed(torch, strategy, m, torch.optim.AdamW(m.parameters(), lr=1e-3))
        grads(m)
        note("ms.torch.distribute AdamW", timed(optimizer.step, 3, 1) * 1e3, "ms a step")
        if not FAKE:
            note("ms.torch.distribute AdamW: kernels and copies", _kernels(optimizer.step), "a step")
            note("memory: torch", torch.cuda.memory_reserved() / 2**20, "MiB")
            note("memory: CuPy's pool", cp().get_default_memory_pool().total_bytes() / 2**20, "MiB")


@item("perf", 60)
def step_at_the_limit():
    """What the same update costs as one kernel over flat memory: the design to reach."""
    if FAKE:
        raise Skip("on a GPU only")
    cupy, torch = cp(), torch_()
    n = size_of(GPT2)
    w, g, m, v = (cupy.full(n, 1e-3, "f4") for _ in range(4))
    kernel = cupy.ElementwiseKernel(
        "float32 g, float32 scale, float32 rate, float32 decay, float32 b1, float32 b2, float32 c1, float32 c2, float32 eps",
        "float32 w, float32 m, float32 v",
        "float x = g * scale; w *= 1 - rate * decay; m += (x - m) * (1 - b1); v += (x * x - v) * (1 - b2);"
        "w -= rate * (m / c1) / (sqrtf(v / c2) + eps);", "adamw")  # fmt: skip
    seconds = timed(lambda: kernel(g, 1.0, 1e-3, 1e-2, 0.9, 0.999, 0.1, 1e-3, 1e-8, w, m, v))
    note("one CuPy ElementwiseKernel, AdamW", seconds * 1e3, "ms")
    note("one CuPy ElementwiseKernel, AdamW: memory", 28 * n / seconds / 1e9, "GB/s")
    tensors = [torch.from_dlpack(x) for x in (w, g, m, v)]
    step = torch.ones((), device="cuda")

    def fused():
        torch._fused_adamw_([tensors[0]], [tensors[1]], [tensors[2]], [tensors[3]], [], [step], lr=1e-3, beta1=0.9, beta2=0.999,
                            weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip

    note("torch._fused_adamw_ on the flat arena", timed(fused) * 1e3, "ms")


@item("perf", 150)
def whole_step_of_gpt2():
    """Forward, backward and step of GPT-2 124M in bf16 autocast: plain torch, DDP on one rank, ms.torch.distribute."""
    torch = torch_()
    import mpistrat as ms

    model, words, length = gpt2_module(torch)
    rows = 2 if SMALL else 8
    ids = torch.randint(0, words, (rows, length), device=tdev())

    def step_of(module, optimizer):
        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not FAKE):
                logits = module(ids)
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].reshape(-1, words).float(), ids[:, 1:].reshape(-1)
                )
            loss.backward()
            optimizer.step()

        return step

    fused = {} if FAKE else {"fused": True}
    plain = timed(step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)), 5, 3)
    note("GPT-2 step: plain torch, fused AdamW", plain * 1e3, "ms")
    if not FAKE:
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group(
                "nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
            )
            ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            note("GPT-2 step: DDP, 1 rank, fused AdamW",
                 timed(step_of(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)), 5, 3) * 1e3, "ms")  # fmt: skip
            del ddp
            torch.distributed.destroy_process_group()
        model, _, _ = gpt2_module(torch)
    with ms.OneDeviceStrategy("gpu:0") as strategy, torch_context():
        module, optimizer = distributed(torch, strategy, model, torch.optim.AdamW(model.parameters(), lr=1e-4, **fused))
        mine = timed(step_of(module, optimizer), 3, 2)
    note("GPT-2 step: ms.torch.distribute", mine * 1e3, "ms")
    note("GPT-2 step: ms over plain torch", mine / plain, "times")


# --------------------------------------------------------------------------------------------- ranks: two ranks, one GPU


@item("ranks", 90, 2)
def default_on_a_shared_gpu():
    """What a user gets who starts two ranks on one GPU, and nothing else: it must work, or end in a clear error."""
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        say(f"rank {strategy.rank}: devices {strategy.extended.worker_devices}")
        total = strategy.run(
            lambda: ms.get_replica_context().all_reduce("SUM", cupy.full(1000, strategy.rank + 1.0, "f4"))
        )
        close(total.get(), np.full(1000, 3.0))


@item("ranks", 60, 2)
def arrays_of_different_places():
    """One rank reduces an array on its GPU, the other one in host memory: an error on both, no hang."""
    import numpy as np

    import mpistrat as ms

    cupy = cp()
    strategy = ms.MultiWorkerMirroredStrategy()
    try:
        strategy.reduce("SUM", cupy.ones(4, "f4") if strategy.rank == 0 else np.ones(4, "f4"))
    except ms.errors.CollectiveMismatchError as error:
        say(error)
    else:
        raise AssertionError("no error")


@item("ranks", 60, 2)
def arrays_of_a_strategy_on_cpus():
    """The devices are CPUs, the arrays on GPUs: they go through the host."""
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        close(strategy.reduce("SUM", cp().ones(4, "f4")).get(), [2, 2, 2, 2])


@item("ranks", 90, 2)
def reductions_mpi():
    _ops("mpi")


@item("ranks", 90, 2)
def reductions_hierarchical():
    _ops("hierarchical")


@item("ranks", 60, 2)
def nccl_on_a_shared_gpu():
    """NCCL refuses two ranks on one GPU: the error must come on both ranks, soon, and say what to do."""
    cupy = cp()
    if cupy.cuda.runtime.getDeviceCount() > 1:
        raise Skip("each rank has a GPU")
    start = time.perf_counter()
    try:
        with group_of("nccl") as ops:
            ops.reduce("sum", cupy.ones(10, "f4"))
    except BaseException as error:
        note("NCCL on a shared GPU: error after", time.perf_counter() - start, "s")
        text = f"{type(error).__name__}: {error}"
        say(text)
        if "one GPU" in text or "share" in text or "Duplicate" in text:
            return
        raise AssertionError(f"the error does not say that ranks share a GPU: {text}") from None
    raise AssertionError("NCCL took two ranks on one GPU")


@item("ranks", 120, 2)
def torch_two_ranks_equal_one():
    import mpistrat as ms
    from mpistrat.cross_device.hierarchical import HierarchicalAllReduce

    torch = torch_()
    module = mlp_of(torch)
    reference = _alone(torch, module, _adamw)
    with (
        ms.MultiWorkerMirroredStrategy(devices=["gpu:0"], cross_device_ops=HierarchicalAllReduce()) as strategy,
        torch_context(),
    ):
        module, optimizer = distributed(torch, strategy, module, _adamw(module.parameters()))
        _fit_half(torch, module, optimizer)
        _same_weights(module.parameters(), reference)


@item("ranks", 120, 2)
def staging_speed():
    """The gradients of GPT-2 through host memory: what two ranks on one GPU, or ranks without NCCL, pay for a sum."""
    import mpistrat as ms
    from mpistrat.cross_device.hierarchical import HierarchicalAllReduce
    from mpistrat.cross_device.mpi import MpiAllReduce

    cupy = cp()
    for kind in (HierarchicalAllReduce, MpiAllReduce):
        with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"], cross_device_ops=kind()) as strategy:
            n = 1 << 16 if FAKE else 1 << 26
            array = cupy.ones(n, "f4")
            seconds = timed(lambda array=array, s=strategy: s.extended.cross_device_ops.reduce("SUM", array), 3, 1)
            if strategy.rank == 0:
                note(
                    f"{kind.__name__} of {array.nbytes / 2**20:.0f} MiB, 2 ranks, one GPU",
                    array.nbytes / seconds / 1e9,
                    "GB/s",
                )


@item("ranks", 90, 2)
def cuda_ipc_prototype():
    """A sum by reading the other rank's memory through CUDA IPC, which mpistrat has not: the limit for ranks that share a GPU."""
    if FAKE:
        raise Skip("on a GPU only")
    from mpi4py import MPI

    cupy = cp()
    comm, runtime = MPI.COMM_WORLD, cupy.cuda.runtime
    n = 1 << 26
    ptr = runtime.malloc(4 * n)  # not of CuPy's pool: a handle is of a whole allocation, and opens at its base
    own = cupy.ndarray((n,), "f4", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(ptr, 4 * n, None, 0), 0))
    own[...] = comm.rank + 1
    cupy.cuda.get_current_stream().synchronize()
    handles = comm.allgather(runtime.ipcGetMemHandle(ptr))
    opened = runtime.ipcOpenMemHandle(handles[1 - comm.rank])
    other = cupy.ndarray((n,), "f4", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(opened, 4 * n, None, 0), 0))
    out = cupy.empty(n, "f4")

    def reduce():
        comm.Barrier()
        cupy.add(own, other, out=out)
        cupy.cuda.get_current_stream().synchronize()
        comm.Barrier()

    seconds = timed(reduce)
    assert float(out[0]) == 3.0 and float(out[-1]) == 3.0
    note("CUDA IPC sum of 256 MiB, 2 ranks, one GPU", 4 * n / seconds / 1e9, "GB/s")
    comm.Barrier()
    runtime.ipcCloseMemHandle(opened)
    comm.Barrier()
    runtime.free(ptr)


@item("ranks", 60, 2)
def current_device_is_the_ranks_own():
    """With two GPUs that both ranks see: what a program makes must land on the rank's own, in CuPy and in torch."""
    cupy = cp()
    import mpistrat as ms

    if cupy.cuda.runtime.getDeviceCount() < 2:
        raise Skip("one GPU")
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        assert cupy.zeros(1).device.id == strategy.rank, "CuPy's current device"
        if not FAKE:
            assert torch_().zeros(1, device="cuda").device.index == strategy.rank, "torch's current device"


@item("ranks", 90, 2)
def reductions_nccl_between_ranks():
    if cp().cuda.runtime.getDeviceCount() < 2:
        raise Skip("one GPU")
    _ops("nccl")
    _ops("auto")


@item("ranks", 60, 1)
def several_replicas_on_a_rank():
    """With two GPUs: each replica's thread must have its own GPU as the current device."""
    cupy = cp()
    import mpistrat as ms

    if cupy.cuda.runtime.getDeviceCount() < 2:
        raise Skip("one GPU")
    with ms.MirroredStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        current = strategy.run(lambda: cupy.cuda.Device().id)
        assert [int(v) for v in strategy.experimental_local_results(current)] == [0, 1], current


# ------------------------------------------------------------------------------- dist: torch.distributed, two ranks, one GPU


@contextlib.contextmanager
def _torch_group(backend: str):
    """torch.distributed over MPI, as a program without anything of ours starts it."""
    torch = torch_()
    import torch.distributed as dist

    dist.init_process_group(backend)
    yield torch, dist
    dist.destroy_process_group()


@item("dist", 90, 2)
def collectives_of_gpu_tensors():
    with _torch_group("mpi") as (torch, dist):
        rank, size, device = dist.get_rank(), dist.get_world_size(), tdev()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool):
            mine = (torch.arange(12, device=device) % 3 + rank).to(dtype)
            every = [(torch.arange(12) % 3 + r).to(dtype) for r in range(size)]
            total = mine.clone()
            dist.all_reduce(total)
            expected = sum(each.to(torch.float64) for each in every)
            if dtype is torch.bool:
                expected = (expected > 0).to(torch.float64)
            assert total.device.type == tdev() and torch.equal(total.cpu().to(torch.float64), expected), (dtype, total)
            rooms = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(rooms, mine)
            assert all(torch.equal(room.cpu(), each) for room, each in zip(rooms, every, strict=True)), dtype
            whole = torch.empty(12 * size, device=device, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            assert torch.equal(whole.cpu(), torch.cat(every)), dtype
            dist.broadcast(mine, src=1)
            assert torch.equal(mine.cpu(), every[1]), dtype
        x = torch.arange(8.0, device=device) + rank
        out = torch.empty(8 // size, device=device)
        dist.reduce_scatter_tensor(out, x)
        assert torch.equal(out.cpu(), (2 * torch.arange(8.0) + 1).chunk(size)[rank])
        came = torch.empty_like(x)
        dist.all_to_all_single(came, x)
        assert torch.equal(came.cpu(), torch.cat([(torch.arange(8.0) + r).chunk(size)[rank] for r in range(size)]))
        rooms = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x, rooms, dst=0)
        assert rank or torch.equal(rooms[1].cpu(), torch.arange(8.0) + 1)
        part = torch.empty(4, device=device)
        dist.scatter(part, list(x.chunk(2)) if rank == 0 else None, src=0)
        assert torch.equal(part.cpu(), torch.arange(8.0).chunk(2)[rank])
        other = 1 - rank
        room = torch.empty_like(x)
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, room, other), dist.P2POp(dist.isend, x, other)])
        for work in works:
            work.wait()
        assert torch.equal(room.cpu(), torch.arange(8.0) + other)
        sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,)).to(device)
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1, 1, 4, 0] and sparse.device.type == tdev()
        found = [None] * size
        dist.all_gather_object(found, {"rank": rank})
        assert [each["rank"] for each in found] == list(range(size))
        dist.barrier()


@item("dist", 90, 2)
def collectives_in_order_with_streams():
    """A tensor that a side stream is still writing; and work that reads the result at once."""
    with _torch_group("mpi") as (torch, dist):
        if FAKE:
            return
        heavy = torch.randn(4096, 4096, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for turn in range(10):
                for _ in range(6):
                    heavy = heavy @ heavy * 1e-3
                x = torch.full((1 << 20,), float(turn + dist.get_rank()), device="cuda") + 0 * heavy[0, 0].nan_to_num(
                    0, 0, 0
                )
                work = dist.all_reduce(x, async_op=bool(turn % 2))
                if work is not None:
                    work.wait()
                mean = (x * 1.0).mean()
                close(float(mean), 2 * turn + 1)


@item("dist", 120, 2)
def ddp_equals_one_process():
    with _torch_group("cpu:mpistrat,cuda:nccl") as (torch, dist):
        module = mlp_of(torch)
        reference = _alone(torch, module, _adamw)
        ddp = torch.nn.parallel.DistributedDataParallel(module)
        _fit_half(torch, ddp, _adamw(ddp.parameters()))
        _same_weights(module.parameters(), reference)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2, 2, 2]


@item("dist", 120, 2)
def fsdp2_equals_one_process():
    with _torch_group("mpistrat") as (torch, _):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        module = mlp_of(torch)
        reference = _alone(torch, module, _adamw)
        fully_shard(module, mesh=init_device_mesh(tdev(), (2,)))
        _fit_half(torch, module, _adamw(module.parameters()))
        _same_weights([each.full_tensor() for each in module.parameters()], reference)


@item("dist", 90, 2)
def nccl_inside_a_group_of_one_rank():
    with _torch_group("mpistrat") as (torch, dist):
        groups = [dist.new_group([rank]) for rank in range(2)]
        own = groups[dist.get_rank()]
        x = torch.arange(5.0, device=tdev())
        dist.all_reduce(x, group=own)
        out = torch.empty(5, device=tdev())
        dist.all_gather_into_tensor(out, x, group=own)
        dist.reduce_scatter_tensor(x, out, group=own)
        dist.broadcast(x, src=dist.get_rank(), group=own)
        assert x.cpu().tolist() == [0, 1, 2, 3, 4]
        if not FAKE:
            assert own.gpus.inner is not None, "NCCL was not used"
            works = []
            with dist._coalescing_manager(group=own, device=x.device, async_ops=True) as coalesced:
                for _ in range(3):
                    works.append(dist.all_reduce(x, group=own, async_op=True))
            coalesced.wait()
            ddp = torch.nn.parallel.DistributedDataParallel(mlp_of(torch), process_group=own)
            rows, labels = rows_of(torch)
            torch.nn.functional.cross_entropy(ddp(rows), labels).backward()
            seconds = timed(lambda: dist.all_reduce(x, group=own))
            note("dist.all_reduce by NCCL inside, 1 rank, 20 B", seconds * 1e6, "us")


@item("dist", 120, 2)
def sync_batch_norm_of_ours_and_of_torch():
    """Two ranks with half of the rows each equal one process with all rows."""
    import copy

    import mpistrat as ms

    torch = torch_()
    n = torch.nn
    torch.manual_seed(0)
    module = n.Sequential(n.Linear(10, 6), n.BatchNorm1d(6), n.Linear(6, 3)).double().to(tdev())
    other = copy.deepcopy(module)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    reference = _alone(torch, module, sgd)
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy, torch_context():
        module, optimizer = distributed(torch, strategy, module, sgd(module.parameters()), sync_batch_norm=True)
        _fit_half(torch, module, optimizer)
        got = [p.detach().cpu() for p in module.parameters()]
    _same_weights(got, reference, 1e-9)
    if FAKE:
        return
    with _torch_group("mpi"):
        ddp = n.parallel.DistributedDataParallel(n.SyncBatchNorm.convert_sync_batchnorm(other))
        _fit_half(torch, ddp, sgd(ddp.parameters()))
        _same_weights(other.parameters(), reference, 1e-9)


@item("dist", 90, 2)
def staging_of_torch_tensors():
    with _torch_group("mpi") as (torch, dist):
        for count in (1 << 8, 1 << 18) if FAKE else (1 << 8, 1 << 18, 1 << 26):
            x = torch.ones(count, device=tdev())
            seconds = timed(lambda x=x: dist.all_reduce(x), 3, 1)
            note(f"dist.all_reduce of {4 * count:,} B on a shared GPU, 2 ranks", seconds * 1e6, "us")


@contextlib.contextmanager
def _horovod():
    """Horovod's calls, as a program has them after `import horovod.torch as hvd`."""
    torch_()
    from mpi4py import MPI

    import mpistrat.horovod.torch as hvd

    hvd.init()
    yield hvd
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()


@item("dist", 90, 2)
def horovods_calls():
    with _horovod() as hvd:
        torch, device, rank = torch_(), tdev(), hvd.rank()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16):
            mine = (torch.arange(12, device=device) + rank).to(dtype)
            total = hvd.allreduce(mine, op=hvd.Sum)
            assert total.device == mine.device and total.dtype == dtype
            assert total.tolist() == [2 * value + 1 for value in range(12)], dtype
            mean = [value + (0.5 if dtype.is_floating_point else 0) for value in range(12)]
            assert hvd.allreduce(mine).tolist() == mean, dtype
            assert hvd.allgather(mine[: rank + 1]).tolist() == [0, 1, 2], dtype
            rows, counts = hvd.alltoall(mine[:3], splits=[1, 2])
            assert rows.tolist() == ([0, 1] if rank == 0 else [1, 2, 2, 3]) and counts.tolist() == [rank + 1] * 2, dtype
            part = mine.view(6, 2)[:, 1]
            assert hvd.broadcast_(part, root_rank=1).tolist() == [2, 4, 6, 8, 10, 12], dtype
            assert hvd.reducescatter(torch.ones(3, device=device, dtype=dtype), op=hvd.Sum).tolist() == [2] * (2 - rank)
        several = [torch.full((count,), float(rank), device=device) for count in (3, 5, 1 << 20)]
        assert [each.sum().item() for each in hvd.grouped_allreduce(several, op=hvd.Sum)] == [3, 5, 1 << 20]
        assert hvd.allreduce(torch.full((3,), 2.0, device=device), op=hvd.Adasum).tolist() == [2, 2, 2]
        if rank == 0:
            assert hvd.allreduce(torch.ones(3, device=device), name="alone", op=hvd.Sum).tolist() == [1, 1, 1]
        hvd.join()


@item("dist", 90, 2)
def horovods_calls_in_order_with_streams():
    """Tensors that a side stream is still writing, work that reads the result at once, and memory that is used again."""
    with _horovod() as hvd:
        if FAKE:
            return
        torch = torch_()
        heavy = torch.randn(4096, 4096, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for turn in range(10):
                for _ in range(6):
                    heavy = heavy @ heavy * 1e-3
                late = 0 * heavy[0, 0].nan_to_num(0, 0, 0)
                handles = [
                    hvd.allreduce_async(
                        torch.full((n,), float(turn + hvd.rank()), device="cuda") + late, name=f"{n}", op=hvd.Sum
                    )
                    for n in (1 << 20, 100, 1 << 22)
                ]
                other = torch.full((1 << 20,), -1e9, device="cuda")
                for handle in handles:
                    close(float((hvd.synchronize(handle) * 1.0).mean()), 2 * turn + 1)
                del other


@item("dist", 120, 2)
def horovods_optimizer_equals_one_process():
    with _horovod() as hvd:
        torch = torch_()
        module = mlp_of(torch)
        reference = _alone(torch, module, _adamw)
        optimizer = _adamw(module.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters())
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        _fit_half(torch, module, optimizer)
        _same_weights(module.parameters(), reference)


# -------------------------------------------------------------------------------- jobs: whole programs, by the package's launcher


def _job(*words: str, program: str = "", seconds: float = 60) -> str:
    """Run `mpistrat WORDS`, with a program's file last; return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mpistrat", *words]
        if program:
            Path(folder, "program.py").write_text(program)
            command.append("program.py")
        environment = {**os.environ, "TORCH_DEVICE": tdev(), "DEVICE": "cpu:0" if FAKE else "gpu:0"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            say("\n    ".join((done.stdout + done.stderr).splitlines()[-40:]))
            raise AssertionError(f"mpistrat {words[0]} ended with {done.returncode}")
        return done.stdout


_KILLED = """
import hashlib, os, signal, sys, torch
import mpistrat as ms
device = os.environ["TORCH_DEVICE"]
torch.manual_seed(0)
n = torch.nn
strategy = ms.MultiWorkerMirroredStrategy(devices=[os.environ["DEVICE"]])
model = n.Sequential(n.Linear(10, 64), n.ReLU(), n.Linear(64, 3)).to(device)
with strategy.scope():
    model, optimizer = ms.torch.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
x = torch.randn(1200, 10, generator=torch.Generator().manual_seed(0)).numpy()
y = x[:, :3].argmax(1)
data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).shuffle(seed=0).batch(40))
def step(x, y):
    x, y = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
    optimizer.zero_grad()
    n.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
class KillOnce(ms.train.Callback):
    def on_step_end(self, loop):
        if os.environ.get("KILL") and loop.step == 150 and strategy.rank == 1 and os.environ["MPISTRAT_GENERATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.01)
trainer = ms.train.Trainer(strategy, step, callbacks=[KillOnce()], checkpoints=checkpoints)
trainer.fit(data, epochs=10)
if strategy.rank == 0:
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("DIGEST", trainer.loop.step, digest, flush=True)
    print("STARTED", int(os.environ["MPISTRAT_GENERATION"]) + 1, flush=True)
"""


@item("jobs", 150)
def a_killed_rank_leaves_the_same_bits():
    torch_()
    found = {}
    for kill in ("", "1"):
        os.environ["KILL"] = kill
        out = _job("run", "-n", "2", "--restarts", "3", program=_KILLED, seconds=100)
        found[kill] = [line for line in out.splitlines() if line.startswith(("DIGEST", "STARTED"))]
    say(found)
    assert found[""][0] == found["1"][0] and found["1"][1] == "STARTED 2", found


@item("jobs", 60)
def the_doctor():
    say("\n    ".join(_job("doctor").splitlines()))


_TREE = """
import os
import numpy as np
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp, optax
import mpistrat as ms
jax.config.update("jax_default_matmul_precision", "highest")  # else products are rounded to 10 bits, on each rank otherwise
rng = np.random.default_rng(0)
tree = {"w": jnp.asarray(rng.normal(size=(10, 3)), "float32"), "b": jnp.zeros(3, "float32")}
x, y = jnp.asarray(rng.normal(size=(8, 10)), "float32"), jnp.asarray(rng.integers(0, 3, 8))
grad = jax.jit(jax.grad(lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(x @ p["w"] + p["b"], y).mean()))
rule = optax.adamw(1e-2)
alone, state = tree, rule.init(tree)
for _ in range(4):
    updates, state = rule.update(grad(alone, x, y), state, alone)
    alone = optax.apply_updates(alone, updates)
with ms.MultiWorkerMirroredStrategy(devices=[os.environ["DEVICE"]]) as strategy:
    mine = slice(strategy.rank * 4, strategy.rank * 4 + 4)
    with strategy.scope():
        params, optimizer = ms.jax.distribute(tree, optax.adamw(1e-2))
    for _ in range(4):
        params = ms.jax.apply(optimizer, grad(params, x[mine], y[mine]), params)
    for key in tree:
        np.testing.assert_allclose(np.array(params[key]), np.array(alone[key]), rtol=1e-4, atol=1e-5)
    if strategy.rank == 0:
        print("EQUAL", jax.default_backend())
"""


@item("jobs", 90)
def a_tree_of_jax_on_two_ranks():
    if not importlib.util.find_spec("jax") or not importlib.util.find_spec("optax"):
        raise Skip("no jax or optax")
    out = _job("run", "-n", "2", program=_TREE, seconds=80)
    assert "EQUAL" in out, out
    say(out.strip())


_KERAS = """
import os
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
import os
import numpy as np
import keras
import mpistrat as ms
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 10)).astype("f4")
y = x[:, :1]
def made():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
alone = made()
alone.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
alone.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
with ms.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        model = ms.keras.distribute(made())
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(16))
    model.fit(data, epochs=2, verbose=0)
    if strategy.rank == 0:
        worst = max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in zip(model.get_weights(), alone.get_weights()))
        print("KERAS", keras.backend.backend(), "worst difference", worst)
        assert worst < 1e-5, worst
"""


def _keras(backend):
    if not importlib.util.find_spec("keras"):
        raise Skip("no keras")
    os.environ["KERAS_BACKEND"] = backend
    if backend == "torch":
        torch_()
    out = _job("run", "-n", "2", program=_KERAS, seconds=100)
    say(out.strip())
    assert "KERAS" in out, out


@item("jobs", 110)
def keras_on_jax():
    _keras("jax")


@item("jobs", 110)
def keras_on_torch():
    _keras("torch")


# ---------------------------------------------------------------------------------------------------------------- tests


@item("tests", 150)
def gpu_tests_of_the_project():
    folder = next(
        (p for p in (Path.cwd() / "tests", *[Path(q) / "tests" for q in sys.path]) if (p / "conftest.py").exists()),
        None,
    )
    if folder is None or not importlib.util.find_spec("pytest") or FAKE:
        raise Skip("no tests here, or no pytest")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=20", "-m", "gpu", str(folder / "single")],
                          cwd=folder.parent, capture_output=True, text=True, timeout=140)  # fmt: skip
    say("\n    ".join(done.stdout.splitlines()[-25:]))
    if done.returncode not in (0, 5):
        raise AssertionError(f"pytest ended with {done.returncode}")


@item("tests", 150)
def gpu_tests_of_the_project_on_ranks():
    folder = next(
        (p for p in (Path.cwd() / "tests", *[Path(q) / "tests" for q in sys.path]) if (p / "conftest.py").exists()),
        None,
    )
    if folder is None or not importlib.util.find_spec("pytest") or FAKE:
        raise Skip("no tests here, or no pytest")
    files = [str(folder / "parallel" / name) for name in ("cross_device/test_gpu.py", "frameworks/test_on_gpus.py")]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--maxfail=3", "--tb=short", "--mpi-env",
                           f"here={sys.executable}", *files],
                          cwd=folder.parent, capture_output=True, text=True, timeout=140)  # fmt: skip
    say("\n    ".join(done.stdout.splitlines()[-70:]))
    if done.returncode not in (0, 5):
        raise AssertionError(f"pytest ended with {done.returncode}")


# ------------------------------------------------------------------------- selftest: of this script, only with GPU_CHECK_SELFTEST

if os.environ.get("GPU_CHECK_SELFTEST"):

    @item("selftest")
    def fails():
        raise ValueError("as it should")

    @item("selftest")
    def crashes():
        os.kill(os.getpid(), signal.SIGSEGV)

    @item("selftest", 2)
    def hangs():
        time.sleep(100)

    @item("selftest", 10, 2)
    def crashes_on_one_rank():
        if RANK:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(30)

    @item("selftest")
    def comes_after():
        note("a number", 1.5, "of something")


# -------------------------------------------------------------------------------------------------------------- driver


def child(names: list[str]) -> None:
    """Run items in this process, one after the other, and tell what became of each."""
    faulthandler.enable()
    if FAKE:
        sys.path.insert(0, str(Path(FAKE).resolve().parent))
        import honest_cupy

        honest_cupy.install()
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for name in names:
        _, _, seconds, function = ITEMS[name]
        faulthandler.dump_traceback_later(seconds + (5 if RANK else 0), exit=False)
        if RANK == 0:
            tell(f"@@START {name}")
        start = time.perf_counter()
        try:
            function()
            word, text = "PASS", ""
        except Skip as why:
            word, text = "SKIP", str(why)
        except BaseException as error:
            word, text = "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            traceback.print_exc(file=sys.stdout)
        faulthandler.cancel_dump_traceback_later()
        if FAKE:
            told, _ = honest_cupy.report()
            for what, times in told.items():
                print(f"    [honest] {what}  (x{times})")
            if told and word == "PASS":
                word, text = "FAIL", f"told by the imaginary GPU: {next(iter(told)).splitlines()[0]}"
            honest_cupy.M.told.clear()
        tell(f"@@{word} {name} {time.perf_counter() - start:.1f} {text}")
    sys.stdout.flush()


class Driver:
    def __init__(self, budget: float) -> None:
        self.end = time.monotonic() + budget
        self.results: dict[str, tuple[str, str, str]] = {}
        self.numbers: list[tuple[str, float, str]] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, names: list[str], ranks: int) -> None:
        """Run items in one job; those behind one that ends the job run in another."""
        names = list(names)
        while names:
            if self.left() < 8:
                for name in names:
                    self.results[name] = ("NOT RUN", "", "no time left")
                return
            done = self._job(names, ranks)
            names = [name for name in names if name not in done]
            if not done and names:
                self.results[names[0]] = ("FAIL", "", "the job ended before it began")
                names = names[1:]

    def _job(self, names: list[str], ranks: int) -> set[str]:
        command = [sys.executable, str(HERE), "--child", ",".join(names)]
        if ranks > 1:
            command = [*shlex.split(os.environ.get("MPIEXEC", "mpiexec")), "-n", str(ranks), *command]
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "MPISTRAT_ABORT_AFTER": "60",
        }
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True, env=environment)  # fmt: skip
        lines: queue.Queue = queue.Queue()

        def read():
            for line in job.stdout:
                lines.put(line.rstrip("\n"))
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        done: set[str] = set()
        votes: dict[str, list[tuple[str, str, str]]] = {}
        current, limit = names[0], time.monotonic() + ITEMS[names[0]][2] + 60
        while True:
            try:
                line = lines.get(timeout=max(0.1, min(limit - time.monotonic(), self.left())))
            except queue.Empty:
                if time.monotonic() < limit and self.left() > 1:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                self._result(current, "HANG", "", f"killed after its limit of {ITEMS[current][2]} s")
                return {*done, current}
            if line is None:
                break
            word, _, rest = line.partition(" ")
            if word == "@@START" and rest in ITEMS:
                current, limit = rest, time.monotonic() + ITEMS[rest][2] + 15
            elif word == "@@NUM":
                self._number(rest)
            elif word in ("@@PASS", "@@FAIL", "@@SKIP"):
                name, seconds, text = [*rest.split(" ", 2), ""][:3]
                votes.setdefault(name, []).append((word[2:], seconds, text))
                if len(votes[name]) == ranks:
                    worst = min(votes[name], key=lambda vote: ("FAIL", "SKIP", "PASS").index(vote[0]))
                    self._result(name, *worst)
                    done.add(name)
            elif line.strip():
                print(line, flush=True)
        code = job.wait()
        if len(done) < len(names):
            said = votes.get(current, [])
            text = f"the job ended with {code}" + (f"; one rank said {said[0][0]} {said[0][2]}" if said else "")
            self._result(current, "CRASH", "", text)
            done.add(current)
        return done

    def _number(self, body: str) -> None:
        parts = body.split(" ")
        for index in range(len(parts) - 1, 0, -1):
            try:
                value = float(parts[index])
            except ValueError:
                continue
            self.numbers.append((" ".join(parts[:index]), value, " ".join(parts[index + 1 :])))
            print(f"    {' '.join(parts[:index])}: {value:g} {' '.join(parts[index + 1 :])}", flush=True)
            return

    def _result(self, name: str, word: str, seconds: str, text: str) -> None:
        self.results[name] = (word, seconds, text)
        print(f"{word:7} {name} {seconds and seconds + ' s'} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=510)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    if args.child:
        child(args.child.split(","))
        return 0
    groups: dict[tuple[str, int], list[str]] = {}
    for name, (group, ranks, _, _) in sorted(ITEMS.items(), key=lambda entry: entry[1][0] in ("perf", "tests")):
        if not args.only or group in args.only.split(",") or name in args.only.split(","):
            groups.setdefault((group, ranks), []).append(name)
    if args.list:
        for (group, ranks), names in groups.items():
            print(f"{group} ({ranks} rank{'s' * (ranks > 1)}): {', '.join(n.partition('.')[2] for n in names)}")
        return 0
    driver = Driver(args.budget)
    for (group, ranks), names in groups.items():
        print(f"\n== {group}, {ranks} rank{'s' * (ranks > 1)}", flush=True)
        for some in [names] if ranks == 1 else [[name] for name in names]:
            driver.run(some, ranks)
    words = [word for word, _, _ in driver.results.values()]
    print("\n== all")
    for name, (word, seconds, text) in driver.results.items():
        print(f"{word:7} {name:45} {seconds:>6} {text[:110]}")
    print("\n== numbers")
    for key, value, unit in driver.numbers:
        print(f"{value:>12.5g} {unit:18} {key}")
    out = Path(os.environ.get("OUT", ".")) / "gpu_check.json"
    out.write_text(json.dumps({"results": driver.results, "numbers": driver.numbers}, indent=1))
    bad = sum(word in ("FAIL", "CRASH", "HANG") for word in words)
    print(
        f"\n{words.count('PASS')} passed, {bad} failed, {words.count('SKIP')} skipped, {words.count('NOT RUN')} not run; {out}"
    )
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())
