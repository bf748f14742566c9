"""Remote files through fsspec: their file systems, their versions, and errors that name the URL."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from ...base.errors import MissingDependencyError, MpistratError, explain
from ...base.lazy import load_optional
from ..shards.files import PathLike
from .handles import shard_error

__all__ = ["RemoteFile", "file_system", "is_url", "naming", "refuse_urls", "web_options"]

_SILENCE = 60.0  # seconds that a server may send nothing
_CONNECT = 30.0  # seconds that a connection may take
_VERSIONS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "md5")
_INSTALL = 'pip install "mpistrat[remote]"'


def is_url(path: PathLike) -> bool:
    """Return True for a URL such as "s3://bucket/a.zarr".

    Example:
        >>> is_url("https://host/a.zarr"), is_url("a.zarr")
        (True, False)
    """
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fspath(path)))


def refuse_urls(function: str, files: Any) -> None:
    """Raise ShardError for the URL of a remote file, or one in a sequence, which the reader cannot read in place.

    Example:
        >>> refuse_urls("from_tar", "s3://bucket/a.tar")
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: from_tar: s3://bucket/a.tar: expected a path on this machine, got a URL. Copy ...
    """
    paths = [files] if isinstance(files, (str, os.PathLike)) else files if isinstance(files, Sequence) else ()
    for path in paths:
        if isinstance(path, (str, os.PathLike)) and is_url(path):
            url = os.fspath(path)
            remedy = f"Copy the files to this node first, and read the copies: ms.data.download({url!r}, folder)."
            raise shard_error(url, "a path on this machine", "a URL", remedy, function)


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
    if url.startswith(("http://", "https://")) and "client_kwargs" not in settings:
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
