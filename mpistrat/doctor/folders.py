"""The folders of a node: /dev/shm, with files of MPI and of crashed jobs, and the one for temporary files."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..base.agree import gather_text
from ..base.errors import by_rank
from ..base.text import binary_size, counted, shortened
from ..cluster.topology import Topology
from ..comm.monitor.leftovers import mapped_by, of_this_user, remove_unused, unused
from ..comm.shared_memory import ENLARGE, SHARED_FOLDER
from .finding import Finding, ok, problem, warning

__all__ = ["check_shared_folder", "check_temporary_folder", "readable_by_others", "segments_of_this_process"]

_LITTLE, _SMALL = (
    32 << 20,
    1 << 30,
)  # bytes: with less free even MPI's start may fail; less in all is a container's default
_LISTED = 6


def check_shared_folder(folder: Path = SHARED_FOLDER, *, clean: bool = False) -> Iterator[Finding]:
    """Check /dev/shm; with `clean` remove files of this user's killed jobs."""
    try:
        found = os.statvfs(folder)
    except OSError:
        yield ok("/dev/shm", f"there is no {folder}: ranks of a node use MPI's own ways")
        return
    yield _room(folder, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    if readable := readable_by_others(path for path, _ in of_this_user(folder)):
        yield readable
    if clean:
        yield _removed(remove_unused(folder))
    elif left := unused(folder):
        yield _leftovers(left)


def _room(folder: Path, size: int, free: int) -> Finding:
    said = f"{binary_size(free)} free of {binary_size(size)}"
    if free < min(_LITTLE, size):
        what = f"{said}: MPI itself, and the variables of a node, need room there"
        return problem("/dev/shm", what, f"See what fills it: ls -l {folder}. Enlarge it: {ENLARGE}")
    if size < _SMALL:
        return warning(
            "/dev/shm", f"{said}: the variables and gradients of a node live there", f"Enlarge it: {ENLARGE}"
        )
    return ok("/dev/shm", said)


def readable_by_others(paths: Iterable[Path]) -> Finding | None:
    """Return a warning if other users may read any of these files, None otherwise."""
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


def segments_of_this_process() -> list[Path]:
    """Return the files of /dev/shm that this process has mapped."""
    return sorted(map(Path, mapped_by(Path("/proc/self/maps"), SHARED_FOLDER)))


def _leftovers(left: list[tuple[Path, int]]) -> Finding:
    size, names = binary_size(sum(nbytes for _, nbytes in left)), _listed(path for path, _ in left)
    what = f"{counted(len(left), 'file')} of yours that no process uses, {size}, left by jobs that were killed: {names}"
    return warning("leftovers", what, "mpistrat doctor --clean removes them")


def _removed(files: list[tuple[Path, int]]) -> Finding:
    if not files:
        return ok("leftovers", "none of yours: nothing was removed")
    size, names = binary_size(sum(nbytes for _, nbytes in files)), _listed(path for path, _ in files)
    return ok("leftovers", f"removed {counted(len(files), 'file')} of yours that no process used, {size}: {names}")


def _listed(paths: Iterable[Path]) -> str:
    return shortened([path.name for path in paths], _LISTED)


_TEMPORARY = "temporary folder"


def check_temporary_folder(topology: Topology) -> Finding:
    """Check that every rank can write temporary files, and report which nodes share the folder. Collective."""
    comm = topology.comm
    made, failed = _make()
    try:
        told = [text.split("\n", 1) for text in gather_text(comm, f"{made or ''}\n{failed}")]
        failures = {rank: error for rank, (_, error) in enumerate(told) if error}
        if failures:
            return problem(
                _TEMPORARY, by_rank(failures)[:400], "export TMPDIR to a folder of the node that you may write to"
            )
        seen = [str(topology.node_of[rank]) for rank, (path, _) in enumerate(told) if os.path.exists(path)]
        nodes = [set(text.split()) for text in gather_text(comm, " ".join(seen))]
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                made.unlink()
    folder = tempfile.gettempdir()
    if topology.num_nodes == 1:
        return ok(_TEMPORARY, f"{folder}, writable for every rank")
    shared = any(len(found) > 1 for found in nodes)
    return ok(
        _TEMPORARY,
        f"{folder}, {'shared between nodes' if shared else 'each node has its own'}, writable for every rank",
    )


def _make() -> tuple[Path | None, str]:
    """Return a new file, or the reason why there is none."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="mpistrat-doctor-")
        os.close(descriptor)
    except OSError as error:
        return None, str(error).replace("\n", " ")
    return Path(name), ""
