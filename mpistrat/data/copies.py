"""Copies of remote files on the disk of a node, made once for all its ranks."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

from ..base.arguments import integer
from ..base.errors import ShardError, shard_error
from ..base.text import counted, decimal_size
from .files.remote import RemoteFile, attempts, file_system, listed_files, naming
from .nodes.node import Node
from .shards.files import PathLike

__all__ = ["download", "source_of"]

_FUNCTION = "download"
_STATE = ".mpistrat"  # the folder of locks, and of what is known of complete copies
_AT_ONCE = 4  # files that a rank copies, or looks at, at the same time
_POLL = 0.05  # seconds between looks at copies that other ranks make


T = TypeVar("T")
R = TypeVar("R")

_error = functools.partial(shard_error, function=_FUNCTION)


@dataclass(frozen=True)
class _Remote:
    """A remote file as it is now, and the place of its copy.

    Attributes:
        url: the address, for errors and to recognize the copy.
        size: its bytes.
        version: what its store says of its version; "" if nothing.
    """

    url: str
    size: int
    version: str
    path: Path = field(repr=False)


@final
class _Copies:
    """The folder of copies. A system lock on a file of its own guards each copy, and ends with the process that holds it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = folder / _STATE
        self._state.mkdir(parents=True, exist_ok=True)
        self._since = time.time()

    def _note(self, path: Path, kind: str) -> Path:
        name = hashlib.sha256(os.fsencode(path.relative_to(self._folder))).hexdigest()[:32]
        return self._state / f"{name}.{kind}"

    def make(self, file: _Remote, system: Any, source: str) -> bool:
        """Make a copy unless it is there; return False if another process is making it."""
        with self._note(file.path, "lock").open("a+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not self.complete(file):
                self._raise_failure(file)
                self._copy(file, system, source)
            return True

    def complete(self, file: _Remote) -> bool:
        """Return True if the folder has a whole copy of this version."""
        try:
            known = json.loads(self._note(file.path, "json").read_text())
            return bool(known == _known(file) and file.path.stat().st_size == file.size)
        except (OSError, ValueError):
            return False

    def _raise_failure(self, file: _Remote) -> None:
        """Raise the error of a process that failed to make this copy while this one waited for it."""
        failure, text = self._note(file.path, "failed"), ""
        with contextlib.suppress(FileNotFoundError):
            text = failure.read_text() if failure.stat().st_mtime >= self._since else ""
        if text:
            raise ShardError(text)

    def _copy(self, file: _Remote, system: Any, source: str) -> None:
        part, note = self._note(file.path, "part"), self._note(file.path, "json")
        file.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with naming(_FUNCTION, file.url, f"{file.size} bytes"):
                _fetch(file, system, source, part)
            note.unlink(missing_ok=True)
            os.replace(part, file.path)  # whose bytes are on the disk: see _fetch
            made = self._note(file.path, "new")
            made.write_text(json.dumps(_known(file)))
            os.replace(made, note)
        except ShardError as error:
            self._note(file.path, "failed").write_text(str(error))
            raise
        finally:
            part.unlink(missing_ok=True)

    def remove_others(self, folder: Path, kept: Container[Path]) -> None:
        """Remove copies in a folder of files that the remote folder no longer has."""
        for path in list(folder.rglob("*")):
            if path.is_file() and path not in kept:
                self._note(path, "json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def others(self, files: Sequence[_Remote]) -> int:
        """Return the bytes of copies in the folder, other than those of some files."""
        own = {self._note(file.path, "json") for file in files}
        total = 0
        for note in self._state.glob("*.json"):
            if note not in own:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    total += Path(json.loads(note.read_text())["path"]).stat().st_size
        return total


def _known(file: _Remote) -> dict[str, Any]:
    return {**asdict(file), "path": str(file.path)}


def _fetch(file: _Remote, system: Any, source: str, target: Path) -> None:
    """Copy a remote file, with some attempts where the connection breaks."""

    def fetch() -> None:
        system.get_file(source, str(target))
        size = target.stat().st_size
        if size != file.size:
            raise ConnectionError(f"{size} bytes, then the end")
        with target.open("rb") as copy:
            os.fsync(copy)

    attempts(fetch)


def _full(system: Any, path: str) -> str:
    return str(system.unstrip_protocol(path))


def _found(url: str, folder: Path, system: Any, path: str) -> tuple[list[tuple[str, _Remote]], Path | list[Path]]:
    """Return the remote files of an address, each with its address in the file system, and the path or paths of their copies."""
    kind, infos = listed_files(system, url, path, deep=True)
    if not infos:
        expected, got = (
            ("at least one file", "no match") if kind == "pattern" else ("a folder of files", "an empty one, or none")
        )
        raise _error(url, expected, got, "Look at the address.")
    if kind == "folder":
        place, root = _place(system, folder, path.rstrip("/")), path.rstrip("/") + "/"
        outside = [name for name in infos if not name.startswith(root) or ".." in name.split("/")]
        if outside:
            raise _error(url, f"files in {root}", outside[0])
    else:
        place, root = None, ""

    def found(name: str) -> tuple[str, _Remote]:
        copy = _place(system, folder, name) if place is None else place / name[len(root) :]
        return name, _remote(system, name, copy, infos[name])

    files = _together([system], found, sorted(infos))
    paths = [file.path for _, file in files]
    return files, place or (paths[0] if kind == "file" else paths)


def _place(system: Any, folder: Path, path: str) -> Path:
    """Return the path of a copy: files of one remote folder have one local folder."""
    parent, _, name = _full(system, path).rpartition("/")
    return folder / hashlib.sha256(parent.encode()).hexdigest()[:12] / re.sub(r"[?#].*", "", name)


def _remote(system: Any, name: str, path: Path, info: Mapping[str, Any]) -> _Remote:
    file = RemoteFile.of(_FUNCTION, system, name, info)
    if file.size is None:
        expected, got = "the size of the file, to recognize an incomplete copy", "a server that does not give it"
        raise _error(file.url, expected, got, "Copy the file by hand.")
    return _Remote(file.url, file.size, file.version, path)


@final
class _Files:
    """The files of a source, and the function that makes it of them."""

    def __init__(self, make: Callable[[Any], Node], files: Any, options: Mapping[str, Any] | None) -> None:
        self._make, self._files, self._options = make, files, options

    def copied(self, folder: PathLike, limit: int | None) -> Node:
        """Copy the files to a folder of this node's disk, and return the source of the copies."""
        return self._make(download(self._files, folder, limit=limit, storage_options=self._options))


def source_of(make: Callable[[Any], Node], files: Any, options: Mapping[str, Any] | None) -> Node:
    """Return the source that a function makes of files, which `Dataset.cache` can copy to a disk of the node.

    Args:
        make: gets paths, as the user may give them.
        files: the paths or URLs.
        options: arguments of fsspec's file system for URLs.
    """
    if isinstance(files, Iterator):
        files = list(files)
    node = make(files)
    node.files = _Files(make, files, options)
    return node


def download(
    files: PathLike | Sequence[PathLike], folder: PathLike, *, limit: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Copy remote files to a folder of this node, once for all its ranks, and return the copies' paths; not collective.

    Each rank calls it before it makes a dataset. The ranks of a node divide the files among themselves by locks in the folder,
    and wait for each other. Copies remain: a job that starts again, or another one, uses those that are whole and of the same
    version (size, and ETag or time of change). It needs fsspec.

    Args:
        files: a URL of a file, a folder (of a web server: with "/" at its end) or a pattern, such as `s3://bucket/train/`,
            `https://host/a.h5` or `gs://bucket/train-*.tar`; or a list of URLs of files. Paths work, too: for copies of a
            parallel file system on the node's disk.
        folder: a folder on a disk of the node. It is made if it is missing.
        limit: the most bytes of all copies in the folder; None for what the disk has room for.
        storage_options: arguments of fsspec's file system, such as `{"anon": True}` for public data on S3.

    Returns:
        The path of the file or folder for one URL, or a list of paths for a pattern or a list.

    Raises:
        MissingDependencyError: without fsspec, or without the package of the kind of URL, such as s3fs.
        ShardError: naming the URL, for files that are missing, forbidden, incomplete, or do not fit.

    Example:
        >>> download([], "/local/train")
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: download: files: expected at least one URL, got none
    """
    one = isinstance(files, (str, os.PathLike))
    urls = [os.fspath(each) for each in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    if not urls:
        raise _error("files", "at least one URL", "none")
    most = None if limit is None else integer(_FUNCTION, "limit", limit, 0)
    target = Path(folder).absolute()
    wanted: dict[Path, tuple[Any, str, _Remote]] = {}
    results = []
    for url in urls:
        system, path = file_system(_FUNCTION, url, storage_options or {})
        with naming(_FUNCTION, url, "files that can be read"):
            found, result = _found(url, target, system, path)
        results.append(result)
        for name, file in found:
            known = wanted.setdefault(file.path, (system, name, file))
            if known[2].url != file.url:
                raise _error(file.url, "files with different paths", f"another one, {known[2].url}")
    copies = _Copies(target)
    _make(target, copies, list(wanted.values()), most)
    for result in results:
        if isinstance(result, Path) and result.is_dir():
            copies.remove_others(result, wanted)
    return results[0] if one else [path for each in results for path in (each if isinstance(each, list) else [each])]


def _make(folder: Path, copies: _Copies, wanted: list[tuple[Any, str, _Remote]], limit: int | None) -> None:
    """Make the copies that are missing, each by the first process of the node that comes to it."""
    files = [file for _, _, file in wanted]
    missing = [each for each in wanted if not copies.complete(each[2])]
    _check_room(folder, copies, files, [file for _, _, file in missing], limit)
    start = os.getpid() % max(1, len(missing))  # ranks of a node begin with different files
    pending = missing[start:] + missing[:start]
    while pending:
        made = _together([each[0] for each in pending], lambda each: copies.make(each[2], *each[:2]), pending)
        if not any(made):
            time.sleep(_POLL)
        pending = [each for each, done in zip(pending, made, strict=True) if not done]


def _together(systems: Iterable[Any], call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what a function returns for each item, of several at the same time if the file systems have many connections."""
    many = all(getattr(system, "async_impl", False) for system in systems)
    with ThreadPoolExecutor(_AT_ONCE if many else 1) as pool:
        return list(pool.map(call, items))


def _check_room(
    folder: Path, copies: _Copies, files: Sequence[_Remote], missing: Sequence[_Remote], limit: int | None
) -> None:
    total, needed = sum(file.size for file in files), sum(file.size for file in missing)
    used = copies.others(files)
    what = f"{counted(len(files), 'file')} of {decimal_size(total)}"
    if limit is not None and total + used > limit:
        expected, got = f"at most {decimal_size(limit)} of copies (limit)", f"{what}, next to {decimal_size(used)}"
        raise _error(str(folder), expected, got, "Raise the limit, or remove the folders of earlier files.")
    free = shutil.disk_usage(folder).free
    if needed > free:
        got = f"{decimal_size(free)}, for {what}"
        raise _error(str(folder), f"{decimal_size(needed)} of free space", got, "Take a larger disk, or fewer files.")
