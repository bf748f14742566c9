"""Run cases one after another, and return one record of each."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from tests.nets.differential.case import Case
from tests.nets.differential.events import finish, happen
from tests.nets.differential.layouts import RANK, SIZE, WORLD
from tests.nets.differential.run import Failure, Run
from tests.nets.differential.steps import run_segment


def run_cases(seed: int, first: int, last: int, kinds: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Run cases `first` to `last` - 1 of a seed; yield a record before and after each. Collective."""
    folder = WORLD.bcast(tempfile.mkdtemp(prefix="differential-") if RANK == 0 else None)
    try:
        for number in range(first, last):
            yield {"number": number, "begins": True}
            case = Case(seed, number, kinds)
            tags, problem, bits = run_case(case, folder)
            record = {
                "number": number,
                "result": "wrong" if problem else "equal",
                "bits": bits,
                "tags": sorted(f"{k}|{t}" for k, t in tags),
            }
            yield record | ({"detail": problem, "config": described(case)} if problem else {})
    finally:
        if RANK == 0:
            shutil.rmtree(folder, ignore_errors=True)


def run_case(case: Case, folder: str) -> tuple[set[tuple[str, str]], str, str]:
    """Run a case; return its options, the first difference ("" without one) and the digests of all ranks. Collective."""
    run, text = Run(case, folder), ""
    try:
        run.start()
        for segment in range(case.segments):
            run_segment(run, segment)
            if segment < len(case.events):
                happen(run, segment, case.events[segment])
        finish(run)
        tag_case(run)
    except Failure as error:
        text = str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exc().splitlines(True)[-14:])
    texts = WORLD.allgather(text)
    try:
        run.close()
    except Exception as error:
        texts.append(f"close: {type(error).__name__}: {error}")
    tags = set().union(*WORLD.allgather(run.tags))
    WORLD.Barrier()
    if RANK == 0:
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
    bits = "-".join(WORLD.gather(run.bits.hexdigest()) or ())
    return tags, next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), ""), bits


def tag_case(run: Run) -> None:
    """Count the options that hold for a whole case."""
    case = run.case
    for name, on in (("large", case.large), ("several optimizers", len(case.optimizers) > 1)):
        if on:
            run.tag(name)
    for variable in case.variables.values():
        run.tag(variable["dtype"])
        for name in ("constraint", "excluded"):
            if variable[name]:
                run.tag(f"variable: {name}")


def described(case: Case) -> dict[str, Any]:
    """Return what a reader needs to know of a case that failed."""
    keys = ("rule", "args", "common", "scaled", "rate")
    shown = ("name", "shape", "dtype", "table", "layout", "optimizer", "excluded")
    return {
        "ranks": SIZE, "strategy": case.strategy, "events": case.events, "later": [spec for spec in case.later if spec],
        "optimizers": [{key: spec[key] for key in keys} for spec in case.optimizers],
        "variables": [{key: v[key] for key in shown} for v in case.variables.values()], "data": case.data,
        **{key: bool(getattr(case, key)) for key in ("begin", "manual", "absent", "overflow")}, "delivery": case.delivery,
    }  # fmt: skip
