"""How functions and values travel between the chief and a worker of the same job: by cloudpickle, with tokens.

What exists on every rank is sent as a token, and arrives as the other rank's own: a variable, the strategy, an optimizer,
the coordinator, a per-worker value. A `RemoteValue` among the arguments arrives as what it stands for.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, final

from .._util import log
from ..errors import MissingDependencyError, explain

__all__ = ["Reduced", "Reducer", "dumps", "load_cloudpickle", "loads", "plain", "token"]

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]  # what a reducer returns: a function and its arguments
Reducer = Callable[[Any], "Reduced | None"]
Resolver = Callable[[str, int], Any]

_LARGE = 16 << 20  # bytes of a function with its arguments that are worth a warning
_resolver: ContextVar[Resolver | None] = ContextVar("mpistrat_tokens", default=None)


def load_cloudpickle() -> Any:
    """Return the module cloudpickle.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import cloudpickle
    except ImportError as error:
        remedy = "Install it on every node: pip install 'mpistrat[coordinator]'"
        expected, got = "the package cloudpickle, which carries functions to the workers", "none"
        raise MissingDependencyError(
            explain("ClusterCoordinator", "", expected=expected, got=got, remedy=remedy)
        ) from error
    return cloudpickle


@functools.cache
def _pickler() -> Any:
    cloudpickle = load_cloudpickle()

    @final
    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        """Asks for a token before anything else."""

        def __init__(self, file: io.BytesIO, reduce: Reducer) -> None:
            super().__init__(file, protocol=5)
            self._reduce = reduce

        def reducer_override(self, obj: Any) -> Any:
            reduced = self._reduce(obj)
            return super().reducer_override(obj) if reduced is None else reduced

    return Pickler


def token(kind: str, key: int) -> Reduced:
    """Return what a reducer returns for something that the other rank has itself."""
    return _resolve, (kind, key)


def plain(value: Any) -> Reduced:
    """Return what a reducer returns to have a value sent in the place of something."""
    return _same, (value,)


def dumps(value: Any, reduce: Reducer, what: str = "") -> bytes:
    """Return a value as bytes.

    Args:
        value: nearly anything.
        reduce: returns a `token` for what is not to be sent, None for the rest.
        what: whose bytes they are, for a warning about large ones; none without it.

    Raises:
        TypeError: it holds something that cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _pickler()(file, reduce).dump(value)
    except MissingDependencyError:
        raise
    except Exception as error:  # whatever a __reduce__ raises
        raise TypeError(f"{type(error).__name__}: {error}") from error
    data = file.getvalue()
    if what and len(data) > _LARGE:
        log.once(
            logging.WARNING,
            f"{what} has {len(data) >> 20} MiB with all that it refers to, and is sent each time: let workers make large "
            "data, with create_per_worker_resource or create_per_worker_dataset",
        )
    return data


def loads(data: bytes | memoryview, resolver: Resolver) -> Any:
    """Return the value of bytes that `dumps` made, on a rank of the same job.

    Args:
        data: the bytes.
        resolver: returns what a token stands for here.
    """
    token = _resolver.set(resolver)
    try:
        return load_cloudpickle().loads(data)
    finally:
        _resolver.reset(token)


def _resolve(kind: str, key: int) -> Any:
    resolver = _resolver.get()
    if resolver is None:
        raise RuntimeError("a token of the coordinator outside its messages")
    return resolver(kind, key)


def _same(value: Any) -> Any:
    return value
