"""Leftover files in /dev/shm: MPI libraries keep files there while ranks run, and leave them when ranks are killed or abort.

Standard library only, and no other file of this package: processes that outlive the ranks run this one by its path. As a
program, `leftovers.py PID` detaches (in a new session), waits for the end of process PID, a launcher, and then removes the
files of its ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "ENDED",
    "FOLDER",
    "KEPT",
    "PATTERNS",
    "kept",
    "mapped_by",
    "of_this_user",
    "remove_since",
    "remove_these",
    "remove_unused",
    "set_word",
    "unused",
]

FOLDER = Path("/dev/shm")
# What MPI libraries and NCCL call their files: MPICH, Open MPI 5 and 4, Intel MPI, MVAPICH, UCX, PSM, libfabric, Cray, NCCL.
PATTERNS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "Intel_MPI_*", "shm-col-space-*", "cxshm*",
            "ucx_shm_posix_*", "psm2_shm.*", "psm3_shm.*", "fi_shm_*", "cray-shared-mem-*", "nccl-*", "mpistrat*")  # fmt: skip
KEPT = "mpistrat-job-"  # what jobs find when they are started again; see ../job_files.py
ENDED = 5  # the word that says in which generation, from 1, ranks have told why the job ends
YOUNG = 60.0  # seconds: a file made just now may not have been mapped yet
_LOOKS = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between looks after the end of a launcher, whose ranks may end later


def of_this_user(folder: Path = FOLDER) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield this user's files that an MPI made."""
    for pattern in PATTERNS:
        for path in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if path.name.startswith(KEPT):
                    continue
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():
                    yield path, about


def mapped_by(maps: Path, folder: Path = FOLDER) -> set[str]:
    """Return the files of the folder that are in a process's `/proc/PID/maps`."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line[line.index(f"{folder}/") :] for line in lines if f" {folder}/" in line and "(deleted)" not in line}


def unused(folder: Path = FOLDER, age: float = YOUNG) -> list[tuple[Path, int]]:
    """Return this user's files, older than `age` seconds, that an MPI made and no living process maps or has open, and sizes."""
    now = time.time()
    old = [(path, about.st_size) for path, about in of_this_user(folder) if now - about.st_mtime > age]
    used = _used(folder) if old else set()
    return [(path, size) for path, size in old if str(path) not in used]


def remove_unused(folder: Path = FOLDER) -> list[tuple[Path, int]]:
    """Remove what `unused` finds, and return it."""
    return _remove(unused(folder))


def remove_since(start: float, end: float) -> list[tuple[Path, int]]:
    """Remove what ranks that have ended made between two times, in seconds since 1970, and return it.

    A file goes when two looks, half a second apart, find no living process of this user that uses it: another job, which
    began meanwhile, has mapped its files as soon as it has made them.
    """
    within = {path for path, about in of_this_user() if start <= about.st_mtime <= end}
    return remove_these([str(path) for path, _ in unused(age=0.0) if path in within]) if within else []


def kept(job: str, what: str) -> Path:
    """Return a file of a job in shared memory that outlives its ranks; see `comm.job_files`."""
    return FOLDER / f"{KEPT}{os.getuid()}-{job}.{what}"


def set_word(job: str, index: int, value: int) -> None:
    """Set a word of a job's state, where it is on this node, and this user's; see `comm.job_files`."""
    with contextlib.suppress(OSError):
        file = os.open(kept(job, "state"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_uid == os.getuid():
                os.pwrite(file, value.to_bytes(8, "little"), 8 * index)
        finally:
            os.close(file)


def remove_these(paths: Iterable[str]) -> list[tuple[Path, int]]:
    """Remove files that an MPI made and ranks had mapped, where no living process of this user uses them, and return them.

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
    """The files of the folder that any process of this user has mapped, or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        found |= mapped_by(process / "maps", folder)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
    return found


def _after(launcher: int) -> None:
    """Wait for the end of a launcher, then remove what its ranks left; those that live a little longer, too."""
    start = time.time() - 1.0  # files' times are those of the last tick
    descriptor = os.pidfd_open(launcher)
    if os.fork():
        os._exit(0)  # the caller becomes the launcher, which must not find a child that it did not start
    os.setsid()
    select.select([descriptor], [], [])
    end = time.time() + 1.0
    for pause in _LOOKS:
        time.sleep(pause)
        remove_since(start, end)


if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):  # no Linux, or an old one
        _after(int(sys.argv[1]))
