"""The memory that a pass over a large HDF5 file takes: ours beside h5py by hand, torch's DataLoader and tf.data.

    python benchmarks/hdf5_input_memory.py --output benchmarks/results/today

Each reader of hdf5_input.py makes a shuffled pass over a file of 4 GiB in a process of its own. What counts is what it adds at
the peak to the memory of the process and its children, mapped files left out. Ours and h5py by hand mix windows of 64 MiB of
compressed rows.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import harness
import numpy as np
from hdf5_input import MAP, OURS, OVER_H5PY, Case, Share, contenders

import mpistrat as ms
from mpistrat.data.nodes.calls import LAUNCHER_PREFIXES
from mpistrat.data.nodes.shuffle import WINDOW_BYTES

LEFT_OUT = (MAP, OVER_H5PY.format(1))  # two workers say more


@dataclass(frozen=True)
class Large(Case):
    """One large file, shuffled in windows of the size that `shuffle` takes unless told another."""

    @property
    def window_chunks(self) -> int:
        """The chunks of a window."""
        return WINDOW_BYTES // (self.chunk_rows * self.row_bytes)


@contextlib.contextmanager
def large(layout: str, gibibytes: float) -> Iterator[Share]:
    """While the context lasts there is a large file: a sparse contiguous one, or compressed zeros."""
    case = Large(layout, 1, "shuffled", 3072)
    rows = int(gibibytes * (1 << 30)) // case.row_bytes
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "large.h5"
        with h5py.File(path, "w", libver="latest") as file:
            if layout == "contiguous":
                properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                space = h5py.h5s.create_simple((rows, case.row_bytes))
                h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, properties)
            else:
                chunks = (case.chunk_rows, case.row_bytes)
                data = file.create_dataset("x", (rows, case.row_bytes), "u1", chunks=chunks, compression=1)
                block = np.zeros((case.chunk_rows * 512, case.row_bytes), np.uint8)
                for start in range(0, rows, len(block)):
                    data[start : start + len(block)] = block[: rows - start]
        with path.open("rb", buffering=0) as raw:  # into the page cache: else the first reader would bring it there
            while raw.readinto(bytearray(1 << 24)):
                pass
        yield Share(case, (path,), rows, 0, 1)


def on_one_device(share: Share) -> Iterator[Any]:
    """This package without other ranks, with its default window."""
    with contextlib.closing(ms.OneDeviceStrategy("cpu:0")) as strategy:
        dataset = ms.data.HDF5Dataset(share.paths[0], fields="x").shuffle(seed=1).batch(share.case.batch)
        yield from strategy.distribute_dataset(dataset)


def private_bytes() -> int:
    """Return the memory of this process and its children less mapped files; what they share counts once."""
    children = [child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()]
    found = 0
    for process in ("self", *children):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a child that has ended
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return found


def added(share: Share, name: str, seconds: float) -> dict[str, float]:
    """Return the bytes that a pass of one reader adds to this process at the peak, and the part of the rows that it read.

    Libraries are imported before, and do not count. A pass that takes longer than some seconds is cut short.
    """
    for reader, module in {"mpistrat": "mpi4py.MPI", "torch": "torch.utils.data", "tf.data": "tensorflow"}.items():
        if name.startswith(reader):
            importlib.import_module(module)
    source = on_one_device if name == OURS else contenders(share.case)[name]
    before = peak = private_bytes()
    start, read = time.perf_counter(), 0
    with contextlib.closing(share), contextlib.closing(source(share)) as batches:  # type: ignore[type-var]
        for step, batch in enumerate(batches):
            read += len(batch)
            if step % 20 == 0:
                peak = max(peak, private_bytes())
            if read + share.case.batch > share.rows or time.perf_counter() - start > seconds:
                break
    return {"added_bytes": float(peak - before), "part_read": read / share.rows}


def begin() -> None:
    """Make a process that a rank has started like a user's program: no rank, and one that forks the workers of a loader."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        del os.environ[name]
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    multiprocessing.set_start_method(None, force=True)


def by_reader(share: Share, seconds: float) -> dict[str, dict[str, float]]:
    """Return what a pass adds by reader. Each reads in a new process, so that none finds another's memory."""
    found = {}
    for name in contenders(share.case):
        if name not in LEFT_OUT:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin) as process:
                found[name] = process.submit(added, share, name, seconds).result()
    return found


def measure(gibibytes: float, seconds: float) -> dict[str, Any]:
    """Return what a pass over a large file adds, by storage and reader, and print it."""
    result: dict[str, Any] = {}
    for layout in ("contiguous", "gzip"):
        with large(layout, gibibytes) as share:
            file, rows = share.paths[0].stat().st_size, share.rows * share.case.row_bytes
            readers = by_reader(share, seconds)
        result[layout] = {"file_bytes": float(file), "rows_bytes": float(rows), "at_most_seconds": seconds}
        result[layout]["readers"] = readers
        table = [[n, f"{r['added_bytes'] / 1e6:,.0f}", f"{r['part_read']:.0%}"] for n, r in readers.items()]
        title = f"{layout}, {gibibytes:g} GiB, shuffled: memory of a pass"
        print(harness.table(title, ["reader", "MB", f"rows read, at most {seconds:g} s"], table), flush=True)
    return result


def main() -> None:
    """Run the benchmark."""
    options = harness.arguments(__doc__, gibibytes=4.0, seconds=30.0)
    from mpi4py import MPI

    result: dict[str, Any] = {"benchmark": "hdf5_input_memory", "machine": harness.machine(MPI.COMM_SELF)}
    result["memory"] = measure(options.gibibytes, options.seconds)
    harness.save(options.output, result)


if __name__ == "__main__":
    main()
