"""Trainer: epochs of steps, evaluation and callbacks, for any step function. The loop is short enough to copy.

Readers: the ranks that read its batches. All read the same ones, or each worker of parameter servers its own.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from ..base import log, nest
from ..base.errors import ContextError, explain
from ..base.masks import plain_array
from .callbacks import Callback, Loop
from .checkpoints import Checkpoints, gather_states, hand_back
from .foreign_metrics import ForeignMetric, load_notes, notes_of
from .metric import known, results

__all__ = [
    "Readers",
    "Trainer",
    "readers_of",
]


_NOT_IN_TURN = (
    "Trainer: there are other workers than when this was saved, and those had stopped at different steps: of epoch %d some "
    "batches are taken twice, and others are left out"
)


class Readers(ABC):
    """The readers of a Trainer's batches, distributed round-robin.

    Attributes:
        alone: True if each reader has its own batches and steps independently.
        first: the first reader that takes batches, in the list of `gather`.
    """

    alone: bool
    first = 0

    @abstractmethod
    def draw(self, batches: Any, wanted: int | None) -> Generator[Any, None, int]:
        """Yield batches of an epoch, `wanted` or all the rest, and return their number."""

    @abstractmethod
    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of every reader. Collective."""

    @abstractmethod
    def dealt(self) -> list[int]:
        """Return the readers that get batches round-robin, by index in the list of `gather`."""

    def places(self, notes: dict[str, Any], endless: bool) -> tuple[int, int, Any]:
        """Return the position in an epoch when a checkpoint was saved.

        Args:
            notes: the checkpoint's.
            endless: True if the data continue past the end of an epoch.

        Returns:
            The number of batches of the epoch that the first reader has taken, the number that this one has, and this one's
            position: a state of its iterator, or a number of batches to skip.
        """
        readers = notes["readers"]
        number, index, turn = self._standing()
        # The batches of earlier epochs, per reader.
        before = notes["step"] - readers[self.first if notes["alone"] else 0]["taken"] if endless else 0
        if notes["alone"] == self.alone and len(readers) == number:
            mine = readers[index]
            return readers[self.first]["taken"], mine["taken"], mine["position"] or before + mine["taken"]
        # The readers are others than then: distribute the remaining batches among these.
        dealt = [readers[one]["taken"] for one in notes.get("dealt") or range(len(readers))]
        total, past = sum(dealt), before * len(dealt)
        if dealt != [_dealt_to(one, len(dealt), total) for one in range(len(dealt))]:
            log.once(logging.WARNING, _NOT_IN_TURN % notes["epoch"])
        count = len(self.dealt())
        first = _dealt_to(0, count, past + total) - _dealt_to(0, count, past)
        if turn is None:
            return first, 0, 0
        skipped = _dealt_to(turn, count, past + total)
        return first, skipped - _dealt_to(turn, count, past), skipped

    @abstractmethod
    def _standing(self) -> tuple[int, int, int | None]:
        """Return the length of the list of `gather`, and this rank's index in it and in `dealt`, None without batches."""


@final
class CommonReaders(Readers):
    """All ranks as one reader: they step together on the same batches."""

    alone = False

    def draw(self, batches: Any, wanted: int | None) -> Generator[Any, None, int]:
        """Yield batches of an epoch, `wanted` or all the rest, and return their number."""
        return _draw(batches, wanted)

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of the one reader. Local."""
        return [mine]

    def dealt(self) -> list[int]:
        """Return the index of the one reader."""
        return [0]

    def _standing(self) -> tuple[int, int, int]:
        return 1, 0, 0


@final
class WorkerReaders(Readers):
    """The ranks of parameter servers: each worker has its own batches, a server has none."""

    alone = True

    def __init__(self, loop: Loop, checkpoints: Checkpoints | None, notes: Callable[[], dict[str, Any]]) -> None:
        self._loop, self._checkpoints, self._notes = loop, checkpoints, notes
        self._strategy, self.first = loop.strategy, loop.first

    def draw(self, batches: Any, wanted: int | None) -> Generator[Any, None, int]:
        """Yield batches of an epoch; when a checkpoint is due, all ranks leave the pass to save it. Collective."""
        loop, strategy, checkpoints = self._loop, self._strategy, self._checkpoints
        drawn, waited = 0, 0.0
        while True:
            step, found = loop.step, 0
            due = None if checkpoints is None else checkpoints.steps_until_due(step)
            left = None if wanted is None else wanted - drawn
            arrived = time.monotonic()
            if strategy.is_server:
                strategy.serve()
            else:
                strategy.resume_pass()  # of data that are longer
                try:
                    found = yield from _draw(batches, min((n for n in (left, due) if n is not None), default=None))
                finally:
                    arrived = time.monotonic()
                    strategy.suspend_pass()
            drawn += found
            if checkpoints is None or due is None:
                break
            more = found == due and drawn != wanted
            if strategy.should_stop():
                return drawn if wanted is None else wanted  # there are more data
            met = strategy.all_gather_object((more, waited))
            if not any(more for more, _ in met):
                break
            waited = 0.0 if strategy.is_server else time.monotonic() - arrived
            loop.step = step + due
            checkpoints.step(loop.step, self._notes, sum(seconds for _, seconds in met) / len(strategy.workers))
        return wanted if strategy.is_server and wanted is not None else drawn

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of every rank. Collective."""
        states: list[dict[str, Any]] = self._strategy.all_gather_object(mine)
        return states

    def dealt(self) -> list[int]:
        """Return the first rank of each group of workers that step together."""
        return list(self._strategy.workers[:: self._strategy.workers_in_sync])

    def _standing(self) -> tuple[int, int, int | None]:
        strategy = self._strategy
        turn = None if strategy.is_server else (strategy.worker_index or 0) // strategy.workers_in_sync
        return strategy.size, strategy.rank, turn


def readers_of(loop: Loop, checkpoints: Checkpoints | None, notes: Callable[[], dict[str, Any]]) -> Readers:
    """Return the readers of a loop's batches.

    Args:
        loop: the loop.
        checkpoints: the loop's, if any.
        notes: returns the notes of a checkpoint. Collective.
    """
    return CommonReaders() if loop.in_step else WorkerReaders(loop, checkpoints, notes)


def _draw(batches: Any, wanted: int | None) -> Generator[Any, None, int]:
    drawn = 0
    for batch in itertools.islice(batches, wanted):
        yield batch
        drawn += 1
    return drawn


def _dealt_to(index: int, count: int, batches: int) -> int:
    """Return how many of the first batches one of `count` readers gets round-robin."""
    return max(0, -(-(batches - index) // count))


@final
class Trainer:
    """A training loop under any strategy, for steps in NumPy, PyTorch or JAX; Keras has its own.

    `strategy.run` calls the step function with the elements of a batch. It updates weights and metrics. Each decision, as
    when to stop, is the same on all ranks.

    Attributes:
        loop: the state that callbacks see.
        history: the results of each epoch, by name.
    """

    def __init__(
        self,
        strategy: Any,
        train_step: Callable[..., Any] | None,
        test_step: Callable[..., Any] | None = None,
        predict_step: Callable[..., Any] | None = None,
        *,
        optimizer: Any = None,
        metrics: Sequence[Any] = (),
        callbacks: Sequence[Callback] = (),
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Create a trainer.

        Args:
            strategy: the strategy.
            train_step: called with the elements of a batch, in replica context; None to only evaluate or predict.
            test_step: the same, for `evaluate`; it updates metrics.
            predict_step: returns an array, or a nest such as a dict, with a row for each row of its batch.
            optimizer: for its learning rate: one of `ms.optimizers`, or of torch.
            metrics: of `ms.train`, created in the scope, updated by the steps; reset before each pass. Or of torchmetrics
                or Keras, one object per rank: see `ms.train.results`.
            callbacks: called in this order.
            checkpoints: where `fit` saves and resumes. It saves as they say or, without every_steps and every_seconds, after
                each epoch; and after `should_stop`. Under parameter servers all ranks meet to save after n steps of each
                worker.

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
        self._metrics, self._callbacks = [known("Trainer", metric) for metric in metrics], list(callbacks)
        self._foreign = [metric for metric in self._metrics if isinstance(metric, ForeignMetric)]
        self.loop, self._checkpoints = Loop(strategy, optimizer), checkpoints
        self.loop.folder = None if checkpoints is None else checkpoints.folder
        self.history: dict[str, list[Any]] = {}
        self._batches: Any = iter(())  # of the epoch
        self._taken, self._endless = 0, False  # batches of it so far; True if it runs on into the next one
        self._count: int | None = None  # of its batches, if steps_per_epoch tells
        self._readers = readers_of(self.loop, checkpoints, self._notes)

    def fit(
        self,
        data: Iterable[Any],
        epochs: int = 1,
        *,
        steps_per_epoch: int | Callable[[], int] | None = None,
        validation_data: Iterable[Any] | None = None,
        validation_freq: int = 1,
        initial_epoch: int = 0,
        max_steps: int | None = None,
    ) -> dict[str, list[Any]]:
        """Train for some epochs, or until a callback or `should_stop` ends training. Collective.

        With checkpoints it resumes from the newest, also within an epoch: results, decisions and weights are those of an
        uninterrupted run. If `strategy.should_stop()` is true afterwards, end the program. With `local_steps` it saves and
        stops after outer steps, and ends with one.

        Args:
            data: batches of this rank, as `strategy.distribute_dataset` returns them; iterated once an epoch.
            epochs: the number of the last epoch, counted from 1.
            steps_per_epoch: of endless data, which are iterated only once; default all. Or a function that returns them before
                each epoch, equal on all ranks.
            validation_data: evaluated every validation_freq epochs; results are named `val_loss` and so on.
            validation_freq: see there.
            initial_epoch: the first epoch, counted from 0, if no checkpoint sets another.
            max_steps: with steps_per_epoch: the last step, counted over all epochs and runs, also within an epoch; under
                parameter servers, each worker's.

        Returns:
            `history`, the results of each epoch by name, NaN where there was no validation.

        Raises:
            ValueError: validation_data without test_step; data end before steps_per_epoch; max_steps without it.
        """
        if max_steps is not None and not steps_per_epoch:
            got = "None, and max_steps"
            raise ValueError(explain("Trainer.fit", "steps_per_epoch", expected="a number of steps", got=got))
        loop, strategy = self.loop, self.strategy
        loop.stop_training, loop.ended, self._taken, self._endless = False, False, 0, bool(steps_per_epoch)
        notes = None if self._checkpoints is None else self._checkpoints.restore_latest()
        first, taken, position = (initial_epoch, 0, None) if notes is None else self._go_on(notes)
        begun = loop.step if notes is None else notes["step"] - self._taken  # the step at which the epoch began
        reached = max_steps is not None and loop.step >= max_steps
        last = first if loop.stop_training or reached else epochs  # a callback had stopped the run
        if self._endless:
            self._batches = iter(data)
        elif first and hasattr(data, "set_epoch"):
            data.set_epoch(first)
        loop.epoch, count = first, None
        self._call("on_train_begin")
        try:
            for loop.epoch in range(first, last):
                self._call("on_epoch_begin")
                if not self._endless:
                    self._batches = iter(data)
                inside = notes["readers"] if notes is not None and loop.epoch == first else []
                if not any(reader["taken"] for reader in inside):
                    self._reset()
                if inside:
                    self._find(position)
                self._taken, taken = taken, 0
                resumed = notes.get("count") if notes is not None and inside else None
                count = resumed or steps_per_epoch() if callable(steps_per_epoch) else steps_per_epoch
                self._count = count
                if count and max_steps is not None:
                    count, reached = min(count, max_steps - begun), begun + count >= max_steps
                self._take_steps(count)
                if strategy.should_stop() and not strategy.nodes_differ:
                    self._save()
                    break
                loop.step = begun + count if count else loop.step  # also on ranks without batches
                loop.validates = validation_data is None or (loop.epoch + 1) % validation_freq == 0
                self._end_epoch(validation_data if loop.validates else None)
                self._taken, begun = 0, loop.step
                over = loop.stop_training or reached or loop.epoch + 1 == last
                if over:
                    strategy.outer_step()
                self._save_epoch(over)
                if over:
                    break
            loop.ended = not strategy.should_stop()
        finally:
            self._close()
            self._call("on_train_end")
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return self.history

    def _take_steps(self, count: int | None) -> None:
        """Take the remaining steps of an epoch, or those until `should_stop`."""
        loop, strategy, batches = self.loop, self.strategy, self._epoch(count)
        for batch in batches:
            self._run("fit", batch)
            self._taken += 1
            loop.step += 1
            self._call("on_step_end")
            if self._checkpoints is not None and not self._readers.alone:
                self._checkpoints.step(loop.step, self._notes)
            if strategy.should_stop() and not strategy.nodes_differ:
                batches.close()
                self._close()
                break

    def _end_epoch(self, validation_data: Iterable[Any] | None) -> None:
        """Record an epoch's results and those of validation, and call callbacks."""
        logs = self._results()
        if validation_data is not None:
            logs |= {f"val_{name}": value for name, value in self.evaluate(validation_data).items()}
        self._note(logs)
        self._call("on_epoch_end", logs)
        self.loop.agree()

    def _close(self) -> None:
        """Stop reading. A worker with its own batches leaves the pass."""
        if hasattr(self._batches, "close"):
            self._batches.close()

    # checkpoints

    def _save(self, next_epoch: bool = False) -> None:
        if self._checkpoints is not None and self.strategy.nodes_differ:
            self._checkpoints.postpone()
        elif self._checkpoints is not None:
            step = self.strategy.broadcast_object(self.loop.step, root=self.loop.first)  # readers may be at other steps
            self._checkpoints.save(step, self._notes(next_epoch))

    def _save_epoch(self, over: bool) -> None:
        """Save after the last epoch, and after each one if `checkpoints` has no other times."""
        if self._checkpoints is not None and (over or not self._checkpoints.periodic):
            self._save(next_epoch=True)
        elif self._checkpoints is not None and self._readers.alone:
            self._checkpoints.step(self.loop.step, partial(self._notes, next_epoch=True))

    def _notes(self, next_epoch: bool = False) -> dict[str, Any]:
        """Return the loop's state for a resumed run, without variables and optimizers. Collective."""
        loop = self.loop
        inside = (self._taken or self._endless) and hasattr(self._batches, "state")
        state = self._batches.state() if inside else None
        mine = {"taken": self._taken, "position": state}
        return {
            "epoch": loop.epoch + next_epoch,
            "count": None if next_epoch else self._count,
            "alone": self._readers.alone,
            "dealt": self._readers.dealt(),
            "readers": self._readers.gather(mine),
            "history": {name: plain_array(values, "Trainer", name).tolist() for name, values in self.history.items()},
            "random": gather_states(self.strategy),
            "rate": loop.rate(),
            "stopped": loop.stop_training,
            "callbacks": [callback.state() for callback in self._callbacks],
            "metrics": notes_of(self.strategy, self._foreign) if self._foreign and not next_epoch else [],
        }

    def _go_on(self, notes: dict[str, Any]) -> tuple[int, int, Any]:
        """Restore the loop from notes, and `_taken` as the first reader's.

        Returns:
            The epoch, this rank's batches taken of it, and the position for `_find`.
        """
        loop = self.loop
        loop.step, self.history, loop.stop_training = notes["step"], notes["history"], notes["stopped"]
        if notes["rate"] not in (None, loop.rate()):
            loop.set_rate(notes["rate"])
        for callback, state in zip(self._callbacks, notes["callbacks"], strict=False):
            callback.load(state)
        hand_back(self.strategy, notes.get("random", ()))
        load_notes(self._foreign, notes.get("metrics", []), loop.tells)
        self._taken, taken, position = self._readers.places(notes, self._endless)
        return notes["epoch"], taken, position

    def _find(self, position: Any) -> None:
        """Set the iterator to a position: its own state, or a number of batches to skip."""
        if hasattr(self._batches, "restore"):
            known = isinstance(position, dict)
            self._batches.restore(position if known else {**self._batches.state(), "next": position})
        else:
            for _ in itertools.islice(self._batches, position):
                pass

    def evaluate(self, data: Iterable[Any], steps: int | None = None) -> dict[str, Any]:
        """Return the metrics over all rows of data, on every rank. Collective."""
        self._reset()
        for batch in itertools.islice(data, steps):
            self._run("evaluate", batch)
        return self._results()

    def predict(self, data: Iterable[Any], steps: int | None = None) -> Any:
        """Return predict_step's rows for all rows of the data, in their order, on every rank. Collective.

        They are an array, or a nest as predict_step returns.

        Raises:
            ContextError: under parameter servers.
            ValueError: there is no predict_step, or no batch.
        """
        if self._readers.alone:
            expected, got = "a strategy whose ranks have the same batches", "one whose workers have their own"
            raise ContextError(explain("Trainer.predict", "strategy", expected=expected, got=got))
        rows = [self.strategy.gather(self._run("predict", batch), axis=0) for batch in itertools.islice(data, steps)]
        if not rows:
            raise ValueError(explain("Trainer.predict", "data", expected="at least one batch", got="0"))

        def joined(*parts: Any) -> np.ndarray:
            return np.concatenate([plain_array(part, "Trainer.predict", "predict_step") for part in parts])

        return nest.map_structure(joined, *rows)

    def _run(self, function: str, batch: Any) -> Any:
        step = self._steps[function]
        if step is None:
            argument = {"fit": "train_step", "evaluate": "test_step", "predict": "predict_step"}[function]
            raise ValueError(explain(f"Trainer.{function}", argument, expected="a function", got="None"))
        return self.strategy.run(step, args=batch if isinstance(batch, tuple) else (batch,))

    def _epoch(self, count: int | None) -> Generator[Any, None, None]:
        """Yield the remaining batches of an epoch."""
        wanted = None if count is None else count - self._taken
        drawn = yield from self._readers.draw(self._batches, wanted)
        if wanted is not None and drawn < wanted:
            expected, got = f"steps_per_epoch={count} batches in each epoch", f"{drawn} in epoch {self.loop.epoch}"
            raise ValueError(explain("Trainer.fit", "data", expected=expected, got=got, remedy="Repeat the dataset"))

    def _call(self, moment: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, moment)(self.loop, *args)

    def _reset(self) -> None:
        for metric in self._metrics:
            metric.reset_state()

    def _results(self) -> dict[str, Any]:
        return results(self._metrics, self.strategy)

    def _note(self, logs: dict[str, Any]) -> None:
        length = len(next(iter(self.history.values()), []))
        for name in {**self.history, **logs}:
            self.history.setdefault(name, [float("nan")] * length).append(logs.get(name, float("nan")))
