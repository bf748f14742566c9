"""Object registry: objects that exist on every rank are sent as tokens, and become the receiver's own; others by cloudpickle.

Tokens represent variables, the strategy, optimizers, the coordinator and per-worker values. A `RemoteValue` among the arguments
of a function arrives as its value. Chief and workers are ranks of the same job.
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
    """A maker and resolver of tokens.

    Args:
        strategy: the owner of the objects.

    Attributes:
        coordinator: the object of a coordinator's token.
        resources: on a worker its own per-worker values, by number.
        used: the optimizers in tokens since this was emptied.
        kept: the per-worker values in tokens since this was emptied.
        varies: True after a token whose object a later call must look up again.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.coordinator: Any = None
        self.resources: dict[int, Any] = {}
        self.used: list[Optimizer] = []
        self.kept: list[PerWorkerValues] = []
        self.varies = False
        self._noted: dict[int, str] = {}
        self._inputs: Mapping[int, memoryview] = {}

    # on the sender

    def reduce(self, thing: Any) -> Reduced | None:
        """Return the token of an object that every rank has, or None.

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
        models = self._strategy.extended.models
        number = models.number(thing)
        if number is None:
            return None
        self.varies = self.varies or models.varies(number)
        return token("model", number)

    def reduce_with(self, inputs: dict[int, RemoteValue]) -> Reducer:
        """Return a reducer that also handles RemoteValues, which it records, and tables."""

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
        """Return the replacement of an object in a result for the chief: of a variable its value."""
        return plain(thing.numpy()) if isinstance(thing, (Variable, ShardedVariable)) else self.reduce(thing)

    def reduce_command(self, thing: Any) -> Reduced | None:
        """Return a token, except for optimizers: a command creates them."""
        return None if isinstance(thing, Optimizer) else self.reduce(thing)

    def note_optimizer(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer is new, or its settings have changed."""
        what, ordinal = repr(optimizer), optimizer._core.ordinal
        new = self._noted.get(ordinal) != what
        self._noted[ordinal] = what
        return new

    def note_optimizers(self) -> None:
        """Record all optimizers that this program has created."""
        for optimizer in optimizers.known():
            self.note_optimizer(optimizer)

    def _check_own(self, coordinator: Any, what: str) -> None:
        if coordinator is not self.coordinator:
            raise TypeError(f"{what} of another coordinator")

    # on the receiver

    def resolve(self, kind: str, key: int) -> Any:
        """Return the object of a token on this rank."""
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
        if kind == "model":
            return self._model(key)
        known = {
            "registry": self,
            "strategy": self._strategy,
            "extended": self._strategy.extended,
            "coordinator": self.coordinator,
        }
        return known[kind]

    def _resource(self, key: int) -> Any:
        if key not in self.resources:
            raise RuntimeError("a per-worker value that could not be created on this worker")
        return self.resources[key]

    def _optimizer(self, ordinal: int) -> Optimizer:
        found: Optimizer | None = optimizers.find(ordinal)
        if found is None:
            remedy = "Run the same program on every rank until the coordinator is created"
            expected, got = "the optimizer that the chief has", f"none with the ordinal {ordinal}"
            raise RuntimeError(explain("ClusterCoordinator", "", expected=expected, got=got, remedy=remedy))
        return found

    def _model(self, number: int) -> Any:
        found = self._strategy.extended.models.find(number)
        if found is None:
            remedy = (
                "Distribute models before the coordinator is created, in a program that every rank runs, and keep them"
            )
            expected, got = "the model, or part of one, that the chief has", "none on this rank"
            raise RuntimeError(explain("ClusterCoordinator", "", expected=expected, got=got, remedy=remedy))
        return found

    @contextlib.contextmanager
    def with_inputs(self, inputs: Mapping[int, memoryview]) -> Iterator[None]:
        """Use these values of other functions in the context."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = {}


def _position(thing: Any, things: Sequence[Any]) -> int:
    for index, own in enumerate(things):
        if own is thing:
            return index
    raise TypeError(f"a {type(thing).__name__} that was not created in the scope of the coordinator's strategy")


Reduced = tuple[Callable[..., Any], tuple[Any, ...]]  # a reducer's result: a function and its arguments
Reducer = Callable[[Any], "Reduced | None"]
Resolver = Callable[[str, int], Any]

_LARGE = 16 << 20  # bytes of a function with its arguments, from which on a warning is logged
_resolver: ContextVar[Resolver | None] = ContextVar("mpistrat_tokens", default=None)


@functools.cache
def _pickler() -> Any:
    cloudpickle = load_cloudpickle()

    @final
    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        """A pickler that first tries a token."""

        def __init__(self, file: io.BytesIO, reduce: Reducer) -> None:
            super().__init__(file, protocol=5)
            self._reduce = reduce

        def reducer_override(self, obj: Any) -> Any:
            reduced = self._reduce(obj)
            return super().reducer_override(obj) if reduced is None else reduced

    return Pickler


def token(kind: str, key: int) -> Reduced:
    """Return a reducer's result for an object that the receiver has itself."""
    return _resolve, (kind, key)


def plain(value: Any) -> Reduced:
    """Return a reducer's result that sends a value in place of an object."""
    return _same, (value,)


def dumps(value: Any, reduce: Reducer, what: str = "") -> bytes:
    """Return a value as bytes.

    Args:
        value: almost any object.
        reduce: returns a `token` for objects that are not sent, None for the rest.
        what: its name, for a warning about large ones; no warning without it.

    Raises:
        TypeError: it contains an object that cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _pickler()(file, reduce).dump(value)
    except (MissingDependencyError, KeyboardInterrupt):
        raise
    except BaseException as error:  # from a __reduce__, also SystemExit
        raise TypeError(error_text(error)) from error
    data = file.getvalue()
    if what and len(data) > _LARGE:
        log.once(
            logging.WARNING,
            f"{what} has {binary_size(len(data))} with all that it refers to, and is sent each time: create large data on "
            "workers with create_per_worker_resource or create_per_worker_dataset",
        )
    return data


def loads(data: bytes | memoryview, resolver: Resolver) -> Any:
    """Return the value of bytes from `dumps`, on a rank of the same job.

    Args:
        data: the bytes.
        resolver: returns the object of a token on this rank.
    """
    token = _resolver.set(resolver)
    try:
        return load_cloudpickle().loads(data)
    finally:
        _resolver.reset(token)


def dumps_result(value: Any, reduce: Reducer) -> bytes:
    """Return the result of a client's function as bytes.

    Raises:
        TypeError: as `dumps`, and if pickling raises KeyboardInterrupt, which is the function's, not the user's.
    """
    try:
        return dumps(value, reduce)
    except KeyboardInterrupt as error:
        raise TypeError(error_text(error)) from error


def text_of_failure(error: BaseException, where: str, loss_ends: bool = True) -> str:
    """Return the text of a call's exception: the rank, and the traceback from the function on.

    Args:
        error: the exception.
        where: the rank, in words.
        loss_ends: whether lost ranks end this rank's program.

    Raises:
        BaseException: the exception itself, if it also ends this rank's program: Ctrl-C, or lost ranks.
    """
    if isinstance(error, KeyboardInterrupt) or (loss_ends and is_loss(error)):
        raise error
    trace = error.__traceback__
    return f"{where}:\n{traceback_text(error, trace if trace is None else trace.tb_next or trace)}"


def dumps_error(error: BaseException, text: str, reduce: Reducer, resolver: Resolver, most: int | None = None) -> bytes:
    """Return an exception and its text as bytes for `loads_error`.

    Args:
        error: of any class. One that cannot be sent or created again is left out.
        text: contains its location.
        reduce, resolver: as for `dumps` and `loads`.
        most: the most bytes of an exception that is sent; default without limit.
    """
    data: bytes | None = None
    with contextlib.suppress(BaseException):  # its class has a lock, or needs other arguments
        found = dumps(error, reduce)
        if isinstance(loads(found, resolver), BaseException) and (most is None or len(found) <= most):
            data = found
    return dumps((data, text), reduce)


def loads_error(payload: bytes, unpack: Callable[[bytes], Any]) -> BaseException:
    """Return the exception in bytes from `dumps_error`; its cause is the text. `unpack` is `loads`."""
    data, text = unpack(payload)
    if data is not None:
        with contextlib.suppress(Exception):  # its class does not exist here
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
