"""Leftover files in /dev/shm: MPI libraries create files there, and leave them behind when ranks are killed or abort.

Standard library only, and no other file of this package: processes that outlive the ranks run this one by its path. As a program,
`leftovers.py PID` detaches (in a new session), waits for the end of process PID, a launcher, and then removes the files of its
ranks; `leftovers.py --job KEY` removes a job's folder on this node.

Every user of the machine can write to /dev/shm. So the files of a job are in a separate folder, which no other user can enter,
and `open_own` opens files by name.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "ENDED",
    "FOLDER",
    "PATTERNS",
    "is_own_folder",
    "job_folders",
    "kept",
    "mapped_by",
    "of_this_user",
    "open_own",
    "remove_job",
    "remove_since",
    "remove_these",
    "remove_unused",
    "set_word",
    "unused",
]

FOLDER = Path("/dev/shm")
# File names of MPI libraries and NCCL: MPICH, Open MPI 5 and 4, Intel MPI, MVAPICH, UCX, PSM, libfabric, Cray, NCCL.
PATTERNS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "Intel_MPI_*", "shm-col-space-*", "cxshm*",
            "ucx_shm_posix_*", "psm2_shm.*", "psm3_shm.*", "fi_shm_*", "cray-shared-mem-*", "nccl-*", "mpistrat*")  # fmt: skip
_KEPT = "mpistrat-job-"  # of the folder of a job with restarts; see ../job_files.py
ENDED = 5  # the word with the generation, from 1, in which ranks have reported why the job ends
YOUNG = 60.0  # seconds: a new file may not be mapped yet
_LOOKS = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between checks after the end of a launcher, whose ranks may end later


def of_this_user(folder: Path = FOLDER) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield this user's files that an MPI created."""
    for pattern in PATTERNS:
        for path in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():
                    yield path, about


def mapped_by(maps: Path, folder: Path = FOLDER) -> set[str]:
    """Return the files of the folder in a process's `/proc/PID/maps`."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line[line.index(f"{folder}/") :] for line in lines if f" {folder}/" in line and "(deleted)" not in line}


def unused(folder: Path = FOLDER, age: float = YOUNG) -> list[tuple[Path, int]]:
    """Return files and sizes: this user's, created by an MPI, older than `age` seconds, and not in use by a living process."""
    now = time.time()
    old = [(path, about.st_size) for path, about in of_this_user(folder) if now - about.st_mtime > age]
    used = _used(folder) if old else set()
    return [(path, size) for path, size in old if str(path) not in used]


def remove_unused(folder: Path = FOLDER) -> list[tuple[Path, int]]:
    """Remove and return the files of `unused`."""
    return _remove(unused(folder))


def remove_since(start: float, end: float) -> list[tuple[Path, int]]:
    """Remove and return files that ended ranks created between two times, in seconds since 1970.

    A file is removed if two checks, half a second apart, find no living process of this user that uses it: another job maps its
    files as soon as it has created them.
    """
    within = {path for path, about in of_this_user() if start <= about.st_mtime <= end}
    return remove_these([str(path) for path, _ in unused(age=0.0) if path in within]) if within else []


def open_own(path: str | Path, flags: int) -> int:
    """Open a regular file of this user that no other user can open; return its descriptor. Never waits, as for a FIFO.

    Raises:
        OSError: it is missing, a link, or not a regular file; another user owns it, or can open it.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        os.close(file)
        raise PermissionError(f"{path} is not a regular file of this user alone")
    return file


def is_own_folder(path: Path) -> bool:
    """Return True if a path is a folder of this user that no other user can enter."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def job_folders(job: str = "") -> list[tuple[str, Path]]:
    """Return the keys and folders of this user's jobs on this node, or of one job.

    Other users' files with such a name are skipped.
    """
    own = re.compile(rf"{_KEPT}{os.getuid()}-({job or '[0-9a-f]{16}'})(\.[0-9a-f]{{16}})?")
    named = [(own.fullmatch(path.name), path) for path in sorted(FOLDER.glob(f"{_KEPT}*"))]
    return [(match[1], path) for match, path in named if match and is_own_folder(path)]


def kept(job: str, what: str) -> Path:
    """Return the path of a job's file in shared memory that outlives its ranks; see `comm.job_files`.

    If another user has taken the name of the job's folder, the folder's name gets a random suffix.
    """
    folder = FOLDER / f"{_KEPT}{os.getuid()}-{job}"
    if not is_own_folder(folder):
        found = job_folders(job)
        if found:
            folder = found[0][1]
        elif os.path.lexists(folder):
            folder = folder.with_name(f"{folder.name}.{os.urandom(8).hex()}")
    return folder / what


def remove_job(job: str) -> None:
    """Remove the folder of a job on this node."""
    for _, folder in job_folders(job):
        # Another process may remove it too, or a rank that is being killed may create another file.
        with contextlib.suppress(OSError):
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()


def set_word(job: str, index: int, value: int) -> None:
    """Set a word of a job's state, if it is on this node; see `comm.job_files`."""
    with contextlib.suppress(OSError):
        file = open_own(kept(job, "state"), os.O_RDWR)
        try:
            os.pwrite(file, value.to_bytes(8, "little"), 8 * index)
        finally:
            os.close(file)


def remove_these(paths: Iterable[str]) -> list[tuple[Path, int]]:
    """Remove and return files that an MPI created and ranks had mapped, unless a living process of this user uses them.

    Waits half a second for ranks that are still ending.
    """
    time.sleep(0.5)
    wanted = set(paths)
    return _remove((path, size) for path, size in unused(age=0.0) if str(path) in wanted)


def _remove(files: Iterable[tuple[Path, int]]) -> list[tuple[Path, int]]:
    removed = []
    for path, size in files:
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append((path, size))
    return removed


def _used(folder: Path) -> set[str]:
    """Return the files of the folder that any process of this user has mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        found |= mapped_by(process / "maps", folder)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
    return found


def _after(launcher: int) -> None:
    """Wait for the end of a launcher, then remove its ranks' files, also of those that live a little longer."""
    start = time.time() - 1.0  # files' times are those of the last tick
    descriptor = os.pidfd_open(launcher)
    if os.fork():
        os._exit(0)  # the caller becomes the launcher, which must not have an unknown child
    os.setsid()
    select.select([descriptor], [], [])
    end = time.time() + 1.0
    for pause in _LOOKS:
        time.sleep(pause)
        remove_since(start, end)


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        remove_job(sys.argv[2])
    else:
        with contextlib.suppress(OSError, AttributeError):  # no Linux, or an old one
            _after(int(sys.argv[1]))
