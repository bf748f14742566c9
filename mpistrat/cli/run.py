"""`mpistrat run`: start a program on ranks of this machine, with the launcher that belongs to mpi4py's MPI."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from ..base.agree import Ranks
from ..base.environment import STRATEGIES
from ..base.errors import ClusterError, explain
from ..base.programs import isolated
from ..base.text import named, printable
from ..cluster.launchers import Allocation, allocation_of_job
from ..comm.monitor import leftovers
from ..launcher.plan import MOST_RANKS, Start, plan
from ..launcher.standby import environment_with, words_of
from ..launcher.supervise import supervise
from .command import DONE, PROBLEM, Command
from .terminal import complain, strategy_name, whole
from .torchrun import read_torchrun

__all__ = ["COMMAND", "program_of", "strategy_arguments"]


def program_of(args: argparse.Namespace) -> list[str]:
    """Return the program's words: a module or file of Python behind this interpreter, any other program as it is."""
    function = f"mpistrat {args.subcommand}"
    if args.module:
        if args.program:
            got = shlex.join(args.program)
            raise ValueError(explain(function, "-m", expected="options before -m, all else after", got=got))
        return [sys.executable, "-m", *args.module]
    words = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not words:
        raise ValueError(explain(function, "program", expected="a program, or -m and a module", got="none"))
    path = Path(words[0])
    if path.suffix == ".py" or path.is_dir():
        if not path.exists():
            raise ValueError(explain(function, "program", expected="a file that is there", got=words[0]))
        return [sys.executable, *words]
    found = shutil.which(words[0])
    if found is not None:
        return [found, *words[1:]]
    if path.is_file():
        return [sys.executable, *words]
    raise ValueError(explain(function, "program", expected="a file, or a program on PATH", got=words[0]))


_count = whole(1, MOST_RANKS - 1)


def strategy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that set the program's strategy."""
    parser.add_argument(
        "--strategy", type=strategy_name, choices=STRATEGIES, metavar="NAME",
        help=f"what ms.strategy_from_environment() makes: {', '.join(STRATEGIES)}",
    )  # fmt: skip
    parser.add_argument("--ps", type=_count, metavar="N", help="parameter servers among the ranks: the last ones")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mpistrat run [options] PROGRAM [ARGUMENT …]\n"
        "       mpistrat run [options] -m MODULE [ARGUMENT …]\n"
        "       mpistrat run [options] --torchrun OPTIONS PROGRAM [ARGUMENT …]"
    )
    parser.add_argument(
        "-n", "--ranks", type=_count, metavar="N",
        help="ranks, servers and evaluator included; default: SLURM's tasks in a SLURM job, else one for each GPU, or core",
    )  # fmt: skip
    strategy_arguments(parser)
    parser.add_argument(
        "--evaluator", action="store_true",
        help="the last rank evaluates checkpoints beside the others, in programs of ms.estimator",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", type=_count, metavar="N",
        help="restart the ranks when one dies, at most N times, from their state in memory or a checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--standby",
        action="store_true",
        help="with --restarts: the next ranks are there before, having imported what the program imports",
    )
    parser.add_argument(
        "--survive", action="store_true",
        help="programs of ms.survive go on, without being started again, when a rank dies: needs Open MPI 5",
    )  # fmt: skip
    parser.add_argument("--tag", action="store_true", help="each line begins with its rank, and no line is torn")
    parser.add_argument("--log-dir", metavar="DIR", help="what rank N prints goes into DIR/rank-N.txt; with --tag, too")
    parser.add_argument(
        "--numbers", action="store_true",
        help="each rank has RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in its environment, as from torchrun",
    )  # fmt: skip
    parser.add_argument(
        "--horovod", action="store_true",
        help="`import horovod.torch` finds mpistrat.horovod.torch, which runs programs of Horovod as they are",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="start a module, as python -m does"
    )
    parser.add_argument(
        "--torchrun", nargs=argparse.REMAINDER, metavar="OPTIONS …",
        help="all else is the command line of torchrun, whose ranks start under MPI; its --help lists the options",
    )  # fmt: skip
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM …",
        help="a file of Python, or another program, and its arguments",
    )  # fmt: skip


def _take_torchrun(args: argparse.Namespace) -> None:
    """Parse the words of torchrun, set the options of `mpistrat run` that they stand for, and print those without effect."""
    asked = read_torchrun(args.torchrun)
    for option, given in (("-n", args.ranks), ("-m", args.module), ("--restarts", args.restarts and asked.restarts)):
        if given:
            raise ValueError(
                explain("mpistrat run", option, expected="none with --torchrun, which says it", got=f"{given}")
            )
    args.program, args.ranks, args.restarts = list(asked.program), asked.ranks, args.restarts or asked.restarts
    args.tag, args.log_dir, args.numbers = args.tag or asked.tag, args.log_dir or asked.log_dir, True
    if asked.unused:
        print(f"mpistrat run: not used, as MPI connects the ranks: {', '.join(asked.unused)}", file=sys.stderr)


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    if args.torchrun is not None:
        _take_torchrun(args)
    try:
        start = _plan(args, args.ranks)
    except ClusterError as error:
        complain(error)
        return PROBLEM
    if args.standby:
        _check_standby(args, start)
    if args.survive and os.environ.get("SLURM_JOB_ID") and not os.environ.get("SLURMD_NODENAME"):
        expected, got = "a node of the SLURM job", "another machine"
        remedy = "Start it in the batch script"
        raise ValueError(explain("mpistrat run", "--survive", expected=expected, got=got, remedy=remedy))
    if args.json:
        print(json.dumps({"command": start.command, "environment": start.environment, "notes": start.notes}, indent=1))
        return DONE
    if args.dry_run:
        print(start)
        return DONE
    for note in start.notes[1:]:
        print(f"mpistrat run: {printable(note)}", file=sys.stderr)
    if args.log_dir is not None:
        os.makedirs(args.log_dir, exist_ok=True)
    if args.restarts or args.survive:
        if start.command[0] != "srun":
            _clean_up_after(os.getpid())
        return supervise(partial(_words, args), args.restarts or 0, args.standby, args.survive)
    start.environment |= _terminal(bar=not args.tag and args.log_dir is None)
    return _become(start)


def _check_standby(args: argparse.Namespace, start: Start) -> None:
    expected, got = "", ""
    if not args.restarts:
        expected, got = "--restarts with it", "none"
    elif os.environ.get("SLURM_JOB_ID"):
        expected, got = "ranks on this machine", "a SLURM job, whose steps would wait for each other"
    elif words_of(program_of(args)) is None:
        expected, got = "a program of Python", program_of(args)[0]
    if expected:
        raise ValueError(explain("mpistrat run", "--standby", expected=expected, got=got))


def _plan(
    args: argparse.Namespace, ranks: int | None, nodes: Allocation = Allocation(), standby: bool = False
) -> Start:
    options = {
        "evaluator": args.evaluator,
        "survive": args.survive,
        "numbers": args.numbers,
        "horovod": args.horovod,
        "tag": args.tag,
        "log_dir": args.log_dir,
        "nodes": nodes,
    }
    program = program_of(args)
    return plan((standby and words_of(program)) or program, ranks, args.strategy, args.ps, **options)


def _words(
    args: argparse.Namespace, ranks: int | None, standby: bool, strategy: str | None = None, servers: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return a command and what is added to the environment.

    Args:
        args: of the command line.
        ranks: another number of ranks than they say, or None.
        standby: whether the ranks wait until they are needed.
        strategy, servers: another strategy than they say, and its number of servers; or None.
    """
    if strategy is not None:
        args = argparse.Namespace(**{**vars(args), "strategy": strategy, "ps": servers})
    nodes = allocation_of_job()
    if nodes.lost:
        print(
            f"mpistrat run: {named('node', nodes.lost)} lost: the ranks are on the others", file=sys.stderr, flush=True
        )
    start = _plan(args, args.ranks if ranks is None else ranks, nodes, standby)
    return start.command, start.environment | _terminal(bar=not args.tag and args.log_dir is None)


def _terminal(*, bar: bool) -> dict[str, str]:
    """Return what tells ranks, whose output goes through pipes, of the terminal at the other end: its size, and that it is one.

    Args:
        bar: whether it takes what is drawn over, as bars are: not behind a tag.
    """
    streams = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]
    if not streams:
        return {}
    size = shutil.get_terminal_size()  # what COLUMNS and LINES say already comes first
    told = {"MPISTRAT_TERMINAL": ",".join(streams)} if bar else {}
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines), **told}


def _become(start: Start) -> NoReturn:
    """Let the launcher take this process's place: no process between it and who sends signals or takes its status."""
    if start.command[0] != "srun":  # whose ranks may be on other machines
        _clean_up_after(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the launcher would, too
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(start.command[0], start.command, environment_with(start.environment))


def _clean_up_after(launcher: int) -> None:
    """Start a daemon that removes what killed ranks leave in /dev/shm when the launcher has ended."""
    with contextlib.suppress(OSError):
        subprocess.run(
            isolated(leftovers.__file__, str(launcher)), env={}, cwd="/", check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


COMMAND = Command(
    summary="start a program on ranks of this machine",
    text="""\
Start a program on several ranks of this machine, by the mpiexec of the MPI that mpi4py loads: the one installed with
the library, or with Python, or on PATH. $MPIEXEC overrides it. In a SLURM job srun starts the
ranks, on all of the job's nodes.

Each rank's BLAS gets its share of the cores by OMP_NUM_THREADS, unless you set that or a similar variable. Options that
the MPI needs are added; --dry-run shows the whole command. --strategy and --ps reach the program as MPISTRAT_STRATEGY and
MPISTRAT_NUM_PS, which ms.strategy_from_environment() reads, --evaluator as MPISTRAT_EVALUATOR, which ms.estimator
reads. The ranks learn the terminal's width (COLUMNS).

After --torchrun comes a command line of torchrun. Its ranks start under MPI, with RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE in their environment; --numbers sets these four without it.

With --horovod a program that imports horovod.torch runs on mpistrat.horovod, whether Horovod is installed or not.

Files of killed ranks in /dev/shm are removed after the end.

With --restarts the ranks are restarted when one is killed or fails, until the program ends. A program with
ms.train.Checkpoints resumes from its state of a second ago, in each node's memory, or from the newest file. After three
deaths at the same step the job ends. With --standby the next ranks are ready: they have imported the same modules, have
started MPI, and wait. They take memory, and save most of the start.

Without --restarts, the launcher replaces this process. Ctrl-C stops the program. SIGUSR1 is forwarded. SIGTERM is
forwarded (MPICH) or stops the program (Open MPI).""",
    examples=(
        "mpistrat run train.py",
        "mpistrat run -n 4 train.py --epochs 3",
        "mpistrat run -n 4 --ps 1 train.py",
        "mpistrat run -n 5 --evaluator train.py",
        "mpistrat run -n 4 --restarts 20 --standby train.py",
        "mpistrat run -n 2 -m mpistrat.examples.digits --epochs 2",
        "mpistrat run -n 4 --tag --log-dir logs train.py",
        "mpistrat run --torchrun --standalone --nproc-per-node 4 train.py",
        "mpistrat run -n 4 --horovod train.py",
        "mpistrat run -n 4 --dry-run train.py",
    ),
    arguments=_arguments,
    run=_run,
    collective=False,
    status="the program's, as its launcher reports it; if nothing was started, 1 where no launcher fits, 2 for wrong use",
)
