"""Files of a job in /dev/shm that outlive its killed ranks, under the key from `mpistrat run --restarts`.

They are in the folder mpistrat-job-UID-KEY, which no other user can enter (`monitor/leftovers.py`).

    lock               locked while the job's supervisor lives
    s5e21.g2.1.r0      snapshots of a run (a hash of its name), of the second restart, of the ranks of a node, from 0 on;
                       see state/snapshot.py
    state              words, numbered below: the ranks' reports to the supervisor
    modules            rank 0's imported modules and changed environment variables
    size               the requested number of ranks

The supervisor removes them at the end of the job. The next supervisor removes files of a killed one if their lock is free, no
rank has them open, and they are some minutes old. The next start of a requeued SLURM job removes them immediately.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ..base.environment import RESTART_EXIT_CODE, STANDBY, Environment
from ..cluster.launcher_variables import launched_rank
from .monitor import abort, leftovers
from .shared_memory import map_file

__all__ = [
    "BEGUN", "DONE", "ENDED", "GENERATION", "RESIZE", "STEP", "STOPPED", "ask_for_size", "asked_size", "expect_end",
    "expect_end_under_launcher", "first_of", "generation_of", "hold", "imported", "least_generation", "lock", "make_file", "mark",
    "new_key", "note_modules", "path_of", "paths", "remove", "remove_older", "state", "supervisors", "sweep", "unsupervised",
]  # fmt: skip

RESIZE = signal.SIGUSR2
STEP = 0  # reached since the last start
GENERATION = 1  # number of restarts and losses of ranks
# The generation, from 1, in which rank 0 has started, has ended properly, or has stopped to resume later; and in which
# any rank has reported why the job ends.
BEGUN, DONE, STOPPED, ENDED = 2, 3, 4, leftovers.ENDED
_BYTES = 64  # of the words
_ABANDONED = 600.0  # seconds
_OF_LAUNCHERS = ("MPISTRAT_", "OMPI_", "PMI", "PRTE_", "HYDRA_", "MPI", "SLURM_")
_end: _End | None = None
_SNAPSHOT = re.compile(r"s([0-9a-f]{8})\.g(\d+)\.(\d+)\.r(\d+)")


def new_key() -> str:
    """Return a key for a job: 16 hexadecimal digits, of which the last 8 are random.

    The first 6 identify the SLURM job, the next 2 its number of requeues, so a node recognizes files of its earlier starts.
    """
    job, count = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not count.isdigit():
        return secrets.token_hex(8)
    return hashlib.blake2b(job.encode(), digest_size=3).hexdigest() + f"{int(count) % 256:02x}" + secrets.token_hex(4)


def _is_earlier_start(job: str, own: str) -> bool:
    """Return True if a key is of the same SLURM job before it was requeued."""
    return job[:6] == own[:6] and job[6:8] != own[6:8]


def mark(job: str, what: str) -> Path:
    """Return a file of a job, such as "lock"."""
    return leftovers.kept(job, what)


def path_of(job: str, run: str, generation: int, serial: int, first: int) -> Path:
    """Return the snapshot file of a run for a node's ranks, from rank `first` on."""
    return mark(job, f"s{_hash(run)}.g{generation}.{serial}.r{first}")


def _hash(run: str) -> str:
    return hashlib.blake2b(run.encode(errors="replace"), digest_size=4).hexdigest()


def generation_of(path: Path) -> int:
    """Return the generation in which a snapshot file was created."""
    match = _SNAPSHOT.fullmatch(path.name)
    return int(match[2]) if match else 0


def first_of(path: Path) -> int:
    """Return the first rank of the node that created a snapshot file."""
    return int(path.name.rpartition(".r")[2])


def paths(job: str, run: str | None = None) -> list[Path]:
    """Return the snapshot files on this node: of one run, or of all."""
    wanted = None if run is None else _hash(run)
    found = [path for _, folder in leftovers.job_folders(job) for path in folder.glob("s*")]
    matches = ((path, _SNAPSHOT.fullmatch(path.name)) for path in found)
    return sorted(path for path, match in matches if match and wanted in (None, match[1]))


def hold(path: Path) -> int:
    """Open a file, so that no sweep removes it; return its descriptor.

    Raises:
        OSError: it does not exist.
    """
    file = leftovers.open_own(path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)  # a check for the lock holds it briefly
    return file


def make_file(path: Path, head: bytes, nbytes: int) -> None:
    """Create a file of `nbytes` bytes with allocated memory, zeros after the head; it gets its name once it is complete.

    Raises:
        OSError: there is no room.
    """
    _make_folder(path.parent)
    beside = path.with_name(f"{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()  # of a rank that was killed
    file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)  # a full /dev/shm is an error here, not a SIGBUS later
        os.pwrite(file, head, 0)
        os.rename(beside, path)
    except BaseException:
        beside.unlink()
        raise
    finally:
        os.close(file)


def _make_folder(folder: Path) -> None:
    """Create the folder of a job, unless this user has it.

    Raises:
        OSError: another user has taken the name since `leftovers.kept` found it free.
    """
    if leftovers.is_own_folder(folder):
        return
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        if not leftovers.is_own_folder(folder):  # another rank of this node has created it
            raise


def remove_older(job: str, path: Path) -> None:
    """Remove the snapshot files of a run's earlier starts, and those that this file has replaced."""
    own = _SNAPSHOT.fullmatch(path.name)
    assert own is not None
    for other in paths(job):
        found = _SNAPSHOT.fullmatch(other.name)
        assert found is not None
        replaced = found[2] == own[2] and found[4] == own[4] and int(found[3]) < int(own[3])
        if found[1] == own[1] and (int(found[2]) < int(own[2]) or replaced):
            other.unlink(missing_ok=True)


def expect_end(job: str, generation: int, first: bool) -> None:
    """Report the start of the program to the supervisor now, and its proper end later. For the first rank of each node.

    If the supervisor is on another node, which then relies on the launcher, the files here are removed at a proper end.

    Args:
        job: the key.
        generation: of the ranks.
        first: True on rank 0.
    """
    global _end
    supervised = mark(job, "lock").exists()
    if first and supervised:
        state(job)[BEGUN] = generation + 1
    if _end is None or _end.process != os.getpid():
        atexit.register(_at_exit)
    _end = _End(os.getpid(), job, generation, first, supervised)


def expect_end_under_launcher(waited: bool = False) -> None:
    """Call `expect_end` on rank 0 of a job with a supervisor; called by `import mpistrat` and by activated standby processes.

    It distinguishes a program that ends before it creates a strategy from one that does not use this package.

    Args:
        waited: True if this process was a standby process, and is a rank now.
    """
    if "MPISTRAT_JOB" not in os.environ or (STANDBY in os.environ and not waited):
        return
    try:
        environment = Environment.read()
    except ValueError:  # the first strategy reports it
        return
    if environment.job and launched_rank() == 0 and mark(environment.job, "lock").exists():
        state(environment.job)[DONE] = 0
        expect_end(environment.job, environment.generation, True)


def note_modules(job: str) -> None:
    """Write this process's imported modules and changed environment variables, for standby ranks.

    Once; see `launcher/standby.py`.
    """
    path = mark(job, "modules")
    if mark(job, "lock").exists() and not path.exists():
        names = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None]
        data = json.dumps({"modules": names, "environment": _environment_put()}).encode()
        with contextlib.suppress(OSError):
            make_file(path, data, len(data))


def _environment_put() -> dict[str, str]:
    """Return the variables that this process has set in its environment, by name."""
    given = dict[bytes, bytes]()
    with contextlib.suppress(OSError):
        words = Path("/proc/self/environ").read_bytes().split(b"\0")
        given = {word.split(b"=", 1)[0]: word for word in words if b"=" in word}
    if not given:
        return {}
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    return {
        name: value for name, value in own.items() if given.get(os.fsencode(name)) != os.fsencode(f"{name}={value}")
    }


def imported(job: str) -> tuple[list[str], dict[str, str]]:
    """Return the contents written by `note_modules`: names of modules, and variables.

    Raises:
        OSError, ValueError: there are none.
    """
    about = json.loads(bytes(map_file(mark(job, "modules"))))
    return about["modules"], about["environment"]


class _End(NamedTuple):
    """The arguments of `expect_end`, for a process's end."""

    process: int
    job: str
    generation: int
    first: bool
    supervised: bool


def _at_exit() -> None:
    if _end is None or os.getpid() != _end.process or abort.ending:
        return
    status = abort.exit_status()
    if _end.supervised and _end.first and status in (0, RESTART_EXIT_CODE):
        state(_end.job)[STOPPED if status else DONE] = _end.generation + 1
    elif not _end.supervised and status in (0, RESTART_EXIT_CODE):  # a stopped program has saved a file
        remove(_end.job)


def state(job: str) -> memoryview:
    """Return the mapped words with the ranks' reports, which a supervisor on this node reads."""
    path = mark(job, "state")
    try:
        if not path.exists():
            make_file(path, b"", _BYTES)
        return memoryview(map_file(path)).cast("q")
    except OSError:  # no room
        return memoryview(bytearray(_BYTES)).cast("q")


def least_generation(job: str, told: int) -> int:
    """Return the least generation of the job that this node knows of, given a supervisor's number.

    Ranks of this node may have continued without those of the supervisor's node, which then does not know the number.
    """
    if mark(job, "lock").exists() or not mark(job, "state").exists():
        return told
    return max(told, state(job)[GENERATION] + 1)


# for the supervisor


def lock(job: str) -> int:
    """Lock a job's key while this process lives; return the file's descriptor, which must stay open."""
    path = mark(job, "lock")
    _make_folder(path.parent)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, f"{os.getpid()}\n".encode())
    make_file(mark(job, "state"), b"", _BYTES)
    return file


def remove(job: str) -> None:
    """Remove all files of a job on this node."""
    leftovers.remove_job(job)


def sweep(own: str = "") -> list[str]:
    """Remove this user's files of jobs whose supervisors are gone; return their keys.

    Args:
        own: key of this process's job, whose files stay.
    """
    removed = []
    for job in unsupervised():
        with contextlib.suppress(OSError):
            folder = mark(job, "lock").parent
            files = list(folder.iterdir())
            old = time.time() - max(path.lstat().st_mtime for path in files or [folder]) > _ABANDONED
            if job != own and (old or _is_earlier_start(job, own)) and not any(map(_is_locked, files)):
                remove(job)
                removed.append(job)
    return removed


def supervisors() -> dict[int, str]:
    """Return the processes of this user's supervisors on this machine, and their jobs' keys."""
    found = {}
    for job in _keys():
        with contextlib.suppress(OSError, ValueError):
            if _is_locked(mark(job, "lock")):
                found[int(mark(job, "lock").read_text())] = job
    return found


def ask_for_size(job: str, ranks: int, strategy: str | None = None, servers: int | None = None) -> None:
    """Write the requested number of ranks of a job, and its strategy; its supervisor reads them on the signal `RESIZE`."""
    path = mark(job, "size")
    path.unlink(missing_ok=True)
    text = json.dumps([ranks, strategy, servers]).encode()
    make_file(path, text, len(text))


def asked_size(job: str) -> tuple[int, str | None, int | None]:
    """Return the number of ranks, the strategy (None for the same one), and its number of servers, of `ask_for_size`.

    Raises:
        OSError, ValueError: there are none.
    """
    ranks, strategy, servers = json.loads(bytes(map_file(mark(job, "size"))))
    return ranks, strategy, servers


def unsupervised() -> list[str]:
    """Return the keys of this user's jobs that have files here, and no living supervisor."""
    return [job for job in _keys() if not _is_locked(mark(job, "lock"))]


def _keys() -> list[str]:
    return sorted({job for job, _ in leftovers.job_folders()})


def _is_locked(path: Path) -> bool:
    try:
        file = leftovers.open_own(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
