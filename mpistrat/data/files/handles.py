"""Files of readers: opened on demand, a few at a time, and only while they are unchanged."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ...base.errors import ClosedError, LayoutError, MissingDependencyError, ShardError, explain, shard_error
from ...cluster.topology import running_mpi

if TYPE_CHECKING:
    import h5py

    from .remote import RemoteRanges, StoredPath

__all__ = [
    "DAMAGED",
    "NOT_UTF8",
    "Descriptor",
    "OpenFiles",
    "ShardFile",
    "before_mpi_ends",
    "check_mpi_io",
    "mpi_io_options",
    "open_bytes",
    "open_hdf5",
    "open_hdf5_files",
]

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_LOCKED = (errno.EAGAIN, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_KEPT_OPEN = 128  # most files kept open: sets may have more files than a process may open
_KEPT_OPEN_BY_MPI = 32  # each uses two of MPICH's 2048 communicators, and MPICH 4.0 crashes without a free one
_KEPT_AHEAD = 1 << 25  # bytes of remote files that are read ahead
_PATIENCE = 10.0  # seconds that the end of MPI waits for running reads


NOT_UTF8 = "The text is in another encoding, such as Latin-1: write it in UTF-8, or do not name the field."
DAMAGED = "The file is damaged: copy it again, or write the shards again."


@dataclass(frozen=True)
class ShardFile:
    """The identity of a file when it was first opened; `function` is for errors."""

    path: StoredPath
    inode: int
    bytes: int
    changed: int
    function: str = "HDF5Dataset"

    @classmethod
    def of(cls, path: StoredPath, function: str = "HDF5Dataset") -> ShardFile:
        status = path.stat()
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns, function)

    def check(self, descriptor: int | None = None) -> None:
        """Raise unless the file is the one that was opened: a truncated file under a map kills the process."""
        try:
            status = self.path.stat() if descriptor is None else os.stat(descriptor)
        except FileNotFoundError:
            got = "no such file"
        else:
            found = (status.st_ino, status.st_size, status.st_mtime_ns)
            if found == (self.inode, self.bytes, self.changed):
                return
            got = f"{found} instead of {(self.inode, self.bytes, self.changed)}"
        what = "inode, bytes, time of change" if isinstance(self.path, Path) else "URL, bytes, version"
        expected = f"the file as it was opened ({what})"
        remedy = "Files must not change while they are read: make a new dataset."
        raise shard_error(self.path, expected, got, remedy, self.function)


def open_hdf5(path: StoredPath, driver: str | None = None, function: str = "HDF5Dataset") -> h5py.File:
    """Open an HDF5 file for reading, with a driver of h5py: None for its default, or "mpio".

    Args:
        function: the name for errors.

    Raises:
        ShardError: naming the file, when HDF5 refuses it.
    """
    import h5py

    if driver is not None and not isinstance(path, Path):
        raise shard_error(path, "a path on this machine", "a URL", "Leave driver out.", function)
    try:
        if not isinstance(path, Path):
            return h5py.File(path.open_for_h5py(), "r")
        return h5py.File(path, "r", **(mpi_io_options(path) if driver == "mpio" else {}))
    except ShardError:
        raise
    except OSError as error:
        got = f"one that HDF5 refuses: {error}"
        remedy = "The file is damaged, truncated or not HDF5: copy it again, or write the shards again."
        raise _refused(path, error, "an HDF5 file", got, remedy, function) from error


def _refused(path: StoredPath, error: OSError, expected: str, got: str, remedy: str, function: str) -> ShardError:
    """Return the error of a file that does not open; the remedy is for an unknown reason."""
    if error.errno in _TOO_MANY:
        remedy = "Raise the number of files that a process may open (ulimit -n)."
    elif error.errno in _LOCKED:
        remedy = (
            "A program has it open for writing, or its file system has no locks: wait for the writer, or set"
            " HDF5_USE_FILE_LOCKING=FALSE."
        )
    elif "already open for" in str(error):
        remedy = (
            "A program is writing it, or ended before it closed it. Wait for the program; if none writes it, clear the mark:"
            f" h5clear -s {path.name}"
        )
    elif error.errno in _FORBIDDEN:
        remedy = "Let this user read it: chmod, or ask its owner."
    elif not isinstance(path, Path) or path.exists():
        got = f"a file of {path.stat().st_size} bytes: {got}"
    return shard_error(path, expected, got, remedy, function)


class _Closing(Protocol):
    def close(self) -> None: ...


Handle = TypeVar("Handle", bound=_Closing)


class OpenFiles(Generic[Handle]):
    """The most recently used files, kept open. Each is lent to one thread at a time; two threads get two handles of a file."""

    def __init__(self, opener: Callable[[ShardFile], Handle], keep: int = _KEPT_OPEN) -> None:
        self._opener = opener
        self._keep = keep
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._lent = self._waiting = 0  # threads with a file, or about to open one; those waiting for room
        self._idle: list[tuple[StoredPath, Handle]] = []  # most recently used last
        self.opened: set[ShardFile] = set()  # all files ever opened
        weakref.finalize(self, _close, self._idle).atexit = False

    @contextmanager
    def lend(self, file: ShardFile) -> Iterator[Handle]:
        """Lend an open file for the duration of the context."""
        handle = self._take(file)
        try:
            if handle is None:
                handle = self._open(file)
            yield handle
        finally:
            self._give_back(file, handle)

    def close(self) -> None:
        """Close all files once none is lent, and lend no more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._lent, _PATIENCE)
            idle, self._idle[:] = list(self._idle), []
        _close(idle)

    def _take(self, file: ShardFile) -> Handle | None:
        with self._changed:
            if self._closed:
                got = "a file that was closed, as MPI ended"
                raise ClosedError(explain(file.function, str(file.path), expected="an open file", got=got))
            self._lent += 1
            found = next((i for i, (path, _) in enumerate(self._idle) if path == file.path), None)
            return None if found is None else self._idle.pop(found)[1]

    def _give_back(self, file: ShardFile, handle: Handle | None) -> None:
        with self._changed:
            self._lent -= 1
            if handle is not None:
                self._idle.append((file.path, handle))
            oldest = [self._idle.pop(0)] if len(self._idle) > self._keep else []
            self._changed.notify_all()
        _close(oldest)

    def _open(self, file: ShardFile) -> Handle:
        self.opened.add(file)
        while True:
            try:
                return self._opener(file)
            except ShardError as error:
                if getattr(error.__cause__, "errno", None) not in _TOO_MANY or not self._make_room():
                    raise

    def _make_room(self) -> bool:
        """Close unused files, once there are any; return False if no other thread can return one."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._lent <= self._waiting, _PATIENCE)
            self._waiting -= 1
            idle, self._idle[:] = list(self._idle), []
        _close(idle)
        return bool(idle)


def _close(files: list[tuple[StoredPath, Handle]]) -> None:
    for _, handle in files:
        handle.close()


class Descriptor:
    """A file opened for `os.pread` and the like."""

    def __init__(self, file: ShardFile) -> None:
        assert isinstance(file.path, Path)
        try:
            self._number = os.open(file.path, os.O_RDONLY)
        except OSError as error:
            raise _refused(file.path, error, "a file that can be read", str(error), "", file.function) from error
        try:
            file.check(self._number)
        except ShardError:
            self.close()
            raise

    def fileno(self) -> int:
        return self._number

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Fill a buffer from a position on; return the number of bytes read, fewer at the end of the file."""
        read = 0
        while read < len(buffer) and (count := os.preadv(self._number, [buffer[read:]], position + read)):
            read += count
        return read

    def close(self) -> None:
        os.close(self._number)


def open_bytes() -> OpenFiles[Descriptor | RemoteRanges]:
    """Return files that are read as bytes."""
    from ..buffers import LastRead
    from .remote import RemoteRanges, SuccessiveReads

    kept = LastRead[bytes](_KEPT_AHEAD)
    ahead: dict[StoredPath, SuccessiveReads] = {}

    def opener(file: ShardFile) -> Descriptor | RemoteRanges:
        if isinstance(file.path, Path):
            return Descriptor(file)
        file.check()
        return RemoteRanges(file.path, file.bytes, ahead.setdefault(file.path, SuccessiveReads(kept)))

    return OpenFiles(opener)


def open_hdf5_files(driver: str | None = None) -> OpenFiles[h5py.File]:
    """Return files that h5py reads."""

    def opener(file: ShardFile) -> h5py.File:
        file.check()
        return open_hdf5(file.path, driver, file.function)

    if driver is None:
        return OpenFiles(opener)
    files = OpenFiles(opener, _KEPT_OPEN_BY_MPI)
    before_mpi_ends(files.close)
    return files


_at_end: list[weakref.WeakMethod[Callable[[], None]]] = []


def check_mpi_io() -> None:
    """Raise unless files can be read through MPI-IO.

    Raises:
        MissingDependencyError: h5py was built without MPI.
        LayoutError: MPI is not running, or with a lower thread level.
    """
    import h5py

    if not h5py.get_config().mpi:
        got, expected = f"h5py {h5py.__version__} without MPI", "an h5py that was built with MPI"
        remedy = (
            "Build one against a parallel HDF5 (HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py), or leave"
            " driver out: the ranks then read the files independently of each other."
        )
        raise MissingDependencyError(explain("HDF5Dataset", "driver", expected=expected, got=got, remedy=remedy))
    mpi = running_mpi("HDF5Dataset")
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:  # files are read in threads, while others communicate
        expected, got = 'MPI_THREAD_MULTIPLE for "mpio"', "a lower one"
        remedy = "Let mpi4py start MPI, or ask for MPI_THREAD_MULTIPLE."
        raise LayoutError(explain("HDF5Dataset", "driver", expected=expected, got=got, remedy=remedy))


def mpi_io_options(path: Path) -> dict[str, Any]:
    """Return h5py.File's options to open a file through MPI-IO, on this rank alone.

    Raises:
        ShardError: for a path that MPI-IO would interpret differently.
    """
    if ":" in str(path):
        expected, remedy = "a path without a colon", "Rename it, or leave driver out."
        got = "one in which MPI-IO takes the text before the colon for a file system"
        raise shard_error(path, expected, got, remedy)
    return {"driver": "mpio", "comm": running_mpi("HDF5Dataset").COMM_SELF}


def before_mpi_ends(close: Callable[[], None]) -> None:
    """Call a method before MPI ends, if its object still exists: later reads or closes of a file end the process."""
    if not _at_end:
        MPI = running_mpi("HDF5Dataset")
        # MPI.Finalize() begins by deleting the attributes of COMM_SELF.
        key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: _close_all())
        MPI.COMM_SELF.Set_attr(key, None)
    _at_end[:] = [method for method in _at_end if method() is not None]
    _at_end.append(weakref.WeakMethod(close))


def _close_all() -> None:
    for method in _at_end:
        close = method()
        if close is not None:
            close()
