"""A file that is replaced as a whole: it is written beside, flushed to the disk, and renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flush_folder", "replacing"]

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # somebody has the lock; other errors: this file system has none
_TRIES = 16


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new empty file beside `path` to write; behind the `with` block it has that name.

    An error in the block leaves `path` as it was. The file's name cannot be guessed, so that nobody in a folder that others
    write to lays a link there, and two jobs that write one path do not share it. Its writer holds a lock of the system's on
    it: what a killed one has left is not locked, and is removed when `path` is next replaced.

    Raises:
        OSError: the file cannot be made, flushed or renamed.
    """
    _remove_dead(path)
    beside, descriptor = _create(path)
    try:
        yield beside
        os.fsync(descriptor)
        beside.replace(path)
        flush_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)  # else it has the other name by now
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder: so renames survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> tuple[Path, int]:
    """Return a new file that this process has locked, where there are locks."""
    for _ in range(_TRIES):
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        descriptor = os.open(beside, _NEW, 0o666)
        # Somebody who looks for dead files may have come between, and have removed it.
        if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return beside, descriptor
        beside.unlink(missing_ok=True)
        os.close(descriptor)
    raise OSError(errno.EAGAIN, "other processes remove what is written beside it", str(path))


def _remove_dead(path: Path) -> None:
    """Remove what killed processes of this user have left beside a file, if the file system tells which those are."""
    of_this = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.part")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if of_this.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    descriptor = os.open(path, _OLD)
    try:
        status = os.fstat(descriptor)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if own and _lock(descriptor):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock a file until its descriptor is closed; False if somebody else has it, None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True
