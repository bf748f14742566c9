"""Claims of folders: only one run at a time writes checkpoints into a folder.

Rank 0 locks a file in the folder. The lock ends with its process, however that ends, so it does not hinder a run that is started
again. Programs that only read the folder need no claim. Where the file system has no locks, nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from ..base.errors import explain

__all__ = ["FolderClaim"]

_NAME = ".owner"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST = 4096  # bytes of the file
_claims: dict[tuple[int, int], FolderClaim] = {}  # of this process, by device and inode of the folder


@final
class FolderClaim:
    """The claim of a strategy on a folder; rank 0 has the lock. It is an attachment of the group of ranks, and ends with it."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self._strategy, self._folder, self._group = strategy, folder, strategy.extended.process_group
        self._taken, self._descriptor, self._key = False, -1, (0, 0)

    def take(self) -> Path:
        """Make the strategy the only one that writes into the folder, which is made if it is not there. Collective.

        Return rank 0's path of the folder: a relative path may name another folder on other ranks.

        Where the same process had claimed it for another strategy, the newer one has it from now on.

        Raises:
            ValueError: on every rank, if another run writes into it.
        """
        claim = (self._try(), self._folder) if self._strategy.rank == 0 else None
        owner, folder = self._strategy.broadcast_object(claim)
        if owner:
            expected, got = "a folder that no other run writes into", f"one that {owner} uses"
            remedy = "Give each run a folder of its own, or end the other run. To read its files is no conflict"
            raise ValueError(explain("Checkpoints", str(self._folder), expected=expected, got=got, remedy=remedy))
        if not self._taken:
            self._group.attach(self)
        self._taken = True
        return Path(folder)

    def _try(self) -> str:
        """Take the lock; return the owner of the folder in words, "" where that is this strategy. Local."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            status = self._folder.stat()
            self._key = status.st_dev, status.st_ino
            known = _claims.get(self._key)
            if known is not None and known._group is self._group:
                return ""
            if known is not None and self._taken:
                return f"a newer strategy of process {os.getpid()}"
            if known is not None:
                self._descriptor, known._descriptor = known._descriptor, -1
                _claims[self._key] = self
                return ""
            descriptor = os.open(self._folder / _NAME, _FLAGS, 0o666)
        except OSError:  # saving raises it, if the folder cannot be written
            return ""
        # Not flock: children of this process, such as workers of a DataLoader, would hold it after its end.
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read(descriptor)
            os.close(descriptor)
            held = error.errno in (errno.EAGAIN, errno.EACCES)
            return "" if not held or self._succeeds(owner) else _words(owner)
        self._descriptor, _claims[self._key] = descriptor, self
        environment = self._group.environment
        about = {"host": os.uname().nodename, "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        about |= {"job": environment.job, "generation": environment.generation}
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
        return ""

    def _succeeds(self, owner: dict[str, Any]) -> bool:
        """Return whether an owner is this job before it was started again, of which a process has not ended yet."""
        environment = self._group.environment
        generation = owner.get("generation")
        same = bool(environment.job) and owner.get("job") == environment.job
        return same and isinstance(generation, int) and generation < environment.generation

    def close(self) -> None:
        """Give the folder back. Local."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _claims.pop(self._key, None)

    def leave(self) -> Callable[[], None] | None:
        """Nothing: the lock ends with the process."""
        return None

    def abandon(self) -> None:
        """Give the folder back. Local."""
        self.close()


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, _LONGEST, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _words(owner: dict[str, Any]) -> str:
    if "process" not in owner:
        return "another process"
    return f"process {owner['process']} on {owner.get('host')}, since {owner.get('since')},"
