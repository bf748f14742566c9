"""What defaults of mpistrat.data rest on: batches that are announced and steps that are read ahead, threads of map.

    mpiexec -n 1 python benchmarks/tune_input.py --output benchmarks/results/today     # --only decoding, prefetch or map

Our own reader only, over cases of hdf5_input.py, the settings in turns; "default" is None, nothing said. The thread that reads
decodes, too, beside the one that decodes ahead. On nodes full of ranks threads take other ranks' cores: measure with as many
ranks.

Reading ahead and threads of map are seen under loops that do nothing, that compute (NumPy, one core, the GIL released) and that
wait as for a GPU; the latter two for as long as reading a step alone takes. If a loop that waits costs nothing, reading and
waiting overlap wholly; a rate of half as much is no overlap.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import harness
import numpy as np
from hdf5_input import Case, Reader, Share, rate, written

import mpistrat as ms
from mpistrat.data.feed import batches as feed_batches

DECODING_CASES = [Case(layout, 8, order, 3072) for layout in ("gzip", "lzf") for order in ("in order", "shuffled")]
DECODING = {"ahead": (1, 2, 4), "prefetch": (None, 2)}

PREFETCH_CASES = [Case("contiguous", 8, "in order", 150_000), Case("gzip", 8, "shuffled", 3072)]
PREFETCH = {"prefetch": (None, 0, 1, 2, 4), "loop": ("nothing", "computes", "waits")}

MAP_CASES = [Case("contiguous", 8, "in order", row_bytes) for row_bytes in (3072, 150_000)]
MAP = {"num_parallel_calls": (None, 1, 2, 4), "loop": ("nothing", "computes")}

Change = Callable[[ms.data.Dataset], ms.data.Dataset]
Loop = Callable[[], object]


def decoding(ahead: int, prefetch: int | None) -> Reader:
    """Return our reader, which announces so many batches ahead."""

    def batches(share: Share) -> Iterator[Any]:
        before, feed_batches.LOOK_AHEAD = feed_batches.LOOK_AHEAD, ahead
        try:
            change = same if prefetch is None else lambda dataset: dataset.prefetch(prefetch)
            yield from looped(share, same, change, lambda: None)
        finally:
            feed_batches.LOOK_AHEAD = before

    return batches


def looped(share: Share, rows: Change, batches: Change, loop: Loop) -> Iterator[Any]:
    """Our reader with stages of rows and of batches, and a loop that does something at each step."""
    case = share.case
    with contextlib.closing(ms.MultiWorkerMirroredStrategy()) as strategy:
        dataset: ms.data.Dataset = ms.data.HDF5Dataset(list(share.paths), fields="x")
        if case.order == "shuffled":
            dataset = dataset.shuffle(seed=1, window_bytes=case.window_chunks * case.chunk_rows * case.row_bytes)
        dataset = rows(dataset.repeat()).batch(case.batch * strategy.size)  # an epoch would end too soon
        for batch in strategy.distribute_dataset(batches(dataset)):
            loop()
            yield batch


def same(dataset: ms.data.Dataset) -> ms.data.Dataset:
    """A change that changes nothing."""
    return dataset


def loops(comm: Any, share: Share, rows: Change, seconds: float) -> dict[str, Loop]:
    """Return loops that take as long as reading a step alone. Collective."""
    alone = functools.partial(looped, rows=rows, batches=lambda batches: batches.prefetch(0), loop=lambda: None)
    step = comm.size * share.case.batch * share.case.row_bytes / rate(comm, share, alone, seconds)
    numbers, done, start = np.ones(1 << 14, np.float32), 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < max(0.1, seconds):
        np.sqrt(numbers, out=numbers)
        done += 1
    times = round(done / spent * step)  # of work, not of the clock: a core that is shared shows

    def compute() -> None:
        for _ in range(times):
            np.sqrt(numbers, out=numbers)

    return {"nothing": lambda: None, "computes": compute, "waits": lambda: time.sleep(step)}


def in_numpy(row: np.ndarray) -> np.ndarray:
    """A function of a row that releases the GIL."""
    return np.sin(row, dtype=np.float32).astype(np.uint8)


def in_python(row: np.ndarray) -> np.ndarray:
    """One that does not, of about as long."""
    largest = 0
    for value in row[::128].tolist():
        largest = max(largest, value)
    return np.minimum(row, largest)


def measure(
    comm: Any, options: Any, share: Share, what: str, settings: Mapping[str, Sequence[Any]], reader: Callable[..., Reader]
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the median rate of each setting, in bytes a second; they take turns. Rank 0 prints a table. Collective."""
    rates: dict[tuple[Any, ...], list[float]] = {}
    for setting in [*itertools.product(*settings.values())] * options.rounds:
        rates.setdefault(setting, []).append(rate(comm, share, reader(*setting), options.seconds))
    medians = {setting: statistics.median(values) for setting, values in rates.items()}
    if comm.rank == 0:
        (down, first), (across, second) = settings.items()
        names = {value: "default" if value is None else str(value) for value in (*first, *second)}
        table = [[names[a], *(f"{medians[a, b] / 1e6:,.0f}" for b in second)] for a in first]
        print(harness.table(f"{what}, MB/s", [down, *(f"{across}: {names[b]}" for b in second)], table), flush=True)
    return [
        {"case": what, **dict(zip(settings, setting, strict=True)), "bytes_per_second": value}
        for setting, value in medians.items()
    ]


def measure_decoding(comm: Any, options: Any) -> Iterator[dict[str, Any]]:
    """Batches that sources are told of ahead, and steps read ahead. Collective."""
    for case in DECODING_CASES:
        with written(comm, case, options.megabytes) as share:
            yield from measure(comm, options, share, str(case), DECODING, decoding)


def measure_prefetch(comm: Any, options: Any) -> Iterator[dict[str, Any]]:
    """Steps read ahead. Collective."""
    for case in PREFETCH_CASES:
        with written(comm, case, options.megabytes) as share:
            known = loops(comm, share, same, options.seconds)

            def reader(depth: int | None, loop: str, known: dict[str, Loop] = known) -> Reader:
                ahead = same if depth is None else lambda batches: batches.prefetch(depth)
                return functools.partial(looped, rows=same, batches=ahead, loop=known[loop])

            yield from measure(comm, options, share, str(case), PREFETCH, reader)


def measure_map(comm: Any, options: Any) -> Iterator[dict[str, Any]]:
    """Threads of `map`, called on rows. Collective."""
    for case, function in itertools.product(MAP_CASES, (in_numpy, in_python)):
        with written(comm, case, options.megabytes) as share:

            def mapped(threads: int | None, function: Callable[..., Any] = function) -> Change:
                return lambda rows: rows.map(function, num_parallel_calls=threads)

            known = loops(comm, share, mapped(None), options.seconds)

            def reader(
                threads: int | None, loop: str, mapped: Callable[..., Change] = mapped, known: dict[str, Loop] = known
            ) -> Reader:
                return functools.partial(looped, rows=mapped(threads), batches=same, loop=known[loop])

            yield from measure(comm, options, share, f"map({function.__name__}), {case}", MAP, reader)


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, megabytes=96, seconds=0.5, rounds=3, only="")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    result: dict[str, Any] = {"benchmark": "tune_input", "machine": harness.machine(comm)}
    for name, what in {"decoding": measure_decoding, "prefetch": measure_prefetch, "map": measure_map}.items():
        if options.only in name:
            result[name] = list(what(comm, options))
    if comm.rank == 0:
        harness.save(options.output, result)


if __name__ == "__main__":
    main()
