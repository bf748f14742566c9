"""Rows and windows out of netCDF files and Zarr groups, and copies of remote files, next to the libraries alone.

    mpiexec -n 1 python benchmarks/netcdf_input.py --rows 20000 --output benchmarks/results/today

Files are netCDF-4 as netCDF4-python writes them: packed int16 [64, 64] over an unlimited time, in chunks of 24 hours, with
zlib or without. "xarray" is open_dataset and isel of a slice per batch, for windows of a slice per window. The Zarr group and
the copies come from a web server in this process (http.server), which both sides share: figures compare the sides, and say
nothing of networks. The contenders take turns; a figure is the median of the rounds, in rows per second.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np

import mpistrat as ms

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


def our_zarr(url: str) -> int:
    return sum(len(batch) for batch in ms.data.from_zarr(url, "x").batch(BATCH))


def zarr_rows(url: str) -> int:
    import zarr

    array = zarr.open(url, mode="r")["x"]
    return sum(len(array[at : at + BATCH]) for at in range(0, array.shape[0], BATCH))


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


class _Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(folder: Path) -> str:
    """Serve a folder until the program ends, and return its URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "web").mkdir()
        url = serve(folder / "web")
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
        try:
            import zarr
        except ImportError:
            zarr = None
        x = np.random.default_rng(0).integers(0, 50, (args.rows, 1024), np.int32)
        if zarr is not None:
            zarr.open_group(folder / "web/a.zarr", mode="w").create_array("x", data=x, chunks=(512, 1024))
            both = {
                "mpistrat": functools.partial(our_zarr, f"{url}/a.zarr"),
                "alone": functools.partial(zarr_rows, f"{url}/a.zarr"),
            }
            figures["Zarr rows over HTTP (zarr)"] = in_turns(both, args.rounds)
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
    machine = harness.machine(MPI.COMM_WORLD, ("xarray", "h5netcdf", "zarr", "fsspec"))
    harness.save(args.output, {"benchmark": "netcdf_input", "machine": machine, "rows_per_second": figures})


if __name__ == "__main__":
    main()
