"""The Variable: an array that a strategy holds, and the operations of all its kinds."""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arena.arena import Arena
from ..arena.layout import Box, Part
from ..base import context
from ..base.context import Frame
from ..base.distributed_values import DistributedValues
from ..base.errors import ClosedError, ContextError, explain
from ..base.types import VariableAggregation, VariableSynchronization
from .array_like import ArrayVariable
from .placement import Description, Placement

__all__ = [
    "Variable",
    "box_of",
    "explain_foreign",
    "parts_for_file",
    "require_gradient",
    "value_for_file",
    "variable_creator_scope",
]


_ARGUMENTS = (
    "initial_value", "trainable", "name", "dtype", "shape", "synchronization", "aggregation", "constraint", "layout",
    "per_worker_variable",
)  # fmt: skip


class _Scopes(threading.local):
    """The creators of this thread's open scopes, outermost first."""

    def __init__(self) -> None:
        self.creators: tuple[Callable[..., Any], ...] = ()


_SCOPES = _Scopes()


@contextlib.contextmanager
def variable_creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Call a function for each `Variable(...)` in a block, on this thread. Every rank must enter the same scopes.

    Args:
        creator: called as `creator(next_creator, **arguments)`. It returns a variable, usually that of
            `next_creator(**arguments)`, perhaps with other arguments. Creators of inner scopes are called first.

    Source: https://www.tensorflow.org/api_docs/python/tf/variable_creator_scope

    Example:
        >>> def halved(next_creator, **arguments):
        ...     return next_creator(**{**arguments, "dtype": "float16"})
        >>> with ms.variable_creator_scope(halved):
        ...     w = ms.Variable([1.0, 2.0])
        >>> w.dtype
        dtype('float16')
    """
    before = _SCOPES.creators
    _SCOPES.creators = (*before, creator)
    try:
        yield
    finally:
        _SCOPES.creators = before


def _created(create: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `create` makes of the arguments of a variable, through the creators of the open scopes."""
    if not _SCOPES.creators or len(args) > len(_ARGUMENTS):  # which raises TypeError
        return create(*args, **kwargs)
    for creator in _SCOPES.creators:
        create = functools.partial(creator, create)
    return create(**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs)


class _FrontDoor(ABCMeta):
    """The metaclass that makes `Variable(...)` create a variable of the current strategy's kind."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Variable:
            return _created(context.current().strategy.extended.create_variable, args, kwargs)
        return super().__call__(*args, **kwargs)


class Variable(ArrayVariable, metaclass=_FrontDoor):
    """An array of a fixed shape and dtype in the current strategy (TF: tf.Variable). Creation is collective.

    `Variable(initial_value, trainable=None, name=None, dtype=None, shape=None, synchronization=AUTO, aggregation=NONE,
    constraint=None, layout=None, per_worker_variable=False)` creates it in the current scope's strategy.

    Reading: NumPy takes a variable wherever it takes an array: `np.tanh(v @ x)`, `v[0]`, `np.asarray(v)`. Reads without
    computation (`v.array`, `np.asarray(v)`, `v[0:2]`) are read-only views that show later writes; `v.numpy()`, `v.value()` and
    `v.read_value()` are copies. Writing: `assign`, `assign_add`, `assign_sub` and the scatter methods, which return the
    variable; NumPy's `v += x` and `out=v` raise.

    Collective: reading ON_READ variables in cross-replica context; all writing, because the ranks of a node share one copy,
    except of ON_READ variables in replica context.

    A variable lives until its strategy is closed; later use raises ClosedError. It cannot be pickled or copied.

    Args:
        initial_value: array, number, nested list of numbers, or a callable that returns one of them. A callable runs on global
            rank 0 only. Otherwise every rank passes a value of the same shape and dtype, and rank 0's numbers are used.
        trainable: whether it has gradients; default True, but False for ON_READ.
        name: default "Variable"; a used name gets a suffix, "w_1".
        dtype: default that of an array; float32 and int32 for Python's floats and integers, as in TensorFlow.
        shape: if given, must be the initial value's; None stands for any length.
        synchronization: AUTO and ON_WRITE keep all copies equal. ON_READ gives each replica its own copy, aggregated when read
            in cross-replica context.
        aggregation: the reduction of values that replicas write, or of ON_READ copies. With NONE an ON_WRITE variable cannot be
            written in replica context.
        constraint: function of the whole array that returns one like it; optimizers apply it after each update.
        layout: under a MeshStrategy, for each dimension the mesh axis that divides it, or None; default: each rank has all. The
            variable is then this rank's part, see `part`: so are `shape`, `array`, `grad` and assigned values. Initial values
            are those of the whole.
        per_worker_variable: give each worker its own copy, which it reads and writes locally, in and outside of steps.
            `v.read_all()`, collective, returns a list of the copies, in the order of the workers.

    Raises:
        ValueError: synchronization NONE; MEAN of integers; a trainable ON_READ variable; another shape than `shape`; a layout
            with other axes than the mesh's, or that does not divide the array evenly.
        TypeError: an initial value that is not an array of numbers.
        CollectiveMismatchError: on every rank: ranks create different variables.
        SharedMemoryError: on every rank: a node has too little shared memory.

    Example:
        >>> import mpistrat as ms
        >>> v = ms.Variable([1.0, 2.0], name="example")
        >>> (v.assign_add([1.0, 1.0]) * 10).tolist()
        [20.0, 30.0]
    """

    __slots__ = ("arena", "offset")

    if TYPE_CHECKING:  # the signature of the call, which goes to the current strategy

        def __new__(
            cls,
            initial_value: Any,
            trainable: bool | None = None,
            name: str | None = None,
            dtype: Any = None,
            shape: Any = None,
            synchronization: VariableSynchronization = ...,
            aggregation: VariableAggregation = ...,
            constraint: Callable[[Any], Any] | None = None,
            layout: Sequence[str | None] | None = None,
            per_worker_variable: bool = False,
        ) -> Variable: ...

    def _hold(self, placement: Placement, description: Description) -> None:
        super()._hold(placement, description)
        self.arena: Arena | None = None
        self.offset = 0

    # attributes

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """The function that optimizers apply after each update."""
        return self._description.constraint

    @property
    def part(self) -> Part | None:
        """The part of the whole array under a MeshStrategy: `layout`, `whole_shape`, `slices`; else None."""
        return self._description.part

    @property
    def device(self) -> str:
        """The device of this replica; outside replica context that of the first local replica."""
        replica = self._replica_or_first()
        devices = self.placement.devices
        return devices[replica if replica < len(devices) else 0]

    # reading

    @property
    @abstractmethod
    def array(self) -> Any:
        """The numbers as a read-only view, of this replica's copy."""

    @property
    @abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The values that each local replica reads, in replica order; read-only views, equal for ON_WRITE."""

    @property
    @abstractmethod
    def num_copies(self) -> int:
        """The number of physical copies that this rank writes."""

    def gathered(self) -> np.ndarray | None:
        """Return a copy of the whole, at least on rank 0; None on ranks that cannot read it. Collective.

        With a coordinator the chief calls it, and the serving ranks take part. It does not wait for scheduled functions: call
        `join` first.

        Raises:
            ContextError: in a scheduled function, which runs on one rank.
        """
        self._require_open()
        self.placement.strategy.extended.coordination.announce("gathered", self)
        return self._value_for_file()

    def _value_for_file(self) -> np.ndarray | None:
        return self.numpy()

    def _parts_for_file(self, leads: bool, at_home: bool) -> list[tuple[int, Any]]:
        value = self._value_for_file()
        return [(0, value)] if leads else []

    def load(self, value: np.ndarray) -> None:
        """Write a value that every rank has. Collective over all ranks of the strategy; used for files."""
        self.assign(value)

    def storage(self, local_replica: int = 0) -> Any:
        """Return the memory of a local replica's copy as a writable array, for adapters of other frameworks.

        The ranks of a node share it: all must write the same, or only one, with barriers around it, as `assign` does.

        Raises:
            ValueError: the copy is not in this rank's memory, as with parameter servers.
        """
        self._require_open()
        expected, got = "a variable whose copy is in this rank's memory", f"a {type(self).__name__}"
        raise ValueError(explain("Variable.storage", self.name, expected=expected, got=got))

    # gradients

    def gradient(self, local_replica: int) -> Any:
        self._require_open()
        raise self._without_gradients()

    def _without_gradients(self) -> ValueError:
        expected = "a trainable variable of a floating dtype"
        got = f"{self.dtype}, trainable={self.trainable}"
        return ValueError(explain("Variable.grad", self.name, expected=expected, got=got))

    def __repr__(self) -> str:
        what = f"{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype}"
        if self.closed:
            return f"<{what} closed>"
        return f"<{what} {self.synchronization.name} {self.aggregation.name} primary={self.values[0]!r}>"

    # where it is used

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedError(f"Variable {self.name!r} was used after its strategy was closed")

    def _frame(self, function: str) -> Frame:
        """Return the current frame of this variable's strategy: outside its scope, the cross-replica context."""
        self._require_open()
        frame = context.current()
        if frame.strategy is self.placement.strategy:
            return frame
        if context.has_strategy():
            raise ValueError(explain_foreign(f"Variable.{function}", self, context.get_strategy()))
        return Frame(self.placement.strategy)

    def _local_index(self, frame: Frame) -> int | None:
        """Return the local replica of a frame; None in cross-replica context."""
        if frame.replica is not None:
            return frame.replica.replica_id_in_sync_group - self.placement.group.topology.replica_offset
        return frame.update_replica_id

    def _replica_or_first(self) -> int:
        frame = context.current()
        return (self._local_index(frame) or 0) if frame.strategy is self.placement.strategy else 0

    def _local_replica(self, function: str) -> int:
        if self.placement.group.topology.num_local_replicas == 1:
            return 0
        index = self._local_index(self._frame(function))
        if index is None:
            remedy = "Call it inside strategy.run, or use v.gradient(local_replica)"
            expected, got = "a call in replica context", "a rank with several local replicas, outside of it"
            raise ContextError(explain(f"Variable.{function}", self.name, expected=expected, got=got, remedy=remedy))
        return index

    def _per_replica(self, value: Any) -> Sequence[Any]:
        """Return one value for each local replica, from an argument of a merge function."""
        if isinstance(value, DistributedValues):
            return value.values
        return (value,) * self.placement.group.topology.num_local_replicas


def require_gradient(variable: Variable) -> None:
    """Raise ValueError if a variable has no gradients. Allocates no memory."""
    variable._require_open()
    if not variable.trainable or variable.dtype.kind in "biu":
        raise variable._without_gradients()


def explain_foreign(function: str, variable: Any, strategy: Any) -> str:
    """Return the error text for a variable from another strategy than the running one.

    It distinguishes three mistakes: a variable made outside of the scope, a step outside of `run`, two strategies.
    """
    owner, expected = variable.placement.strategy, f"a variable made in the scope of the {_kind(strategy)} that runs"
    if owner.extended.is_default:
        got = "one made outside of every scope"
        remedy = f"Make it inside: with strategy.scope(): {variable.name} = ms.Variable(...)"
    elif strategy.extended.is_default:
        expected = f"a call in a step of the {_kind(owner)} that the variable belongs to"
        got = "one outside of strategy.run"
        remedy = "Put it into a function, and call that by strategy.run(step, args=(batch,))"
    else:
        got = f"one of another strategy, a {_kind(owner)}"
        remedy = (
            "Create one strategy per program, or use each variable only in its own strategy's scope, run and optimizer"
        )
    return explain(function, variable.name, expected=expected, got=got, remedy=remedy)


def _kind(strategy: Any) -> str:
    return type(strategy).__name__


def value_for_file(variable: Variable) -> np.ndarray | None:
    """Return `Variable.gathered`, when all ranks call it. Collective."""
    return variable._value_for_file()


def parts_for_file(variable: Variable, leads: bool, at_home: bool) -> list[tuple[int, Any]]:
    """Return the value for files on the rank that leads, with the number of its first element, and [] on others. Collective.

    With `at_home` the server of a variable on servers has it instead.
    """
    return variable._parts_for_file(leads, at_home)


def box_of(variable: Variable) -> Box:
    """Return a variable's place in its whole array: all of it, or on a mesh a box."""
    return variable._description.box
