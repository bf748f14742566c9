"""`mpistrat bench`: the package's own benchmarks on the user's machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from ..base.agree import Ranks
from ..base.errors import explain
from ..bench import BENCHMARKS, Report, run
from ..bench.plot import draw
from ..bench.result import Result, caption, layout
from ..cluster.topology import check_comm, running_mpi
from .command import DONE, Command
from .terminal import check_folders, console, draw_or_tell

__all__ = ["COMMAND"]

_PLOT = "mpistrat_bench.png"
_WIDTH = 79  # of what is printed: under mpiexec the terminal's is not known
_SPLIT = re.compile(r"(,| \+) ")  # heads of columns, into lines


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", action="append", choices=list(BENCHMARKS), help="this benchmark; may be given several times"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and short measurements: about ten seconds")
    parser.add_argument(
        "--json", metavar="FILE", help="write all figures there as JSON, with the machine and versions; - for stdout"
    )
    parser.add_argument("--plot", metavar="FILE", default=_PLOT, help=f"the picture; default {_PLOT}")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.add_argument(
        "--folder", metavar="DIR", default=tempfile.gettempdir(),
        help="for 64 MB of HDF5 files, which are removed; default %(default)s",
    )  # fmt: skip


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    with ranks.together():
        there = os.path.isdir(args.folder)
        if not there or not os.access(args.folder, os.W_OK | os.X_OK):
            expected, got = "a folder that can be written", "no permission" if there else "no such folder"
            raise OSError(explain("--folder", args.folder, expected=expected, got=got))
        if ranks.rank == 0:
            check_folders({"--json": args.json})
            if (
                not args.no_plot and args.plot != _PLOT
            ):  # without the default picture the figures are printed all the same
                check_folders({"--plot": args.plot})
    mpi = running_mpi("mpistrat bench")
    comm = check_comm(mpi, ranks.comm, "mpistrat bench").Dup()
    show = _Show(plain=ranks.size > 1, silent=args.json == "-" or ranks.rank > 0)
    document = run(comm, args.only or BENCHMARKS, quick=args.quick, folder=args.folder, tell=show.report)
    comm.Free()
    status = DONE
    with ranks.together():
        if ranks.rank == 0:
            show.end(document)
            if args.json:
                _write(args.json, json.dumps(document, indent=1) + "\n")
            if not args.no_plot and show.results:
                status = draw_or_tell(args.plot, lambda path: draw(path, show.results, document["machine"]))
    return status


class _Show:
    """Shows each benchmark's table as it comes."""

    def __init__(self, *, plain: bool, silent: bool) -> None:
        self.results: dict[str, Result] = {}
        self._console = console(plain=plain)
        self._silent = silent

    def report(self, report: Report) -> None:
        """Take one benchmark's report."""
        if report.result is not None:
            self.results[report.name] = report.result
        if self._silent:
            return
        if report.result is None:
            self._console.print(f"{report.name}: left out: {report.left_out}\n")
            return
        from rich.table import Table

        self._console.print(f"{report.result.title} ({report.seconds:.0f} s)")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, head in enumerate(report.result.header()):
            table.add_column(_SPLIT.sub(r"\1\n", head), justify="left" if number == 0 else "right")
        for row in report.result.rows():
            table.add_row(*row)
        self._console.print(table)
        self._console.print(f"{textwrap.fill(report.result.note, _WIDTH)}\n")

    def end(self, document: dict[str, Any]) -> None:
        """Print on what machine it was measured."""
        if self._silent:
            return
        about = document["machine"]
        self._console.print(f"{layout(about)}\n{textwrap.fill(caption([about]), _WIDTH)}")
        cores = about["cores"] * about["nodes"]
        if about["ranks"] > cores:
            few = f"{about['ranks']} ranks on {cores} cores wait for each other: measure with at most as many ranks."
            self._console.print(textwrap.fill(few, _WIDTH))
        if document["load_before"] > max(1.0, about["cores"] / 2):
            busy = f"Other programs were busy here (load {document['load_before']}): these figures say little."
            self._console.print(textwrap.fill(busy, _WIDTH))


def _write(file: str, text: str) -> None:
    if file == "-":
        print(text, end="")
    else:
        Path(file).write_text(text, encoding="utf-8")


COMMAND = Command(
    summary="measure this machine: all-reduce, step, parameter servers, input",
    text="""\
Measure what the package does on this machine: all_reduce and step next to plain MPI in the same run, window (reads and
pushes of parameter servers, by transport) and input (batches out of HDF5 files). About a minute; at most 1 GB of memory a
rank and a quarter of what a node has left; 64 MB of files in a temporary folder, removed at the end.

A figure is the median of several repetitions of the slowest rank; a barrier precedes each, and those who are compared
take turns. Start as many ranks as the program will have.""",
    examples=(
        "mpistrat run -n 4 -m mpistrat bench",
        "mpistrat run -n 2 -m mpistrat bench --quick --only all_reduce",
        "srun --mpi=pmix mpistrat bench --json bench.json --plot bench.png",
        "mpistrat bench --only input --folder /scratch/me",
    ),
    arguments=_arguments,
    run=_run,
)
