"""TensorFlow's other names of a strategy's methods, as functions. `ms.tf` exports them; as methods they warn.

Some are other names of methods (`experimental_distribute_dataset`), others are calls of TensorFlow 1. They are not members of
`Strategy` and `StrategyExtended`, which show one name for each function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, final

from ..base import context
from ..base.errors import explain
from ..base.types import ReduceOp

if TYPE_CHECKING:
    from ..data import Dataset, DistributedIterator, InputContext, InputReplicationMode

__all__ = [
    "EXTENDED",
    "STRATEGY",
    "MultiStepContext",
    "OtherName",
    "OtherNames",
    "configure",
    "experimental_distribute_dataset",
    "experimental_distribute_datasets_from_function",
    "experimental_distribute_values_from_function",
    "experimental_local_results",
    "experimental_make_numpy_dataset",
    "experimental_run",
    "experimental_run_steps_on_iterator",
    "experimental_run_v2",
    "group",
    "make_dataset_iterator",
    "make_input_fn_iterator",
    "map_and_batch",
    "read_var",
    "reduce_per_replica",
    "unwrap",
    "update_config_proto",
    "update_non_slot",
]


class OtherName(NamedTuple):
    """The function behind an old name of a method.

    Attributes:
        function: gets the object, and the arguments of the call.
        instead: the recommended name; empty if the call raises.
    """

    function: Callable[..., Any]
    instead: str


class OtherNames:
    """A mix-in with methods under TensorFlow's other names. Each call is a DeprecationWarning."""

    _other_names: ClassVar[Mapping[str, OtherName]]

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Callable[..., Any]:
            other = self._other_names.get(name)
            if other is None:
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)
            if other.instead:
                warnings.warn(
                    f"{name} is TensorFlow's other name: write {other.instead}, or ms.tf.{name}",
                    DeprecationWarning,
                    stacklevel=2,
                )
            return partial(other.function, self)


def make_dataset_iterator(strategy: Any, dataset: Dataset) -> DistributedIterator:
    """Return an iterator over `strategy.distribute_dataset(dataset)`. Collective."""
    return iter(strategy.distribute_dataset(dataset))


def make_input_fn_iterator(
    strategy: Any, input_fn: Callable[[InputContext], Any], replication_mode: InputReplicationMode | None = None
) -> DistributedIterator:
    """Return an iterator over `strategy.distribute_datasets_from_function(input_fn)`. Collective.

    Args:
        strategy: the strategy.
        input_fn: gets an InputContext; returns an iterable of batches, each for one replica.
        replication_mode: PER_WORKER, as the default, or PER_REPLICA.
    """
    from ..data import InputOptions

    options = None if replication_mode is None else InputOptions(replication_mode=replication_mode)
    return iter(strategy.distribute_datasets_from_function(input_fn, options))


def experimental_run(strategy: Any, fn: Callable[..., Any], input_iterator: DistributedIterator | None = None) -> Any:
    """Call a step once on each local replica with the next batch of an iterator. Collective if the step is.

    Raises:
        StopIteration: the iterator has no batch left.
    """
    with strategy.scope():
        args = () if input_iterator is None else (input_iterator.get_next(),)
    return strategy.run(fn, args=args)


def experimental_make_numpy_dataset(strategy: Any, numpy_input: Any, session: Any = None) -> Dataset:
    """Return the dataset of the rows of arrays, `ms.data.from_arrays`. `strategy` and `session` have no effect."""
    from ..data import from_arrays

    return from_arrays(numpy_input)


def read_var(extended: Any, v: Any) -> Any:
    """Return a copy of a variable's value, of all replicas if they differ. Collective if reading is.

    Raises:
        ValueError: the variable was not made in this strategy's scope.
    """
    extended.require_own(v, "extended.read_var")
    return v.read_value()


def update_non_slot(
    extended: Any,
    colocate_with: str | Sequence[str],
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    group: bool = True,
) -> Any:
    """Call `fn(*args, **kwargs)` once for each device of `extended.non_slot_devices`: `extended.update` without a variable.

    Raises:
        ValueError: a PerReplica among the arguments, or no devices.
        ContextError: in replica context.
    """
    devices = (colocate_with,) if isinstance(colocate_with, str) else tuple(colocate_with)
    if not devices or not all(isinstance(device, str) for device in devices):
        expected, got = "devices as non_slot_devices returns them", f"{colocate_with!r:.80}"
        raise ValueError(explain("extended.update_non_slot", "colocate_with", expected=expected, got=got))
    extended.require_cross("extended.update_non_slot")
    return extended.call_on_copies("extended.update_non_slot", len(devices), fn, (args, kwargs), group)


def experimental_run_steps_on_iterator(
    extended: Any,
    fn: Callable[[MultiStepContext, Any], Any],
    iterator: DistributedIterator,
    iterations: int = 1,
    initial_loop_values: Mapping[str, Any] | None = None,
) -> MultiStepContext:
    """Call `fn(context, batch)` with some batches of an iterator, and return that context. Collective.

    Args:
        extended: `strategy.extended`.
        fn: is called in cross-replica context; runs the step itself, by `call_for_each_replica`.
        iterator: of a distributed dataset.
        iterations: the number of batches.
        initial_loop_values: outputs that exist before `fn` sets them.

    Raises:
        StopIteration: the iterator has fewer batches left.
    """
    extended.require_cross("extended.experimental_run_steps_on_iterator")
    steps = MultiStepContext(initial_loop_values or {})
    with extended.frame.strategy.scope():
        for _ in range(iterations):
            fn(steps, iterator.get_next())
    return steps


@final
class MultiStepContext:
    """The outputs that a function of `experimental_run_steps_on_iterator` sets.

    Attributes:
        last_step_outputs: by name, of the last step that set it.
    """

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self.last_step_outputs: dict[str, Any] = dict(outputs)

    def set_last_step_output(self, name: str, output: Any, reduce_op: ReduceOp | str | None = None) -> None:
        """Set an output; with a `reduce_op` reduced over all replicas, which is collective. In a step it is required.

        Raises:
            ValueError: there is none in a step.
        """

        def set_output(strategy: Any, value: Any) -> None:
            self.last_step_outputs[name] = value if reduce_op is None else strategy.reduce(reduce_op, value, axis=None)

        if context.in_cross_replica_context():
            set_output(context.get_strategy(), output)
        elif reduce_op is None:
            expected = "a ReduceOp in a step, whose replicas have different values"
            raise ValueError(
                explain("MultiStepContext.set_last_step_output", "reduce_op", expected=expected, got="None")
            )
        else:
            context.current().replica.merge_call(set_output, args=(output,))


def experimental_distribute_dataset(strategy: Any, dataset: Any, options: Any = None) -> Any:
    """Return `strategy.distribute_dataset(dataset, options)`. Collective."""
    return strategy.distribute_dataset(dataset, options)


def experimental_distribute_datasets_from_function(
    strategy: Any, dataset_fn: Callable[..., Any], options: Any = None
) -> Any:
    """Return `strategy.distribute_datasets_from_function(dataset_fn, options)`. Collective."""
    return strategy.distribute_datasets_from_function(dataset_fn, options)


def experimental_distribute_values_from_function(strategy: Any, value_fn: Callable[..., Any]) -> Any:
    """Return `strategy.distribute_values_from_function(value_fn)`."""
    return strategy.distribute_values_from_function(value_fn)


def experimental_local_results(strategy: Any, value: Any) -> tuple[Any, ...]:
    """Return `strategy.local_results(value)`."""
    results: tuple[Any, ...] = strategy.local_results(value)
    return results


def experimental_run_v2(
    strategy: Any,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Any = None,
) -> Any:
    """Return `strategy.run(fn, args, kwargs, options)`. Collective if the step is."""
    return strategy.run(fn, args, kwargs, options)


unwrap = experimental_local_results


def group(strategy: Any, value: Any, name: str | None = None) -> None:
    """Do nothing: TensorFlow's operation that runs all of `value` first; here each call has run when it returns."""


def configure(
    strategy: Any,
    session_config: Any = None,
    cluster_spec: Any = None,
    task_type: str | None = None,
    task_id: int | None = None,
) -> NoReturn:
    """Raise NotImplementedError: a strategy is configured when it is created."""
    expected, got = "a strategy that is created with its cluster", "a change of it"
    remedy = "Pass cluster_resolver=ms.cluster_resolver.SimpleClusterResolver(cluster_spec, task_type, task_id)"
    raise NotImplementedError(explain("Strategy.configure", "", expected=expected, got=got, remedy=remedy))


def update_config_proto(strategy: Any, config_proto: Any) -> NoReturn:
    """Raise NotImplementedError: there is no session, which a ConfigProto configures."""
    expected, got = "no session", f"a {type(config_proto).__name__} for one"
    remedy = "Pass devices= and communication_options=ms.CommunicationOptions(...) to the strategy"
    text = explain("Strategy.update_config_proto", "config_proto", expected=expected, got=got, remedy=remedy)
    raise NotImplementedError(text)


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply`: `dataset.map(map_func, num_parallel_calls).batch(batch_size, drop_remainder)`.

    TensorFlow fuses them; here `batch` reads the rows of a mapped dataset together anyway. `num_parallel_batches` has no effect.

    Example:
        >>> rows = ms.data.from_arrays(np.arange(4.0))
        >>> [batch.tolist() for batch in rows.apply(ms.tf.map_and_batch(np.square, 2))]
        [[0.0, 1.0], [4.0, 9.0]]
    """
    return lambda dataset: dataset.map(map_func, num_parallel_calls).batch(batch_size, drop_remainder)


def reduce_per_replica(values: Any, strategy: Any, reduction: str = "auto") -> Any:
    """Return one value of those of all replicas, as Keras's training loop does, on every rank. Collective.

    Args:
        values: a result of `strategy.run`.
        strategy: the strategy.
        reduction: "sum", "mean" or its synonym "auto": element by element; "concat": along the first axis; "first": replica 0's.

    Raises:
        ValueError: another reduction.

    Example:
        >>> strategy = ms.get_strategy()
        >>> ms.tf.reduce_per_replica(strategy.run(lambda: np.ones(2)), strategy, "sum")
        array([1., 1.])

    Source: keras/src/backend/tensorflow/trainer.py.
    """
    if reduction in ("sum", "mean", "auto"):
        return strategy.reduce("SUM" if reduction == "sum" else "MEAN", values)
    if reduction == "concat":
        return strategy.gather(values, axis=0)
    if reduction == "first":
        return strategy.extended.collectives.broadcast(values, root=0)
    expected = "auto, first, sum, mean or concat"
    raise ValueError(explain("ms.tf.reduce_per_replica", "reduction", expected=expected, got=repr(reduction)))


STRATEGY: Mapping[str, OtherName] = {
    "experimental_distribute_dataset": OtherName(experimental_distribute_dataset, "distribute_dataset"),
    "experimental_distribute_datasets_from_function": OtherName(
        experimental_distribute_datasets_from_function, "distribute_datasets_from_function"
    ),
    "experimental_distribute_values_from_function": OtherName(
        experimental_distribute_values_from_function, "distribute_values_from_function"
    ),
    "experimental_local_results": OtherName(experimental_local_results, "local_results"),
    "experimental_run_v2": OtherName(experimental_run_v2, "run"),
    "unwrap": OtherName(unwrap, "local_results"),
    "make_dataset_iterator": OtherName(make_dataset_iterator, "iter(strategy.distribute_dataset(dataset))"),
    "make_input_fn_iterator": OtherName(
        make_input_fn_iterator, "iter(strategy.distribute_datasets_from_function(input_fn))"
    ),
    "experimental_run": OtherName(
        experimental_run, "strategy.run(fn, args=(batch,)) in a loop over the distributed dataset"
    ),
    "experimental_make_numpy_dataset": OtherName(experimental_make_numpy_dataset, "ms.data.from_arrays(arrays)"),
    "group": OtherName(group, "nothing, as calls happen at once"),
    "configure": OtherName(configure, ""),
    "update_config_proto": OtherName(update_config_proto, ""),
}

EXTENDED: Mapping[str, OtherName] = {
    "read_var": OtherName(read_var, "v.read_value()"),
    "update_non_slot": OtherName(update_non_slot, "strategy.extended.update(variable, fn, args)"),
    "experimental_make_numpy_dataset": STRATEGY["experimental_make_numpy_dataset"],
    "experimental_run_steps_on_iterator": OtherName(
        experimental_run_steps_on_iterator, "a loop over the distributed dataset"
    ),
}
