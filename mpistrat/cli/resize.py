"""`mpistrat resize`: have a running job continue with another number of ranks, or another strategy."""

from __future__ import annotations

import argparse
import os

from ..base.agree import Ranks
from ..base.text import counted
from ..comm import job_files
from ..launcher.plan import MOST_RANKS
from .command import DONE, PROBLEM, Command
from .run import strategy_arguments
from .terminal import complain, whole

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", type=whole(1), metavar="JOB",
        help="the process of `mpistrat run --restarts`; default the only one of yours on this machine",
    )  # fmt: skip
    parser.add_argument("ranks", type=whole(1, MOST_RANKS - 1), metavar="N", help="the new number of ranks")
    strategy_arguments(parser)


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    jobs = job_files.supervisors()
    if args.job is None and len(jobs) == 1:
        args.job = next(iter(jobs))
    if args.job not in jobs:
        here = f"here are {', '.join(map(str, jobs))}" if jobs else "there is none here"
        asked = "name one job" if args.job is None else f"process {args.job} is no `mpistrat run --restarts` of yours"
        complain(f"{asked}: {here}")
        return PROBLEM
    strategy = "parameter_server" if args.ps and args.strategy is None else args.strategy
    job_files.ask_for_size(jobs[args.job], args.ranks, strategy, args.ps)
    os.kill(args.job, job_files.RESIZE)
    print(f"the job continues with {counted(args.ranks, 'rank')} when its ranks have stopped")
    return DONE


COMMAND = Command(
    summary="continue a running job with another number of ranks, or another strategy",
    text="""\
Continue a job that `mpistrat run --restarts` started with more ranks, or fewer. Its ranks get the signal to stop, as before a
time limit: a program that then saves and ends with status 42 (ms.RESTART_EXIT_CODE) resumes where it was. Results are
those of the same global batches.

With --strategy or --ps it continues under another strategy, if the program makes its strategy by
ms.strategy_from_environment().""",
    examples=("mpistrat resize 4", "mpistrat resize 12345 2", "mpistrat resize 4 --ps 1"),
    arguments=_arguments,
    run=_run,
    collective=False,
)
