"""A checkpoint of a model and its optimizer: how long training stands still, and when the file is complete, against peers.

    mpiexec -n 2 python benchmarks/checkpoints.py --output benchmarks/results/today

Each contender saves the same numbers: weights and Adam's two slots, float32. The stall is the time of the call on the slowest
rank; complete is when the file has its name and is on the disk, as far as the contender sees to that: ours, h5py's, and
torch.save's by an fsync here; DCP's and Orbax's as these do it. The memcpy is that of a rank's share, the raw write that of the
disk, by one process with one fsync. Contenders take turns in each round.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np

import mpistrat as ms

ASYNC, SYNC, MEMCPY, RAW = "ours, asynchronous", "ours", "memcpy of the share", "raw write of all"
LAYERS = 16  # matrices among which the parameters are divided

Contender = Callable[[Path], Callable[[], None] | None]  # begins to save, and returns what waits


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=16_800_000, rounds=7, folder="")
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    scratch = Path(comm.bcast(tempfile.mkdtemp(dir=options.folder or None) if comm.rank == 0 else None))
    rows = options.parameters // LAYERS // 1000
    with strategy.scope():
        variables = [ms.Variable(np.ones((rows, 1000), np.float32), name=f"layer_{i}") for i in range(LAYERS)]
        optimizer = ms.optimizers.Adam(1e-3)

    def step() -> None:
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    strategy.run(step)
    arrays = {v.name: np.array(v.numpy()) for v in variables}
    for variable in variables:
        arrays |= {f"{variable.name}.{name}": slot for name, slot in optimizer.slots(variable).items()}
    nbytes = sum(array.nbytes for array in arrays.values())
    contenders = {**_references(comm, nbytes), **_ours(strategy), **_torch(comm, arrays), **_one_process(comm, arrays)}
    stalls: dict[str, list[float]] = {name: [] for name in contenders}
    complete: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):  # the first is not counted
        for index, (name, begin) in enumerate(contenders.items()):
            place = scratch / f"{index}-{number % 2}"
            if comm.rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                os.sync()
            comm.Barrier()
            start = time.perf_counter()
            wait = begin(place)
            stalled = time.perf_counter() - start
            if wait is not None:
                wait()
            taken = time.perf_counter() - start
            if number:
                stalls[name].append(harness.largest(comm, stalled))
                complete[name].append(harness.largest(comm, taken))
    result = {
        "benchmark": "checkpoints",
        "machine": harness.machine(comm, ("torch", "h5py", "orbax-checkpoint", "safetensors")),
        "bytes": nbytes,
        "stall_seconds": {name: statistics.median(times) for name, times in stalls.items()},
        "complete_seconds": {name: statistics.median(times) for name, times in complete.items()},
    }
    if comm.rank == 0:
        _show(result)
        harness.save(options.output, result)
    comm.Barrier()
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        dist.destroy_process_group()
    strategy.close()
    shutil.rmtree(scratch, ignore_errors=True)


def _show(result: dict[str, Any]) -> None:
    stall, complete = result["stall_seconds"], result["complete_seconds"]
    rows = [
        [name, harness.duration(stall[name]), f"{stall[name] / stall[MEMCPY]:.1f} ×", harness.duration(complete[name]),
         f"{result['bytes'] / complete[name] / 1e9:.2f} GB/s"]
        for name in stall
    ]  # fmt: skip
    title = f"checkpoint of {result['bytes'] / 1e6:.0f} MB, {result['machine']['ranks']} ranks"
    print(harness.table(title, ["", "stall", "against memcpy", "complete", ""], rows), flush=True)


def _references(comm: Any, nbytes: int) -> dict[str, Contender]:
    share = np.ones(nbytes // comm.size // 4, np.float32)
    target, everything = np.ones_like(share), np.ones(nbytes, np.uint8).data

    def raw(folder: Path) -> None:
        if comm.rank:
            return
        with (folder / "x").open("wb", buffering=0) as file:
            rest = everything
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    return {MEMCPY: lambda folder: np.copyto(target, share), RAW: raw}


def _ours(strategy: Any) -> dict[str, Contender]:
    return {
        ASYNC: lambda folder: strategy.begin_save(folder / "x.h5").wait,
        SYNC: lambda folder: strategy.save(folder / "x.h5"),
    }


def _torch(comm: Any, arrays: dict[str, np.ndarray]) -> dict[str, Contender]:
    dist = harness.gloo(comm)
    if dist is None:
        return {}
    import torch
    import torch.distributed.checkpoint as dcp

    state = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def begin(folder: Path) -> Callable[[], None]:
        future: Any = dcp.async_save(state, checkpoint_id=str(folder / "x"))
        return lambda: (future.result(), comm.Barrier())[1]

    def save(folder: Path) -> None:
        dcp.save(state, checkpoint_id=str(folder / "x"))

    def plain(folder: Path) -> None:
        if comm.rank == 0:
            with (folder / "x.pt").open("wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
        comm.Barrier()

    return {"torch DCP, asynchronous": begin, "torch DCP": save, "torch.save on rank 0": plain}


def _one_process(comm: Any, arrays: dict[str, np.ndarray]) -> dict[str, Contender]:
    found: dict[str, Contender] = {}

    def h5py_save(folder: Path) -> None:
        import h5py

        if comm.rank == 0:
            with h5py.File(folder / "x.h5", "w") as file:
                for name, array in arrays.items():
                    file[name] = array
            descriptor = os.open(folder / "x.h5", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        comm.Barrier()

    found["h5py on rank 0"] = h5py_save
    try:
        import jax
        import orbax.checkpoint as ocp
    except ImportError:
        return found
    if comm.rank:
        checkpointer = None
    else:
        tree = {name: jax.numpy.array(array) for name, array in arrays.items()}
        checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def orbax(folder: Path) -> Callable[[], None]:
        if checkpointer is not None:
            checkpointer.save(folder / "x", args=ocp.args.StandardSave(tree))

        def wait() -> None:
            if checkpointer is not None:
                checkpointer.wait_until_finished()
            comm.Barrier()

        return wait

    found["Orbax, asynchronous, on rank 0"] = orbax
    return found


if __name__ == "__main__":
    main()
