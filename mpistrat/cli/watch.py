"""`mpistrat top` and `mpistrat stacks`: what the ranks of a running job do, asked of the small process on each node."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from ..base import local_socket
from ..base.agree import Ranks
from ..base.programs import program
from ..base.text import counted, printable, ranges
from ..comm.monitor.exit_report import PREFIX
from ..comm.recorder import Ring
from ..timeline.stragglers import shares
from .command import DONE, PROBLEM, Command
from .terminal import complain, positive

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from typing_extensions import Self

__all__ = ["STACKS", "TOP"]

_SOCKETS = Path("/proc/net/unix")
_PIECE = 800  # characters
_ANSWER = 3.0  # seconds that ranks have to send their stacks
_CONNECT = 2.0
_SHARES = ("input", "compute", "communication", "waiting", "saving")


@final
class NodeJob(AbstractContextManager[Any]):
    """A running job's ranks on this node.

    Attributes:
        ranks: process and name of each.
    """

    def __init__(self, name: bytes) -> None:
        """Connect to the node's process.

        Raises:
            OSError: it is another user's, or has ended.
        """
        self._line = local_socket.connect(name, _CONNECT)
        self._rest = b""
        self.ranks: dict[int, str] = {}
        self._memories: dict[int, mmap.mmap] = {}
        try:
            self._line.sendall(b"watch\n")
            self._read_ranks()
        except BaseException:
            self._line.close()
            raise

    def _read_ranks(self) -> None:
        text = self._line.recv(1)  # the greeting
        if not text:
            raise OSError("it refuses")
        waiting: list[int] = []
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._line, 65536, 64)
            if not data:
                raise OSError("it has ended")
            *lines, self._rest = (self._rest + data).split(b"\n")
            waiting += descriptors
            for line in lines:
                words = line.decode(errors="replace").split(" ", 2)
                if words[0] == "all":
                    return
                if words[0] == "rank":
                    pid = int(words[1])
                    self.ranks[pid] = words[2]
                    if waiting:  # each comes with its rank's line
                        descriptor = waiting.pop(0)
                        self._memories[pid] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
                        os.close(descriptor)

    def rings(self) -> dict[int, Ring]:
        """Return the events of each rank, as they are now."""
        return {pid: Ring(memory[:]) for pid, memory in self._memories.items()}

    def stacks(self) -> dict[int, dict[str, Any]]:
        """Return what each rank answers that does within some seconds: its position, and the stacks of its threads."""
        found: dict[int, dict[str, Any]] = {}
        self._line.sendall(b"stacks?\n")
        deadline = time.monotonic() + _ANSWER
        while len(found) < len(self.ranks) and time.monotonic() < deadline:
            self._line.settimeout(max(0.05, deadline - time.monotonic()))
            try:
                data = self._line.recv(1 << 20)
            except TimeoutError:
                break
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                kind, pid, text = line.decode(errors="replace").split(" ", 2)
                if kind == "stacks":
                    found[int(pid)] = json.loads(text)
        return found

    def is_job(self, job: str) -> bool:
        """Return whether it goes by this name: its number in SLURM, or a process of a rank or above one."""
        return any(job in (_environment(pid).get("SLURM_JOB_ID"), *map(str, _ancestors(pid))) for pid in self.ranks)

    @property
    def name(self) -> str:
        """The job's number in SLURM, or the process of its launcher."""
        pid = min(self.ranks)
        number = _environment(pid).get("SLURM_JOB_ID")
        return f"SLURM job {number}" if number else f"job {_ancestors(pid)[-1]}"

    def describe(self) -> str:
        """Return the job's name, its ranks here and their command, in one line."""
        pid = min(self.ranks)
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            command = b" ".join(words).decode(errors="replace").strip()
        except OSError:
            command = "?"
        return printable(f"{self.name}: {counted(len(self.ranks), 'rank')} here, {command[:100]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
        for memory in self._memories.values():
            memory.close()


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)


def _ancestors(pid: int) -> list[int]:
    """The process and those above it, up to the launcher: that of the same session which is the last one not a shell."""
    found = [pid]
    while len(found) < 10:
        try:
            stat = Path(f"/proc/{found[-1]}/stat").read_text().rsplit(")", 1)
            parent, name = int(stat[1].split()[1]), Path(f"/proc/{int(stat[1].split()[1])}/comm").read_text().strip()
        except (OSError, IndexError, ValueError):
            break
        if parent <= 1 or not any(word in name for word in ("mpi", "hydra", "prte", "orte", "srun", "slurm", "pmi")):
            break
        found.append(parent)
    return found


def _names() -> list[bytes]:
    """The sockets of the processes of jobs on this node."""
    try:
        lines = _SOCKETS.read_bytes().splitlines()[1:]
    except OSError:
        return []
    marks = (line.rsplit(b" ", 1)[-1] for line in lines)
    return sorted({mark[1:] for mark in marks if mark.startswith(b"@" + PREFIX)})


def _jobs() -> list[NodeJob]:
    found = []
    for name in _names():
        try:
            job = NodeJob(name)
        except OSError:
            continue
        if job.ranks:
            found.append(job)
        else:
            job.__exit__(None, None, None)
    return found


def _of_each_job(
    command: str, job: str | None, ask: Callable[[NodeJob], list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a job's ranks, by its description; of all of this user's jobs here if none is named.

    If none runs, print an error and return nothing.

    Args:
        command: `mpistrat top` or `stacks`, which asks the other nodes of a job in SLURM.
        job: as on the command line.
        ask: returns a job's rows.
    """
    rows = _by_srun(command, job)
    if rows is not None:
        return {f"SLURM job {job}": sorted(rows, key=_rank_number)}
    found: dict[str, list[dict[str, Any]]] = {}
    for one in _jobs():
        with one, contextlib.suppress(OSError):  # a job that ends meanwhile
            if job is None or one.is_job(job):
                rows = [{"job": one.name, **row} for row in ask(one)]
                found.setdefault(one.describe(), []).extend(sorted(rows, key=_rank_number))
    if not found:
        what = "no job of yours" if job is None else f"no job {job} of yours"
        remedy = "jobs of several ranks are seen on the nodes where they run, and by their number in SLURM"
        complain(f"{what} runs here: {remedy}")
    return found


def _by_srun(command: str, job: str | None) -> list[dict[str, Any]] | None:
    """Return what a command finds on all nodes of a job of SLURM; None where that is not one, or is here."""
    if job is None or not job.isdigit() or shutil.which("srun") is None or "SLURM_STEP_ID" in os.environ:
        return None
    asked = subprocess.run(
        ["squeue", "-h", "-j", job, "-t", "R", "-o", "%D"], capture_output=True, text=True, check=False, timeout=20
    )
    nodes = asked.stdout.strip()
    if not nodes.isdigit():
        return None
    words = ["srun", f"--jobid={job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += ["--mpi=none", *program("mpistrat", command, job, "--pieces")]
    return _joined(subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout.splitlines())


def _print_json(rows: list[dict[str, Any]], pieces: bool) -> None:
    """Print a line for each rank, or lines so short that srun, which puts those of all nodes together, tears none."""
    for row in rows:
        text = json.dumps(row)
        if not pieces:
            print(text)
            continue
        parts = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
        for number, part in enumerate(parts):
            print(f"{socket.gethostname()}.{row['pid']} {number} {len(parts)} {part}", flush=True)


def _joined(lines: list[str]) -> list[dict[str, Any]]:
    """Return what the lines that `_print_json` has printed say."""
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in lines:
        words = line.split(" ", 3)
        if len(words) == 4 and words[1].isdigit() and words[2].isdigit():
            found.setdefault(words[0], {})[int(words[1])] = words[3]
            counts[words[0]] = int(words[2])
    whole = [parts for name, parts in found.items() if len(parts) == counts[name]]
    return [json.loads("".join(parts[number] for number in sorted(parts))) for parts in whole]


# top


def _rows(job: NodeJob, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each rank here, of the last seconds."""
    rows, now = [], perf_counter_ns()
    for pid, ring in job.rings().items():
        remembered, *parts, steps = shares(ring, now - int(seconds * 1e9))
        open_ones = [ring.names[ring.name[i]][1] for i in range(max(0, len(ring) - 50), len(ring)) if ring.end[i] == 0]
        idle = (now - int(ring.end.max())) / 1e9 if len(ring) and not open_ones else 0.0
        rows.append(
            {
                "rank": job.ranks[pid], "pid": pid, "steps_per_second": steps / seconds, "seconds": remembered,
                **dict(zip(_SHARES, parts, strict=True)),
                "doing": " > ".join(open_ones) if open_ones else f"the program, for {idle:.1f} s",
            }
        )  # fmt: skip
    return rows


def _rank_number(row: dict[str, Any]) -> int:
    words = row["rank"].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else row["pid"]


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
    table.add_column("rank", overflow="ellipsis", no_wrap=True, ratio=2)
    for title in ("steps/s", "input", "compute", "comm.", "wait", "save"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("now", overflow="ellipsis", no_wrap=True, ratio=2)
    for row in rows:
        cells = [f"{row['steps_per_second']:.3g}", *(f"{row[part]:.0%}" for part in _SHARES)]
        table.add_row(Text(printable(row["rank"])), *cells, Text(printable(row["doing"])))
    return table


def _tables(jobs: Mapping[str, list[dict[str, Any]]]) -> Group:
    """Return a table for each job, below its name if there are several."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for name, rows in jobs.items():
        parts += [Text(name), _table(rows)] if len(jobs) > 1 else [_table(rows)]
    return Group(*parts)


def _run_top(args: argparse.Namespace, ranks: Ranks) -> int:
    def look() -> dict[str, list[dict[str, Any]]]:
        return _of_each_job("top", args.job, lambda job: _rows(job, args.seconds))

    jobs = look()
    if not jobs:
        return PROBLEM
    if args.json or args.pieces:
        _print_json([row for rows in jobs.values() for row in rows], args.pieces)
        return DONE
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if args.once or not console.is_terminal:
        console.print(_tables(jobs))
        return DONE
    with Live(_tables(jobs), console=console, auto_refresh=False) as live:
        try:
            while jobs:
                time.sleep(args.seconds)
                jobs = look()
                live.update(_tables(jobs), refresh=True)
        except KeyboardInterrupt:
            pass
    return DONE


# stacks


def _run_stacks(args: argparse.Namespace, ranks: Ranks) -> int:
    jobs = _of_each_job("stacks", args.job, _answers)
    if not jobs:
        return PROBLEM
    if args.json or args.pieces:
        _print_json([row for rows in jobs.values() for row in rows], args.pieces)
        return DONE
    for number, (name, answers) in enumerate(jobs.items()):
        if len(jobs) > 1:
            print("\n" * bool(number) + name)
        for answer in answers:
            print(printable(f"{answer['rank']}, process {answer['pid']}: {answer['position']}"))
        for stacks, numbers in _alike(answers):
            text = printable(stacks, keep="\n")
            print(f"\n{'ranks' if len(numbers) > 1 else 'rank'} {', '.join(ranges(numbers))}:\n{text}", end="")
    return DONE


def _answers(job: NodeJob) -> list[dict[str, Any]]:
    """Return what each rank here answers, and of one that does not why."""
    found = job.stacks()
    return [{"rank": who, "pid": pid, **found.get(pid, _silent(pid))} for pid, who in job.ranks.items()]


def _silent(pid: int) -> dict[str, Any]:
    """Return a row for a rank that does not answer."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return {"position": "has ended", "threads": {}}
    how = {"T": "is stopped (SIGCONT lets it go on)", "D": "waits for a file system or a device", "Z": "has ended"}.get(
        state,
        "does not answer: it is in compiled code that holds Python's lock; gdb -p, or py-spy dump --native, sees it",
    )
    return {"position": how, "threads": {}}


def _alike(answers: list[dict[str, Any]]) -> Iterator[tuple[str, list[int]]]:
    """Stacks, each once, with the ranks that have them."""
    found: dict[str, list[int]] = {}
    for answer in answers:
        threads = sorted(answer["threads"].items(), key=lambda item: item[0] != "MainThread")
        text = "".join(f" {name}\n{stack}" for name, stack in threads)
        if text:
            found.setdefault(text, []).append(_rank_number(answer))
    yield from found.items()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", metavar="JOB",
        help="its number in SLURM, or the process of its launcher or of a rank; default all jobs of yours on this node",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each rank, once")
    parser.add_argument("--pieces", action="store_true", help=argparse.SUPPRESS)  # for `_by_srun`


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the table once; without a terminal that is what it does"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=2.0,
        metavar="S",
        help="between two looks, and over which it counts (%(default)s)",
    )


TOP = Command(
    summary="show what the ranks of running jobs do, in a table that is updated",
    text="""\
Show for each rank of a running job how many steps it makes a second, where its time goes (input, compute,
communication, waiting for others, saving), and what it does now. It reads the memory in which each rank records its
events, and does not slow the job down. It shows all your jobs with several ranks on this
node, and by its SLURM number a job on all its nodes.""",
    examples=("mpistrat top", "mpistrat top 12345", "mpistrat top --once --seconds 10"),
    arguments=_top_arguments,
    run=_run_top,
    collective=False,
)

STACKS = Command(
    summary="print the Python stacks of the ranks of running jobs",
    text="""\
Print where each rank of a running job is: in which collective, and the stacks of its Python threads, equal ones once.
The ranks go on. A rank that does not answer within some seconds is said so: it is stopped, or in compiled code.""",
    examples=("mpistrat stacks", "mpistrat stacks 12345"),
    arguments=_arguments,
    run=_run_stacks,
    collective=False,
)
