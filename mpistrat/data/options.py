"""Options of the input: the split of a dataset over workers and replicas, and reading ahead."""

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

AUTOTUNE = -1  # tf.data.AUTOTUNE: numbers of calls and of elements read ahead that the package chooses
SHARD_HINT = -1  # tf.data.experimental.SHARD_HINT: in Dataset.shard, "the number of workers" and "this worker"

E = TypeVar("E", bound=enum.Enum)
C = TypeVar("C", bound=type[Any])


class AutoShardPolicy(enum.IntEnum):
    """The policy by which `distribute_dataset` splits a dataset over workers (TF: tf.data.experimental.AutoShardPolicy).

    AUTO: DATA.
    FILE: each worker reads its own files.
    DATA: each step's global batch is split into one block per replica; the order is the same for any number of ranks.
    OFF: each worker reads the whole dataset.
    HINT: each worker reads its shard of `shard(SHARD_HINT, SHARD_HINT)` in the dataset.
    FILE_OR_DATA: TensorFlow's AUTO: FILE if there is at least one file for each worker, else DATA.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3
    FILE_OR_DATA = 4


class InputReplicationMode(enum.Enum):
    """The number of calls of a dataset function: one per worker or per replica (TF: tf.distribute.InputReplicationMode)."""

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
    """Make a class's arguments also accept TensorFlow's prefix `experimental_`."""
    init = cls.__init__

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name.removeprefix("experimental_"): value for name, value in kwargs.items()})

    cls.__init__ = wrapper
    return cls


@dataclass
class Options:
    """Options of a whole dataset, for `Dataset.with_options` (TF: tf.data.Options). None means not set.

    Attributes may also be set later, as may TF's `options.experimental_distribute.auto_shard_policy`; `with_options` uses
    their values at that time. Options of TensorFlow's own runtime (threads, optimizations) raise an error.

    Args:
        auto_shard_policy: the policy of `distribute_dataset`; a member of AutoShardPolicy or its name.

    Raises:
        ValueError: for an unknown policy.
        AttributeError: for any other option.

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
        remedy = "Options of TensorFlow's runtime have no counterpart here: leave it out."
        return AttributeError(explain("Options", name, expected="auto_shard_policy", got=name, remedy=remedy))

    @property
    def experimental_distribute(self) -> Options:
        """These options, which TensorFlow has under this name."""
        return self

    def merge(self, override: Options) -> Options:
        """Return these options with every field that `override` sets.

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
    """Input options of a distributed dataset (TF: tf.distribute.InputOptions). TF's prefix `experimental_` works too.

    Args:
        fetch_to_device: move batches to the replicas' devices; False leaves them in the host's memory.
        replication_mode: PER_REPLICA calls the function of `distribute_datasets_from_function` once for each local
            replica; `distribute_dataset` takes PER_WORKER only.
        place_dataset_on_device: False; datasets are made in the host's memory.
        per_replica_buffer_size: steps buffered for each replica; one more may be in progress. 0 disables reading ahead
            and its thread.

    Raises:
        ValueError: for a negative buffer size, and for place_dataset_on_device=True.

    Example:
        >>> options = InputOptions(experimental_per_replica_buffer_size=2)
        >>> options.per_replica_buffer_size
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
    """Return `num_parallel_calls` or a similar argument, checked: None, AUTOTUNE or a number of at least 1.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is another number.
    """
    if value is None or value == AUTOTUNE:
        return None if value is None else AUTOTUNE
    return integer(function, argument, value, 1, "Or ms.data.AUTOTUNE, or None for the thread that reads.")
