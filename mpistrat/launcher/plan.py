"""The command that starts a program on ranks: the mpiexec of mpi4py's MPI, or srun in a SLURM job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..base.cores import THREAD_VARIABLES, usable_cores
from ..base.devices import count_gpus
from ..base.errors import ClusterError, explain
from ..base.programs import isolated
from ..base.text import counted
from ..cluster.launcher_variables import (
    RANK_VARIABLES,
    fitting_pmi,
    launched_size,
    offered_pmis,
    srun_environment,
    unset_variable,
)
from ..cluster.launchers import USER, Allocation, MPILibrary, choose_launcher, find_launchers, loaded_library, mismatch
from ..cluster.world import UNSAFE
from . import pass_words, rank_output, rank_variables

__all__ = ["MOST_RANKS", "Start", "plan"]

_INFINIBAND = Path("/sys/class/infiniband")  # InfiniBand cards and compatible ones
_HOROVOD = str(Path(__file__).resolve().parents[1] / "horovod" / "alias")  # a folder with a module `horovod`
MOST_RANKS = 1 << 16
# Arguments that launchers interpret: all of them start another program after ":", and Open MPI 5 rewrites the others.
_OF_LAUNCHERS = frozenset({":", "--map-by", "--rank-by", "--bind-to", "--runtime-options"})


@dataclass
class Start:
    """A command that starts ranks.

    Attributes:
        command: its words; no shell reads them.
        ranks: the number of ranks.
        environment: variables added to this process's.
        notes: remarks for the user.
    """

    command: list[str]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a line for a shell, after comments."""
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
    numbers: bool = False,
    horovod: bool = False,
    tag: bool = False,
    log_dir: str | None = None,
    nodes: Allocation = Allocation(),
) -> Start:
    """Return how to start a program. Does not start MPI.

    Args:
        program: its command line, interpreter included.
        ranks: their number, servers included; None for the default.
        strategy: for MPISTRAT_STRATEGY.
        servers: for MPISTRAT_NUM_PS.
        evaluator: for MPISTRAT_EVALUATOR: the last rank evaluates.
        survive: MPI continues when a rank dies.
        numbers: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in each rank's environment.
        horovod: `import horovod` finds `mpistrat.horovod`.
        tag: prefix each line of a rank's output with its number.
        log_dir: folder for one output file per rank; without `tag` the output is not printed.
        nodes: of a SLURM job; lost nodes are left out, with their share of the ranks.

    Raises:
        ClusterError: mpi4py finds no MPI, or one that cannot survive a death, or no launcher here belongs to it.
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
    if horovod:
        start.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_HOROVOD, os.environ.get("PYTHONPATH")]))
    if tag or log_dir is not None:
        folder = "" if log_dir is None else os.path.abspath(log_dir)
        variables = ",".join(RANK_VARIABLES.values())
        start.command += isolated(rank_output.__file__, variables, "1" if tag else "0", folder)
        start.environment.setdefault("PYTHONUNBUFFERED", os.environ.get("PYTHONUNBUFFERED") or "1")
    if numbers:
        ranks_of, sizes = ",".join(RANK_VARIABLES.values()), ",".join(RANK_VARIABLES)
        start.command += isolated(rank_variables.__file__, ranks_of, sizes)
    start.command += _passed(program)
    return start


def _passed(program: Sequence[str]) -> list[str]:
    """Return a program's command line in a form that no launcher changes."""
    if _OF_LAUNCHERS.isdisjoint(program):
        return list(program)
    return isolated(pass_words.__file__, *(f"={word}" for word in program))


def _let_survive(start: Start, library: MPILibrary) -> None:
    """Configure Open MPI to continue when a rank dies."""
    if not library.survives:
        remedy = "Use --restarts instead: it works under any MPI"
        expected = "Open MPI 5 or newer, which continues when a rank dies"
        raise ClusterError(explain("mpistrat run", "--survive", expected=expected, got=str(library), remedy=remedy))
    start.command += ["--with-ft", "ulfm"]
    setting = os.environ.get("OMPI_MCA_coll", "^")  # noqa: SIM112
    if setting.startswith("^"):  # excluded components
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
    """Return the job's tasks, or a rank for each GPU, or without GPUs for each core; at least one worker."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if in_slurm and tasks.isascii() and tasks.isdigit() and 0 < int(tasks) < MOST_RANKS:
        return int(tasks)
    if strategy == "one_device":
        return 1
    ranks = count_gpus() or usable_cores()
    if strategy == "parameter_server":
        return max(ranks, 1 + (servers or 1))
    return ranks


def _threads(ranks: int) -> dict[str, str]:
    """Return the thread setting for each rank's share of the cores, unless the user set one."""
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
        command += ["--bind-to", "none"]  # its default binds each of two ranks to one core, regardless of threads
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
    """Return the start by srun in a SLURM allocation, or by mpiexec if srun has no protocol for this MPI."""
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
        command.append(f"--cpus-per-task={cpus}")  # since 22.05 srun does not inherit it from the job
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
