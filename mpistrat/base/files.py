"""Files that are replaced as a whole, and digests of files and of arrays, whose unused bytes do not count.

A file is written beside the one it replaces, flushed to the disk, and renamed. Digests are xxHash's where it is installed,
which is ten times as fast, else SHA-256.
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
from typing import Any

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

PAGE = 4096  # two hosts that write parts of one page of a file over NFS may lose bytes

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # another process has the lock; other errors: this file system has none
_TRIES = 16
_LINKS = 40  # followed one after the other, as by Linux
_READ_BYTES = 1 << 22
_END = 1 << 16

_X87 = np.finfo(np.longdouble).nmant == 63  # then a long double has 80 bits, in 12 or 16 bytes


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new empty file beside `path` to write; behind the `with` block it has that name.

    Where `path` is a symbolic link, the file that it leads to is replaced, and the link stays. An error in the block leaves
    `path` as it was. The file's name cannot be guessed, so that no other user of the folder can put a link there, and two jobs
    that write one path do not share it. Its writer holds a file lock on it: what a killed one has left is not locked, and is
    removed when `path` is next replaced.

    Raises:
        OSError: the file cannot be made, flushed or renamed; the link is another user's, in a folder for all users such as /tmp.
    """
    path = _resolved(path)
    remove_dead(path.parent, re.escape(path.name))
    beside, descriptor = _create(path)
    try:
        yield beside
        os.fsync(descriptor)
        beside.replace(path)
        with contextlib.suppress(OSError):  # where there are no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # who opens it by HDF5 locks it, too
        flush_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)  # else it has the other name by now
        os.close(descriptor)


def _resolved(path: Path) -> Path:
    """Return the file that a path leads to, which need not exist yet.

    Raises:
        PermissionError: it leads through a link of another user in a folder for all users, which Linux (`fs.protected_symlinks`)
            does not follow either: the link may lead to a file of this user.
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
    """Return the bytes of a regular file that is named by the user or the environment. Never waits, as for a FIFO.

    Args:
        path: the file, or a link to it.
        most: the number of bytes that it may have.

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
        raise OSError(f"{os.fspath(path)!r} is larger than {most} bytes: it is not such a file")
    return data


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, so that renames survive a crash."""
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
        # Another process that looks for dead files may have removed it before it was locked.
        if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return beside, descriptor
        beside.unlink(missing_ok=True)
        os.close(descriptor)
    raise OSError(errno.EAGAIN, "other processes remove what is written beside it", str(path))


def remove_dead(folder: Path, names: str) -> None:
    """Remove what killed processes of this user have left beside files, if the file system has locks.

    Args:
        folder: where.
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
    """Lock a file until its descriptor is closed; False if another process has it, None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


def default_algorithm() -> str:
    """Return xxh3_128 where xxhash is installed, else sha256."""
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


def digest_of_file(path: Path, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's bytes.

    Raises:
        ImportError: the algorithm needs a library that is not installed.
        ValueError: an unknown algorithm.
    """
    name, hasher = _hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return f"{name}:{hasher.hexdigest()}"


def digest_of_ends(path: Path, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's first and last 64 KiB and of its length. Raises as `digest_of_file`.

    Two small reads, to distinguish files of one size.
    """
    name, hasher = _hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        hasher.update(f"{size}\0".encode())
        for start in sorted({0, max(0, size - _END)}):
            file.seek(start)
            hasher.update(file.read(_END))
    return f"{name}:{hasher.hexdigest()}"


def digest_of_array(array: np.ndarray, about: str = "", algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of an array's dtype, shape and values, and of a text about it.

    It is the same on machines of either byte order. Raises as `digest_of_file`.

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
    """Return an array whose unused bytes are 0: the array itself where its type has none, else a copy.

    Long doubles have unused bytes, and so have structured types whose fields are aligned or are only some of a row. Arrays that
    are equal then have equal bytes. Types with objects have none that can be compared.

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
    """Return which bytes of an element mean something."""
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
