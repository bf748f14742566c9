"""Files of a job in /dev/shm that stay when its ranks are killed, under the key that `mpistrat run --restarts` gives it.

    mpistrat-job-UID-KEY.lock               locked while the job's supervisor lives
    mpistrat-job-UID-KEY.g2.1.r0            snapshots of the ranks from 0 on, of the second restart; see strategy/snapshot.py
    mpistrat-job-UID-KEY.begun, .done       rank 0 has begun; the program has ended as it should
    mpistrat-job-UID-KEY.modules            what rank 0 has imported
    mpistrat-job-UID-KEY.stopped            it has stopped, to go on later
    mpistrat-job-UID-KEY.ended              ranks have said why the job ends
    mpistrat-job-UID-KEY.size               with how many ranks it shall go on
    mpistrat-job-UID-KEY.step               words: the step that the job has reached since it was started last, and its
                                            generation; where rank 0 is, or was

The supervisor removes them when the job has ended. What a supervisor that was killed has left, the next one removes: files whose
lock nobody holds, and which nobody has touched for some minutes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ..environment import RESTART_EXIT_CODE
from .monitor import abort, leftovers
from .shared_memory import map_file

__all__ = [
    "RESIZE", "ask_for_size", "expect_end", "generation_of", "least_generation", "lock", "make_file", "mark", "note_modules",
    "path_of", "paths", "progress", "remove", "remove_older", "supervisors", "sweep", "unsupervised",
]  # fmt: skip

RESIZE = signal.SIGUSR2
_ABANDONED = 600.0  # seconds
_WORDS = 16  # bytes
_end: _End | None = None
_SNAPSHOT = re.compile(r"\.g(\d+)\.(\d+)\.r(\d+)$")


def _prefix(job: str) -> str:
    return f"{leftovers.KEPT}{os.getuid()}-{job}"


def mark(job: str, what: str) -> Path:
    """Return the file that says something of a job, such as "lock" or "done"."""
    return leftovers.kept(job, what)


def path_of(job: str, generation: int, serial: int, first: int) -> Path:
    """Return the file of the snapshots of a node's ranks, from rank `first` on."""
    return leftovers.kept(job, f"g{generation}.{serial}.r{first}")


def generation_of(path: Path) -> int:
    """Return how often the job had been started again when a file of snapshots was made."""
    match = _SNAPSHOT.search(path.name)
    return int(match[1]) if match else 0


def paths(job: str) -> list[Path]:
    """Return the files of snapshots on this node."""
    found = leftovers.FOLDER.glob(f"{_prefix(job)}.g*") if leftovers.FOLDER.is_dir() else ()
    return sorted(path for path in found if _SNAPSHOT.search(path.name))


def make_file(path: Path, head: bytes, nbytes: int) -> None:
    """Make a file of so many bytes, whose memory is there, zeros behind the head; it has its name when it is complete.

    Raises:
        OSError: there is no room, or the file is there.
    """
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


def remove_older(job: str, path: Path) -> None:
    """Remove the files of snapshots of earlier starts of the job, and those that this file has replaced."""
    own = _SNAPSHOT.search(path.name)
    assert own is not None
    for other in paths(job):
        found = _SNAPSHOT.search(other.name)
        assert found is not None
        replaced = found[1] == own[1] and found[3] == own[3] and int(found[2]) < int(own[2])
        if int(found[1]) < int(own[1]) or replaced:
            other.unlink(missing_ok=True)


def expect_end(job: str, first: bool) -> None:
    """Tell the supervisor that the program has begun, and that it has ended as it should. For the first rank of each node.

    Where the supervisor is on another node, which then believes the launcher, the files here are removed at a good end.

    Args:
        job: the key.
        first: whether this is rank 0.
    """
    global _end
    supervised = mark(job, "lock").exists()
    if first and supervised:
        mark(job, "begun").touch(mode=0o600)
    if _end is None or _end.process != os.getpid():
        atexit.register(_at_exit)
    _end = _End(os.getpid(), job, first, supervised)


def note_modules(job: str) -> None:
    """Write what this process has imported, once, for ranks that wait to be the next ones; see `cli/standby.py`."""
    path = mark(job, "modules")
    if mark(job, "lock").exists() and not path.exists():
        names = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None]
        data = "\n".join(names).encode()
        with contextlib.suppress(OSError):
            make_file(path, data, len(data))


class _End(NamedTuple):
    """What a process does at its end, with the arguments of `expect_end`."""

    process: int
    job: str
    first: bool
    supervised: bool


def _at_exit() -> None:
    if _end is None or os.getpid() != _end.process or hasattr(sys, "last_value") or abort.ending:
        return
    if abort.exit_status():
        if _end.first and _end.supervised and abort.exit_status() == RESTART_EXIT_CODE:
            mark(_end.job, "stopped").touch(mode=0o600)
    elif not _end.supervised:
        remove(_end.job)
    elif _end.first:
        mark(_end.job, "done").touch(mode=0o600)


def progress(job: str) -> memoryview:
    """Return the two words of how far the job is, which are mapped: on a supervisor's node it reads them."""
    path = mark(job, "step")
    try:
        if not path.exists():
            make_file(path, b"", _WORDS)
        return memoryview(map_file(path)).cast("q")
    except OSError:  # no room
        return memoryview(bytearray(_WORDS)).cast("q")


def least_generation(job: str, told: int) -> int:
    """Return how often the job had gone on at least, as this node knows it, where a supervisor has told a number.

    Ranks of this node may have gone on without those of the supervisor's, which then does not know how often.
    """
    path = mark(job, "step")
    return told if mark(job, "lock").exists() or not path.exists() else max(told, progress(job)[1] + 1)


# the supervisor's


def lock(job: str) -> int:
    """Lock a job's key while this process lives; return the file's number, to be kept open."""
    file = os.open(mark(job, "lock"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, f"{os.getpid()}\n".encode())
    make_file(mark(job, "step"), b"", _WORDS)
    return file


def remove(job: str) -> None:
    """Remove all files of a job on this node."""
    for path in leftovers.FOLDER.glob(f"{_prefix(job)}.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def sweep() -> list[str]:
    """Remove this user's files of jobs whose supervisors are gone; return their keys."""
    removed = []
    for job in unsupervised():
        with contextlib.suppress(OSError, ValueError):
            newest = max(path.stat().st_mtime for path in leftovers.FOLDER.glob(f"{_prefix(job)}.*"))
            if time.time() - newest > _ABANDONED:
                remove(job)
                removed.append(job)
    return removed


def supervisors() -> dict[int, str]:
    """Return the processes of this user's supervisors on this machine, and their jobs' keys."""
    found = {}
    for job in sorted(_keys()):
        with contextlib.suppress(OSError, ValueError):
            if _locked(job):
                found[int(mark(job, "lock").read_text())] = job
    return found


def ask_for_size(job: str, ranks: int) -> None:
    """Write with how many ranks a job shall go on; its supervisor looks there when it gets the signal `RESIZE`."""
    path = mark(job, "size")
    path.unlink(missing_ok=True)
    make_file(path, str(ranks).encode(), len(str(ranks)))


def unsupervised() -> list[str]:
    """Return the keys of this user's jobs that have files here, and no supervisor that lives."""
    return [job for job in sorted(_keys()) if not _locked(job)]


def _keys() -> set[str]:
    found = set()
    for path in leftovers.FOLDER.glob(_prefix("*")):
        match = re.match(_prefix("([0-9a-f]{16})[.]"), path.name)
        if match:
            found.add(match[1])
    return found


def _locked(job: str) -> bool:
    try:
        file = os.open(mark(job, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
