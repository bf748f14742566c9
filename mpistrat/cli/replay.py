"""`mpistrat replay`: a program with the layouts of an earlier run, which went on with fewer ranks or more, at the same steps."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from ..base.agree import Ranks
from ..base.environment import RESTART_EXIT_CODE
from ..base.errors import ClusterError, explain
from ..base.text import counted
from ..launcher.plan import plan
from ..state.file import CheckpointFile, DamagedError
from .command import DONE, PROBLEM, Command
from .run import program_of, strategy_arguments
from .terminal import complain

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mpistrat replay [options] FILE PROGRAM [ARGUMENT …]\n"
        "       mpistrat replay [options] FILE -m MODULE [ARGUMENT …]"
    )
    strategy_arguments(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="a checkpoint of that run")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="start a module, as python -m does"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM …", help="as for mpistrat run")


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    program = program_of(args)
    try:
        layouts = _layouts(args.file)
        starts = [plan(program, number, args.strategy, args.ps) for _, number in layouts]
    except (ClusterError, OSError, ValueError) as error:
        complain(error)
        return PROBLEM
    ends = [step for step, _ in layouts[1:]]
    for (begin, number), end, start in zip(layouts, [*ends, 0], starts, strict=True):
        until = f"to step {end}" if end else "to the end"
        print(f"mpistrat replay: {counted(number, 'rank')} from step {begin} {until}", file=sys.stderr, flush=True)
        environment = {**os.environ, **start.environment, "MPISTRAT_UNTIL": str(end)}
        status = subprocess.run(start.command, env=environment, check=False).returncode
        if end and status != RESTART_EXIT_CODE:
            expected = (
                f"a program that saves after step {end} by ms.train.Checkpoints, and ends with {RESTART_EXIT_CODE}"
            )
            complain(explain("mpistrat replay", "program", expected=expected, got=status))
            return PROBLEM
        if not end and status:
            return PROBLEM
    return DONE


def _layouts(path: Path) -> list[tuple[int, int]]:
    """Return the layouts that a file tells of: after which step, and how many ranks; those that took a step.

    Raises:
        OSError: it cannot be read, or is no checkpoint.
        ValueError: it tells of none, or of several nodes.
    """
    if not path.exists():
        got = f"no such file in {Path.cwd()}" if path.parent == Path() else "no such file"
        raise FileNotFoundError(explain("mpistrat replay", str(path), expected="a checkpoint", got=got))
    try:
        with CheckpointFile(path) as file:
            notes = file.extra() or {}
    except DamagedError as error:
        raise OSError(f"mpistrat replay: {path}: {error}") from None
    layouts = [(int(step), list(map(int, nodes))) for step, nodes in notes.get("layouts", [])]
    if not layouts:
        expected, got = "a file of ms.train.Checkpoints, which notes the layouts", "a file without layouts"
        raise ValueError(explain("mpistrat replay", str(path), expected=expected, got=got))
    if any(len(nodes) > 1 for _, nodes in layouts):
        nodes = max((nodes for _, nodes in layouts), key=len)
        expected, got = "a run on one node", f"{len(nodes)} nodes with {', '.join(map(str, nodes))} ranks"
        raise ValueError(explain("mpistrat replay", str(path), expected=expected, got=got))
    steps = [step for step, _ in layouts] + [int(notes["step"])]
    return [
        (step, sum(nodes)) for (step, nodes), (begin, end) in zip(layouts, pairwise(steps), strict=True) if begin < end
    ]


COMMAND = Command(
    summary="run a program with the layouts of an earlier run, to get its bits",
    text="""\
Repeat an earlier run of a program. A run that continued with fewer ranks after some died, or was resized, divided its
batches over another number of ranks from then on, so its sums are rounded differently from those of an undisturbed run. Its
checkpoints have the steps. The program runs with the first number of ranks up to the first of these steps, saves, and
continues with the next number: the result is the same to the last bit. It must start in a new folder, and resume from
its checkpoints.

Runs on one node can be repeated. Those with replicas= need no replay: their bits don't depend on layouts.""",
    examples=("mpistrat replay checkpoints/step-0000000600.h5 train.py --folder again",),
    arguments=_arguments,
    run=_run,
    collective=False,
)
