"""TensorFlow 1's calls of a strategy and its inner parts, which have newer ones here; the log says so once."""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from ..base import context, log
from ..base.errors import explain
from ..base.types import ReduceOp

if TYPE_CHECKING:
    from ..data import Dataset, DistributedIterator, InputContext, InputReplicationMode

__all__ = ["MultiStepContext", "TensorFlow1Extended", "TensorFlow1Strategy"]


def _told(name: str, instead: str) -> None:
    log.once(logging.WARNING, f"{name} is TensorFlow 1's: write {instead}")


class TensorFlow1Strategy(ABC):
    """What a strategy of TensorFlow 1 could be asked beside."""

    _extended: Any

    def make_dataset_iterator(self: Any, dataset: Dataset) -> DistributedIterator:
        """Return an iterator over `distribute_dataset(dataset)`; deprecated. Collective."""
        _told("Strategy.make_dataset_iterator", "iter(strategy.distribute_dataset(dataset))")
        return iter(self.distribute_dataset(dataset))

    def make_input_fn_iterator(
        self: Any, input_fn: Callable[[InputContext], Any], replication_mode: InputReplicationMode | None = None
    ) -> DistributedIterator:
        """Return an iterator over `distribute_datasets_from_function(input_fn)`; deprecated. Collective.

        Args:
            input_fn: gets an InputContext; returns an iterable of batches, each for one replica.
            replication_mode: PER_WORKER, as the default, or PER_REPLICA.
        """
        from ..data import InputOptions

        _told("Strategy.make_input_fn_iterator", "iter(strategy.distribute_datasets_from_function(input_fn))")
        options = None if replication_mode is None else InputOptions(replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))

    def experimental_run(self: Any, fn: Callable[..., Any], input_iterator: DistributedIterator | None = None) -> Any:
        """Call a step once on each local replica with the next batch of an iterator; deprecated. Collective where the step is.

        Raises:
            StopIteration: the iterator has none left.
        """
        _told("Strategy.experimental_run", "strategy.run(fn, args=(batch,)) in a loop over the distributed dataset")
        with self.scope():
            args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args=args)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return the dataset of the rows of arrays, `ms.data.from_arrays`; deprecated. `session` has no effect."""
        from ..data import from_arrays

        _told("Strategy.experimental_make_numpy_dataset", "ms.data.from_arrays(arrays)")
        return from_arrays(numpy_input)


class TensorFlow1Extended(ABC):
    """What the inner parts of a strategy of TensorFlow 1 could be asked beside."""

    _strategy: Any

    experimental_require_static_shapes = False  # shapes may change from step to step

    def read_var(self: Any, v: Any) -> Any:
        """Return a copy of a variable's value, of all replicas where they differ; deprecated. Collective where reading is.

        Raises:
            ValueError: the variable was not made in this strategy's scope.
        """
        _told("StrategyExtended.read_var", "v.read_value()")
        self.require_own(v, "extended.read_var")
        return v.read_value()

    def update_non_slot(
        self: Any,
        colocate_with: str | Sequence[str],
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(*args, **kwargs)` once for each device of `non_slot_devices`; deprecated. As `update`, without a variable.

        Raises:
            ValueError: a PerReplica among the arguments, or no devices.
            ContextError: in replica context.
        """
        _told("StrategyExtended.update_non_slot", "strategy.extended.update(variable, fn, args)")
        devices = (colocate_with,) if isinstance(colocate_with, str) else tuple(colocate_with)
        if not devices or not all(isinstance(device, str) for device in devices):
            expected, got = "what non_slot_devices returns", f"{colocate_with!r:.80}"
            raise ValueError(explain("extended.update_non_slot", "colocate_with", expected=expected, got=got))
        self.require_cross("extended.update_non_slot")
        return self.call_on_copies("extended.update_non_slot", len(devices), fn, (args, kwargs), group)

    def experimental_make_numpy_dataset(self: Any, numpy_input: Any, session: Any = None) -> Dataset:
        """Return the dataset of the rows of arrays: see `Strategy.experimental_make_numpy_dataset`."""
        return self._strategy.experimental_make_numpy_dataset(numpy_input, session)

    def experimental_run_steps_on_iterator(
        self: Any,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: DistributedIterator,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call `fn(context, batch)` with some batches of an iterator, and return that context; deprecated. Collective.

        Args:
            fn: is called in cross-replica context; runs the step itself, by `call_for_each_replica`.
            iterator: of a distributed dataset.
            iterations: how many batches.
            initial_loop_values: outputs that are there before `fn` sets them.

        Raises:
            StopIteration: the iterator has fewer batches left.
        """
        _told("StrategyExtended.experimental_run_steps_on_iterator", "a loop over the distributed dataset")
        self.require_cross("extended.experimental_run_steps_on_iterator")
        steps = MultiStepContext(initial_loop_values or {})
        with self._strategy.scope():
            for _ in range(iterations):
                fn(steps, iterator.get_next())
        return steps


@final
class MultiStepContext:
    """What a function of `experimental_run_steps_on_iterator` has set.

    Attributes:
        last_step_outputs: by name, of the last step that set it.
    """

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self.last_step_outputs: dict[str, Any] = dict(outputs)

    def set_last_step_output(self, name: str, output: Any, reduce_op: ReduceOp | str | None = None) -> None:
        """Set an output; reduced over all replicas if there is a `reduce_op`, then collective. In a step there must be one.

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
