"""Reading batches from HDF5: ours against h5py by hand, torch's DataLoader, tf.data and a bare memory map.

    mpiexec -n 1 python benchmarks/hdf5_input.py --output benchmarks/results/today
    mpiexec -n 2 python benchmarks/hdf5_input.py --own-core --only gzip

With `--own-core` each rank and its threads have one core: without it one rank decodes on two, and two ranks on a machine of
two cores have no more of them than one has.

The files are written by h5py with rows of bytes that compress about 2 ×, and lie warm in the page cache. "Shuffled" is
every row anywhere for contiguous data, and permuted chunks in equal windows of some MB for compressed data (ours, and h5py
by hand); torch and tf.data draw single rows. Rates count the bytes of the batches of all ranks over the slowest rank's time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import harness
import numpy as np

from mpistrat.bench import hdf5_input
from mpistrat.bench.hdf5_input import Case

OURS, MAP, HAND = "mpistrat", "memory map, np.take", "h5py by hand"
OVER_H5PY = "torch DataLoader over h5py, {} workers"
CASES = [
    *(
        Case(layout, files, order, 3072)
        for layout in ("contiguous", "gzip", "lzf")
        for files in (1, 8, 100)
        for order in ("in order", "shuffled")
    ),
    Case("contiguous", 1, "shuffled", 3072, labels=True),
    *(
        Case(layout, 8, order, row_bytes)
        for row_bytes in (64, 150_000)
        for layout in ("contiguous", "gzip")
        for order in ("in order", "shuffled")
    ),
]


@dataclass(frozen=True)
class Share:
    """A case's files and this rank's place among those who read them."""

    case: Case
    paths: tuple[Path, ...]
    rows: int
    rank: int
    size: int
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False, compare=False)

    @functools.cached_property
    def datasets(self) -> list[h5py.Dataset]:
        """The open datasets, one a file."""
        return [self._opened.enter_context(h5py.File(path))["x"] for path in self.paths]

    def close(self) -> None:
        """Close the files that were opened here."""
        self._opened.close()

    @functools.cached_property
    def maps(self) -> list[np.ndarray]:
        """Memory maps of the contiguous datasets."""
        return [np.memmap(d.file.filename, np.uint8, "r", d.id.get_offset(), d.shape) for d in self.datasets]

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """A memory map of the first file's labels."""
        label = self.datasets[0].file["y"]
        return np.memmap(label.file.filename, label.dtype, "r", label.id.get_offset(), label.shape)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first row of each file."""
        return np.cumsum([0, *(len(d) for d in self.datasets)])

    def row(self, index: int) -> np.ndarray:
        """Return one row through h5py."""
        file = int(np.searchsorted(self.starts, index, "right")) - 1
        return self.datasets[file][index - self.starts[file]]

    def batches(self, seed: int) -> Iterator[np.ndarray]:
        """The row numbers of this rank's batches of one pass."""
        order = np.random.default_rng(seed).permutation(self.rows) if self.case.order == "shuffled" else None
        step = self.case.batch * self.size
        for start in range(self.rank * self.case.batch, self.rows - self.case.batch + 1, step):
            rows = np.arange(start, start + self.case.batch)
            yield rows if order is None else order[rows]


Reader = Callable[[Share], Iterator[Any]]


@contextlib.contextmanager
def written(comm: Any, case: Case, megabytes: int) -> Iterator[Share]:
    """While the context lasts there are a case's files; give each rank its share. Collective."""
    with hdf5_input.files(comm, case, megabytes, tempfile.gettempdir()) as (paths, rows):
        yield Share(case, tuple(paths), rows, comm.rank, comm.size)


def ours(share: Share) -> Iterator[Any]:
    """This package, as a user writes it."""
    return hdf5_input.batches(share.case, share.paths, None)


def by_hand(share: Share) -> Iterator[Any]:
    """Slices in order; shuffled: whole chunks in windows where compressed, else row by row, which beats fancy indexing."""
    while True:
        if share.case.layout != "contiguous":
            yield from _chunks_by_hand(share)
        else:
            for rows in share.batches(1):
                if share.case.order == "shuffled":
                    yield np.stack([share.row(int(row)) for row in rows])
                else:
                    yield _slice_by_hand(share, int(rows[0]), len(rows))


def _slice_by_hand(share: Share, start: int, count: int) -> np.ndarray:
    file = int(np.searchsorted(share.starts, start, "right")) - 1
    low = start - int(share.starts[file])
    block = share.datasets[file][low : low + count]
    if len(block) == count:
        return block
    return np.concatenate([block, share.datasets[file + 1][: count - len(block)]])


def _chunks_by_hand(share: Share) -> Iterator[np.ndarray]:
    """Windows of whole chunks of this rank, their rows permuted when shuffled; HDF5's caches are new in every pass."""
    rng, step = np.random.default_rng(1), share.case.chunk_rows
    datasets = [h5py.File(path)["x"] for path in share.paths]
    pieces = [(d, low) for d in datasets for low in range(0, len(d), step)][share.rank :: share.size]
    if share.case.order == "shuffled":
        rng.shuffle(pieces)
    count = share.case.window_chunks
    for first in range(0, len(pieces), count):
        window = np.concatenate([d[low : low + step] for d, low in pieces[first : first + count]])
        order = rng.permutation(len(window)) if share.case.order == "shuffled" else None
        for start in range(0, len(window) - share.case.batch + 1, share.case.batch):
            part = slice(start, start + share.case.batch)
            yield window[part] if order is None else window[order[part]]


def bare_map(share: Share) -> Iterator[Any]:
    """One memory map a field and `np.take` into one buffer: what NumPy can do."""
    fields = (share.maps[0], share.labels) if share.case.labels else (share.maps[0],)
    out = tuple(np.empty((share.case.batch, *stored.shape[1:]), stored.dtype) for stored in fields)
    while True:
        for rows in share.batches(1):
            for stored, buffer in zip(fields, out, strict=True):
                stored.take(rows, axis=0, out=buffer, mode="clip")
            yield out


class _Rows:
    """A map-style dataset of torch over h5py rows, or over memory maps a batch at a time. Workers open files themselves."""

    def __init__(self, share: Share, mapped: bool) -> None:
        self.share, self.mapped = share, mapped
        if mapped:
            self.__getitems__ = self._gather

    def __len__(self) -> int:
        return self.share.rows

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self.share.row(index))

    def _gather(self, indices: list[int]) -> Any:
        import torch

        rows = np.asarray(indices)
        file = np.searchsorted(self.share.starts, rows, "right") - 1
        out = np.empty((len(rows), self.share.case.row_bytes), np.uint8)
        for number in np.unique(file):
            own = file == number
            out[own] = self.share.maps[number][rows[own] - self.share.starts[number]]
        return torch.from_numpy(out)


def torch_loader(share: Share, workers: int, mapped: bool) -> Iterator[Any]:
    """torch's DataLoader, with its own shuffling sampler and collation."""
    from torch.utils.data import DataLoader, DistributedSampler

    rows = _Rows(share, mapped)
    shuffle = share.case.order == "shuffled"
    sampler = DistributedSampler(rows, share.size, share.rank, shuffle=shuffle)  # type: ignore[arg-type]
    collate: Any = (lambda batch: batch) if mapped else None
    loader = DataLoader(rows, share.case.batch, sampler=sampler, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type,var-annotated]
    while True:
        yield from loader


def tf_data(share: Share) -> Iterator[Any]:
    """tf.data over batches of row numbers and a function that reads them row by row through h5py."""
    import tensorflow as tf

    def read(rows: np.ndarray) -> np.ndarray:
        return np.stack([share.row(int(row)) for row in rows])

    numbers = tf.data.Dataset.range(share.rows).shard(share.size, share.rank)
    if share.case.order == "shuffled":
        numbers = numbers.shuffle(share.rows, seed=1)
    batches = numbers.batch(share.case.batch, drop_remainder=True).repeat()
    for batch in batches.map(lambda rows: tf.numpy_function(read, [rows], tf.uint8)).prefetch(2):
        yield batch.numpy()


def contenders(case: Case) -> dict[str, Reader]:
    """Return who can read a case, by name; peers that are not installed are left out."""
    readers: dict[str, Reader] = {OURS: ours} if case.labels else {OURS: ours, HAND: by_hand}
    if case.layout == "contiguous" and case.files == 1:
        readers[MAP] = bare_map
    if case.labels:
        return readers
    if harness.version("torch"):
        for workers in (0, 1, 2):
            readers[OVER_H5PY.format(workers)] = functools.partial(torch_loader, workers=workers, mapped=False)
        if case.layout == "contiguous":
            name = "torch DataLoader, __getitems__ on memory maps"
            readers[name] = functools.partial(torch_loader, workers=0, mapped=True)
    if importlib.util.find_spec("tensorflow"):
        readers["tf.data over h5py"] = tf_data
    return readers


def rate(comm: Any, share: Share, reader: Reader, seconds: float) -> float:
    """Return bytes a second of all ranks' batches, start-up left out. Collective."""
    return hdf5_input.rate(comm, reader(share), seconds)


def measure(comm: Any, case: Case, megabytes: int, seconds: float, rounds: int) -> dict[str, float]:
    """Return each contender's median rate; they take turns. Collective."""
    rates: dict[str, list[float]] = {}
    with written(comm, case, megabytes) as share:
        for _ in range(rounds):
            for label, reader in contenders(case).items():
                # With files of its own: HDF5 shares the caches of open ones.
                with contextlib.closing(replace(share)) as own:
                    rates.setdefault(label, []).append(rate(comm, own, reader, seconds))
    return {label: statistics.median(values) for label, values in rates.items()}


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, megabytes=96, seconds=0.5, rounds=2, only="", own_core=False)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.own_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    result: dict[str, Any] = {"benchmark": "hdf5_input", "machine": harness.machine(comm)}
    result["own_core"], result["cases"] = options.own_core, []
    for case in CASES:
        if options.only not in str(case):
            continue
        rates = measure(comm, case, options.megabytes, options.seconds, options.rounds)
        result["cases"].append({**asdict(case), "batch": case.batch, "bytes_per_second": rates})
        if comm.rank == 0:
            rows = [[name, f"{r / 1e6:,.0f}", f"{rates[OURS] / r:.1f} ×"] for name, r in rates.items()]
            print(harness.table(f"{case}, {comm.size} rank(s)", ["reader", "MB/s", "ours is"], rows), flush=True)
    if comm.rank == 0:
        harness.save(options.output, result)


if __name__ == "__main__":
    main()
