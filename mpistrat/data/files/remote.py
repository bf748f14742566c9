"""Remote files through fsspec: their addresses, their versions, reads by ranges, and errors that name the URL."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from ...base.errors import MissingDependencyError, MpistratError, explain, shard_error
from ...base.lazy import load_optional
from ..buffers import LastRead

__all__ = [
    "SuccessiveReads",
    "RemoteFile",
    "RemotePath",
    "RemoteStream",
    "StoredPath",
    "attempts",
    "file_system",
    "is_pattern",
    "is_url",
    "is_web",
    "listed_files",
    "naming",
    "opened_to_scan",
    "refuse_url",
    "remote_files",
    "stored_path",
    "web_options",
]

_SILENCE = 60.0  # seconds that a server may send nothing
_CONNECT = 30.0  # seconds that a connection may take
_ATTEMPTS = 3
_PAUSE = 1.0  # seconds before the second attempt
_BLOCK = 1 << 18  # bytes of a block that a stream keeps
_SCANNED = 1 << 22  # bytes of a block where the whole file may be read
_KEPT = 1 << 24  # bytes of blocks that a stream keeps
_RUNS = 8  # places of a file that are read ahead from at the same time, such as those of several datasets
_GROWTH = 4  # of successive reads
_GAP = 1 << 16  # bytes between two reads that are successive
_VERSIONS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "md5")
_INSTALL = 'pip install "mpistrat[remote]"'
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # errors that a retry meets again

T = TypeVar("T")


def is_url(path: object) -> bool:
    """Return True for a URL such as "s3://bucket/a.zarr".

    Example:
        >>> is_url("https://host/a.zarr"), is_url("a.zarr")
        (True, False)
    """
    return isinstance(path, RemotePath) or (
        isinstance(path, (str, os.PathLike)) and bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fspath(path)))
    )


def is_web(url: str) -> bool:
    """Return True for the URL of a web server.

    Example:
        >>> is_web("https://host/a.tar"), is_web("s3://bucket/a.tar")
        (True, False)
    """
    return url.startswith(("http://", "https://"))


def is_pattern(url: str, path: str) -> bool:
    """Return True if an address, and its path in its file system, is a pattern of several files.

    Example:
        >>> is_pattern("s3://bucket/*.tar", "bucket/*.tar"), is_pattern("https://host/a?b=1", "https://host/a?b=1")
        (True, False)
    """
    return bool(re.search(r"[*?\[]", path)) and not (is_web(url) and "?" in url)


def refuse_url(function: str, path: object, why: str) -> None:
    """Raise ShardError for the URL of a remote file, which the reader cannot read in place.

    Example:
        >>> refuse_url("from_netcdf", "s3://bucket/a.nc", "netCDF-3")
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: from_netcdf: s3://bucket/a.nc: expected a path on this machine, got a URL (netCDF-3). ...
    """
    if is_url(path):
        url = str(path)
        remedy = f"Copy the files to this node first, and read the copies: ms.data.download({url!r}, folder)."
        raise shard_error(url, "a path on this machine", f"a URL ({why})", remedy, function)


def attempts(call: Callable[[], T]) -> T:
    """Return the result of a call of a file system, tried again where the connection breaks.

    Example:
        >>> attempts(lambda: 3)
        3
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return call()
        except (*_FINAL, MpistratError):
            raise
        except Exception as error:
            if 400 <= getattr(error, "status", 0) < 500:
                raise
            time.sleep(_PAUSE * attempt)
    return call()


@contextlib.contextmanager
def naming(function: str, url: str, expected: str) -> Iterator[None]:
    """Turn the errors of file systems into a `ShardError` that names the URL."""
    try:
        yield
    except MpistratError:
        raise
    except Exception as raised:  # each file system raises its own
        error: BaseException = raised
        if isinstance(raised, FileNotFoundError):  # fsspec's for whatever a web server answers, too
            cause = raised.__cause__
            if cause is None or getattr(cause, "status", None) == 404 or isinstance(cause, FileNotFoundError):
                raise shard_error(url, expected, "no such file", "Look at the address.", function) from raised
            error = cause
        remedy = "Check the address, the credentials and the network of this node."
        raise shard_error(url, expected, f"{type(error).__name__}: {error}", remedy, function) from error


def web_options(function: str, url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a file system; of a web server with time limits for connections that are silent."""
    settings = dict(options)
    if is_web(url) and "client_kwargs" not in settings:
        aiohttp = load_optional("aiohttp", function, "aiohttp, which reads from web servers", _INSTALL)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE)
        settings["client_kwargs"] = {"timeout": timeout}
    return settings


def file_system(function: str, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of an address, and the address in it.

    Raises:
        MissingDependencyError: without fsspec, or the package of the kind of address.
        ShardError: fsspec does not know the kind of address.
    """
    fsspec = load_optional("fsspec", function, "fsspec, which reads remote files", _INSTALL)
    try:
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **web_options(function, url, options))
    except ImportError as error:
        expected = "the package of this kind of address"
        raise MissingDependencyError(explain(function, url, expected=expected, got=error)) from error
    except MpistratError:
        raise
    except Exception as error:
        expected = "a URL that fsspec knows, such as s3://bucket/train/ or https://host/a.h5"
        raise shard_error(url, expected, f"{type(error).__name__}: {error}", "", function) from error
    return system, path


@final
@dataclass(frozen=True)
class RemoteFile:
    """The identity of a remote file when it was first looked at.

    Attributes:
        url: the address, for errors.
        size: its bytes; None if its server does not give them.
        version: what its server says of its version; "" if nothing.
    """

    url: str
    size: int | None
    version: str

    @classmethod
    def of(cls, function: str, system: Any, name: str, info: Mapping[str, Any] | None = None) -> RemoteFile:
        """Look at a file, given its address in the file system, and what a list of files says of it."""
        url = str(system.unstrip_protocol(name))
        if info is None or info.get("size") is None:
            with naming(function, url, "a file that can be read"):
                info = system.info(name)
        size = info.get("size")
        version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
        return cls(url, None if size is None else int(size), version)

    def require_same(self, function: str, now: RemoteFile) -> None:
        """Raise ShardError if the file has changed since then."""
        if now != self:
            expected = "the file as it was opened (URL, bytes, version)"
            remedy = "Files must not change while they are read: make a new dataset."
            raise shard_error(self.url, expected, f"{now} instead of {self}", remedy, function)


@final
class RemoteStatus:
    """The part of `os.stat_result` that readers of files compare."""

    def __init__(self, file: RemoteFile, size: int) -> None:
        self.file = file
        self.st_mode, self.st_ino, self.st_size = stat.S_IFREG, 0, size
        self.st_mtime_ns = int.from_bytes(hashlib.sha256(file.version.encode()).digest()[:7], "big")
        self.st_ctime_ns = self.st_mtime_ns


@final
class RemotePath:
    """The address of a remote file, with what readers ask of a `pathlib.Path`. It has no `__fspath__`. Picklable.

    Args:
        function: the user's call, for errors.
        url: the address.
        options: arguments of fsspec's file system.
    """

    def __init__(self, function: str, url: str, options: Mapping[str, Any]) -> None:
        self._function, self._url, self._options = function, url, dict(options)
        self._opened: tuple[int, Any, str] | None = None  # the process, its file system, and the address in it
        self._first: RemoteFile | None = None  # as it was first looked at

    def __reduce__(self) -> tuple[Callable[..., RemotePath], tuple[Any, ...]]:
        return RemotePath, (self._function, self._url, self._options)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    @property
    def function(self) -> str:
        """The user's call, for errors."""
        return self._function

    @property
    def version(self) -> str:
        """The version that was first looked at; "" if the store gives none."""
        return "" if self._first is None else self._first.version

    @property
    def name(self) -> str:
        return re.sub(r"[?#].*", "", self._url).rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return self.at(self._url.rstrip("/").rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return self.at(f"{self._url.rstrip('/')}/{name}")

    def at(self, url: str) -> RemotePath:
        other = RemotePath(self._function, url, self._options)
        if self._opened is not None:
            process, system, _ = self._opened
            other._opened = process, system, system._strip_protocol(url)
        return other

    def absolute(self) -> RemotePath:
        return self

    def resolve(self) -> RemotePath:
        return self

    def system(self) -> tuple[Any, str]:
        """Return the file system of this process, and the address in it."""
        if self._opened is None or self._opened[0] != os.getpid():  # after a fork its threads are gone
            self._opened = os.getpid(), *file_system(self._function, self._url, self._options)
        return self._opened[1:]

    def stat(self) -> RemoteStatus:
        """Return its size and version.

        Raises:
            ShardError: it is not there, cannot be looked at, or its server does not give its size.
        """
        system, name = self.system()
        with naming(self._function, self._url, "a file that can be read"):
            file = attempts(lambda: RemoteFile.of(self._function, system, name))
        if file.size is None:
            expected, remedy = "the size of the file", "Copy it by hand, and read the copy."
            raise shard_error(self._url, expected, "a server that does not give it", remedy, self._function)
        self._first = self._first or file
        return RemoteStatus(file, file.size)

    def check(self) -> RemoteStatus:
        """Return its size and version; raise unless the file is as it was when it was first looked at."""
        status = self.stat()
        if self._first is not None:
            self._first.require_same(self._function, status.file)
        return status

    def open(self, mode: str = "rb", buffering: int = -1, block: int = _BLOCK) -> RemoteStream:
        """Open it for reading, in blocks that are kept. See `RemoteStream`."""
        return RemoteStream(RemoteRanges(self, self.check().st_size), block)

    def open_for_h5py(self) -> RemoteStream:
        """Open it for h5py, which reads it under its lock."""
        _collect_beside_h5py()
        return _LockedStream(RemoteRanges(self, self.check().st_size), _BLOCK)


@final
@dataclass(frozen=True, eq=False)
class _LastOfRun:
    """The last read of successive ones: its bytes in the file, and their number if there was one before; else 0."""

    first: int
    stop: int
    size: int


@final
class SuccessiveReads:
    """Reads of a file by requests that grow from the third one of successive reads on. Thread-safe.

    Args:
        kept: the bytes that were read ahead, also of other files.
    """

    def __init__(self, kept: LastRead[bytes]) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._runs: deque[_LastOfRun] = deque(maxlen=_RUNS)  # most recently used last

    def read(self, start: int, stop: int, fetch: Callable[[int, int], bytes]) -> bytes:
        """Return some bytes of the file, which `fetch` reads; another thread may have read them."""
        with self._lock:
            for run in reversed(self._runs):
                data = self._kept.get(run)
                if data is not None and run.first <= start and stop <= run.stop:
                    return data[start - run.first : stop - run.first]
                after = run.stop if data is None else run.first + 1
                if after <= start <= run.stop + _GAP:
                    self._runs.remove(run)
                    if not run.size:
                        self._runs.append(_LastOfRun(start, stop, stop - start))
                        break
                    size = min(_GROWTH * max(run.size, stop - start), _SCANNED)
                    longer = _LastOfRun(start, max(stop, start + size), size)
                    data = fetch(longer.first, longer.stop)
                    self._runs.append(longer)
                    self._kept.put(longer, data, len(data))
                    return data[: stop - start]
            else:
                self._runs.append(_LastOfRun(start, stop, 0))
        return fetch(start, stop)


@final
class RemoteRanges:
    """Reads of parts of a remote file, where the store can only of the version that was opened.

    Args:
        path: the file.
        size: its bytes.
        ahead: reads ahead; shared with others that read the file, if there are any.
    """

    def __init__(self, path: RemotePath, size: int, ahead: SuccessiveReads | None = None) -> None:
        self._path, self.size = path, size
        self._ahead = SuccessiveReads(LastRead(_KEPT)) if ahead is None else ahead
        system, name = path.system()
        options: dict[str, Any] = {"cache_type": "none"}
        if is_web(str(path)):
            options["size"] = self.size  # else it asks once more
            version = path.version
            if version.startswith('"'):  # a strong one
                options["headers"] = {"If-Match": version}
        with naming(path.function, str(path), "a file that can be read"):
            self._file = attempts(lambda: system.open(name, "rb", **options)) if self.size else io.BytesIO()

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes of the file, fewer at its end.

        Raises:
            ShardError: the connection breaks three times, or the file has changed.
        """
        stop = min(stop, self.size)
        return self._ahead.read(start, stop, self._fetch) if start < stop else b""

    def _fetch(self, start: int, stop: int) -> bytes:
        """Return bytes by one request."""
        stop = min(stop, self.size)

        def read() -> bytes:
            self._file.seek(start)
            data = bytes(self._file.read(stop - start))
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} bytes")
            return data

        with naming(self._path.function, str(self._path), f"bytes {start} to {stop}"):
            try:
                return attempts(read)
            except Exception:
                self._path.check()
                raise

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Fill a buffer from a position on; return the number of bytes read, fewer at the end of the file."""
        data = self.read(position, position + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()


StoredPath = Path | RemotePath


class RemoteStream(io.RawIOBase):
    """A remote file as a file object that keeps the blocks that were read last.

    Args:
        ranges: reads the file.
        block: the bytes of a block.
    """

    def __init__(self, ranges: RemoteRanges, block: int) -> None:
        super().__init__()
        self._ranges, self._block = ranges, block
        self._position = 0
        self._kept = LastRead[bytes](max(_KEPT, 2 * block))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._ranges.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        start, stop = self._position, min(self._position + len(out), self._ranges.size)
        if start >= stop:
            return 0
        blocks = range(start // self._block, (stop - 1) // self._block + 1)
        found = {number: kept for number in blocks if (kept := self._kept.get(number)) is not None}
        for first, last in _runs(number for number in blocks if number not in found):
            found.update(self._read(first, last))
        for number in blocks:
            low, high = max(start, number * self._block), min(stop, (number + 1) * self._block)
            offset = low - number * self._block
            out[low - start : high - start] = found[number][offset : offset + high - low]
        self._position = stop
        return stop - start

    def _read(self, first: int, last: int) -> dict[int, bytes]:
        """Read successive blocks by one request."""
        start = first * self._block
        data = self._ranges.read(start, (last + 1) * self._block)
        found = {}
        for number in range(first, last + 1):
            own = found[number] = data[number * self._block - start : (number + 1) * self._block - start]
            self._kept.put(number, own, len(own))
        return found

    def close(self) -> None:
        self._ranges.close()
        super().close()


@final
class _LockedStream(RemoteStream):
    """A stream that is read with h5py's lock, for which other threads wait when they collect garbage of h5py.

    A server in this process is one of them. So none starts to collect meanwhile.
    """

    def readinto(self, buffer: Any) -> int:
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().readinto(buffer)
        finally:
            if collects:
                gc.enable()


@functools.cache
def _collect_beside_h5py() -> None:
    """Keep fsspec's threads from waiting for h5py's lock while they collect, also if they began before a `_LockedStream` read.

    They collect with the lock; or nothing, if another thread has it, which may wait for them.
    """
    from h5py._objects import phil

    locked = False

    def collect(phase: str, _: Any) -> None:
        nonlocal locked
        if not threading.current_thread().name.startswith(("fsspecIO", "asyncio_")):
            return
        if phase == "start":
            locked = phil.acquire(blocking=False)
            if not locked:
                gc.freeze()  # this collection finds no objects
        elif locked:
            phil.release()
        else:
            gc.unfreeze()

    gc.callbacks.append(collect)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of successive numbers, each as its first and last one."""
    first = last = -2
    for number in numbers:
        if number != last + 1:
            if first >= 0:
                yield first, last
            first = number
        last = number
    if first >= 0:
        yield first, last


def opened_to_scan(path: StoredPath) -> Any:
    """Return a file that is read from its start to its end, or only in parts: a remote one in larger blocks."""
    return path.open(block=_SCANNED) if isinstance(path, RemotePath) else path.open("rb")


def stored_path(function: str, path: Any, options: Mapping[str, Any] | None) -> StoredPath:
    """Return a path or the address of a remote file, which fsspec's file system opens with some arguments.

    Example:
        >>> stored_path("f", "s3://bucket/a.h5", None), stored_path("f", "/a.h5", None)
        (RemotePath('s3://bucket/a.h5'), PosixPath('/a.h5'))
    """
    if isinstance(path, RemotePath):
        return path
    return RemotePath(function, os.fspath(path), options or {}) if is_url(path) else Path(path).absolute()


def listed_files(system: Any, url: str, name: str, *, deep: bool) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Return what an address is, a "pattern", "folder" or "file", and its files, each with what a list of files says of it.

    A folder of a web server ends with "/", and its page lists its files.

    Args:
        system: its file system.
        url: the address.
        name: the address in its file system.
        deep: also list files in folders of a folder.
    """
    if is_pattern(url, name):
        found = system.glob(name, detail=True)
        return "pattern", {each: info for each, info in found.items() if info["type"] == "file"}
    if not (url.endswith("/") if is_web(url) else system.info(name)["type"] == "directory"):
        return "file", {name: {}}
    if deep:
        return "folder", system.find(name, detail=True)
    return "folder", {info["name"]: info for info in system.ls(name, detail=True) if info["type"] == "file"}


def remote_files(path: RemotePath, wanted: Callable[[RemotePath], bool]) -> list[RemotePath]:
    """Return the files of an address: those that a pattern names, the wanted ones of a folder, or the one file.

    Hidden files are left out, unless the pattern begins with a dot.
    """
    system, name = path.system()
    with naming(path.function, str(path), "files that can be read"):
        kind, found = listed_files(system, str(path), name, deep=False)
    if kind == "file":
        return [path]
    files = [path.at(str(system.unstrip_protocol(each))) for each in found]
    if not path.name.startswith("."):  # as glob
        files = [file for file in files if not file.name.startswith(".")]
    return files if kind == "pattern" else list(filter(wanted, files))
