"""How far `mpistrat plan` is off: it is calibrated on small layouts, and compared with steps of others, which are measured.

    python benchmarks/plan_check.py --mpi-env mpich=.venv/bin/python

Calibrated, by the constants of `mpistrat bench`, on one host with two ranks, one host with three (which share two cores), and two
isolated hosts of a rank each. Held out: steps of 1, 4.2 and 16.8 M parameters on 1 to 4 ranks, and on two hosts of one and of two
ranks. No constant is a step of one of these sizes. Each rank has the threads that it gets by default. All of it is started anew a
few times, in turns, and medians count: some layouts keep another pace from start to start.

The hosts are on this machine: each has one of its cores, and they share its caches and its memory, whose speed is therefore
that of the run on two hosts. Their messages pass through these cores. About four minutes for each start; nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES = {"1.0 M": 1 << 20, "4.2 M": 1 << 22, "16.8 M": 1 << 24}
HELD_OUT = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2))  # hosts, ranks of each
CALIBRATED = ((1, 2), (1, 3), (2, 1))
CLOSE = 0.15


def keep_to_a_core(hosts: int) -> None:
    """Have this rank run on its host's part of the cores: h1 has the first."""
    cores = sorted(os.sched_getaffinity(0))
    each, host = max(len(cores) // hosts, 1), int(socket.gethostname().removeprefix("h")) - 1
    os.sched_setaffinity(0, cores[host * each : (host + 1) * each] or cores[-each:])


def measure(path: str, hosts: int, calibrates: bool, seconds: float) -> None:
    """Measure constants, or steps, on the ranks that run this, and write them to a file."""
    if hosts > 1:
        keep_to_a_core(hosts)  # before MPI starts threads
    from mpi4py import MPI

    from mpistrat.bench import constants
    from mpistrat.bench.result import Setting, machine

    world = MPI.COMM_WORLD
    found: dict[str, Any] = {}
    if calibrates:
        setting = Setting(world, False, "", 1 << 30)
        found = {"machine": machine(world), "benchmarks": {"constants": constants.measure(setting).document()}}
    else:
        for label, count in SIZES.items():
            found[label] = constants.step_seconds(world, count, seconds)
    if world.rank == 0:
        Path(path).write_text(json.dumps(found))


def compare(documents: list[dict[str, Any]], measured: dict[tuple[int, int], dict[str, Any]]) -> list[list[str]]:
    """Return a line for each held-out step: predicted, measured, and how far off."""
    from mpistrat.base.text import duration
    from mpistrat.bench.plan import Machine, predict

    machine = Machine.read([each for each in documents if each["machine"]["nodes"] == 1])
    rows = []
    for (hosts, ranks), steps in measured.items():
        here = machine
        if hosts > 1:  # of a core each: what a node is was measured on them, what is lost without a core on all cores
            here = Machine.read([each for each in documents if each["machine"]["nodes"] == hosts])
            here = replace(here, crowded=machine.crowded)
        for label, (seconds, low, high) in steps.items():
            step = predict(here, SIZES[label], 0.0, hosts, ranks)
            inside = step.step[0] <= seconds <= step.step[1]
            rows.append([
                f"{hosts} × {ranks}", label, duration(step.expected), duration(step.step[0]), duration(step.step[1]),
                duration(seconds), f"{duration(low)} to {duration(high)}", f"{100 * (step.expected / seconds - 1):+.0f} %",
                "yes" if inside else "no", step.doubt,
            ])  # fmt: skip
    return rows


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold a lock, where programs that measure on this machine share one."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def median_of(found: list[Any]) -> Any:
    """Return a document whose numbers are the medians of several; what is no number is the first one's."""
    first = found[0]
    if isinstance(first, dict):
        return {key: median_of([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [median_of([each[index] for each in found]) for index in range(len(first))]
    return statistics.median(found) if isinstance(first, float) else first


def run_all(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[tuple[int, int], dict[str, Any]]]:
    """Run this program on each layout a few times, in turns; return what calibrates, and the steps by layout."""
    from tests.launch.hosts import Hosts, why_no_hosts
    from tests.launch.launcher import launch, mpi_env

    name, _, python = options.mpi_env.rpartition("=")
    env = mpi_env(python, name or None)
    constants: dict[tuple[int, int], list[Any]] = {}
    steps: dict[tuple[int, int], list[Any]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if options.output is None else options.output
        folder.mkdir(parents=True, exist_ok=True)
        reason = why_no_hosts()
        if reason:
            print(f"two hosts left out: {reason}", flush=True)
        two = None if reason else stack.enter_context(contextlib.closing(Hosts(2)))
        each_start = [*((constants, layout) for layout in CALIBRATED), *((steps, layout) for layout in HELD_OUT)]
        for start, (found, (hosts, ranks)) in itertools.product(range(options.starts), each_start):
            if hosts > 1 and two is None:
                continue
            calibrates = found is constants
            path = (folder / f"{'constants' if calibrates else 'steps'}-{hosts}x{ranks}-{start}.json").resolve()
            words = ["--measure", str(path), "--hosts", str(hosts), "--seconds", str(options.seconds)]
            program = [str(Path(__file__).resolve()), *words, *["--calibrate"] * calibrates]
            # The tests' launcher gives each rank one thread; here it has those of a user's program.
            threads: dict[str, str | None] = {"OMP_NUM_THREADS": None}
            with alone(options.lock):
                over = two if hosts > 1 else None
                result = launch(program, hosts * ranks, env, 300, hosts=over, cwd=ROOT, env=threads)
            if result.returncode:
                raise SystemExit(str(result))
            found.setdefault((hosts, ranks), []).append(json.loads(path.read_text()))
    documents = [median_of(runs) for runs in constants.values()]
    return documents, {layout: median_of(runs) for layout, runs in steps.items()}


def main() -> None:
    """Calibrate, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mpi-env", default=sys.executable, metavar="NAME=PYTHON")
    parser.add_argument("--output", type=Path, help="folder for what was measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps of one size on one layout")
    parser.add_argument("--starts", type=int, default=3, help="of each layout, whose medians count")
    parser.add_argument("--lock", type=Path, help="a file that is locked while a layout is measured")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.hosts, options.calibrate, options.seconds)
        return
    rows = compare(*run_all(options))
    heads = [
        "hosts × ranks",
        "parameters",
        "expected",
        "least",
        "most",
        "measured",
        "quartiles",
        "error",
        "inside",
        "why wide",
    ]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    close = sum(abs(float(row[7].split()[0])) <= 100 * CLOSE for row in rows)
    print(f"\nwithin {100 * CLOSE:.0f} %: {close} of {len(rows)}; in the range: {sum(row[8] == 'yes' for row in rows)}")


if __name__ == "__main__":
    main()
