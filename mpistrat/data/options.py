"""Settings of the input: how a dataset is divided over workers and replicas, and what is read ahead."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..base.arguments import integer
from ..base.errors import explain

__all__ = [
    "AUTOTUNE",
    "SHARD_HINT",
    "AutoShardPolicy",
    "InputOptions",
    "InputReplicationMode",
    "Options",
    "number_of_calls",
]

AUTOTUNE = -1  # tf.data.AUTOTUNE: numbers of calls and of elements read ahead that are chosen here
SHARD_HINT = -1  # tf.data.experimental.SHARD_HINT: in Dataset.shard, "the number of workers" and "this worker"

E = TypeVar("E", bound=enum.Enum)
C = TypeVar("C", bound=type[Any])


class AutoShardPolicy(enum.IntEnum):
    """How `distribute_dataset` divides a dataset over the workers (TF: tf.data.experimental.AutoShardPolicy).

    AUTO: DATA.
    FILE: each worker reads files of its own.
    DATA: each step's global batch is cut into blocks, one a replica; the order is the same for any number of ranks.
    OFF: each worker reads the whole dataset.
    HINT: each worker reads what `shard(SHARD_HINT, SHARD_HINT)` in the dataset leaves it.
    FILE_OR_DATA: TensorFlow's AUTO: FILE where there is at least a file for each worker, else DATA.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3
    FILE_OR_DATA = 4


class InputReplicationMode(enum.Enum):
    """Whether a dataset function is called once a worker or once a replica (TF: tf.distribute.InputReplicationMode)."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


def _member(kind: type[E], function: str, argument: str, value: Any) -> E:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    expected = f"{kind.__name__}.{', '.join(kind.__members__)}, or its name"
    raise ValueError(explain(function, argument, expected=expected, got=repr(value)))


def _also_experimental(cls: C) -> C:
    """Let a class's arguments carry TensorFlow's prefix `experimental_` too."""
    init = cls.__init__

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name.removeprefix("experimental_"): value for name, value in kwargs.items()})

    cls.__init__ = wrapper
    return cls


@dataclass
class Options:
    """Settings of a whole dataset, for `Dataset.with_options` (TF: tf.data.Options). None means: not said here.

    Attributes may be set later, TF's `options.experimental_distribute.auto_shard_policy`, too; `with_options` takes them
    as they are then. Settings of TensorFlow's own runtime (threads, optimizations) are refused.

    Args:
        auto_shard_policy: how `distribute_dataset` divides the dataset; a member of AutoShardPolicy or its name.

    Raises:
        ValueError: for another policy.
        AttributeError: for another setting.

    Example:
        >>> Options(auto_shard_policy="file").auto_shard_policy.name
        'FILE'
        >>> options = Options()
        >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
        >>> options.auto_shard_policy.name
        'OFF'
    """

    auto_shard_policy: AutoShardPolicy | str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise self._unknown(name)
        if value is not None:
            value = _member(AutoShardPolicy, "Options", name, value)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise self._unknown(name)

    def _unknown(self, name: str) -> AttributeError:
        remedy = "What TensorFlow's runtime is told there has no counterpart here: leave it out."
        return AttributeError(explain("Options", name, expected="auto_shard_policy", got=name, remedy=remedy))

    @property
    def experimental_distribute(self) -> Options:
        """These options: TensorFlow keeps `auto_shard_policy` there."""
        return self

    def merge(self, override: Options) -> Options:
        """Return these options with every field that the other one sets.

        Example:
            >>> Options("off").merge(Options()).auto_shard_policy.name
            'OFF'
        """
        said = {f.name: getattr(override, f.name) for f in fields(override)}
        return Options(**{n: getattr(self, n) if value is None else value for n, value in said.items()})

    def __str__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(
            f"{n}={value.name if isinstance(value, enum.Enum) else value}"
            for n, value in said.items()
            if value is not None
        )


@_also_experimental
@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset is fed (TF: tf.distribute.InputOptions). TF's names with `experimental_` work, too.

    Args:
        fetch_to_device: move batches to the replicas' devices; False leaves them in the host's memory.
        replication_mode: PER_REPLICA calls the function of `distribute_datasets_from_function` once for each local
            replica; `distribute_dataset` takes PER_WORKER only.
        place_dataset_on_device: False; datasets are made in the host's memory.
        per_replica_buffer_size: steps that wait ready for each replica; one more may be on its way. 0 reads nothing
            ahead and needs no thread.

    Raises:
        ValueError: for a negative buffer size, and for place_dataset_on_device=True.

    Example:
        >>> InputOptions(experimental_per_replica_buffer_size=2).per_replica_buffer_size
        2
    """

    fetch_to_device: bool = True
    replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER
    place_dataset_on_device: bool = False
    per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        mode = _member(InputReplicationMode, "InputOptions", "replication_mode", self.replication_mode)
        object.__setattr__(self, "replication_mode", mode)
        if self.place_dataset_on_device:
            remedy = "Datasets are made in the host's memory; fetch_to_device moves their batches."
            raise ValueError(
                explain("InputOptions", "place_dataset_on_device", expected="False", got="True", remedy=remedy)
            )
        if not isinstance(self.per_replica_buffer_size, int) or self.per_replica_buffer_size < 0:
            got = repr(self.per_replica_buffer_size)
            raise ValueError(explain("InputOptions", "per_replica_buffer_size", expected="at least 0", got=got))


def number_of_calls(function: str, value: Any, argument: str = "num_parallel_calls") -> int | None:
    """Return `num_parallel_calls`, or another argument like it: None, AUTOTUNE or a number of at least 1.

    Raises:
        TypeError: it is no integer.
        ValueError: it is another number.
    """
    if value is None or value == AUTOTUNE:
        return None if value is None else AUTOTUNE
    return integer(function, argument, value, 1, "Or ms.data.AUTOTUNE, or None for the thread that reads.")
