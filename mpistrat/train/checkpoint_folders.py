"""The place of a run's checkpoints: a folder that the ranks see, or one of an object store.

Only one run at a time writes into a folder: rank 0 locks a file in it. The lock ends with its process, so it does not block a
restarted run. Programs that only read the folder need no claim. On a file system without locks, and in an object store, nothing
is checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from ..base.errors import explain
from ..base.files import digest_of_file, remove_dead
from ..data.files.remote import attempts, file_system, is_url, is_web, naming
from ..timeline.trace import process_group_of

__all__ = ["CheckpointFolder", "LocalFolder", "ObjectStore", "folder_of", "newest_file"]

_FILES = r"step-(\d{10,})\.h5"
_MARKS = r"step-(\d{10,})\.json"  # of complete files in an object store


class CheckpointFolder(ABC):
    """The folder of a run's checkpoints."""

    @abstractmethod
    def __str__(self) -> str:
        """Return its name, equal on all ranks after `take`."""

    @abstractmethod
    def take(self) -> None:
        """Make the strategy the folder's only writer, where that can be checked. Collective."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps that have complete files, as this rank sees the folder."""

    @abstractmethod
    def path(self, step: int) -> Any:
        """Return the address of a step's file."""

    @abstractmethod
    def prepare(self, again: bool) -> None:
        """Make the folder, and unless `again` remove what killed writers left. On rank 0."""

    @abstractmethod
    def target(self, step: int) -> Path:
        """Return the file to write. Collective."""

    @abstractmethod
    def publish(self, step: int) -> None:
        """Make a file that was written visible to others. On rank 0."""

    @abstractmethod
    def source(self, step: int) -> contextlib.AbstractContextManager[Path]:
        """Lend a file to restore. Collective.

        Raises:
            OSError: on every rank, if it cannot be had.
        """

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove a file. On rank 0."""


@final
class LocalFolder(CheckpointFolder):
    """A folder on a file system that all ranks see."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self.folder = folder.absolute()
        self._strategy = strategy
        self._claim = _FolderClaim(strategy, self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def take(self) -> None:
        self.folder = self._claim.take()

    def steps(self) -> list[int]:
        return _steps_in(self.folder)

    def path(self, step: int) -> Path:
        return self.folder / _name(step)

    def prepare(self, again: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not again:
            remove_dead(self.folder, _FILES)

    def target(self, step: int) -> Path:
        return self.path(step)

    def publish(self, step: int) -> None:
        pass  # it was renamed when it was complete

    def source(self, step: int) -> contextlib.AbstractContextManager[Path]:
        return contextlib.nullcontext(self.path(step))

    def remove(self, step: int) -> None:
        self.path(step).unlink(missing_ok=True)


@final
class ObjectStore(CheckpointFolder):
    """A folder of an object store, through fsspec.

    Rank 0's node writes a file into its folder of temporary files, and uploads it, then a small object that says that it is
    complete. An object is whole or absent in all stores; both together are not, so this order counts: without the small object
    a file does not exist, and it goes first when a file is removed.
    """

    def __init__(self, strategy: Any, url: str) -> None:
        self._strategy, self._url = strategy, url.rstrip("/")
        self._stage: tempfile.TemporaryDirectory[str] | None = None  # on rank 0
        if is_web(url):
            expected, got = "a folder, or a URL to which files can be written", "that of a web server"
            raise ValueError(explain("Checkpoints", "folder", expected=expected, got=f"{url}: {got}"))
        self._system, self._root = file_system("Checkpoints", self._url, {})

    def __str__(self) -> str:
        return self._url

    def take(self) -> None:
        pass

    def steps(self) -> list[int]:
        with naming("Checkpoints", self._url, "a folder that can be listed"):
            try:
                names = attempts(lambda: self._system.ls(self._root, detail=False))
            except FileNotFoundError:
                names = []
        own = [str(name).rstrip("/").rpartition("/")[2] for name in names]
        return sorted(set(_numbers(_FILES, own)).intersection(_numbers(_MARKS, own)))

    def path(self, step: int) -> str:
        return f"{self._url}/{_name(step)}"

    def prepare(self, again: bool) -> None:
        if self._stage is None:
            self._stage = tempfile.TemporaryDirectory(prefix="mpistrat-checkpoints-")

    def _staged(self, step: int) -> Path:
        self.prepare(True)
        assert self._stage is not None
        return Path(self._stage.name) / _name(step)

    def target(self, step: int) -> Path:
        return Path(self._strategy.broadcast_object(str(self._staged(step)) if self._strategy.rank == 0 else None))

    def _object(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def publish(self, step: int) -> None:
        path = self._staged(step)
        about = {"bytes": path.stat().st_size, "digest": digest_of_file(path)}
        try:
            with naming("Checkpoints", self.path(step), "a file that can be written"):
                self._system.makedirs(self._root, exist_ok=True)
                self._delete(_mark(step))  # of an older file of this step
                attempts(lambda: self._system.put_file(str(path), self._object(_name(step))))
                attempts(lambda: self._system.pipe_file(self._object(_mark(step)), json.dumps(about).encode()))
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def source(self, step: int) -> Iterator[Path]:
        error, path = "", ""
        if self._strategy.rank == 0:
            try:
                path = str(self._fetched(step))
            except OSError as raised:
                error = str(raised)
        error, path = self._strategy.broadcast_object((error, path))
        if error:
            raise OSError(error)
        try:
            yield Path(path)
        finally:
            if self._strategy.rank == 0:
                Path(path).unlink(missing_ok=True)

    def _fetched(self, step: int) -> Path:
        path = self._staged(step)
        with naming("Checkpoints", self.path(step), "a file that can be read"):
            about = json.loads(attempts(lambda: self._system.cat_file(self._object(_mark(step)))))
            attempts(lambda: self._system.get_file(self._object(_name(step)), str(path)))
            found = {"bytes": path.stat().st_size, "digest": digest_of_file(path, about["digest"].partition(":")[0])}
            if found != about:
                raise OSError(f"{found} instead of {about}")
        return path

    def remove(self, step: int) -> None:
        with naming("Checkpoints", self.path(step), "a file that can be removed"):
            self._delete(_mark(step))
            self._delete(_name(step))

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            attempts(lambda: self._system.rm_file(self._object(name)))


def folder_of(strategy: Any, folder: str | os.PathLike[str]) -> CheckpointFolder:
    """Return the folder that a path or a URL names."""
    return ObjectStore(strategy, os.fspath(folder)) if is_url(folder) else LocalFolder(strategy, Path(folder))


def newest_file(folder: Path) -> Path | None:
    """Return the file of the newest step in a folder; None without files.

    Example:
        >>> newest_file(Path("no folder")) is None
        True
    """
    steps = _steps_in(folder)
    return folder / _name(steps[-1]) if steps else None


def _steps_in(folder: Path) -> list[int]:
    try:
        return _numbers(_FILES, os.listdir(folder))  # an unreadable folder raises: a run would start over
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbers(pattern: str, names: list[str]) -> list[int]:
    found = (re.fullmatch(pattern, name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _name(step: int) -> str:
    return f"step-{step:010}.h5"


def _mark(step: int) -> str:
    return f"step-{step:010}.json"


_NAME = ".owner"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST_CLAIM = 4096  # bytes of the file
_claims: dict[tuple[int, int], _FolderClaim] = {}  # of this process, by device and inode of the folder


@final
class _FolderClaim:
    """The claim of a strategy on a folder; rank 0 has the lock. It ends with the group of ranks."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self._strategy, self._folder = strategy, folder
        self._group = process_group_of(strategy, "Checkpoints")
        self._taken, self._descriptor, self._key = False, -1, (0, 0)

    def take(self) -> Path:
        """Make the strategy the folder's only writer; create a missing folder. Collective.

        Return rank 0's path of the folder: a relative path may name another folder on other ranks. A claim of another
        strategy of this process moves to this one.

        Raises:
            ValueError: on every rank, if another run writes into it.
        """
        claim = (self._try(), self._folder) if self._strategy.rank == 0 else None
        owner, folder = self._strategy.broadcast_object(claim)
        if owner:
            expected, got = "a folder that no other run writes into", f"one that {owner} uses"
            remedy = "Give each run a folder of its own, or end the other run. Programs that only read its files do not conflict"
            raise ValueError(explain("Checkpoints", str(self._folder), expected=expected, got=got, remedy=remedy))
        if not self._taken:
            self._group.attach(self)
        self._taken = True
        return Path(folder)

    def _try(self) -> str:
        """Take the lock; return the folder's owner in words, "" if that is this strategy. Local."""
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
        # Not flock: child processes, such as workers of a DataLoader, would keep it after this one's end.
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
        """Return whether an owner is this job before its restart, still ending."""
        environment = self._group.environment
        generation = owner.get("generation")
        same = bool(environment.job) and owner.get("job") == environment.job
        return same and isinstance(generation, int) and generation < environment.generation

    def close(self) -> None:
        """Release the folder. Local."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _claims.pop(self._key, None)

    def leave(self) -> Callable[[], None] | None:
        """Return None: the lock ends with the process."""
        return None

    def abandon(self) -> None:
        """Release the folder. Local."""
        self.close()


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, _LONGEST_CLAIM, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _words(owner: dict[str, Any]) -> str:
    if "process" not in owner:
        return "another process"
    return f"process {owner['process']} on {owner.get('host')}, since {owner.get('since')},"
