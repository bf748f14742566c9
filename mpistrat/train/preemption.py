"""PreemptionCheckpointHandler: save and exit when the job is about to end, as in TensorFlow."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, final

from ..base.environment import RESTART_EXIT_CODE
from ..base.errors import ContextError, explain
from ..base.log import logger
from ..base.types import Quality
from ..strategy.preemption import ask_to_stop, catch_stop_signals, stop_reason
from .checkpoints import Checkpoints

__all__ = ["PreemptionCheckpointHandler", "PreemptionWatcher", "TerminationConfig"]

_POLL_SECONDS = 1.0  # between two calls of termination_watcher_fn
_STEPS_LEFT = 6  # the last file is due this many steps before the end of the grace period, as in TensorFlow


@final
class TerminationConfig:
    """The signs of a job's end, and the reaction of a `PreemptionCheckpointHandler`.

    Args:
        termination_watcher_fn: called every second in a thread; True asks this rank to stop, as a signal. It must not block.
            Signals and the time limit count in any case.
        exit_fn: called on every rank after the last file is complete. Default: `sys.exit(ms.RESTART_EXIT_CODE)`. If it
            returns, the program continues, and nothing more is saved.
        grace_period: seconds from the request to the end. If more than 0, a file is saved at once, training continues, and a
            second one is saved shortly before the end. Default: 0, one file and the end.
        save_fn: called instead of `Checkpoints.save`, collectively, with the arguments of `save_checkpoint_if_preempted`.

    Raises:
        ValueError: `grace_period` is not a number >= 0, or a function cannot be called.

    Example:
        >>> ms.train.TerminationConfig(grace_period=3600.0).grace_period
        3600.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/TerminationConfig.
    """

    def __init__(
        self,
        termination_watcher_fn: Callable[[], bool] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
    ) -> None:
        functions: dict[str, object] = {
            "termination_watcher_fn": termination_watcher_fn,
            "exit_fn": exit_fn,
            "save_fn": save_fn,
        }
        for argument, function in functions.items():
            if function is not None and not callable(function):
                got = f"a {type(function).__name__}"
                raise ValueError(explain("TerminationConfig", argument, expected="a function", got=got))
        if grace_period is not None and not grace_period >= 0:
            raise ValueError(explain("TerminationConfig", "grace_period", expected="seconds >= 0", got=grace_period))
        self.termination_watcher_fn, self.exit_fn = termination_watcher_fn, exit_fn
        self.grace_period, self.save_fn = grace_period or 0.0, save_fn


@final
class PreemptionCheckpointHandler:
    """A handler that saves and ends the program, at one step of all ranks, when a rank is asked to stop. Collective.

    Create it after variables and optimizers: it restores the newest file. Call each step with `run`, or call
    `save_checkpoint_if_preempted` after each. `Strategy.should_stop` decides: signals, time limits, or a `TerminationConfig`.
    `ms.train.Trainer` and `Checkpoints.batches` do the same without this class.

    Args:
        checkpoints: replaces TensorFlow's resolver, checkpoint and folder.
        termination_config: the signs of the end, and the reaction.

    Attributes:
        notes: the restored file's notes, with "step"; None without a file.

    Raises:
        TypeError: `checkpoints` is something else.
        ContextError: under parameter servers.
        OSError, ValueError: as `Checkpoints.restore_latest`.

    Example:
        >>> import tempfile
        >>> strategy = ms.OneDeviceStrategy()
        >>> with tempfile.TemporaryDirectory() as folder, strategy:
        ...     with strategy.scope():
        ...         done = ms.Variable(0, name="done")
        ...     checkpoints = ms.train.Checkpoints(strategy, folder)
        ...     handler = ms.train.PreemptionCheckpointHandler(checkpoints)
        ...     while handler.total_run_calls < 3:
        ...         _ = handler.run(done.assign_add, 1)
        ...     int(done.numpy())
        3

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler.
    """

    def __init__(self, checkpoints: Checkpoints, termination_config: TerminationConfig | None = None) -> None:
        given: object = checkpoints
        if not isinstance(given, Checkpoints):
            expected, remedy = (
                "ms.train.Checkpoints",
                "It replaces TensorFlow's resolver, checkpoint and folder",
            )
            got = f"a {type(given).__name__}"
            raise TypeError(
                explain("PreemptionCheckpointHandler", "checkpoints", expected=expected, got=got, remedy=remedy)
            )
        self._checkpoints, self._strategy = checkpoints, checkpoints.strategy
        if lacking := self._strategy.extended.placement.lacks(Quality.COMMON_STEPS):
            expected, got = "a strategy whose ranks step together", f"one of {lacking}"
            raise ContextError(explain("PreemptionCheckpointHandler", "strategy", expected=expected, got=got))
        self._config = termination_config or TerminationConfig()
        catch_stop_signals()
        self.notes = checkpoints.restore_latest()
        self._calls = 0 if self.notes is None else int(self.notes["step"])
        self._checks, self._began = 0, time.monotonic()
        self._end: float | None = None  # of the grace period, once it has started
        self._over, self._save_seconds = False, 0.0
        self._error: Exception | None = None  # of termination_watcher_fn
        if self._config.termination_watcher_fn is not None:
            threading.Thread(target=self._watch, args=(self._config.termination_watcher_fn,), daemon=True).start()

    @property
    def total_run_calls(self) -> int:
        """The number of calls, including those before the restored file: the step of the next file."""
        return self._calls

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save and exit if the job is about to end; else call a step, and return its result. Collective.

        Raises:
            OSError: on every rank, when the file cannot be written.
            SystemExit: on every rank, at the end.
        """
        self._check()
        result = distributed_train_function(*args, **kwargs)
        self._calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and exit if the job is about to end, after a step that `run` did not call. Collective.

        Args:
            args, kwargs: of `save_fn`; without one `notes`, as for `Checkpoints.save`.

        Raises:
            OSError: on every rank, when the file cannot be written.
            SystemExit: on every rank, at the end.
        """
        self._calls += 1
        self._check(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Do nothing: as in TensorFlow without TPUs, `run` itself saves and exits."""
        yield

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Save, and exit, if the job is about to end."""
        if self._over:
            return
        if self._error is not None:
            raise self._error
        self._checks += 1
        if self._end is None:
            if not self._strategy.should_stop():
                return
            self._end = time.monotonic() + self._config.grace_period
            last = self._config.grace_period <= 0
        else:
            last = self._grace_is_over(self._end)
            if not last:
                return
        self._over = last
        self._save(*args, **kwargs)
        if last:
            self._end_program()

    def _grace_is_over(self, end: float) -> bool:
        """Return whether some rank only has time for a few steps and a save. Collective."""
        now = time.monotonic()
        left = _STEPS_LEFT * (now - self._began) / self._checks + self._save_seconds
        group = self._strategy.extended.process_group
        with group.collective("PreemptionCheckpointHandler"):
            return bool(group.agree(now >= end - left, "max"))

    def _save(self, *args: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        self._strategy.outer_step()
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._checkpoints.save(self._calls, *args, **kwargs)
        self._checkpoints.wait()
        self._save_seconds = time.monotonic() - began
        if self._strategy.rank == 0:
            after = "then the program ends" if self._over else f"it ends in {self._config.grace_period:g} s at most"
            logger.info("PreemptionCheckpointHandler: saved after step %d; %s", self._calls, after)

    def _end_program(self) -> None:
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            sys.exit(RESTART_EXIT_CODE)

    def _watch(self, asked: Callable[[], bool]) -> None:
        """Call the program's function until it returns True. In a thread of its own."""
        try:
            while not asked():
                time.sleep(_POLL_SECONDS)
                if self._over or self._strategy.extended.closed:
                    return
        except Exception as error:  # raised at the next step, in the program's own thread
            self._error = error
        else:
            ask_to_stop("termination_watcher_fn")


@final
class PreemptionWatcher:
    """A rank's view of stop requests, for a program that decides itself. Local.

    It catches the stop signals: see `ms.catch_stop_signals`. Ranks may differ; `Strategy.should_stop` is the same on all.

    Example:
        >>> with ms.OneDeviceStrategy() as strategy:
        ...     strategy.should_stop(), ms.train.PreemptionWatcher().preemption_message
        (False, None)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionWatcher.
    """

    def __init__(self) -> None:
        catch_stop_signals()

    @property
    def preemption_message(self) -> str | None:
        """The reason to stop on this rank, as "signal SIGTERM"; None without one."""
        return stop_reason() or None

    def block_until_worker_exit(self) -> None:
        """Return at once, as in TensorFlow without TPUs: the ranks of a job end together."""
