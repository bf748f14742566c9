"""A file that hides errors from HDF5, which can crash the process on closing a file after one (a full disk)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import h5py

__all__ = ["UnfailingFile", "unfailing"]


@contextlib.contextmanager
def unfailing(path: Path, mode: str, **options: Any) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Open an existing file for writing through HDF5. Yield the HDF5 file and `check`, which the caller calls often.

    Args:
        path: the file; an empty one for mode "w".
        mode: "w" or "r+".
        options: options of h5py.File.

    Raises:
        OSError: the file could not be written; `check` raises it too.
    """
    import h5py

    raw = UnfailingFile(path)
    try:
        with h5py.File(raw, mode, **options) as file:
            yield file, raw.check
    finally:
        raw.close()
    raw.check()


@final
class UnfailingFile:
    """A file for h5py's driver "fileobj". `check` raises the first error.

    After an error, HDF5's writes stay in memory, so that HDF5 can read them back. The caller must call `check` often.
    """

    def __init__(self, path: Path, new: bool = False) -> None:
        """Open an existing file, or create a new one."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0), 0o666)
        self._position, self._size = 0, os.fstat(self._descriptor).st_size
        self._error: OSError | None = None
        self._unwritten: list[tuple[int, bytes]] = []  # writes since the error, by position

    def check(self) -> None:
        """Raise the first error.

        Raises:
            OSError: with the file's path.
        """
        if self._error is not None:
            raise type(self._error)(self._error.errno, self._error.strerror, str(self._path))

    def close(self) -> None:
        """Close the file, unless it is closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # methods that HDF5 calls

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        data = bytearray(max(0, self._size - self._position) if size < 0 else size)
        return bytes(data[: self.readinto(data)])

    def readinto(self, buffer: Any) -> int:
        target, start = memoryview(buffer).cast("B"), self._position
        count = max(0, min(len(target), self._size - start))
        found = os.pread(self._descriptor, count, start)
        target[:count] = found + bytes(count - len(found))
        for low, data in self._unwritten:
            first, stop = max(low, start), min(low + len(data), start + count)
            if first < stop:
                target[first - start : stop - start] = data[first - low : stop - low]
        self._position += count
        return count

    def write(self, data: Any) -> int:
        """Write at the position; return the number of bytes, also after an error."""
        source, at = memoryview(data).cast("B"), self._position
        try:
            if self._error is None:
                done = 0
                while done < len(source):
                    done += os.pwrite(self._descriptor, source[done:], at + done)
        except OSError as error:
            self._error = error
        if self._error is not None:
            self._unwritten.append((at, bytes(source)))
        self._position += len(source)
        self._size = max(self._size, self._position)
        return len(source)

    def truncate(self, size: int) -> int:
        try:
            if self._error is None:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._error = error
        self._size = size
        return size

    def flush(self) -> None:
        """Do nothing: the system has the data."""
