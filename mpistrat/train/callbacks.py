"""Callbacks, such as early stopping and learning rates, for a `Trainer` or a loop of your own.

Names, arguments and decisions are Keras's (https://keras.io/api/callbacks/). Logs are equal on all ranks, and so are
decisions; those by a clock or by chance follow the first rank (`Loop.agree`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from ..base.errors import explain
from ..base.log import logger
from ..base.masks import plain_array, unmasked
from .weights import assign_from_file, weights_of

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateScheduler",
    "Logs",
    "Loop",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TerminateOnNaN",
    "item_of",
    "number_of",
    "plain",
]

#: Results by name.
Logs = Mapping[str, Any]


@final
class Loop:
    """The state of a training loop that callbacks read and change.

    Attributes:
        strategy: the strategy.
        optimizer: its learning rate is read and set; None without one.
        first: the first rank that takes steps.
        tells: True on that rank, which writes and prints.
        in_step: True if all ranks take each step together, False if workers have their own batches.
        epoch: the number of the epoch, from 0.
        step: the number of steps so far, in all epochs.
        stop_training: set by a callback to stop after the epoch.
        folder: of the checkpoints, a URL of an object store as text; None without any.
        validates: False in an epoch of `Trainer.fit` that has no validation, by `validation_freq`.
        ended: False in `on_train_end` after an error, or if a restarted program resumes training.
    """

    folder: Path | str | None = None
    ended = validates = True

    def __init__(self, strategy: Any, optimizer: Any = None) -> None:
        """Create a loop.

        Args:
            strategy: the strategy.
            optimizer: one of `ms.optimizers`, or of torch.
        """
        self.strategy, self.optimizer = strategy, optimizer
        self.first = int(strategy.extended.first_worker)
        self.in_step = bool(strategy.extended.common_steps)
        self.tells = bool(strategy.rank == self.first)
        self.epoch = self.step = 0
        self.stop_training = False

    def agree(self) -> None:
        """Use the first rank's `stop_training`, learning rate and step. Collective; after an epoch's callbacks."""
        if self.strategy.size == 1:
            return
        rate = self.rate()
        mine = self.stop_training, rate, self.step
        self.stop_training, told, self.step = self.strategy.broadcast_object(mine, root=self.first)
        if told is not None and told != rate:
            self.set_rate(told)

    def rate(self) -> float | None:
        """Return the learning rate, torch's of the first group; None without one or with a schedule."""
        groups = getattr(self.optimizer, "param_groups", None)
        core = getattr(self.optimizer, "_core", None)
        rate = groups[0]["lr"] if groups else None if core is None else core.given_rate
        return None if rate is None or callable(rate) else float(rate)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate; torch's other groups keep their ratio to the first.

        Raises:
            ValueError: no optimizer, or a schedule.
        """
        before = self.rate()
        if before is None:
            expected, got = (
                "an optimizer whose learning rate is a number",
                "none" if self.optimizer is None else "a schedule",
            )
            raise ValueError(explain("Loop", "optimizer", expected=expected, got=got))
        for group in getattr(self.optimizer, "param_groups", ()):
            group["lr"] = group["lr"] * (rate / before) if before else rate
        if not hasattr(self.optimizer, "param_groups"):
            self.optimizer.learning_rate = rate


class Callback:
    """Base of callbacks. A loop calls the methods on all ranks."""

    def on_train_begin(self, loop: Loop) -> None:
        """Run before the first epoch."""

    def on_epoch_begin(self, loop: Loop) -> None:
        """Run before an epoch."""

    def on_step_end(self, loop: Loop) -> None:
        """Run after a step."""

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        """Run after an epoch, with the results of all ranks."""

    def on_train_end(self, loop: Loop) -> None:
        """Run at the end, also after an error."""

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run: numbers, text, lists and dicts, equal on all ranks."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Load a result of `state`."""


# in names of results that are better the larger they are: of Keras's metrics and those of this package
_RISING = ("acc", "auc", "precision", "recall", "f1", "fbeta", "r2_", "io_u", "iou", "similarity", "correlation")


@final
class _Best:
    """The best result so far."""

    def __init__(self, function: str, monitor: str, mode: str, min_delta: float) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(explain(function, "mode", expected="auto, min or max", got=repr(mode)))
        rises = mode == "max" or (mode == "auto" and any(word in monitor.lower() for word in _RISING))
        self._function, self._monitor, self._sign = function, monitor, 1.0 if rises else -1.0
        self._min_delta = abs(min_delta)
        self.value = -self._sign * math.inf

    def has(self, loop: Loop, logs: Logs) -> bool:
        """Return whether this epoch has the result; one without validation has none of validation.

        Raises:
            ValueError: there is no such result.
        """
        known = self._monitor in logs
        if not known and (loop.validates or not self._monitor.startswith("val_")):
            text = explain(self._function, "monitor", expected=f"one of {', '.join(logs)}", got=repr(self._monitor))
            raise ValueError(text)
        return known

    def takes(self, logs: Logs) -> bool:
        """Return whether this epoch's result is the best so far, and store it if so."""
        value = float(logs[self._monitor])
        better = self._sign * (value - self.value) > self._min_delta
        if better:
            self.value = value
        return better


@final
class _BestWeights:
    """The weights of the best epoch, in a file of the loop's folder, or in memory. All calls are collective."""

    def __init__(self) -> None:
        self._wanted, self._copies = False, list[tuple[Any, Any]]()

    def want(self, loop: Loop) -> None:
        """Take the present weights, or those of the next outer step."""
        self._wanted = True
        self.take(loop)

    def take(self, loop: Loop) -> None:
        """Take the weights, if they are wanted and equal on all nodes."""
        if not self._wanted or loop.strategy.nodes_differ:
            return
        self._wanted = False
        if loop.folder is None:
            self._copies = [(variable, variable.numpy()) for variable in weights_of(loop.strategy)]
        else:
            _save(loop, self._path(loop))

    def restore(self, loop: Loop) -> None:
        """Assign the weights."""
        if loop.folder is not None:
            assign_from_file("EarlyStopping", loop.strategy, self._path(loop))
        for variable, value in self._copies:
            variable.assign(value)

    def _path(self, loop: Loop) -> Path:
        path: Path = loop.strategy.broadcast_object(loop.folder) / "best-weights.h5"  # ranks may be in other folders
        return path


@final
class EarlyStopping(Callback):
    """A stop when a result has not improved for some epochs.

    With `restore_best_weights` training ends with the weights of the best epoch, also if it ends for another reason; optimizers
    keep their last state. In a Trainer with checkpoints these weights are in `best-weights.h5` in their folder, so that a
    resumed run has them; else each rank has a copy in memory. With `local_steps` they are those of the next outer step.

    Attributes:
        best: the best result.
        best_epoch: its epoch.
        restore_best_weights: as given.

    Example:
        >>> loop = ms.train.Loop(ms.get_strategy())
        >>> stop = ms.train.EarlyStopping("loss", patience=1)
        >>> for loop.epoch, loss in enumerate([3.0, 2.0, 2.5]):
        ...     stop.on_epoch_end(loop, {"loss": loss})
        >>> loop.stop_training
        True
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "auto",
        start_from_epoch: int = 0,
        restore_best_weights: bool = False,
    ) -> None:
        self._best = _Best("EarlyStopping", monitor, mode, min_delta)
        self._patience, self._start, self._waited = patience, start_from_epoch, 0
        self.best_epoch = 0
        self.restore_best_weights, self._weights = restore_best_weights, _BestWeights()

    @property
    def best(self) -> float:
        return self._best.value

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}

    def load(self, state: dict[str, Any]) -> None:
        self._best.value, self.best_epoch, self._waited = state["best"], state["best_epoch"], state["waited"]

    def on_train_begin(self, loop: Loop) -> None:
        if self.restore_best_weights and isinstance(loop.folder, str):
            expected, got = "checkpoints in a folder, next to which the best weights are kept", repr(loop.folder)
            remedy = "Use ModelCheckpoint(..., save_best_only=True), or a folder"
            text = explain("EarlyStopping", "restore_best_weights", expected=expected, got=got, remedy=remedy)
            raise ValueError(text)

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        if loop.epoch < self._start or not self._best.has(loop, logs):
            return
        if self._best.takes(logs):
            self.best_epoch, self._waited = loop.epoch, 0
            if self.restore_best_weights:
                self._weights.want(loop)
            return
        self._waited += 1
        if self._waited >= self._patience and loop.epoch > 0:
            loop.stop_training = True
            if loop.tells:
                logger.info(
                    "EarlyStopping: after epoch %d; %.6g of epoch %d was best", loop.epoch, self.best, self.best_epoch
                )

    def on_step_end(self, loop: Loop) -> None:
        self._weights.take(loop)

    def on_train_end(self, loop: Loop) -> None:
        if self.restore_best_weights and loop.ended and math.isfinite(self.best):
            self._weights.take(loop)
            self._weights.restore(loop)


@final
class ModelCheckpoint(Callback):
    """A save by `Strategy.save` after each epoch, or after those with the best result so far.

    To resume a run use `Checkpoints`. Arguments are Keras's. The file's `extra` has the epoch and its results. If an epoch
    ends between two outer steps (`local_steps`), the file has the weights after the next one.

    Attributes:
        best: the best result.

    Example:
        >>> import tempfile
        >>> strategy = ms.OneDeviceStrategy()
        >>> with tempfile.TemporaryDirectory() as folder, strategy.scope():
        ...     w = ms.Variable(1.0, name="w")
        ...     loop = ms.train.Loop(strategy)
        ...     file = f"{folder}/best.h5"
        ...     best = ms.train.ModelCheckpoint(file, "loss", save_best_only=True)
        ...     for loop.epoch, loss in enumerate([3.0, 2.0, 2.5]):
        ...         best.on_epoch_end(loop, {"loss": loss})
        ...     strategy.restore(f"{folder}/best.h5")
        {'epoch': 1, 'logs': {'loss': 2.0}}
        >>> strategy.close()
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
    ) -> None:
        """Set the file's name, perhaps with `{epoch}`, counted from 1, and results: "{epoch:02d}-{loss:.2f}.h5"."""
        self._path, self._begun_in, self._best_only = os.fspath(filepath), os.getcwd(), save_best_only
        self._best = _Best("ModelCheckpoint", monitor, mode, 0.0)
        self._waiting: dict[str, dict[str, Any]] = {}  # the extra of files by path, until nodes have the same weights

    @property
    def best(self) -> float:
        return self._best.value

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def load(self, state: dict[str, Any]) -> None:
        self._best.value = state["best"]

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        if not self._best_only or (self._best.has(loop, logs) and self._best.takes(logs)):
            numbers = {name: item_of(value, name) for name, value in logs.items()}
            try:
                name = self._path.format(**{**numbers, "epoch": loop.epoch + 1})
            except (LookupError, TypeError, ValueError) as error:
                expected = f"a name with {{epoch}} and these results: {', '.join(logs)}"
                got = f"{self._path!r}: {error!r}"
                raise ValueError(explain("ModelCheckpoint", "filepath", expected=expected, got=got)) from error
            self._waiting[os.path.join(self._begun_in, name)] = {"epoch": loop.epoch, "logs": plain(logs)}
        self._save(loop)

    def on_step_end(self, loop: Loop) -> None:
        self._save(loop)

    def on_train_end(self, loop: Loop) -> None:
        self._save(loop)

    def _save(self, loop: Loop) -> None:
        if self._waiting and not loop.strategy.nodes_differ:
            for path, extra in self._waiting.items():
                _save(loop, Path(loop.strategy.broadcast_object(path)), extra)  # ranks may be in other folders
            self._waiting.clear()


@final
class ReduceLROnPlateau(Callback):
    """A factor on the learning rate when a result has not improved for some epochs."""

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(explain("ReduceLROnPlateau", "factor", expected="0 < factor < 1", got=str(factor)))
        self._best = _Best("ReduceLROnPlateau", monitor, mode, min_delta)
        self._factor, self._patience, self._cooldown, self._least = factor, patience, cooldown, min_lr
        self._waited = self._cooling = 0

    def state(self) -> dict[str, Any]:
        return {"best": self._best.value, "waited": self._waited, "cooling": self._cooling}

    def load(self, state: dict[str, Any]) -> None:
        self._best.value, self._waited, self._cooling = state["best"], state["waited"], state["cooling"]

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        if not self._best.has(loop, logs):
            return
        if self._cooling:
            self._cooling -= 1
            self._waited = 0
        if self._best.takes(logs):
            self._waited = 0
        elif not self._cooling:
            self._waited += 1
            rate = loop.rate()
            if self._waited >= self._patience and (rate is None or rate > self._least):
                loop.set_rate(max((rate or 0) * self._factor, self._least))
                self._cooling, self._waited = self._cooldown, 0


@final
class LearningRateScheduler(Callback):
    """A learning rate for each epoch, by a function of the epoch, or of the epoch and the rate."""

    def __init__(self, schedule: Callable[..., float]) -> None:
        self._schedule, self._count = schedule, 2
        with contextlib.suppress(ValueError):  # a function of C without a signature
            try:
                inspect.signature(schedule).bind(0, 0.0)
            except TypeError:
                self._count = 1

    def on_epoch_begin(self, loop: Loop) -> None:
        loop.set_rate(float(self._schedule(*(loop.epoch, loop.rate() or 0.0)[: self._count])))


@final
class TerminateOnNaN(Callback):
    """A stop after an epoch with a result that is not finite."""

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        broken = [name for name, value in logs.items() if not math.isfinite(number_of(value) or 0)]
        if broken:
            loop.stop_training = True
            if loop.tells:
                logger.warning("TerminateOnNaN: epoch %d: %s is not finite", loop.epoch, ", ".join(broken))


def _save(loop: Loop, path: Path, extra: dict[str, Any] | None = None) -> None:
    """Save the strategy's state, in a new folder if there is none. Collective."""
    if loop.strategy.rank == 0:
        with contextlib.suppress(OSError):  # which `save` raises on all ranks
            path.parent.mkdir(parents=True, exist_ok=True)
    loop.strategy.save(path, extra)


def plain(logs: Logs) -> dict[str, Any]:
    """Convert results to values for JSON."""
    return {name: plain_array(item_of(value, name), "callbacks", name).tolist() for name, value in logs.items()}


def number_of(value: Any) -> float | None:
    """Return a result that is one number, also of NumPy, torch or JAX; None for any other.

    Example:
        >>> number_of(np.float32(0.5)), number_of([0.5]), number_of("0.5")
        (0.5, None, None)
    """
    found = item_of(value)
    return float(found) if isinstance(found, (int, float)) else None


def item_of(value: Any, name: str = "") -> Any:
    """Return the element of an array or tensor without dimensions, and any other value as it is.

    Raises:
        TypeError: it is masked.
    """
    unmasked(value, "callbacks", name)
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
