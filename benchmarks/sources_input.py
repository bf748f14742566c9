"""Rows out of each kind of files, next to the library alone that reads it; also over HTTP, and copies of remote files.

    mpiexec -n 1 python benchmarks/sources_input.py --rows 20000 --output benchmarks/results/today

Each file has the same rows of 1,024 int32, written by the library; a side yields them in batches of 64, in order, and some
sources also 500 rows at random places, one by one, as a map-style dataset of PyTorch reads. netCDF files are packed int16
[64, 64] over time in chunks of 24 hours; "xarray" is open_dataset and isel. pyarrow's batches of Arrow files are views
of a memory map, and nothing reads their bytes. Our batches are copies, since programs may change them; "Arrow copies" copies
pyarrow's, too. Both sides share a web server (aiohttp, with ranges) in this process: figures compare the sides, and say nothing
of networks. The contenders take turns; a figure is the median of the rounds, in rows per second. A library that is not
installed is left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np

import mpistrat as ms

sys.path.append(str(Path(__file__).parents[1]))
from tests.harness.range_server import serving_ranges

BATCH, LENGTH, HORIZON = 64, 24, 6
SHAPE = (64, 64)


def write_netcdf(path: Path, rows: int, zlib: bool) -> None:
    import netCDF4

    rng = np.random.default_rng(0)
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        for name, length in zip(("lat", "lon"), SHAPE, strict=True):
            file.createDimension(name, length)
        dimensions = ("time", "lat", "lon")
        variable = file.createVariable("t2m", "i2", dimensions, zlib=zlib, complevel=4, chunksizes=(24, *SHAPE))
        variable.setncatts({"scale_factor": np.float32(0.01), "add_offset": np.float32(280)})
        variable.set_auto_maskandscale(False)
        for start in range(0, rows, 1000):
            count = min(1000, rows - start)
            variable[start : start + count] = rng.integers(0, 100, (count, *SHAPE))


def ours(path: Path) -> int:
    return sum(len(batch) for batch in ms.data.from_netcdf(path, "t2m").batch(BATCH))


def xarray_rows(path: Path) -> int:
    import xarray

    with xarray.open_dataset(path, engine="h5netcdf", cache=False) as opened:
        rows = opened.sizes["time"]
        return sum(
            len(opened["t2m"].isel(time=slice(at, min(at + BATCH, rows))).values) for at in range(0, rows, BATCH)
        )


def our_windows(path: Path, windows: int) -> int:
    dataset = ms.data.from_netcdf(path, "t2m").sliding_window(LENGTH, HORIZON).shuffle(seed=1).take(windows)
    return sum(len(past) for past, _ in dataset.batch(BATCH))


def xarray_windows(path: Path, windows: int) -> int:
    """Single windows at random places, as a Dataset of torch with xarray reads them."""
    import xarray

    rng = np.random.default_rng(1)
    with xarray.open_dataset(path, engine="h5netcdf", cache=False) as opened:
        starts = rng.permutation(opened.sizes["time"] - LENGTH - HORIZON + 1)[:windows]
        for start in starts.tolist():
            values = opened["t2m"].isel(time=slice(start, start + LENGTH + HORIZON)).values
            _ = values[:LENGTH], values[LENGTH:]
    return len(starts)


WIDTH = 1024  # numbers of a row


def our_rows(dataset: Callable[[], Any]) -> int:
    return sum(
        len(next(iter(batch.values())) if isinstance(batch, dict) else batch) for batch in dataset().batch(BATCH)
    )


def our_random_rows(dataset: Callable[[], Any], places: list[int]) -> int:
    made = dataset()
    for place in places:
        made.rows([place])
    return len(places)


@dataclass(frozen=True)
class Contest:
    """One kind of files: what writes them, our dataset, and the library's batches and random rows of the files."""

    library: str
    write: Callable[[Path, np.ndarray], None]
    ours: Callable[[str], Any]
    alone: Callable[[str], int]
    alone_random: Callable[[str, list[int]], int] | None = None
    remote: bool = False  # the library reads file objects of fsspec


def batches_of(array: Any) -> int:
    return sum(len(array[at : at + BATCH]) for at in range(0, array.shape[0], BATCH))


def write_h5(path: Path, x: np.ndarray) -> None:
    import h5py

    with h5py.File(path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(64, WIDTH), compression="gzip", compression_opts=1)


def h5_rows(path: str) -> int:
    import h5py

    with opened(path, "a.h5") as source, h5py.File(source) as file:
        return batches_of(file["x"])


def h5_random(path: str, places: list[int]) -> int:
    import h5py

    with opened(path, "a.h5") as source, h5py.File(source) as file:
        return sum(len(file["x"][place : place + 1]) for place in places)


def opened(path: str, name: str) -> Any:
    """Return an open file: fsspec's of a URL."""
    import fsspec

    return fsspec.open(f"{path}/{name}", "rb").open() if "://" in path else open(f"{path}/{name}", "rb")


def write_groups(path: Path, x: np.ndarray) -> None:
    import h5py

    with h5py.File(path / "a.h5", "w") as file:
        for number, row in enumerate(x):
            file[f"data/{number}/x"] = row


def groups_rows(path: str) -> int:
    import h5py

    with h5py.File(f"{path}/a.h5") as file:
        names = sorted(file["data"], key=int)
        parts = (names[at : at + BATCH] for at in range(0, len(names), BATCH))
        return sum(len(np.stack([file[f"data/{name}/x"][...] for name in part])) for part in parts)


def write_parquet(path: Path, x: np.ndarray) -> None:
    import pyarrow
    import pyarrow.parquet

    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(x.reshape(-1)), WIDTH)
    pyarrow.parquet.write_table(pyarrow.table({"x": lists}), path / "a.parquet", row_group_size=512)


def parquet_rows(path: str) -> int:
    import pyarrow.parquet

    with opened(path, "a.parquet") as source:
        file = pyarrow.parquet.ParquetFile(source, pre_buffer="://" in path)
        batches = file.iter_batches(BATCH, use_threads=False)
        return sum(len(batch["x"].flatten().to_numpy().reshape(-1, WIDTH)) for batch in batches)


def write_arrow(path: Path, x: np.ndarray) -> None:
    import pyarrow

    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(x.reshape(-1)), WIDTH)
    table = pyarrow.table({"x": lists})
    with pyarrow.OSFile(str(path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=512)


def arrow_rows(path: str) -> int:
    import pyarrow

    with pyarrow.memory_map(f"{path}/a.arrow") as source:
        batches = pyarrow.ipc.open_file(source).read_all().to_batches(BATCH)
        return sum(len(batch["x"].flatten().to_numpy().reshape(-1, WIDTH)) for batch in batches)


def copied_arrow_rows(path: str) -> int:
    import pyarrow

    with pyarrow.memory_map(f"{path}/a.arrow") as source:
        batches = pyarrow.ipc.open_file(source).read_all().to_batches(BATCH)
        return sum(len(batch["x"].flatten().to_numpy().reshape(-1, WIDTH).copy()) for batch in batches)


def write_csv(path: Path, x: np.ndarray) -> None:
    header = ",".join(f"c{number}" for number in range(8))
    np.savetxt(path / "a.csv", x[:, :8], "%d", ",", header=header, comments="")


def csv_rows(path: str) -> int:
    import pyarrow.csv

    table = pyarrow.csv.read_csv(f"{path}/a.csv", read_options=pyarrow.csv.ReadOptions(use_threads=False))
    return sum(
        len({name: batch[name].to_numpy() for name in table.column_names}["c0"]) for batch in table.to_batches(BATCH)
    )


def write_tar(path: Path, x: np.ndarray) -> None:
    import webdataset

    with webdataset.TarWriter(str(path / "a.tar")) as sink:
        for number, row in enumerate(x):
            sink.write({"__key__": f"{number:06}", "x.npy": row})


def tar_rows(path: str) -> int:
    import webdataset

    samples = webdataset.WebDataset(f"{path}/a.tar", shardshuffle=False).decode().to_tuple("x.npy").batched(BATCH)
    return sum(len(batch[0]) for batch in samples)


def write_tfrecord(path: Path, x: np.ndarray) -> None:
    import tfrecord

    writer = tfrecord.TFRecordWriter(str(path / "a.tfrecord"))
    for row in x:
        writer.write({"x": (row.tolist(), "int")})
    writer.close()


def tfrecord_rows(path: str) -> int:
    import tfrecord

    loader = tfrecord.tfrecord_loader(f"{path}/a.tfrecord", None, {"x": "int"})
    rows = iter(loader)
    total = 0
    while part := list(itertools.islice(rows, BATCH)):
        total += len(np.stack([row["x"] for row in part]))
    return total


def write_zarr(path: Path, x: np.ndarray) -> None:
    import zarr

    zarr.open_group(path / "a.zarr", mode="w").create_array("x", data=x, chunks=(512, WIDTH))


def zarr_rows(path: str) -> int:
    import zarr

    return batches_of(zarr.open(f"{path}/a.zarr", mode="r")["x"])


def write_sparse(path: Path, x: np.ndarray) -> None:
    import anndata
    import scipy.sparse

    rows = np.where(x % 20 == 0, x, 0).astype(np.float32)
    anndata.AnnData(X=scipy.sparse.csr_matrix(rows)).write_h5ad(path / "a.h5ad")


def sparse_rows(path: str) -> int:
    import anndata

    matrix = anndata.read_h5ad(f"{path}/a.h5ad", backed="r").X
    return sum(len(matrix[at : at + BATCH].toarray()) for at in range(0, matrix.shape[0], BATCH))


CONTESTS = {
    "HDF5, gzip": Contest(
        "h5py", write_h5, lambda path: ms.data.HDF5Dataset([f"{path}/a.h5"], "x"), h5_rows, h5_random, True
    ),
    "groups of HDF5": Contest(
        "h5py", write_groups, lambda path: ms.data.from_groups(f"{path}/a.h5", "x", within="data"), groups_rows
    ),
    "Parquet": Contest(
        "pyarrow", write_parquet, lambda path: ms.data.from_tables(f"{path}/a.parquet", "x"), parquet_rows, remote=True
    ),
    "Arrow": Contest("pyarrow", write_arrow, lambda path: ms.data.from_tables(f"{path}/a.arrow", "x"), arrow_rows),
    "Arrow copies": Contest(
        "pyarrow", write_arrow, lambda path: ms.data.from_tables(f"{path}/a.arrow", "x"), copied_arrow_rows
    ),
    "CSV": Contest("pyarrow", write_csv, lambda path: ms.data.from_tables(f"{path}/a.csv"), csv_rows),
    "tar": Contest("webdataset", write_tar, lambda path: ms.data.from_tar(f"{path}/a.tar", "x.npy"), tar_rows),
    "TFRecord": Contest(
        "tfrecord", write_tfrecord, lambda path: ms.data.from_tfrecord(f"{path}/a.tfrecord", "x"), tfrecord_rows
    ),
    "Zarr": Contest("zarr", write_zarr, lambda path: ms.data.from_zarr(f"{path}/a.zarr", "x"), zarr_rows, remote=True),
    "anndata": Contest(
        "anndata", write_sparse, lambda path: ms.data.from_sparse(f"{path}/a.h5ad", dense=True), sparse_rows
    ),
}


def contests(web: Path, url: str, rows: int, random_rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the rates of all kinds whose library is installed."""
    rng, figures = np.random.default_rng(0), {}
    x = rng.integers(0, 50, (rows, WIDTH), np.int32)
    places = rng.integers(0, rows, random_rows).tolist()
    for name, contest in CONTESTS.items():
        folder = web / name.partition(",")[0].replace(" ", "-")
        folder.mkdir()
        try:
            contest.write(folder, x)
        except ImportError as error:
            print(f"{name}: left out: {error}")
            continue
        paths = {"": str(folder)} | ({" over HTTP": f"{url}/{folder.name}"} if contest.remote else {})
        for where, path in paths.items():
            ours, alone = functools.partial(contest.ours, path), functools.partial(contest.alone, path)
            both = {"mpistrat": functools.partial(our_rows, ours), "alone": alone}
            figures[f"{name}{where} ({contest.library})"] = in_turns(both, rounds)
            if contest.alone_random is not None:
                both = {
                    "mpistrat": functools.partial(our_random_rows, ours, places),
                    "alone": functools.partial(contest.alone_random, path, places),
                }
                figures[f"{name}{where}, random rows ({contest.library})"] = in_turns(both, rounds)
    return figures


def our_copy(url: str, folder: Path, rows: int) -> int:
    ms.data.download(url, folder)
    shutil.rmtree(folder)
    return rows


def fsspec_copy(url: str, folder: Path, rows: int) -> int:
    import fsspec

    system = fsspec.filesystem("http", use_listings_cache=False)
    folder.mkdir()
    for name in system.find(url):
        system.get_file(name, str(folder / name.rpartition("/")[2]))
    shutil.rmtree(folder)
    return rows


def in_turns(contenders: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Return rows per second of each contender, the median of rounds after one untimed."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            began = time.perf_counter()
            rows = call()
            if turn:
                rates[name].append(rows / (time.perf_counter() - began))
    return {name: statistics.median(each) for name, each in rates.items()}


def main() -> None:
    from mpi4py import MPI

    args = harness.arguments(__doc__, rows=5000, windows=500, rounds=5)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "web").mkdir()
        url = stack.enter_context(serving_ranges(folder / "web")).url
        for zlib in (False, True):
            path = folder / f"{zlib}.nc"
            write_netcdf(path, args.rows, zlib)
            what = "zlib" if zlib else "uncompressed"
            both = {"mpistrat": functools.partial(ours, path), "alone": functools.partial(xarray_rows, path)}
            figures[f"netCDF rows, {what} (xarray)"] = in_turns(both, args.rounds)
            both = {
                "mpistrat": functools.partial(our_windows, path, args.windows),
                "alone": functools.partial(xarray_windows, path, args.windows),
            }
            figures[f"netCDF windows, {what} (xarray)"] = in_turns(both, args.rounds)
        figures |= contests(folder / "web", url, args.rows, args.windows, args.rounds)
        x = np.random.default_rng(0).integers(0, 50, (args.rows, WIDTH), np.int32)
        ms.data.write_shards(folder / "web/set", {"x": x}, num_shards=8)
        both = {
            "mpistrat": functools.partial(our_copy, f"{url}/set/", folder / "ours", args.rows),
            "alone": functools.partial(fsspec_copy, f"{url}/set/", folder / "theirs", args.rows),
        }
        figures["copies of shards over HTTP (fsspec)"] = in_turns(both, args.rounds)
    rows = [
        [what, f"{rates['mpistrat']:,.0f}", f"{rates['alone']:,.0f}", f"{rates['mpistrat'] / rates['alone']:.2f}"]
        for what, rates in figures.items()
    ]
    print(harness.table("Rows per second", ["what (library)", "mpistrat", "library alone", "ratio"], rows))
    machine = harness.machine(
        MPI.COMM_WORLD, ("xarray", "h5netcdf", "zarr", "fsspec", "pyarrow", "webdataset", "tfrecord", "anndata", "isal")
    )
    harness.save(args.output, {"benchmark": "sources_input", "machine": machine, "rows_per_second": figures})


if __name__ == "__main__":
    main()
