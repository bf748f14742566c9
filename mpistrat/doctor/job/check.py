"""The whole check: all items in turn, then one JSON file and one page."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...base.errors import explain
from ...base.version import __version__
from .items import ITEMS, TOTAL_SECONDS, CheckItem
from .page import page
from .steps import ItemReport, run_item

__all__ = ["check_job", "passed"]

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
# Settings of MPI, networks and this package, by prefix.
_PREFIXES = (
    "UCX_", "FI_", "MPICH_", "MPIR_CVAR_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "I_MPI_", "PSM2_", "PSM3_", "MV2_", "NCCL_",
    "HDF5_", "MPISTRAT_", "OMP_", "SLURM_MPI_TYPE",
)  # fmt: skip
_LEAST = 10.0  # seconds of a step
_LONGEST = 200  # characters of a setting
_ENDING = 25.0  # seconds for a step to end after its limit
_ENDED = 128 + signal.SIGTERM  # exit status


def check_job(
    launcher: Sequence[str], folder: Path, seconds: float, show: Callable[[ItemReport], None]
) -> tuple[list[ItemReport], Path, Path]:
    """Run all items, and return their results, the JSON file and the page. Both files are rewritten after each item.

    An item that fails or hangs does not end the others. SIGTERM ends the check and its running launcher, and removes its folder.
    Files of other checks of the same job stay: the names then end in -2, -3, ….

    Args:
        launcher: the command that starts the ranks of a program: `srun --mpi=pmix`.
        folder: for the files, on a file system that all nodes see.
        seconds: for all items.
        show: called with each result.

    Raises:
        OSError: the folder cannot be written.
        SystemExit: with status 143, after SIGTERM.
    """
    if not folder.is_dir():
        raise OSError(explain("doctor", "--folder", expected="a folder that is there", got=str(folder)))
    scale, end = seconds / TOTAL_SECONDS, time.monotonic() + seconds
    about = {
        "mpistrat": __version__, "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "launcher": list(launcher), "seconds": seconds, "variables": _variables(),
    }  # fmt: skip
    reports: list[ItemReport] = []
    with _ended_by_sigterm(), _own_files(folder) as (work, document, html):
        for item in ITEMS:
            limit = min(item.seconds * scale, end - time.monotonic() - _ENDING * min(scale, 1))
            if limit < _LEAST * min(scale, 1):
                report = ItemReport(item.name, item.proves, "not run", "no time was left for it")
            else:
                report = run_item(item, launcher, work.absolute(), limit)
            reports.append(report)
            known = [*reports, *(_waiting(item) for item in ITEMS[len(reports) :])]
            _write(document, json.dumps({**about, **_document(known)}, indent=1) + "\n")
            _write(html, page(about, known))
            show(report)
    return reports, document, html


def passed(reports: Sequence[ItemReport]) -> bool:
    """Return True if every item has a report, and none failed, hung or was not run."""
    well = {report.name for report in reports if report.status in ("passed", "skipped")}
    return well == {item.name for item in ITEMS} and len(reports) == len(ITEMS)


def _waiting(item: CheckItem) -> ItemReport:
    """Return the report of an item without a result."""
    what = "the check has not ended: it is still running, or was cut off"
    return ItemReport(item.name, item.proves, "not run", what)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, once, to end child processes. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would end the clean-up
        raise SystemExit(_ENDED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def _own_files(folder: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Yield a temporary folder and the paths of the results, under the first unused name."""
    first = f"mpistrat-check-{_number()}"
    for count in itertools.count(1):
        name = first if count == 1 else f"{first}-{count}"
        work, document, html = (folder / f"{name}.{ending}" for ending in ("files", "json", "html"))
        try:
            work.mkdir(mode=0o700)
        except FileExistsError:
            continue
        try:
            if not (document.exists() or html.exists()):
                yield work, document, html
                return
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _document(reports: Sequence[ItemReport]) -> dict[str, Any]:
    return {"passed": passed(reports), "items": [asdict(report) for report in reports]}


def _variables() -> dict[str, str]:
    return {name: value[:_LONGEST] for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def _number() -> str:
    """Return the batch system's number of this job, or the time."""
    number = next((os.environ[name] for name in _JOBS if os.environ.get(name)), "")
    kept = "".join(letter for letter in number.split(".")[0] if letter.isalnum() or letter in "_-")
    return kept or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
