"""Trainer: epochs of steps, evaluation and callbacks, around any step function. The loop is short enough to copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np

from ..errors import ContextError, explain
from ..optimizers import Optimizer
from .callbacks import Callback, Loop
from .metric import Metric, results

__all__ = ["Trainer"]


@final
class Trainer:
    """A training loop under any strategy: NumPy's steps, PyTorch's and JAX's alike; Keras has its own.

    A step is a function that `strategy.run` calls with the parts of a batch. It updates weights and metrics, and returns nothing
    that is needed here. Each decision, as when to stop, is the same on all ranks.

    Attributes:
        loop: what callbacks see.
        history: the results of each epoch, by name.
    """

    def __init__(
        self,
        strategy: Any,
        train_step: Callable[..., Any],
        test_step: Callable[..., Any] | None = None,
        predict_step: Callable[..., Any] | None = None,
        *,
        optimizer: Optimizer | None = None,
        metrics: Sequence[Metric] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Take the pieces of a loop.

        Args:
            strategy: the strategy.
            train_step: called with the parts of a batch, in replica context.
            test_step: the same, for `evaluate`; it updates metrics.
            predict_step: returns a row, or an array of a row each, for each row of its batch.
            optimizer: whose learning rate callbacks may change.
            metrics: of `ms.train`, made in the strategy's scope, updated by the steps; reset before each pass.
            callbacks: called in this order.

        Example:
            >>> with ms.OneDeviceStrategy() as strategy:
            ...     with strategy.scope():
            ...         w = ms.Variable(0.0, name="w", aggregation=ms.VariableAggregation.SUM)
            ...         seen = ms.train.Sum("seen")
            ...     def step(x):
            ...         w.assign_add(x.sum())
            ...         seen.update_state(x)
            ...     data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(4.0)).batch(2))
            ...     ms.train.Trainer(strategy, step, metrics=[seen]).fit(data, epochs=2)
            {'seen': [6.0, 6.0]}
        """
        self.strategy = strategy
        self._steps = {"fit": train_step, "evaluate": test_step, "predict": predict_step}
        self._metrics, self._callbacks = list(metrics), list(callbacks)
        self.loop = Loop(strategy, optimizer)
        self.history: dict[str, list[Any]] = {}

    def fit(
        self,
        data: Iterable[Any],
        epochs: int = 1,
        *,
        steps_per_epoch: int | None = None,
        validation_data: Iterable[Any] | None = None,
        validation_freq: int = 1,
        initial_epoch: int = 0,
    ) -> dict[str, list[Any]]:
        """Train for some epochs, or until a callback stops. Collective.

        Args:
            data: batches of this rank, as `strategy.distribute_dataset` returns them; iterated once an epoch.
            epochs: the number of the last epoch, counted from 1.
            steps_per_epoch: of data without an end, which is then iterated once in all; default all of it.
            validation_data: evaluated after each validation_freq-th epoch; its results are named `val_loss` and so on.
            validation_freq: see there.
            initial_epoch: the first epoch, counted from 0.

        Returns:
            `history`: the results of each epoch by name, NaN where there was no validation.

        Raises:
            ValueError: there is no test_step for validation_data; data end before steps_per_epoch.
        """
        loop = self.loop
        loop.stop_training, endless = False, iter(data) if steps_per_epoch else None
        self._call("on_train_begin")
        try:
            for loop.epoch in range(initial_epoch, epochs):
                self._call("on_epoch_begin")
                self._reset()
                batches = data if endless is None else self._some(endless, steps_per_epoch)
                for batch in batches:
                    self._run("fit", batch)
                    loop.step += 1
                    self._call("on_step_end")
                    if loop.strategy.should_stop():
                        break
                loop.stop_training = loop.strategy.should_stop()
                logs = self._results()
                if validation_data is not None and (loop.epoch + 1) % validation_freq == 0:
                    logs |= {f"val_{name}": value for name, value in self.evaluate(validation_data).items()}
                self._note(logs)
                self._call("on_epoch_end", logs)
                loop.agree()
                if loop.stop_training:
                    break
        finally:
            self._call("on_train_end")
        return self.history

    def evaluate(self, data: Iterable[Any], steps: int | None = None) -> dict[str, Any]:
        """Return the metrics over data: those of all rows, on every rank. Collective."""
        self._reset()
        for batch in itertools.islice(data, steps):
            self._run("evaluate", batch)
        return self._results()

    def predict(self, data: Iterable[Any], steps: int | None = None) -> np.ndarray:
        """Return predict_step's rows for all rows of the data, in their order, on every rank. Collective.

        Raises:
            ContextError: under parameter servers, whose workers have batches of their own.
            ValueError: there is no predict_step, or no batch.
        """
        if self.strategy.extended.placement.store is not None:
            expected, got = "a strategy whose ranks have the same batches", "one of parameter servers"
            raise ContextError(explain("Trainer.predict", "strategy", expected=expected, got=got))
        rows = [self.strategy.gather(self._run("predict", batch), axis=0) for batch in itertools.islice(data, steps)]
        if not rows:
            raise ValueError(explain("Trainer.predict", "data", expected="a batch", got="none"))
        return np.concatenate(rows)

    def _run(self, function: str, batch: Any) -> Any:
        step = self._steps[function]
        if step is None:
            argument = {"evaluate": "test_step", "predict": "predict_step"}[function]
            raise ValueError(explain(f"Trainer.{function}", argument, expected="a function", got="None"))
        return self.strategy.run(step, args=batch if isinstance(batch, tuple) else (batch,))

    def _some(self, batches: Iterator[Any], count: int | None) -> Iterator[Any]:
        drawn = 0
        for batch in itertools.islice(batches, count):
            yield batch
            drawn += 1
        if drawn != count:
            expected, got = f"steps_per_epoch={count} batches in each epoch", f"{drawn} in epoch {self.loop.epoch}"
            raise ValueError(explain("Trainer.fit", "data", expected=expected, got=got, remedy="Repeat the dataset"))

    def _call(self, moment: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, moment)(self.loop, *args)

    def _reset(self) -> None:
        for metric in self._metrics:
            metric.reset_state()

    def _results(self) -> dict[str, Any]:
        return results(self._metrics)

    def _note(self, logs: dict[str, Any]) -> None:
        length = len(next(iter(self.history.values()), []))
        for name in {**self.history, **logs}:
            self.history.setdefault(name, [float("nan")] * length).append(logs.get(name, float("nan")))
