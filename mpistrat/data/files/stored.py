"""Bytes of files that do not change, read by their places. Processes may share it: each opens the files itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from .handles import ShardFile, open_bytes, shard_error

__all__ = ["StoredBytes"]


@final
class StoredBytes:
    """Files that are open while they are read.

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
    def paths(self) -> list[Path]:
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
        buffer, file = bytearray(count), self._files[number]
        where = f"{file.path}: {what}"
        with self._open.lend(file) as opened:
            try:
                found = opened.read_into(memoryview(buffer), position)
            except OSError as error:
                raise shard_error(where, "bytes that can be read", error, function=self._function) from error
        if found != count:
            expected, remedy = f"{count} bytes at {position}", "The file was truncated: copy it again."
            raise shard_error(where, expected, f"{found}", remedy, self._function)
        return bytes(buffer)

    def fingerprint(self, content: bytes) -> int:
        """Return a number below 2**63 that is the same wherever files have the same names and this content."""
        hasher = hashlib.sha256("\n".join(path.name for path in self.paths).encode(errors="surrogateescape"))
        hasher.update(content)
        return int.from_bytes(hasher.digest()[:8], "big") >> 1
