"""Files that do not change, open while they are read. Processes may share them: each opens the files itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from ...base.errors import MpistratError, shard_error
from ..nodes.sources import short_digest
from ..shards.objects import Refused
from .handles import DAMAGED, OpenFiles, ShardFile, open_bytes, open_hdf5_files
from .remote import StoredPath

if TYPE_CHECKING:
    import h5py

__all__ = ["StoredBytes", "StoredHDF5"]


@final
class StoredBytes:
    """Files whose bytes are read by their places.

    Args:
        function: the name for errors.
        files: as they were when they were first looked at.
    """

    def __init__(self, function: str, files: Sequence[ShardFile]) -> None:
        self._function = function
        self._files = files
        self._open = open_bytes()

    def __reduce__(self) -> tuple[Callable[..., StoredBytes], tuple[Any, ...]]:
        return StoredBytes, (self._function, self._files)

    @property
    def paths(self) -> list[StoredPath]:
        """The files' paths."""
        return [file.path for file in self._files]

    def check(self) -> None:
        """Raise if a file has changed."""
        for file in self._files:
            file.check()

    def read(self, number: int, position: int, count: int, what: str) -> bytes:
        """Return bytes of a file.

        Args:
            number: which file.
            position: the first byte.
            count: the number of bytes.
            what: what they are, for errors.

        Raises:
            ShardError: the file ends before, has changed, or cannot be read.
        """
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), number, position, what)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, number: int, position: int, what: str) -> None:
        """Fill a buffer with bytes of a file. See `read`."""
        count, file = len(buffer), self._files[number]
        where = f"{file.path}: {what}"
        with self._open.lend(file) as opened:
            try:
                found = opened.read_into(buffer, position)
            except MpistratError:
                raise
            except OSError as error:
                raise shard_error(where, "bytes that can be read", error, function=self._function) from error
        if found != count:
            expected, remedy = f"{count} bytes at {position}", "The file was truncated: copy it again."
            raise shard_error(where, expected, f"{found}", remedy, self._function)

    def fingerprint(self, content: bytes) -> int:
        """Return a number below 2**63 that is the same wherever files have the same names and this content."""
        hasher = hashlib.sha256("\n".join(path.name for path in self.paths).encode(errors="surrogateescape"))
        hasher.update(content)
        return short_digest(hasher)


@final
class StoredHDF5:
    """An HDF5 file.

    Attributes:
        status: the file as it was when it was first looked at.

    Args:
        function: the name for errors.
        path: the file.
        files: the open files that it shares with others of a source, few of which are open at a time; default its own.
    """

    def __init__(self, function: str, path: StoredPath, files: OpenFiles[h5py.File] | None = None) -> None:
        self._function = function
        self.path = path
        self.status = ShardFile.of(path, function)
        self._files = open_hdf5_files() if files is None else files

    def __reduce__(self) -> tuple[Callable[..., StoredHDF5], tuple[Any, ...]]:
        return StoredHDF5, (self._function, self.path)

    def check(self) -> None:
        """Raise if the file has changed."""
        self.status.check()

    @contextmanager
    def open(self, what: str) -> Iterator[h5py.File]:
        """Lend the file for as long as the context lasts; an error of h5py becomes a `ShardError` that names what is read."""
        where = f"{self.path}: {what}" if what else self.path
        try:
            with self._files.lend(self.status) as file:
                yield file
        except Refused as refused:
            expected = "data that can be read"
            raise shard_error(where, expected, refused, refused.remedy, self._function) from None
        except (MpistratError, MemoryError):
            raise
        except Exception as error:  # h5py raises many kinds for damaged data
            got = f"{type(error).__name__}: {error}"
            raise shard_error(where, "data that can be read", got, DAMAGED, self._function) from error
