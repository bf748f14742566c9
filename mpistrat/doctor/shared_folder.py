"""/dev/shm: its room, who may read what MPI keeps there, and what crashed jobs left behind. Nothing is removed here."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..comm.shared_memory import ENLARGE, SHARED_FOLDER
from .finding import Finding, ok, problem, warning

__all__ = ["check_shared_folder", "readable_by_others", "segments_of_this_process"]

# What MPI libraries and NCCL call their files: MPICH, Open MPI 5 and 4, Intel MPI, MVAPICH, UCX, PSM, libfabric, Cray, NCCL.
_PATTERNS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "Intel_MPI_*", "shm-col-space-*", "cxshm*",
             "ucx_shm_posix_*", "psm2_shm.*", "psm3_shm.*", "fi_shm_*", "cray-shared-mem-*", "nccl-*", "mpistrat*")  # fmt: skip
_LITTLE, _SMALL = (
    32 << 20,
    1 << 30,
)  # bytes: with less free even MPI's start may fail; less in all is a container's default
_YOUNG = 60.0  # seconds: a file that somebody made just now may not have been mapped yet
_LISTED = 6


def check_shared_folder(folder: Path = SHARED_FOLDER) -> Iterator[Finding]:
    """Say how /dev/shm is. Not collective."""
    try:
        found = os.statvfs(folder)
    except OSError:
        yield ok("/dev/shm", f"there is no {folder}: ranks of a node use MPI's own ways")
        return
    yield _room(folder, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    files = list(_segments(folder))
    if readable := readable_by_others(path for path, _ in files):
        yield readable
    mapped = _mapped(folder)
    now = time.time()
    left = [(path, about.st_size) for path, about in files if now - about.st_mtime > _YOUNG and str(path) not in mapped]
    if left:
        yield _leftovers(folder, left)


def _room(folder: Path, size: int, free: int) -> Finding:
    said = f"{_mib(free)} free of {_mib(size)}"
    if free < min(_LITTLE, size):
        what = f"{said}: MPI itself, and the variables of a node, need room there"
        return problem("/dev/shm", what, f"See what fills it: ls -l {folder}. Enlarge it: {ENLARGE}")
    if size < _SMALL:
        return warning(
            "/dev/shm", f"{said}: the variables and gradients of a node live there", f"Enlarge it: {ENLARGE}"
        )
    return ok("/dev/shm", said)


def readable_by_others(paths: Iterable[Path]) -> Finding | None:
    """Return a warning if other users may read any of these files, None otherwise. Not collective."""
    open_files = []
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                open_files.append(path)
    if not open_files:
        return None
    mode = stat.S_IMODE(open_files[0].stat().st_mode)
    what = f"other users of this machine may read your memory: {_listed(open_files)} (mode {mode:04o})"
    remedy = "Set umask 077 before you start, in the job script; for those that are there: chmod 600 "
    return warning("segments", what, remedy + shlex.join(map(str, open_files[:_LISTED])))


def segments_of_this_process(folder: Path = SHARED_FOLDER) -> list[Path]:
    """Return the files of /dev/shm that this process has mapped. Not collective."""
    return sorted(map(Path, _maps(Path("/proc/self/maps"), folder)))


def _segments(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield this user's files that an MPI made."""
    for pattern in _PATTERNS:
        for path in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():
                    yield path, about


def _mapped(folder: Path) -> set[str]:
    """The files of the folder that any process of this user has mapped, or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        found |= _maps(process / "maps", folder)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
    return found


def _maps(maps: Path, folder: Path) -> set[str]:
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line[line.index(f"{folder}/") :] for line in lines if f" {folder}/" in line and "(deleted)" not in line}


def _leftovers(folder: Path, left: list[tuple[Path, int]]) -> Finding:
    paths = [path for path, _ in left]
    size = sum(nbytes for _, nbytes in left)
    count = f"{len(left)} file{'s' * (len(left) > 1)} of yours"
    what = f"{count} that no process uses, {_mib(size)}, left by jobs that were killed: {_listed(paths)}"
    if len(paths) <= _LISTED:
        return warning("leftovers", what, f"rm {shlex.join(map(str, paths))}")
    names = " -o ".join(
        f"-name {shlex.quote(pattern)}" for pattern in _PATTERNS if any(p.match(pattern) for p in paths)
    )
    find = f'find {folder} -user "$(id -un)" \\( {names} \\) -delete'
    return warning("leftovers", what, f"When none of your jobs runs on this machine: {find}")


def _listed(paths: list[Path]) -> str:
    more = len(paths) - _LISTED
    return ", ".join(path.name for path in paths[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / 2**20:.0f} MiB"
