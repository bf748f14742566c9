"""Mutate files of each source and read them at a URL, next to the same file on a path: python -m tests.nets.fuzz_remote

A mutant is either refused by a ShardError that names it, or its rows are those that are read on the path. The URLs are those of
fsspec's own file system of this machine: what differs is the way in which bytes are read. HDF5 loops for ever in some damaged
files, on a path, too; that is counted, but no fault.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.data import write_shards
from mpistrat.errors import ShardError
from tests.harness.sources import SOURCES
from tests.nets.fuzz_shards import MUTATIONS, run, same, status_of

KINDS = ("hdf5", "hdf5_chunked", "parquet", "arrow", "tar", "tfrecord", "groups", "sparse", "netcdf")
ROWS = 400
X = np.arange(ROWS, dtype=np.int64) * 3
V = np.stack([X, X + 0.5, -X], axis=1).astype(np.float32)
_VALUES = (ValueError, MemoryError)  # of a member that cannot be decoded, or a header that asks for more than there is


class WrittenFiles:
    """The files as they were written, and a mutant of one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in KINDS:
            (directory / name).mkdir()
            write = SOURCES[name].write
            if name.startswith("hdf5"):
                layout = "chunked" if name.endswith("chunked") else "contiguous"
                write_shards(directory / name, {"x": X, "v": V}, num_shards=2, layout=layout, chunk_rows=None)
                (directory / name / "manifest.json").unlink()  # which would betray the mutant
            elif write is not None:
                write(directory / name, X, V)

    def read(self, seed: int, number: int, tell: Callable[[str], None]) -> str:
        """Make a mutant, tell what it is, read it twice, and return what came of it."""
        rng = np.random.default_rng([seed, number])
        name = KINDS[number % len(KINDS)]
        mutate = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        folder = self.directory / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.directory / name, folder)
        files = sorted(folder.iterdir())
        path = files[int(rng.integers(len(files)))]
        data = bytearray(path.read_bytes())
        mutate(data, rng)
        path.write_bytes(data)
        tell(f"{name}, {mutate.__name__}")
        try:
            local, remote = (_rows(name, where) for where in (folder, f"file://{folder}"))
        except Exception:
            return "other error: " + traceback.format_exc().replace("\n", "\\n")
        if isinstance(remote, str):
            return "refused" if isinstance(local, str) else f"refused only remotely: {remote}"
        if isinstance(local, str):
            return f"refused only on the path: {local}"
        every = np.arange(len(local["x"]))
        return "as on the path" if same(remote, local, every) else "unlike on the path"


def _rows(name: str, where: Any) -> Any:
    """Return all rows, or the text of the error that refuses the file."""
    try:
        dataset = SOURCES[name].opened(where)
        rows = dataset.rows(np.arange(min(len(dataset), 10 * ROWS)))
        return {key: np.asarray(values) for key, values in rows.items()}
    except ShardError as error:
        if "mutant" not in str(error):
            raise
        return str(error)
    except _VALUES as error:
        return str(error)


def faults(outcomes: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Outcomes that must not be."""
    hdf5 = ("hdf5", "groups", "sparse", "netcdf")

    def fault(what: str, outcome: str) -> bool:
        return outcome not in {"refused", "as on the path"} | ({"hang"} if what.startswith(hdf5) else set())

    return [(number, what, outcome) for number, what, outcome in outcomes if fault(what, outcome)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200 * len(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    outcomes = run(arguments.mutants, arguments.seed, made=WrittenFiles)
    counted = Counter(f"{what.split(',')[0]}: {outcome[:25]}" for _, what, outcome in outcomes)
    for what, number in sorted(counted.items()):
        print(f"{number:6} {what}")
    return status_of(outcomes, faults(outcomes))


if __name__ == "__main__":
    sys.exit(main())
