"""Mutate HDF5 files and read them: python -m tests.nets.fuzz_shards --mutants 10000 --seed 1

Each mutant is a small set of files of which one was damaged. It is read in a forked child, so that a crash of the HDF5
library or a hang is seen and counted. Where a manifest is verified, nothing but a ShardError or the right rows may come;
without one, damage that nobody notices gives wrong rows, and is counted. Under reader="h5py" the HDF5 library itself goes
through damaged data, and loops for ever in some; that is counted, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np

from mpistrat.data import HDF5Dataset, write_shards
from mpistrat.errors import MpistratError, ShardError

ROWS = 60
PATIENCE = 10.0  # seconds for one mutant
BATCH = 200  # mutants that one child reads
MEMORY = 8 << 30  # bytes of addresses that a child may have


# The sets: each writes files into a directory and returns their rows.


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.integers(0, 50, (ROWS, 6), np.int32), "y": np.arange(ROWS), "name": np.full(ROWS, b"abc", "S4")}


def contiguous(directory: Path) -> dict[str, Any]:
    write_shards(directory, arrays(), num_shards=2)
    return arrays()


def gzip(directory: Path) -> dict[str, Any]:
    write_shards(directory, arrays(), num_shards=2, compression="gzip")
    return arrays()


def lzf(directory: Path) -> dict[str, Any]:
    write_shards(directory, arrays(), num_shards=2, compression="lzf")
    return arrays()


def varying_rows() -> tuple[np.ndarray, np.ndarray]:
    ragged = np.empty(ROWS, object)
    ragged[:] = [np.arange(i % 5, dtype=np.int16) for i in range(ROWS)]
    return np.array([f"text {i}" * (i % 3) for i in range(ROWS)], object), ragged


def varying(directory: Path) -> dict[str, Any]:
    """Strings and rows of varying length."""
    expected = dict(zip(("text", "ragged"), varying_rows(), strict=True))
    write_shards(directory, expected, num_shards=2, layout="chunked")
    return expected


def foreign(directory: Path) -> dict[str, Any]:
    """What others write: groups, strings, rows of varying length, structures, old and new formats, no manifest."""
    table = np.zeros(ROWS, [("a", "<i4"), ("b", "<f8")])
    table["a"] = np.arange(ROWS)
    text, ragged = varying_rows()
    expected = {
        "data/x": arrays()["x"], "data/text": text,
        "table": table, "ragged": ragged, "data/deep/chunked": np.arange(ROWS * 2.0).reshape(ROWS, 2),
    }  # fmt: skip
    for number, libver in enumerate(("earliest", "latest")):
        part = slice(number * 30, number * 30 + 30)
        with h5py.File(directory / f"{number}.h5", "w", libver=libver) as file:
            file["data/x"] = expected["data/x"][part]
            file.create_dataset("data/text", data=expected["data/text"][part], dtype=h5py.string_dtype())
            file["table"] = table[part]
            file.create_dataset("ragged", (30,), h5py.vlen_dtype(np.int16))
            for i, row in enumerate(ragged[part]):
                file["ragged"][i] = row
            chunked = expected["data/deep/chunked"][part]
            file.create_dataset("data/deep/chunked", data=chunked, chunks=(7, 2), compression="gzip", fletcher32=True)
            file["alias"] = h5py.SoftLink("/data")
    return expected


SETS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "contiguous": contiguous, "gzip": gzip, "lzf": lzf, "varying": varying, "foreign": foreign,
}  # fmt: skip
WAYS = ("unverified", "pread", "h5py", "cut", "verified")  # how a mutant is read; "cut": damaged after it was opened


# Mutations of a file's bytes.


def flip(data: bytearray, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(1, 9))):
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))


def truncate(data: bytearray, rng: np.random.Generator) -> None:
    del data[int(rng.integers(len(data))) :]


def splice(data: bytearray, rng: np.random.Generator) -> None:
    size = int(rng.integers(1, min(256, len(data))))
    source, target = (int(i) for i in rng.integers(len(data) - size + 1, size=2))
    data[target : target + size] = data[source : source + size]


def zero(data: bytearray, rng: np.random.Generator) -> None:
    size = int(rng.integers(1, min(256, len(data))))
    start = int(rng.integers(len(data) - size + 1))
    data[start : start + size] = bytes(size)


def noise(data: bytearray, rng: np.random.Generator) -> None:
    size = int(rng.integers(1, 9))
    start = int(rng.integers(len(data) - size + 1))
    data[start : start + size] = rng.bytes(size)


def insert(data: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(len(data)))
    data[start:start] = rng.bytes(int(rng.integers(1, 65)))


MUTATIONS = (flip, truncate, splice, zero, noise, insert)


class Readable(Protocol):
    """Files whose mutants are read."""

    def read(self, seed: int, number: int, tell: Callable[[str], None]) -> str: ...


class WrittenSets:
    """The sets as they were written, and a directory for the mutant of the moment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.expected: dict[str, dict[str, Any]] = {}
        for name, write in SETS.items():
            (directory / name).mkdir()
            self.expected[name] = write(directory / name)

    def read(self, seed: int, number: int, tell: Callable[[str], None]) -> str:
        """Make a mutant, tell what it is, read it, and return what came of it."""
        rng = np.random.default_rng([seed, number])
        name = list(SETS)[number % len(SETS)]
        way = WAYS[int(rng.integers(len(WAYS) - (name == "foreign")))]
        mutate = truncate if way == "cut" else MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        mutant = self.directory / "mutant"
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(self.directory / name, mutant)
        if way != "verified":
            (mutant / "manifest.json").unlink(missing_ok=True)  # which would betray another size
        path = sorted(mutant.glob("*.h5"))[int(rng.integers(2))]
        data = bytearray(path.read_bytes())
        mutate(data, rng)
        tell(f"{name}, {way}, {mutate.__name__}")
        reader = {"pread": "pread", "cut": "pread", "h5py": "h5py"}.get(way, "auto")
        order = rng.permutation(ROWS)
        try:
            if way == "cut":
                dataset = HDF5Dataset(mutant, reader=reader)
                dataset.rows([0, ROWS - 1])  # opens both files
                os.truncate(path, len(data))
            else:
                path.write_bytes(data)
                dataset = HDF5Dataset(mutant, verify=way == "verified", reader=reader)
            found = dataset.rows(order if len(dataset) == ROWS else [])
        except ShardError as error:
            return "refused" if str(mutant) in str(error) else f"error without the file's name: {error}"
        except MpistratError as error:
            return f"refused as {type(error).__name__}"
        except Exception:
            return "other error: " + traceback.format_exc().replace("\n", "\\n")
        return "right rows" if same(found, self.expected[name], order) else "wrong rows"


def same(found: dict[str, Any], expected: dict[str, Any], order: np.ndarray) -> bool:
    if set(found) != set(expected):
        return False
    for name, array in expected.items():
        other = found[name]
        if array.dtype != other.dtype or array[order].shape != other.shape:
            return False
        if array.dtype != object:
            if array[order].tobytes() != other.tobytes():
                return False
        elif not all(type(a) is type(b) and np.array_equal(a, b) for a, b in zip(array[order], other, strict=True)):
            return False
    return True


def child(sets: Readable, seed: int, numbers: range, pipe: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    for number in numbers:
        outcome = sets.read(seed, number, lambda what, n=number: write(pipe, f"{n}\t{what}\t"))
        write(pipe, f"{outcome[:3000]}\n")


def write(pipe: int, text: str) -> None:
    os.write(pipe, text.encode(errors="replace"))


def run(
    mutants: int,
    seed: int,
    report: Callable[[int, Counter[tuple[str, str]]], None] | None = None,
    made: Callable[[Path], Readable] = WrittenSets,
) -> list[tuple[int, str, str]]:
    """Read the mutants in forked children; return number, what was done and the outcome of each."""
    outcomes: list[tuple[int, str, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        sets = made(Path(directory))
        following = 0
        while following < mutants:
            numbers = range(following, min(mutants, following + BATCH))
            outcomes.extend(watch(sets, seed, numbers))
            following = outcomes[-1][0] + 1
            if report is not None:
                report(following, count(outcomes))
    return outcomes


def watch(sets: Readable, seed: int, numbers: range) -> list[tuple[int, str, str]]:
    """Let a child read some mutants; return the outcomes, up to the one that it did not survive."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reading)
            child(sets, seed, numbers, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    text, ending = b"", ""
    deadline = time.monotonic() + PATIENCE
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(process, signal.SIGKILL)
            ending = "hang"
            break
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        text += piece
        deadline = time.monotonic() + PATIENCE
    os.close(reading)
    _, status = os.waitpid(process, 0)
    *lines, last = text.decode(errors="replace").split("\n")
    if not ending and (len(lines) < len(numbers) or status):
        code = os.waitstatus_to_exitcode(status)
        ending = f"crash: {signal.Signals(-code).name}" if code < 0 else f"crash: exit {code}"
    if ending:
        number, what, _ = (last or f"{numbers[len(lines)]}\t\t").split("\t")
        lines.append(f"{number}\t{what}\t{ending}")
    return [(int(number), what, outcome) for number, what, outcome in (line.split("\t", 2) for line in lines)]


def count(outcomes: list[tuple[int, str, str]]) -> Counter[tuple[str, str]]:
    return Counter((", ".join(what.split(", ")[:2]), outcome.split(":")[0]) for _, what, outcome in outcomes)


def faults(outcomes: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Outcomes that must not be."""
    allowed = {"refused", "right rows"}
    also = {"verified": set[str](), "h5py": {"wrong rows", "hang", "crash"}}

    def fault(what: str, outcome: str) -> bool:
        way = what.split(", ")[1] if what else "verified"
        return outcome.split(":")[0] not in allowed | also.get(way, {"wrong rows"})

    return [(number, what, outcome) for number, what, outcome in outcomes if fault(what, outcome)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="read one mutant, in this process, and say what comes")
    arguments = parser.parse_args()
    if arguments.only is not None:
        with tempfile.TemporaryDirectory() as directory:
            print(WrittenSets(Path(directory)).read(arguments.seed, arguments.only, print).replace("\\n", "\n"))
        return 0

    def report(done: int, _: Counter[tuple[str, str]]) -> None:
        print(f"\r{done} of {arguments.mutants}", end="", file=sys.stderr, flush=True)

    outcomes = run(arguments.mutants, arguments.seed, report)
    print(file=sys.stderr)
    counted = count(outcomes)
    results = sorted({result for _, result in counted})
    print(f"{'set, way':24}" + "".join(f"{result:>14}" for result in results))
    for what in sorted({what for what, _ in counted}):
        print(f"{what or '(not told)':24}" + "".join(f"{counted[what, result]:14}" for result in results))
    return status_of(outcomes, faults(outcomes))


def status_of(outcomes: list[tuple[int, str, str]], bad: list[tuple[int, str, str]]) -> int:
    """Print the faults among the outcomes; return the exit status."""
    for number, what, outcome in bad[:50]:
        print(f"mutant {number}: {what}: {outcome}".replace("\\n", "\n"))
    print(f"{len(outcomes)} mutants, {len(bad)} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
