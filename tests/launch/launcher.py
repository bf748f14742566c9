"""Start a program on n MPI ranks, watch it, and end it without leaving a process behind.

Knows the two MPIs and nothing of pytest. Every process of a job carries a mark in its environment, so that all of them are
found again wherever they went: other sessions and process groups (both MPIs make some), isolated hosts of `hosts.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.launch.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
MARK = "MPISTRAT_TEST_JOB"
# Each rank writes into files of its own; `exec` leaves no shell between the launcher and the program.
RANK_SHELL = 'r=${PMI_RANK:-${PMIX_RANK:-0}}; ulimit -c 0; exec "$@" >"$0/$r.out" 2>"$0/$r.err"'


@dataclass(frozen=True)
class MpiEnv:
    """One MPI to test under: a Python that has mpi4py, and the mpiexec that belongs to it."""

    name: str
    python: str
    mpiexec: tuple[str, ...]
    vendor: str

    def command(self, ranks: int, hosts: Hosts | None = None) -> list[str]:
        """The words that start `ranks` ranks of what follows them."""
        if hosts is not None:
            return hosts.mpiexec(self, ranks)
        if not self.mpiexec:
            return []  # one process alone
        return [*self.mpiexec, *self.flags, "-n", str(ranks)]

    @property
    def flags(self) -> list[str]:
        if "Open MPI" not in self.vendor or Path(self.mpiexec[0]).name not in ("mpiexec", "mpirun", "prterun"):
            return []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [*root, "--oversubscribe", "--bind-to", "none"]


@functools.cache
def mpi_env(python: str, name: str | None = None) -> MpiEnv:
    """The MPI of a Python, asked in a process of its own: the asking one never starts MPI. LookupError where there is none."""
    python = os.path.abspath(python)  # not resolved: in a virtual environment python is a link
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    if not os.path.exists(python):
        raise LookupError(f"there is no {python}")
    reply = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=120)
    if reply.returncode:
        raise LookupError(f"{python} cannot import mpi4py.MPI: {(reply.stderr.strip().splitlines() or ['?'])[-1]}")
    vendor = reply.stdout.strip()
    beside = Path(python).with_name("mpiexec")
    words = str(beside) if beside.exists() else os.environ.get("MPIEXEC") or shutil.which("mpiexec")
    if not words:
        raise LookupError(f"no mpiexec beside {python}, in $MPIEXEC or on PATH")
    short = {"MPICH": "mpich", "Open MPI": "openmpi"}.get(vendor, vendor.lower().replace(" ", ""))
    return MpiEnv(name or short, python, tuple(shlex.split(words)), vendor)


@dataclass
class Result:
    """What a job did. `returncode` is None where it had to be killed; `out` and `err` hold a text for each rank."""

    returncode: int | None
    out: list[str]
    err: list[str]
    launcher: str
    seconds: float
    timed_out: bool
    leftover: list[str]

    @property
    def stdout(self) -> str:
        return "".join(self.out)

    @property
    def stderr(self) -> str:
        return "".join(self.err) + self.launcher

    def __str__(self) -> str:
        end = "killed after" if self.timed_out else f"exit status {self.returncode} after"
        return f"{end} {self.seconds:.1f} s\n" + texts(self.out, self.err, self.launcher)


def texts(out: Sequence[str], err: Sequence[str], launcher: str, tail: int = 6000) -> str:
    """Everything the ranks and mpiexec wrote, each under its own heading, long texts by their ends."""
    pieces = [(f"rank {r} {kind}", text) for r in range(len(out)) for kind, text in (("out", out[r]), ("err", err[r]))]
    pieces.append(("mpiexec", launcher))
    return (
        "\n".join(f"---- {title}\n{text[-tail:].rstrip()}" for title, text in pieces if text.strip()) or "(no output)"
    )


class Job:
    """A running `mpiexec`, in a session of its own, whose ranks write to files in `folder`."""

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        mpi: MpiEnv,
        folder: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        hosts: Hosts | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.mark, self.ranks, self.folder, self.started = uuid.uuid4().hex, ranks, folder, time.monotonic()
        with open(folder / "mpiexec", "w") as log:
            self._process = subprocess.Popen(
                [*mpi.command(ranks, hosts), "sh", "-c", RANK_SHELL, str(folder), *command],
                env=job_environment(self.mark, folder, env), cwd=cwd, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
            )  # fmt: skip

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int | None:
        """The exit status, or None where it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to mpiexec and all of its process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for(self, text: str, timeout: float) -> bool:
        """Wait until every rank has written `text` to its stdout; False where one has not in time."""
        until = time.monotonic() + timeout
        while not all(text in self.read(f"{rank}.out") for rank in range(self.ranks)):
            if self.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def processes(self) -> list[int]:
        """All living processes of this job, on every host of this machine."""
        return with_variable(f"{MARK}={self.mark}")

    def living(self, program: str) -> int:
        """How many Python processes of this job that run a program live."""
        words = [command_line(pid).split(" ") for pid in self.processes()]
        return sum("python" in first.rpartition("/")[2] and program in " ".join(rest) for first, *rest in words)

    def leftover(self, patience: float = 10.0) -> list[str]:
        """The command lines of what still lives `patience` seconds after the end."""
        until = time.monotonic() + patience
        while (alive := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return [command_line(pid) for pid in alive]

    def end(self, *, stacks: bool = False) -> None:
        """Kill every process of the job; with `stacks` each rank first writes where its threads are to its stderr."""
        if stacks:
            self._write_stacks()
        elif self._process.poll() is None:  # let mpiexec clear its shared memory and its session folder
            self._process.terminate()
            self.wait(1.5)
        until = time.monotonic() + 10
        while (alive := self.processes()) and time.monotonic() < until:
            for pid in alive:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _write_stacks(self) -> None:
        """Python's fault handler writes all stacks on SIGABRT. mpiexec is halted: it would kill the others at the first death."""
        alive = self.processes()
        python = [pid for pid in alive if "python" in command_line(pid).split(" ")[0].rpartition("/")[2]]
        for pid in set(alive) - set(python):
            _kill(pid, signal.SIGSTOP)
        for pid in python:
            _kill(pid, signal.SIGABRT)
        until = time.monotonic() + 3
        while set(python) & set(self.processes()) and time.monotonic() < until:
            time.sleep(0.02)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def outputs(self) -> tuple[list[str], list[str], str]:
        """Each rank's stdout, each rank's stderr, and what mpiexec said itself."""
        out, err = ([self.read(f"{r}.{kind}") for r in range(self.ranks)] for kind in ("out", "err"))
        return out, err, self.read("mpiexec")


def launch(
    program: str | Sequence[str],
    ranks: int,
    mpi: MpiEnv,
    timeout: float = 60.0,
    *,
    env: Mapping[str, str | None] | None = None,
    hosts: Hosts | None = None,
    cwd: str | os.PathLike[str] | None = None,
    interrupt_at: str | None = None,
) -> Result:
    """Run a Python program on `ranks` ranks and wait for its end, at most `timeout` seconds.

    `program` is the text of a script, or the arguments of the Python of `mpi` (["-m", "package", "--flag"]). Variables in
    `env` are added to the environment, those that are None are taken out of it. Once every rank has written the text
    `interrupt_at` to its stdout, the job gets a Ctrl-C. A job that takes longer writes each rank's stacks to `err` and is
    killed.
    """
    with tempfile.TemporaryDirectory(prefix="mpistrat-job-") as name:
        folder = Path(name)
        if isinstance(program, str):
            (folder / "program.py").write_text(program)
            program = [str(folder / "program.py")]
        job = Job([mpi.python, *program], ranks, mpi, folder, env=env, hosts=hosts, cwd=cwd)
        try:
            if interrupt_at is not None and job.wait_for(interrupt_at, timeout):
                job.interrupt()
            returncode = job.wait(max(0.0, job.started + timeout - time.monotonic()))
            seconds = time.monotonic() - job.started
            leftover = [] if returncode is None else job.leftover()
        finally:
            job.end(stacks=job.poll() is None)
        return Result(returncode, *job.outputs(), seconds, returncode is None, leftover)


def job_environment(mark: str, folder: Path, extra: Mapping[str, str | None] | None) -> dict[str, str]:
    """One BLAS thread a rank, output as it comes, stacks on a crash, this mpistrat, temporary files in `folder`; then `extra`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    wanted: dict[str, str | None] = {
        "TMPDIR": str(folder),
        "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1",
        "OMPI_MCA_osc": "^ucx",  # its one-sided calls fail where UCX finds no network card
        **(extra or {}), MARK: mark,
    }  # fmt: skip
    return {key: value for key, value in {**os.environ, **wanted}.items() if value is not None}


def with_variable(setting: str) -> list[int]:
    """The living processes with this "NAME=value" in their environment (Linux; elsewhere none are seen)."""
    sought, found = setting.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sought in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid}"


def remove_dead_shared_memory(age: float = 5.0) -> None:
    """Unlink what ranks that were killed left in /dev/shm: files of an MPI, ours, not new, mapped by no process."""
    dead = []
    for pattern in ("mpich_shm_*", "sm_segment.*"):
        for path in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(OSError):
                about = path.stat()
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > age:
                    dead.append(path)
    living = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            living += "".join(line for line in maps.read_text().splitlines(True) if "/dev/shm/" in line)
    for path in dead:
        if str(path) not in living:
            path.unlink(missing_ok=True)


def end_with_parent(number: int) -> Callable[[], None]:
    """For `preexec_fn`: the new process gets this signal when the one that starts it dies, however it dies (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return lambda: prctl and prctl(1, number)  # PR_SET_PDEATHSIG


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
