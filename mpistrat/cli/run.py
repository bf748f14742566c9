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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from ..base.agree import Ranks
from ..base.environment import STRATEGIES
from ..base.errors import ClusterError, explain
from ..base.programs import isolated
from ..base.text import counted, named, printable
from ..cluster.allocation import Allocation, allocation_of_job
from ..cluster.cores import THREAD_VARIABLES, usable_cores
from ..cluster.devices import count_gpus
from ..cluster.launcher_variables import RANK_VARIABLES, launched_size
from ..cluster.launchers import USER, MPILibrary, choose_launcher, find_launchers, loaded_library, mismatch
from ..cluster.pmi import fitting_pmi, offered_pmis, srun_environment, unset_variable
from ..cluster.world import UNSAFE
from ..comm.monitor import leftovers
from ..launcher import pass_words, rank_output
from ..launcher.standby import environment_with, words_of
from . import supervise
from .command import DONE, PROBLEM, Command
from .terminal import complain, strategy_name

__all__ = ["COMMAND", "Start", "plan", "program_of", "strategy_arguments"]

_INFINIBAND = Path("/sys/class/infiniband")  # its network cards, and those of its relatives
_MOST_RANKS = 1 << 16
# What launchers change among a program's words: ":" ends the program, and what follows is started as another one (all); Open
# MPI 5 writes the others in another way.
_OF_LAUNCHERS = frozenset({":", "--map-by", "--rank-by", "--bind-to", "--runtime-options"})


@dataclass
class Start:
    """What is started.

    Attributes:
        command: the words; no shell reads them.
        ranks: how many it starts.
        environment: what is added to this process's.
        notes: what a person should know.
    """

    command: list[str]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """A line for a shell, behind comments."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*(f"# {note}" for note in self.notes), " ".join([*settings, shlex.join(self.command)])])


def plan(
    program: Sequence[str],
    ranks: int | None,
    strategy: str | None,
    servers: int | None,
    *,
    evaluator: bool = False,
    survive: bool = False,
    tag: bool = False,
    log_dir: str | None = None,
    nodes: Allocation = Allocation(),
) -> Start:
    """Return how to start a program. Starts no MPI.

    Args:
        program: its words, that of the interpreter included.
        ranks: their number, servers included; None for the default.
        strategy: for MPISTRAT_STRATEGY.
        servers: for MPISTRAT_NUM_PS.
        evaluator: for MPISTRAT_EVALUATOR: the last rank evaluates.
        survive: MPI goes on when a rank dies.
        tag: each line that a rank prints begins with its number.
        log_dir: folder for a file of each rank; without `tag` nothing else shows what they print.
        nodes: of a SLURM job; those that are lost are left out, with their share of the ranks.

    Raises:
        ClusterError: mpi4py finds no MPI, or one that cannot survive, or no launcher here belongs to it.
        ValueError: the counts contradict each other, or a launcher started this process with others.
    """
    launched = launched_size()
    if launched is not None and launched[0] > 1:
        got = f"one of {launched[0]} processes ({launched[1]}={launched[0]})"
        remedy = f"Leave `mpistrat run` out: start {shlex.join(program)} itself"
        raise ValueError(explain("mpistrat run", "", expected="to start the ranks", got=got, remedy=remedy))
    strategy = _strategy(strategy, servers)
    in_slurm = bool(os.environ.get("SLURM_JOB_ID")) and shutil.which("srun") is not None
    if ranks is None:
        ranks = _default_ranks(strategy, servers, in_slurm)
    others = (servers or 0) + evaluator
    if others and ranks <= others:
        got = f"{counted(ranks, 'rank')} for {', '.join(_others(servers, evaluator))}"
        option = "--ps" if servers else "--evaluator"
        raise ValueError(
            explain("mpistrat run", option, expected="a worker besides", got=got, remedy="Start more ranks")
        )
    library = loaded_library()
    ranks = max(nodes.share(ranks), others + 1)
    if in_slurm and not survive:
        start = _by_srun(library, ranks, nodes)
    else:
        start = _by_mpiexec(library, ranks, _threads(ranks), nodes)
    if survive:
        _let_survive(start, library)
    if strategy is not None:
        start.environment["MPISTRAT_STRATEGY"] = strategy
    if servers is not None:
        start.environment["MPISTRAT_NUM_PS"] = str(servers)
    if evaluator:
        start.environment["MPISTRAT_EVALUATOR"] = "1"
    if tag or log_dir is not None:
        folder = "" if log_dir is None else os.path.abspath(log_dir)
        variables = ",".join(RANK_VARIABLES.values())
        start.command += isolated(rank_output.__file__, variables, "1" if tag else "0", folder)
        start.environment.setdefault("PYTHONUNBUFFERED", os.environ.get("PYTHONUNBUFFERED") or "1")
    start.command += _passed(program)
    return start


def _passed(program: Sequence[str]) -> list[str]:
    """Return a program's words in a form that every launcher passes on as it is."""
    if _OF_LAUNCHERS.isdisjoint(program):
        return list(program)
    return isolated(pass_words.__file__, *(f"={word}" for word in program))


def _let_survive(start: Start, library: MPILibrary) -> None:
    """Have Open MPI go on when a rank dies."""
    if not library.survives:
        remedy = "Leave --survive out: with --restarts the job goes on, too, under any MPI"
        expected = "Open MPI 5 or newer, which goes on when a rank dies"
        raise ClusterError(explain("mpistrat run", "--survive", expected=expected, got=str(library), remedy=remedy))
    start.command += ["--with-ft", "ulfm"]
    setting = os.environ.get("OMPI_MCA_coll", "^")  # noqa: SIM112
    if setting.startswith("^"):  # names of what is left out
        names = [*filter(None, setting[1:].split(",")), *UNSAFE]
        start.environment["OMPI_MCA_coll"] = "^" + ",".join(dict.fromkeys(names))


def _others(servers: int | None, evaluator: bool) -> list[str]:
    return [*([counted(servers, "server")] if servers else []), *(["an evaluator"] if evaluator else [])]


def _strategy(strategy: str | None, servers: int | None) -> str | None:
    if servers is None:
        return strategy
    if strategy not in (None, "parameter_server"):
        expected = "--strategy parameter_server, which has servers"
        raise ValueError(explain("mpistrat run", "--ps", expected=expected, got=f"--strategy {strategy}"))
    return "parameter_server"


def _default_ranks(strategy: str | None, servers: int | None, in_slurm: bool) -> int:
    """Return the job's tasks; or a rank for each GPU, without GPUs for each core; at least one worker."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if in_slurm and tasks.isascii() and tasks.isdigit() and 0 < int(tasks) < _MOST_RANKS:
        return int(tasks)
    if strategy == "one_device":
        return 1
    ranks = count_gpus() or usable_cores()
    if strategy == "parameter_server":
        return max(ranks, 1 + (servers or 1))
    return ranks


def _threads(ranks: int) -> dict[str, str]:
    """Return the setting of threads for each rank's share of the cores, unless the user chose."""
    if any(os.environ.get(name) for name in THREAD_VARIABLES):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}


def _by_mpiexec(
    library: MPILibrary,
    ranks: int,
    environment: dict[str, str],
    nodes: Allocation = Allocation(),
) -> Start:
    """Return the start by the mpiexec of mpi4py's MPI."""
    launchers = find_launchers(library)
    launcher = choose_launcher(library, launchers)
    if launcher is None:
        found = "; ".join(f"{one.path}, but {mismatch(library, one)}" for one in launchers) or "none"
        remedy = "Put its folder on PATH, or name it: export MPIEXEC=/path/to/mpiexec"
        expected = f"an mpiexec that belongs to {library}"
        raise ClusterError(explain("mpistrat run", "launcher", expected=expected, got=found, remedy=remedy))
    command = [*launcher.command]
    in_slurm = bool(os.environ.get("SLURM_JOB_ID"))
    if library.family == "openmpi":
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--allow-run-as-root")
        command += ["--bind-to", "none"]  # it would bind two ranks to one core each, whatever their threads
        if ranks > usable_cores() and not in_slurm:
            command.append("--oversubscribe")
        if "OMPI_MCA_osc" not in os.environ and not in_slurm and not _network_cards():
            environment["OMPI_MCA_osc"] = "^ucx"  # its one-sided calls fail where UCX finds no network card
    if nodes.lost:
        each = -(-ranks // len(nodes.living))
        command += ["-host" if library.family == "openmpi" else "-hosts"]
        command += [",".join(f"{name}:{each}" for name in nodes.living)]
    where = f" from {library.path}" if library.path else ""
    notes = [f"{library}{where}; {counted(ranks, 'rank')} on {usable_cores()} cores"]
    given = os.environ.get("MPIEXEC")
    if given and launcher.where != USER:
        why = next((mismatch(library, one) for one in launchers if one.where == USER), "there is no such program")
        notes.append(f"$MPIEXEC ({given}) is left out: {why}")
    return Start([*command, "-n", str(ranks)], ranks, environment, notes)


def _by_srun(library: MPILibrary, ranks: int, nodes: Allocation) -> Start:
    """Return the start by srun in a SLURM allocation; by mpiexec where srun has no protocol for this MPI."""
    offered = offered_pmis()
    pmi = fitting_pmi(library, offered)
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    chosen = any(os.environ.get(name) for name in THREAD_VARIABLES)
    environment = {"OMP_NUM_THREADS": cpus} if cpus.isdigit() and not chosen else {}
    if pmi is None:
        start = _by_mpiexec(library, ranks, environment, nodes)
        offers = f"offers {', '.join(offered)}" if offered else "does not answer --mpi=list"
        start.notes.append(f"srun {offers}: nothing for {library}, so its own mpiexec starts the ranks")
        return start
    command = ["srun", f"--ntasks={ranks}", f"--mpi={pmi}", "--kill-on-bad-exit=1"]
    if nodes.lost:
        command += [f"--nodes={min(len(nodes.living), ranks)}", f"--exclude={','.join(nodes.lost)}"]
    if cpus.isdigit():
        command.append(f"--cpus-per-task={cpus}")  # since 22.05 srun does not take it from the job
    notes = [f"{library}; {ranks} tasks in SLURM's job {os.environ['SLURM_JOB_ID']}"]
    wanted = {name: value for name, value in srun_environment(library, pmi).items() if name not in os.environ}
    environment |= wanted
    if wanted:
        settings = ", ".join(f"{name}={value}" for name, value in wanted.items())
        notes.append(f"{settings}: over UCX the lines of {library} are too long for SLURM's PMI2, and MPI_Init fails")
    elif setting := unset_variable(library):
        notes.append(f"{library} may need: export {setting}")
    return Start(command, ranks, environment, notes)


def _network_cards() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def program_of(args: argparse.Namespace) -> list[str]:
    """Return the program's words: a module or file of Python behind this interpreter, any other program as it is."""
    if args.module:
        if args.program:
            got = shlex.join(args.program)
            raise ValueError(explain("mpistrat run", "-m", expected="options before -m, all else after", got=got))
        return [sys.executable, "-m", *args.module]
    words = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not words:
        raise ValueError(explain("mpistrat run", "program", expected="a program, or -m and a module", got="none"))
    path = Path(words[0])
    if path.suffix == ".py" or path.is_dir():
        if not path.exists():
            raise ValueError(explain("mpistrat run", "program", expected="a file that is there", got=words[0]))
        return [sys.executable, *words]
    found = shutil.which(words[0])
    if found is not None:
        return [found, *words[1:]]
    if path.is_file():
        return [sys.executable, *words]
    raise ValueError(explain("mpistrat run", "program", expected="a file, or a program on PATH", got=words[0]))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < _MOST_RANKS):
        raise argparse.ArgumentTypeError(f"expected a number >= 1, got {text!r}")
    return int(text)


def strategy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that tell a program its strategy."""
    parser.add_argument(
        "--strategy", type=strategy_name, choices=STRATEGIES, metavar="NAME",
        help=f"what ms.strategy_from_environment() makes: {', '.join(STRATEGIES)}",
    )  # fmt: skip
    parser.add_argument("--ps", type=_count, metavar="N", help="parameter servers among the ranks: the last ones")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        f"{parser.prog} [-n N] [--strategy NAME] [--ps N] [--evaluator] [--restarts N [--standby]] [--survive] [--tag] "
        "[--log-dir DIR] [--dry-run | --json] (PROGRAM | -m MODULE) [ARGUMENT …]"
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
        help="start the ranks again when one dies, at most so many times: from their state in memory, or a checkpoint",
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
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="start a module, as python -m does"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM …",
        help="a file of Python, or another program, and its arguments",
    )  # fmt: skip


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    try:
        start = _plan(args, args.ranks)
    except ClusterError as error:
        complain(error)
        return PROBLEM
    if args.standby:
        _check_standby(args, start)
    if args.survive and os.environ.get("SLURM_JOB_ID") and not os.environ.get("SLURMD_NODENAME"):
        expected, got = "a node of the SLURM job, whose ranks tell how it ends", "another machine"
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
        return supervise.supervise(partial(_words, args), args.restarts or 0, args.standby, args.survive)
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
        "tag": args.tag,
        "log_dir": args.log_dir,
        "nodes": nodes,
    }
    program = program_of(args)
    return plan((standby and words_of(program)) or program, ranks, args.strategy, args.ps, **options)


def _words(args: argparse.Namespace, ranks: int | None, standby: bool) -> tuple[list[str], dict[str, str]]:
    """Return a command and what is added to the environment.

    Args:
        args: of the command line.
        ranks: another number of ranks than they say, or None.
        standby: whether the ranks wait until they are needed.
    """
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
Start a program on several ranks of this machine, with the mpiexec that belongs to the MPI that mpi4py loads: the one
that was installed with the library, or with Python, or on PATH; $MPIEXEC precedes them. In a SLURM job srun starts the
ranks, on all of the job's nodes.

Each rank's BLAS has its share of the cores, by OMP_NUM_THREADS, unless you set that or a relative of it. What the MPI
wants besides is added; --dry-run shows the whole command. --strategy and --ps reach the program as MPISTRAT_STRATEGY and
MPISTRAT_NUM_PS, which ms.strategy_from_environment() reads, --evaluator as MPISTRAT_EVALUATOR, which ms.estimator
reads. The ranks learn the terminal's width (COLUMNS).

What killed ranks leave in /dev/shm is removed after the end.

With --restarts the ranks are started again when one is killed or fails, until the program has ended. One with
ms.train.Checkpoints goes on with its state of a second ago, which is kept in each node's memory, or with the newest
file. Ranks that die three times after the same step are given up. With --standby the next ranks are there before: they have
imported what the first ones have, have begun MPI, and wait. That takes their memory, and saves most of the start.

Without it, the launcher takes this process's place. It ends the program on Ctrl-C, passes SIGUSR1 on to the ranks, and on SIGTERM
does the latter (MPICH) or the former (Open MPI).""",
    examples=(
        "mpistrat run train.py",
        "mpistrat run -n 4 train.py --epochs 3",
        "mpistrat run -n 4 --ps 1 train.py",
        "mpistrat run -n 5 --evaluator train.py",
        "mpistrat run -n 4 --restarts 20 --standby train.py",
        "mpistrat run -n 2 -m mpistrat.examples.digits --epochs 2",
        "mpistrat run -n 4 --tag --log-dir logs train.py",
        "mpistrat run -n 4 --dry-run train.py",
    ),
    arguments=_arguments,
    run=_run,
    collective=False,
    status="the program's, as its launcher tells it; if nothing was started, 1 where no launcher fits, 2 for wrong use",
)
