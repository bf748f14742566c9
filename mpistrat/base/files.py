"""Atomic replacement of files, and digests of files and arrays that ignore unused bytes.

A file is written next to the one it replaces, flushed to disk, and renamed. Digests use xxHash if it is installed, which is ten
times as fast, else SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = [
    "PAGE",
    "algorithm_of",
    "default_algorithm",
    "digest_of_array",
    "digest_of_bytes",
    "digest_of_ends",
    "digest_of_file",
    "flush_folder",
    "read_whole",
    "remove_dead",
    "replacing",
    "with_zero_padding",
]

PAGE = 4096  # hosts that write parts of the same page of a file over NFS may lose bytes

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # another process has the lock; other errors: no locks on this file system
_TRIES = 16
_LINKS = 40  # the most that are followed, as in Linux
_READ_BYTES = 1 << 22
_END = 1 << 16

_X87 = np.finfo(np.longdouble).nmant == 63  # then a long double has 80 bits, in 12 or 16 bytes


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new empty file next to `path` to write; after the `with` block it replaces `path`.

    If `path` is a symbolic link, its target is replaced and the link stays. An error in the block leaves `path` unchanged. The
    new file's name cannot be guessed, so no other user of the folder can put a link there, and two jobs that write one path do
    not share it. Its writer holds a file lock. Files of killed writers are unlocked, and are removed when `path` is next
    replaced.

    Raises:
        OSError: the file cannot be created, flushed or renamed; or the link is another user's, in a folder for all users such as
            /tmp.
    """
    path = _resolved(path)
    remove_dead(path.parent, re.escape(path.name))
    beside, descriptor = _create(path)
    try:
        yield beside
        os.fsync(descriptor)
        beside.replace(path)
        with contextlib.suppress(OSError):  # without file locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # readers lock it too, with HDF5
        flush_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)  # unless it was renamed
        os.close(descriptor)


def _resolved(path: Path) -> Path:
    """Return the file that a path leads to, which may not exist yet.

    Raises:
        PermissionError: it leads through a link of another user in a folder for all users, which Linux
            (`fs.protected_symlinks`) does not follow either: the target may be a file of this user.
        OSError: the links form a circle.
    """
    for _ in range(_LINKS):
        path = path.absolute()
        try:
            link, folder = path.lstat(), path.parent.stat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(link.st_mode):
            return path
        for_all = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
        if for_all and link.st_uid not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EACCES, "a symbolic link of another user in a folder for all users", str(path))
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def read_whole(path: str | os.PathLike[str], most: int = 1 << 24) -> bytes:
    """Return the bytes of a regular file that the user or the environment names. Never waits, as for a FIFO.

    Args:
        path: the file, or a link to it.
        most: the largest number of bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)!r} is not a regular file")
    with open(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{os.fspath(path)!r} is larger than {most} bytes: it is not a file of this kind")
    return data


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, so that renames survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> tuple[Path, int]:
    """Return a new file that this process has locked, if the file system has locks."""
    for _ in range(_TRIES):
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        descriptor = os.open(beside, _NEW, 0o666)
        # Another process may have removed it as dead before it was locked.
        if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return beside, descriptor
        beside.unlink(missing_ok=True)
        os.close(descriptor)
    raise OSError(errno.EAGAIN, "other processes remove the new file before it is locked", str(path))


def remove_dead(folder: Path, names: str) -> None:
    """Remove files that killed processes of this user have left next to others, if the file system has locks.

    Args:
        folder: the folder.
        names: a regular expression of the files' names.
    """
    of_these = re.compile(rf"\.{names}\.[0-9a-f]+\.part")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if of_these.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
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
    """Lock a file until its descriptor is closed; return False if another process has it, None without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


def default_algorithm() -> str:
    """Return xxh3_128 if xxhash is installed, else sha256."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "sha256"
    return "xxh3_128"


def algorithm_of(digest: str) -> str:
    """Return the algorithm of a digest "algorithm:hex"."""
    return digest.partition(":")[0]


def digest_of_bytes(data: bytes, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of bytes. Raises as `digest_of_file`."""
    name, hasher = _hasher(algorithm)
    hasher.update(data)
    return f"{name}:{hasher.hexdigest()}"


class _Opening(Protocol):
    """A path."""

    def open(self, mode: str, buffering: int) -> Any: ...


def digest_of_file(path: _Opening, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's bytes.

    Raises:
        ImportError: the algorithm needs a library that is not installed.
        ValueError: an unknown algorithm.
    """
    name, hasher = _hasher(algorithm)
    with path.open("rb", 0) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return f"{name}:{hasher.hexdigest()}"


def digest_of_ends(path: _Opening, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's length and its first and last 64 KiB. Raises as `digest_of_file`.

    Two small reads distinguish most files of one size.
    """
    name, hasher = _hasher(algorithm)
    with path.open("rb", 0) as file:
        size = file.seek(0, os.SEEK_END)
        hasher.update(f"{size}\0".encode())
        for start in sorted({0, max(0, size - _END)}):
            file.seek(start)
            hasher.update(file.read(_END))
    return f"{name}:{hasher.hexdigest()}"


def digest_of_array(array: np.ndarray, about: str = "", algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of an array's dtype, shape and values, and of a text about it.

    It does not depend on the machine's byte order. Raises as `digest_of_file`.

    Example:
        >>> digest_of_array(np.zeros(2), "w", "sha256")[:16]
        'sha256:465c0cc0f'
    """
    name, hasher = _hasher(algorithm)
    dtype = array.dtype
    if sys.byteorder == "big" if dtype.isnative else sys.byteorder == "little":
        array = array.astype(dtype.newbyteorder("<"))
    hasher.update(f"{about}\0{dtype.name}\0{array.shape}\0".encode())
    hasher.update(np.ascontiguousarray(with_zero_padding(array)).reshape(-1).view(np.uint8).data)
    return f"{name}:{hasher.hexdigest()}"


def _hasher(algorithm: str | None) -> tuple[str, Any]:
    algorithm = algorithm or default_algorithm()
    if algorithm == "sha256":
        return algorithm, hashlib.sha256()
    if algorithm == "xxh3_128":
        import xxhash

        return algorithm, xxhash.xxh3_128()
    raise ValueError(f"unknown digest algorithm {algorithm!r}")


def with_zero_padding(array: np.ndarray) -> np.ndarray:
    """Return an array whose unused bytes are 0: the array itself if its type has none, else a copy.

    Long doubles have unused bytes, and so do structured types with aligned fields or a selection of fields. Equal
    arrays then have equal bytes. The bytes of objects cannot be compared.

    Example:
        >>> row = np.dtype({"names": ["a"], "formats": ["u1"], "offsets": [1], "itemsize": 3})
        >>> with_zero_padding(np.frombuffer(b"xAzyB?", row)).tobytes()
        b'\\x00A\\x00\\x00B\\x00'
    """
    dtype = array.dtype
    if dtype.names is None and dtype.char not in "gG":
        return array
    used = _used(dtype)
    if used.all():
        return array
    copy = np.array(array, order="C")
    copy.reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)[:, ~used] = 0
    return copy


@functools.lru_cache(maxsize=64)
def _used(dtype: np.dtype) -> np.ndarray:
    """Return a mask of the bytes of an element that have a meaning."""
    used = np.zeros(dtype.itemsize, np.bool_)
    if dtype.subdtype is not None:
        base, _ = dtype.subdtype
        used[:] = np.tile(_used(base), dtype.itemsize // base.itemsize) if base.itemsize else True
    elif dtype.fields is not None:
        for field, offset, *_ in dtype.fields.values():
            used[offset : offset + field.itemsize] |= _used(field)
    elif dtype.char in "gG" and _X87:
        number = np.arange(dtype.itemsize // (2 if dtype.char == "G" else 1)) < 10
        number = number if dtype.isnative else number[::-1]
        used[:] = np.tile(number, 2 if dtype.char == "G" else 1)
    else:
        used[:] = True
    return used
