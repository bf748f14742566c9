"""Mutate netCDF files and read them, next to xarray: python -m tests.nets.fuzz_netcdf --mutants 1000 --seed 1

Files of netCDF have no checksums, so damage may give other values. But they must be those that xarray.open_dataset reads of
the damaged file: a mutant is either refused by a ShardError that names it, or equal. The HDF5 library loops for ever in some
damaged attributes, under xarray and h5py as well; that is counted, but no fault.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.data import from_netcdf
from mpistrat.errors import ShardError
from tests.nets.fuzz_shards import MUTATIONS, run, same, status_of

ROWS = 60
NAMES = ["time", "packed", "x"]


def netcdf(format: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        """By netCDF4-python: times, packed values and compressed ones."""
        import netCDF4

        rng = np.random.default_rng(0)
        with netCDF4.Dataset(path, "w", format=format) as file:
            file.createDimension("time", None)
            file.createDimension("place", 4)
            time = file.createVariable("time", "i4", ("time",))
            time.units = "hours since 2000-01-01"
            time[:] = np.arange(ROWS)
            packed = file.createVariable("packed", "i2", ("time", "place"), fill_value=-1)
            packed.setncatts({"scale_factor": 0.25, "add_offset": 1.0})
            packed[:] = rng.integers(0, 50, (ROWS, 4))
            options = {} if "NETCDF3" in format else {"zlib": True, "fletcher32": True, "chunksizes": (7, 4)}
            file.createVariable("x", "f4", ("time", "place"), **options)[:] = rng.normal(size=(ROWS, 4))

    return write


def h5netcdf(path: Path) -> None:
    import h5netcdf.legacyapi

    rng = np.random.default_rng(0)
    with h5netcdf.legacyapi.Dataset(str(path), "w") as file:
        file.createDimension("time", ROWS)
        file.createDimension("place", 4)
        time = file.createVariable("time", "i4", ("time",))
        time.setncattr("units", "hours since 2000-01-01")
        time[:] = np.arange(ROWS)
        packed = file.createVariable("packed", "i2", ("time", "place"), fill_value=-1)
        packed.setncattr("scale_factor", 0.25)
        packed[:] = rng.integers(0, 50, (ROWS, 4))
        file.createVariable("x", "f4", ("time", "place"))[:] = rng.normal(size=(ROWS, 4))


SETS: dict[str, Callable[[Path], None]] = {
    "netCDF-4": netcdf("NETCDF4"),
    "h5netcdf": h5netcdf,
    "netCDF-3": netcdf("NETCDF3_64BIT_OFFSET"),
}


class WrittenFiles:
    """The files as they were written, and a mutant of one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, write in SETS.items():
            write(directory / f"{name}.nc")

    def read(self, seed: int, number: int, tell: Callable[[str], None]) -> str:
        """Make a mutant, tell what it is, read it, and return what came of it."""
        rng = np.random.default_rng([seed, number])
        name = list(SETS)[number % len(SETS)]
        mutate = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        mutant = self.directory / "mutant.nc"
        shutil.copy(self.directory / f"{name}.nc", mutant)
        data = bytearray(mutant.read_bytes())
        mutate(data, rng)
        tell(f"{name}, {mutate.__name__}")
        mutant.write_bytes(data)
        try:
            dataset = from_netcdf(mutant, NAMES, dimension="time")
            order = rng.permutation(min(len(dataset), 10 * ROWS))
            found = dataset.rows(order)
        except ShardError as error:
            return "refused" if str(mutant) in str(error) else f"error without the file's name: {error}"
        except Exception:
            return "other error: " + traceback.format_exc().replace("\n", "\\n")
        return compare(mutant, "scipy" if name == "netCDF-3" else "h5netcdf", found, order)


def compare(mutant: Path, engine: str, found: dict[str, Any], order: np.ndarray) -> str:
    """Return the outcome of rows that were read, given those of xarray."""
    import xarray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xarray.open_dataset(mutant, engine=engine, decode_timedelta=False) as reference:
            expected = {name: reference[name].transpose("time", ...).values for name in NAMES}
    return "as xarray" if same(found, expected, order) else "unlike xarray"


def faults(outcomes: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Outcomes that must not be."""

    def fault(what: str, outcome: str) -> bool:
        allowed = {"refused", "as xarray"} | (set() if what.startswith("netCDF-3") else {"hang"})
        return outcome not in allowed

    return [(number, what, outcome) for number, what, outcome in outcomes if fault(what, outcome)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    outcomes = run(arguments.mutants, arguments.seed, made=WrittenFiles)
    for what, number in sorted(
        Counter(f"{what.split(',')[0]}: {outcome[:20]}" for _, what, outcome in outcomes).items()
    ):
        print(f"{number:6} {what}")
    return status_of(outcomes, faults(outcomes))


if __name__ == "__main__":
    sys.exit(main())
