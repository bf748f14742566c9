"""How far `mpistrat plan` is off: it is calibrated on small layouts, and compared with steps of others, which are measured.

    python benchmarks/plan_check.py --mpi-env mpich=.venv/bin/python

Calibrated on one host with two ranks, one host with three (which share two cores), and two isolated hosts of a rank each, with
steps of 262 K and 4.2 M parameters where ranks share cores. Held out: steps of 1, 4.2 and 16.8 M parameters on 1 to 4 ranks, and
on two hosts of one and of two ranks. The hosts are on this machine and share its cores, which the model is told. Less than four
minutes; nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers" / "launch")]

SIZES = {"1.0 M": 1 << 20, "4.2 M": 1 << 22, "16.8 M": 1 << 24}
HELD_OUT = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2))  # hosts, ranks of each
CALIBRATED = ((1, 2), (1, 3), (2, 1))
CLOSE = 0.15


def measure(path: str, calibrates: bool, seconds: float) -> None:
    """Measure constants, or steps, on the ranks that run this, and write them to a file."""
    from mpi4py import MPI

    import mpistrat as ms
    from mpistrat.bench import constants, training_step
    from mpistrat.bench.machine import machine
    from mpistrat.bench.measure import pair
    from mpistrat.bench.result import Setting

    world = MPI.COMM_WORLD
    found: dict[str, Any] = {}
    if calibrates:
        setting = Setting(world, False, "", 1 << 30)
        found = {"machine": machine(world), "benchmarks": {"constants": constants.measure(setting).document()}}
    sizes = {"262 K": 1 << 18, "4.2 M": 1 << 22} if calibrates else SIZES
    steps = {}
    for label, count in sizes.items():
        strategy = ms.MultiWorkerMirroredStrategy(comm=world)
        ours = {training_step.OURS: training_step.ours(strategy, count)}
        steps[label] = pair(strategy.comm, ours, repetitions=200, seconds=seconds)
        strategy.close()
    if calibrates:
        found["benchmarks"]["step"] = {"values": steps}
    else:
        found = {label: each[training_step.OURS] for label, each in steps.items()}
    if world.rank == 0:
        Path(path).write_text(json.dumps(found))


def compare(documents: list[dict[str, Any]], measured: dict[tuple[int, int], dict[str, float]]) -> list[list[str]]:
    """Return a line for each held-out step: predicted, measured, and how far off."""
    from mpistrat._util.text import duration
    from mpistrat.bench.plan import predict
    from mpistrat.bench.plan_machine import Machine

    machine = Machine.read(documents)
    rows = []
    for (hosts, ranks), steps in measured.items():
        here = machine
        if hosts > 1:  # each has a part of the cores, and all of them work at once
            cores = max(machine.cores // hosts, 1)
            here = replace(machine, cores=cores, measured_cores=cores, ranks=1, alone=machine.together)
        for label, seconds in steps.items():
            step = predict(here, SIZES[label], 0.0, hosts, ranks)
            inside = step.step[0] <= seconds <= step.step[1]
            rows.append([
                f"{hosts} × {ranks}", label, duration(step.expected), duration(step.step[0]), duration(step.step[1]),
                duration(seconds), f"{100 * (step.expected / seconds - 1):+.0f} %", "yes" if inside else "no", step.doubt,
            ])  # fmt: skip
    return rows


def main() -> None:
    """Calibrate, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mpi-env", default=sys.executable, metavar="NAME=PYTHON")
    parser.add_argument("--output", type=Path, help="folder for what was measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps of one size on one layout")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.calibrate, options.seconds)
        return
    from hosts import Hosts, why_no_hosts
    from launcher import launch, mpi_env

    name, _, python = options.mpi_env.rpartition("=")
    env = mpi_env(python, name or None)
    documents, measured = [], {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if options.output is None else options.output
        folder.mkdir(parents=True, exist_ok=True)
        reason = why_no_hosts()
        two = None if reason else stack.enter_context(contextlib.closing(Hosts(2)))
        for calibrates, layouts in ((True, CALIBRATED), (False, HELD_OUT)):
            for hosts, ranks in layouts:
                if hosts > 1 and two is None:
                    print(f"two hosts left out: {reason}", flush=True)
                    continue
                path = (folder / f"{'constants' if calibrates else 'steps'}-{hosts}x{ranks}.json").resolve()
                words = ["--measure", str(path), "--seconds", str(options.seconds)] + ["--calibrate"] * calibrates
                program = [str(Path(__file__).resolve()), *words]
                result = launch(program, hosts * ranks, env, 300, hosts=two if hosts > 1 else None, cwd=ROOT)
                if result.returncode:
                    raise SystemExit(str(result))
                found = json.loads(path.read_text())
                if calibrates:
                    documents.append(found)
                else:
                    measured[hosts, ranks] = found
        rows = compare(documents, measured)
    heads = ["hosts × ranks", "parameters", "expected", "least", "most", "measured", "error", "inside", "why wide"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    close = sum(abs(float(row[6].split()[0])) <= 100 * CLOSE for row in rows)
    print(f"\nwithin {100 * CLOSE:.0f} %: {close} of {len(rows)}; in the range: {sum(row[7] == 'yes' for row in rows)}")


if __name__ == "__main__":
    main()
