"""`mpistrat doctor`: is this machine, or this job, fit for training?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.agree import Ranks
from ..base.errors import explain
from ..base.text import counted, did_you_mean, printable
from ..cluster.launcher_variables import launched_rank, launched_size
from ..doctor.finding import Finding, Summary, worst
from ..doctor.job.items import TOTAL_SECONDS
from ..doctor.login import NEEDS, check_login
from ..doctor.ranks import check_ranks
from .command import DONE, PROBLEM, Command
from .terminal import console, names, positive

if TYPE_CHECKING:
    from rich.table import Table

    from ..doctor.job.steps import ItemReport

__all__ = ["COMMAND"]

_COLOURS = {"OK": "green", "warning": "yellow", "problem": "bold red"}
_RANKS = 64  # shown at most
_LIMIT = 60.0  # seconds


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", action="store_true", help="look at all ranks of this job together: start it with srun or mpiexec"
    )
    parser.add_argument(
        "--need",
        metavar="NAME,…",
        type=names,
        default=[],
        help=f"what the program cannot do without, of {', '.join(NEEDS)}: what is missing of it is a problem",
    )
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=positive, default=None,
        help=f"for each thing that may hang (default: {_LIMIT:g}); with --job for all together (default: {TOTAL_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--clean", action="store_true", help="remove your files in /dev/shm that no living process uses, of killed jobs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--job", metavar="LAUNCHER …", nargs=argparse.REMAINDER,
        help="in a batch script: check the network and the file system; all else are the words that start the job's ranks. "
        "`mpistrat job --check` writes such a script",
    )  # fmt: skip
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="with --job: for files, which are removed, and for the results (default: this one)",
    )


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    for name in args.need:
        if name not in NEEDS:
            expected, remedy = f"one of {', '.join(NEEDS)}", did_you_mean(name, NEEDS)
            raise ValueError(explain("doctor", "--need", expected=expected, got=repr(name), remedy=remedy))
    limit = args.time_limit if args.time_limit is not None else TOTAL_SECONDS if args.job is not None else _LIMIT
    if args.ranks and args.clean:
        raise ValueError(explain("doctor", "--clean", expected="it without --ranks", got="both"))
    if args.folder is not None and args.job is None:
        raise ValueError(explain("doctor", "--folder", expected="--job with it", got="none"))
    if args.job is not None:
        return _check_job(args, limit)
    if args.ranks:
        summary = check_ranks(args.need, limit)
    elif launched_rank() in (None, 0):
        summary = Summary(check_login(args.need, limit, clean=args.clean))
    else:  # one process speaks for this machine
        return DONE
    if launched_rank() in (None, 0):
        _show(summary, as_json=args.json, plain=args.ranks)
    return PROBLEM if worst(summary.findings) == "problem" else DONE


def _check_job(args: argparse.Namespace, limit: float) -> int:
    """Run the check of a job, print each result as it comes, and return the exit status."""
    from ..doctor.job.check import check_job, passed

    expected, got = "", ""
    if not args.job:
        expected, got = "the words that start the job's ranks, as srun --mpi=pmix", "none"
    elif args.ranks or args.clean or args.json or args.need:
        expected, got = "it without --ranks, --clean, --json and --need", "one of them"
    elif (launched := launched_size()) is not None and launched[0] > 1:
        expected, got = "one process, in the batch script", f"one of {launched[0]} that a launcher started"
    if expected:
        raise ValueError(explain("doctor", "--job", expected=expected, got=got))
    out = console(plain=True)

    def show(report: ItemReport) -> None:
        what = printable(report.what or report.proves, keep="\n")
        out.print(f"{report.status:8} {report.name:12} {report.seconds:4.0f} s  {what}", markup=False, highlight=False)

    reports, document, page = check_job(args.job, Path(args.folder or "."), limit, show)
    out.print(f"\nwrote {document} and {page}", markup=False, highlight=False, soft_wrap=True)
    return DONE if passed(reports) else PROBLEM


def _show(summary: Summary, *, as_json: bool, plain: bool) -> None:
    if as_json:
        print(json.dumps(summary.document(), indent=1))
        return
    out = console(plain=plain)
    if summary.ranks:
        out.print(_rank_table(summary.ranks))
        more = len(summary.ranks) - _RANKS
        out.print(f"… and {more} more ranks; --json lists all of them\n" if more > 0 else "")
    out.print(_finding_table(summary.findings))
    out.print(f"\n{_conclusion(summary.findings)}")


def _finding_table(findings: Sequence[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        what = Text(printable(finding.what, keep="\n"))
        if finding.remedy:
            what.append("\n→ ", "bold")
            what.append(printable(finding.remedy, keep="\n"), "" if finding.status == "OK" else "bold")
        table.add_row(Text(finding.status, _COLOURS[finding.status]), finding.name, what)
    return table


def _rank_table(ranks: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rank", "host", "local", "role", "GPU", "cores", "threads", "MPI"):
        table.add_column(title, overflow="fold", justify="right" if title in ("rank", "local", "threads") else "left")
    for rank in ranks[:_RANKS]:
        gpus = ", ".join(rank["gpus"]) or "-"
        table.add_row(
            str(rank["rank"]), rank["host"], str(rank["local_rank"]), rank["role"], gpus, rank["cores"],
            str(rank["threads"]), rank["mpi"],
        )  # fmt: skip
    return table


def _conclusion(findings: Sequence[Finding]) -> str:
    parts = []
    for status in ("problem", "warning"):
        count = sum(finding.status == status for finding in findings)
        if count:
            parts.append(counted(count, status))
    return " and ".join(parts) if parts else "all is well"


COMMAND = Command(
    "look for what keeps programs from running, or makes them slow",
    "Look at this machine: Python, MPI and the launcher that fits it, threads, one-sided calls, shared memory, GPUs, HDF5,\n"
    "limits, what crashed jobs left behind. With --ranks, under srun or mpiexec: where the ranks are and what they have, and\n"
    "whether that agrees; then an all-reduce and a window are tried. With --job, in a batch script: collectives, windows,\n"
    "PyTorch, a restart after a kill, and files, each in a job step of its own; results go into a JSON file and a page.\n"
    "Each finding is OK, a warning (it works, but slowly or not everywhere) or a problem, with what to do. Warnings alone end\n"
    "with status 0. Nothing is changed; --clean alone removes files of yours that killed jobs left in /dev/shm.",
    (
        "mpistrat doctor",
        "mpistrat doctor --clean",
        "mpistrat doctor --need nccl,parallel-hdf5 --json",
        "srun mpistrat doctor --ranks",
        "mpiexec -n 4 mpistrat doctor --ranks",
        "mpistrat doctor --job srun --mpi=pmix",
        "mpistrat doctor --folder /scratch/me --job mpiexec -n 8 -ppn 4",
    ),
    _arguments,
    _run,
    collective=False,
)
