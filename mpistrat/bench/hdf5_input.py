"""Batches from HDF5 files in the page cache: contiguous and compressed, in order and shuffled."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.agree import Ranks
from ..base.text import counted
from ..data import Dataset, HDF5Dataset
from ..strategy import MultiWorkerMirroredStrategy
from .measure import largest, total
from .result import Result, Setting

__all__ = ["Case", "batches", "files", "measure", "rate"]

CHUNK_BYTES = 1 << 18
BATCH = {64: 256, 3072: 256, 150_000: 64}
CASES = {  # storage -> label -> order
    "contiguous": {"contiguous, in order": "in order", "contiguous, random rows": "shuffled"},
    "gzip": {"gzip, in order": "in order", "gzip, shuffled": "shuffled"},
}


@dataclass(frozen=True)
class Case:
    """The files of a case: storage, number, order and size of rows, and whether rows have labels of 8 bytes."""

    layout: str
    files: int
    order: str
    row_bytes: int
    labels: bool = False

    @property
    def batch(self) -> int:
        """The rows of one rank's batch."""
        return BATCH[self.row_bytes]

    @property
    def chunk_rows(self) -> int:
        """The rows of a compressed chunk."""
        return max(1, CHUNK_BYTES // self.row_bytes)

    @property
    def window_chunks(self) -> int:
        """The chunks that a block shuffle mixes: 16, or four batches."""
        return max(16, 4 * self.batch // self.chunk_rows)

    def __str__(self) -> str:
        labels = " and labels" if self.labels else ""
        return f"{self.layout}, {counted(self.files, 'file')}, {self.order}, {self.row_bytes:,} B rows{labels}"


@contextlib.contextmanager
def files(comm: Any, case: Case, megabytes: int, folder: str) -> Iterator[tuple[list[Path], int]]:
    """Yield the paths of a case's files, on every node, and their rows, in a `with` block. Collective.

    Rank 0 writes them, and one rank of each node that does not see its folder.

    Raises:
        ShardError: on every rank, if one cannot write.
    """
    from mpi4py import MPI

    ranks = Ranks(comm, "mpistrat bench")
    where = Path(ranks.exchange(os.path.join(folder, f"mpistrat-bench-{secrets.token_hex(6)}"))[0])
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.rank == 0
    node.Free()
    made, rows = False, 0
    try:
        for turn in (comm.rank == 0, comm.rank != 0 and leader):
            with ranks.together():
                if turn and not where.exists():
                    where.mkdir(mode=0o700)
                    made = True
                    rows = _write(where, case, megabytes)
        rows = int(ranks.exchange(str(rows))[0])
        yield sorted(where.glob("*.h5")), rows
        comm.Barrier()
    finally:
        if made:
            shutil.rmtree(where, ignore_errors=True)


def _write(folder: Path, case: Case, megabytes: int) -> int:
    """Write a case's files by h5py, and return the number of rows."""
    import h5py

    rng = np.random.default_rng(0)
    rows = megabytes * 1_000_000 // case.row_bytes // case.files
    storage: dict[str, Any] = {}
    if case.layout != "contiguous":
        storage = {"chunks": (min(rows, case.chunk_rows), case.row_bytes), "compression": case.layout}
    for number in range(case.files):
        with h5py.File(folder / f"part-{number:03d}.h5", "w", libver="latest") as file:
            data = rng.integers(0, 16, (rows, case.row_bytes), np.uint8)  # four bits of eight
            if case.layout == "lzf":  # which only finds repetitions
                data[:, case.row_bytes // 2 :] = 0
            file.create_dataset("x", data=data, **storage)
            if case.labels:
                file.create_dataset("y", data=np.arange(rows))
    return rows * case.files


def batches(case: Case, paths: Sequence[Path], comm: Any) -> Iterator[Any]:
    """Yield this rank's batches without end, as a user's program reads them. Collective."""
    strategy = MultiWorkerMirroredStrategy(comm=comm)
    dataset: Dataset = HDF5Dataset(list(paths), fields=("x", "y") if case.labels else "x")
    if case.order == "shuffled":
        window = case.window_chunks * case.chunk_rows * case.row_bytes
        dataset = dataset.shuffle(seed=1, window_bytes=window)
    data = strategy.distribute_dataset(dataset.batch(case.batch * strategy.size))
    try:
        while True:
            yield from data
    finally:
        strategy.close()


def rate(comm: Any, source: Iterator[Any], seconds: float) -> float:
    """Return bytes per second of all ranks' batches, without start-up; close the source. Collective."""
    try:
        next(source)
        comm.Barrier()
        start, got = time.perf_counter(), 0
        go_on = np.ones(1, np.int32)
        while go_on[0]:
            for _ in range(4):
                element = next(source)
                got += sum([a.nbytes for a in element]) if type(element) is tuple else element.nbytes
            go_on[0] = time.perf_counter() - start < seconds
            if comm.size > 1:
                comm.Bcast(go_on, root=0)
        spent = largest(comm, time.perf_counter() - start)
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    return total(comm, float(got)) / spent


def measure(setting: Setting) -> Result:
    """Return bytes per second by storage and order. Collective."""
    comm, values = setting.comm, {}
    megabytes = 16 if setting.quick else 64
    for layout, orders in CASES.items():
        case = Case(layout, 4, "in order", 3072)
        with files(comm, case, megabytes, setting.folder) as (paths, _):
            for label, order in orders.items():
                ordered = replace(case, order=order)
                rates = [rate(comm, batches(ordered, paths, comm), setting.budget(0.6)) for _ in range(3)]
                values[label] = {"mpistrat": statistics.median(rates)}
    return Result(
        title="Input from HDF5 files",
        unit="bytes per second",
        first_column="storage, order",
        values=values,
        note=f"Batches of 256 rows of 3 KB from {megabytes} MB in the page cache, all ranks together. A disk may be slower.",
    )
