"""Files that readers read from: opened when needed, a few at a time, and only while they are what they were."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ...errors import ShardError, explain

if TYPE_CHECKING:
    import h5py

__all__ = ["Descriptor", "OpenFiles", "ShardFile", "open_bytes", "open_hdf5", "open_hdf5_files"]

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_KEPT_OPEN = 128  # files kept open: sets of shards may have more files than a process may open


@dataclass(frozen=True)
class ShardFile:
    """A file as it was when it was first looked at."""

    path: Path
    inode: int
    bytes: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> ShardFile:
        status = path.stat()
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, descriptor: int | None = None) -> None:
        """Raise if the file is no longer the one that was opened: a truncated file under a map kills the process."""
        try:
            status = os.stat(self.path if descriptor is None else descriptor)
        except FileNotFoundError:
            got = "no such file"
        else:
            found = (status.st_ino, status.st_size, status.st_mtime_ns)
            if found == (self.inode, self.bytes, self.changed):
                return
            got = f"{found} instead of {(self.inode, self.bytes, self.changed)}"
        expected = "the file as it was opened (inode, bytes, time of change)"
        remedy = "Shards must not change while they are read: make a new dataset."
        raise ShardError(explain("HDF5Dataset", str(self.path), expected=expected, got=got, remedy=remedy))


def open_hdf5(path: Path, driver: str | None = None) -> h5py.File:
    """Open an HDF5 file for reading, with a driver of h5py's: None for its default, or "mpio".

    Raises:
        ShardError: when HDF5 refuses it, naming it.
    """
    import h5py

    options = {}
    if driver == "mpio":
        from mpi4py import MPI

        options = {"driver": driver, "comm": MPI.COMM_SELF}  # no rank waits for another
    try:
        return h5py.File(path, "r", **options)
    except OSError as error:
        raise _refused(path, error, f"one that HDF5 refuses: {error}") from error


def _refused(path: Path, error: OSError, got: str) -> ShardError:
    remedy = "The file is damaged, truncated or not HDF5: copy it again, or write the shards again."
    if error.errno in _TOO_MANY:
        remedy = "Raise the number of files that a process may open (ulimit -n)."
    elif path.exists():
        got = f"a file of {path.stat().st_size} bytes: {got}"
    return ShardError(explain("HDF5Dataset", str(path), expected="an HDF5 file", got=got, remedy=remedy))


class _Closing(Protocol):
    def close(self) -> None: ...


Handle = TypeVar("Handle", bound=_Closing)


class OpenFiles(Generic[Handle]):
    """The files used last, kept open. Each is lent to one thread at a time; two threads get two of the same file.

    Args:
        opener: opens a file.
    """

    def __init__(self, opener: Callable[[ShardFile], Handle]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        self._idle: list[tuple[Path, Handle]] = []  # the one used last at the end
        weakref.finalize(self, _close, self._idle).atexit = False

    @contextmanager
    def lend(self, file: ShardFile) -> Iterator[Handle]:
        """Lend a file, open, for as long as the context lasts."""
        with self._lock:
            found = next((i for i, (path, _) in enumerate(self._idle) if path == file.path), None)
            handle = None if found is None else self._idle.pop(found)[1]
        if handle is None:
            handle = self._open(file)
        try:
            yield handle
        finally:
            with self._lock:
                self._idle.append((file.path, handle))
                oldest = [self._idle.pop(0)] if len(self._idle) > _KEPT_OPEN else []
            _close(oldest)

    def _open(self, file: ShardFile) -> Handle:
        try:
            return self._opener(file)
        except ShardError as error:
            if getattr(error.__cause__, "errno", None) not in _TOO_MANY:
                raise
            with self._lock:
                idle, self._idle[:] = list(self._idle), []
            _close(idle)
            return self._opener(file)


def _close(files: list[tuple[Path, Handle]]) -> None:
    for _, handle in files:
        handle.close()


class Descriptor:
    """A file open for `os.pread` and its kin."""

    def __init__(self, file: ShardFile) -> None:
        try:
            self._number = os.open(file.path, os.O_RDONLY)
        except OSError as error:
            raise _refused(file.path, error, str(error)) from error
        try:
            file.check(self._number)
        except ShardError:
            self.close()
            raise

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        os.close(self._number)


def open_bytes() -> OpenFiles[Descriptor]:
    """Files for what is read as bytes."""
    return OpenFiles(Descriptor)


def open_hdf5_files(driver: str | None = None) -> OpenFiles[h5py.File]:
    """Files for what only h5py reads."""

    def opener(file: ShardFile) -> h5py.File:
        file.check()
        return open_hdf5(file.path, driver)

    return OpenFiles(opener)
