"""Object registry: what exists on every rank travels as a token, and arrives as the other rank's own; the rest by cloudpickle.

Tokens stand for variables, the strategy, optimizers, the coordinator and per-worker values. A `RemoteValue` among the
arguments of a function arrives as what it stands for. Chief and workers are ranks of the same job.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from ..base import log
from ..base.errors import MissingDependencyError, explain
from ..base.lazy import load_cloudpickle
from ..base.text import binary_size, error_text, traceback_text
from ..cluster.world import is_loss
from ..lookup import StaticHashTable
from ..optimizers import Optimizer
from ..optimizers import core as optimizers
from ..variables import Variable
from ..variables.sharded import ShardedVariable
from .scheduler import PerWorkerValues, RemoteError, RemoteTraceback, RemoteValue

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = [
    "ObjectRegistry",
    "Reduced",
    "Reducer",
    "dumps",
    "dumps_error",
    "dumps_result",
    "loads",
    "loads_error",
    "plain",
    "text_of_failure",
    "token",
]


@final
class ObjectRegistry:
    """Makes tokens, and finds what they stand for.

    Args:
        strategy: whose things they are.

    Attributes:
        coordinator: what the token of a coordinator stands for.
        resources: on a worker its own per-worker values, by number.
        used: the optimizers whose tokens were made since this was emptied.
        kept: the per-worker values whose tokens were made since this was emptied.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.coordinator: Any = None
        self.resources: dict[int, Any] = {}
        self.used: list[Optimizer] = []
        self.kept: list[PerWorkerValues] = []
        self._noted: dict[int, str] = {}
        self._inputs: Mapping[int, memoryview] = {}

    # on the sender

    def reduce(self, thing: Any) -> Reduced | None:
        """Return the token of something that every rank has, or None.

        Raises:
            TypeError: it belongs to another strategy or coordinator.
        """
        if isinstance(thing, Variable):
            return token("variable", _position(thing, self._strategy.extended.variables))
        if isinstance(thing, ShardedVariable):
            return token("sharded", _position(thing, self._strategy.extended.placement.sharded))
        if isinstance(thing, Optimizer):
            self.used.append(thing)
            return token("optimizer", thing._core.ordinal)
        if isinstance(thing, PerWorkerValues):
            self._check_own(thing._scheduler, "a per-worker value")
            self.kept.append(thing)
            return token("per_worker", thing._number)
        if thing is self:
            return token("registry", 0)
        if thing is self._strategy:
            return token("strategy", 0)
        if thing is self._strategy.extended:
            return token("extended", 0)
        if thing is self.coordinator and thing is not None:
            return token("coordinator", 0)
        return None

    def reduce_with(self, inputs: dict[int, RemoteValue]) -> Reducer:
        """Return what makes tokens, of RemoteValues and tables too, and notes them."""

        def reduce(thing: Any) -> Reduced | None:
            if isinstance(thing, StaticHashTable):
                return self.reduce(self.coordinator.copies_of(thing))
            if not isinstance(thing, RemoteValue):
                return self.reduce(thing)
            self._check_own(thing._scheduler, "a RemoteValue")
            inputs[thing._number] = thing
            return token("remote", thing._number)

        return reduce

    def reduce_result(self, thing: Any) -> Reduced | None:
        """Return what is sent to the chief instead of something: of a variable its value."""
        return plain(thing.numpy()) if isinstance(thing, (Variable, ShardedVariable)) else self.reduce(thing)

    def reduce_command(self, thing: Any) -> Reduced | None:
        """Return a token, but of no optimizer: a command makes it."""
        return None if isinstance(thing, Optimizer) else self.reduce(thing)

    def note_optimizer(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is new, or has other numbers than the last time."""
        what, ordinal = repr(optimizer), optimizer._core.ordinal
        new = self._noted.get(ordinal) != what
        self._noted[ordinal] = what
        return new

    def note_optimizers(self) -> None:
        """Note all that this program has made."""
        for optimizer in optimizers.known():
            self.note_optimizer(optimizer)

    def _check_own(self, coordinator: Any, what: str) -> None:
        if coordinator is not self.coordinator:
            raise TypeError(f"{what} of another coordinator")

    # on the receiver

    def resolve(self, kind: str, key: int) -> Any:
        """Return what a token stands for here."""
        if kind == "remote":
            return loads(self._inputs[key], self.resolve)
        if kind == "variable":
            return self._strategy.extended.variables[key]
        if kind == "sharded":
            return self._strategy.extended.placement.sharded[key]
        if kind == "per_worker":
            return self._resource(key)
        if kind == "optimizer":
            return self._optimizer(key)
        known = {
            "registry": self,
            "strategy": self._strategy,
            "extended": self._strategy.extended,
            "coordinator": self.coordinator,
        }
        return known[kind]

    def _resource(self, key: int) -> Any:
        if key not in self.resources:
            raise RuntimeError("a per-worker value that could not be made on this worker")
        return self.resources[key]

    def _optimizer(self, ordinal: int) -> Optimizer:
        found: Optimizer | None = optimizers.find(ordinal)
        if found is None:
            remedy = "Run the same program on every rank until the coordinator is made"
            expected, got = "the optimizer that the chief has", f"none with the ordinal {ordinal}"
            raise RuntimeError(explain("ClusterCoordinator", "", expected=expected, got=got, remedy=remedy))
        return found

    @contextlib.contextmanager
    def with_inputs(self, inputs: Mapping[int, memoryview]) -> Iterator[None]:
        """While the context lasts these are the values of other functions."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = {}


def _position(thing: Any, things: Sequence[Any]) -> int:
    for index, own in enumerate(things):
        if own is thing:
            return index
    raise TypeError(f"a {type(thing).__name__} that was not made in the scope of the coordinator's strategy")


Reduced = tuple[Callable[..., Any], tuple[Any, ...]]  # what a reducer returns: a function and its arguments
Reducer = Callable[[Any], "Reduced | None"]
Resolver = Callable[[str, int], Any]

_LARGE = 16 << 20  # bytes of a function with its arguments that are worth a warning
_resolver: ContextVar[Resolver | None] = ContextVar("mpistrat_tokens", default=None)


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
    """Return what a reducer returns to have a value sent instead of something."""
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
    except (MissingDependencyError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a __reduce__ raises, SystemExit too
        raise TypeError(error_text(error)) from error
    data = file.getvalue()
    if what and len(data) > _LARGE:
        log.once(
            logging.WARNING,
            f"{what} has {binary_size(len(data))} with all that it refers to, and is sent each time: let workers make large "
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


def dumps_result(value: Any, reduce: Reducer) -> bytes:
    """Return what a client's function has made as bytes.

    Raises:
        TypeError: as `dumps`, and where pickling raises KeyboardInterrupt: it is the function's, not the user's.
    """
    try:
        return dumps(value, reduce)
    except KeyboardInterrupt as error:
        raise TypeError(error_text(error)) from error


def text_of_failure(error: BaseException, where: str) -> str:
    """Return the text of an exception that a call raised: the rank, and the traceback from the function on.

    Raises:
        BaseException: the exception itself, if it ends this rank's program too: Ctrl-C, or lost ranks.
    """
    if isinstance(error, KeyboardInterrupt) or is_loss(error):
        raise error
    trace = error.__traceback__
    return f"{where}:\n{traceback_text(error, trace if trace is None else trace.tb_next or trace)}"


def dumps_error(error: BaseException, text: str, reduce: Reducer, resolver: Resolver, most: int | None = None) -> bytes:
    """Return an exception and its text as `loads_error` takes them.

    Args:
        error: of any class. One that cannot be sent, or made anew, is left out.
        text: says where it was raised.
        reduce, resolver: as for `dumps` and `loads`.
        most: bytes of an exception that is sent; default without limit.
    """
    data: bytes | None = None
    with contextlib.suppress(BaseException):  # of a class with a lock, or one that asks for other arguments
        found = dumps(error, reduce)
        if isinstance(loads(found, resolver), BaseException) and (most is None or len(found) <= most):
            data = found
    return dumps((data, text), reduce)


def loads_error(payload: bytes, unpack: Callable[[bytes], Any]) -> BaseException:
    """Return the exception of bytes that `dumps_error` made; its cause is the text. `unpack` is `loads`."""
    data, text = unpack(payload)
    if data is not None:
        with contextlib.suppress(Exception):  # of a class that is not here
            error = unpack(data)
            error.__cause__ = RemoteTraceback(f"\n{text}")
            if isinstance(error, BaseException):
                return error
    return RemoteError(text)


def _resolve(kind: str, key: int) -> Any:
    resolver = _resolver.get()
    if resolver is None:
        raise RuntimeError("a token of the coordinator outside its messages")
    return resolver(kind, key)


def _same(value: Any) -> Any:
    return value
