"""Settings of an Estimator: how to run, train and evaluate; and the result of its model function.

Exporters: they write some of the evaluated models as files for other programs, and remove old ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from ..base.errors import explain
from ..train import Callback, EarlyStopping

__all__ = [
    "BestExporter",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "ModeKeys",
    "RunConfig",
    "TrainSpec",
    "WarmStartSettings",
    "refuse_best_weights",
]


@final
class ModeKeys:
    """The purpose of a call of a model function: TRAIN, EVAL or PREDICT, with TensorFlow's texts."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@final
@dataclass(frozen=True)
class EstimatorSpec:
    """The result of a model function: the model's steps, and the objects that they update.

    It has functions, as `ms.train.Trainer` takes them, instead of TensorFlow's tensors of a graph.

    Attributes:
        mode: the mode of the model function's call.
        train_step: called with features and labels of this replica's rows, in replica context.
        test_step: the same, for evaluation; it updates metrics.
        predict_step: returns a row for each row of its batch.
        optimizer: its learning rate may be changed by hooks.
        metrics: updated by the steps, as `ms.train.Trainer` takes them.
    """

    mode: str
    train_step: Callable[..., Any] | None = None
    test_step: Callable[..., Any] | None = None
    predict_step: Callable[..., Any] | None = None
    optimizer: Any = None
    metrics: Sequence[Any] = ()

    def has_step(self, mode: str) -> bool:
        """Return whether it has the step of a mode. Local."""
        steps = {ModeKeys.TRAIN: self.train_step, ModeKeys.EVAL: self.test_step, ModeKeys.PREDICT: self.predict_step}
        return steps[mode] is not None


@final
@dataclass(frozen=True)
class RunConfig:
    """Settings of an Estimator's runs.

    Attributes:
        model_dir: the folder of checkpoints, results and exports, on a file system that all ranks see.
        save_checkpoints_steps: steps between files, each with an evaluation if due; default 1000.
        save_checkpoints_secs: instead, the seconds between files, by the first rank's clock. They become a number of steps by
            the time of the steps before: first 1, then at most ten times as many as before.
        keep_checkpoint_max: the number of files to keep; 0 for all.
        train_distribute: creates the strategy for the communicator of the training ranks: `lambda comm:
            ms.MirroredStrategy(comm=comm)`; or a strategy, in a job without an evaluator. Default:
            `ms.strategy_from_environment`.
        eval_distribute: the same for the evaluator; default OneDeviceStrategy.

    Raises:
        ValueError: a number is out of range.
    """

    model_dir: str | os.PathLike[str] | None = None
    save_checkpoints_steps: int | None = None
    keep_checkpoint_max: int = 5
    train_distribute: Any = None
    eval_distribute: Any = None
    save_checkpoints_secs: float | None = None

    def __post_init__(self) -> None:
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is not None and seconds is not None:
            expected, got = "save_checkpoints_steps or save_checkpoints_secs", "both"
            raise ValueError(explain("RunConfig", "save_checkpoints_secs", expected=expected, got=got))
        if seconds is None:
            steps = 1000 if steps is None else steps
            _at_least("RunConfig", "save_checkpoints_steps", steps, 1)
            object.__setattr__(self, "save_checkpoints_steps", steps)
        elif not 0 < seconds < math.inf:
            got = str(seconds)
            raise ValueError(explain("RunConfig", "save_checkpoints_secs", expected="seconds > 0", got=got))
        _at_least("RunConfig", "keep_checkpoint_max", self.keep_checkpoint_max, 0)


@final
@dataclass(frozen=True)
class WarmStartSettings:
    """The variables with which a new model starts (TF: tf.estimator.WarmStartSettings).

    Attributes:
        ckpt_to_initialize_from: a file of `Strategy.save`; or a folder, whose newest checkpoint is used.
        vars_to_warm_start: a regular expression: the trainable variables whose names begin with a match; or several, for
            variables of any kind; None for those of var_name_to_prev_var_name only. Optimizers start anew.
        var_name_to_prev_var_name: the names in the file of variables with other names here.

    Example:
        >>> settings = ms.estimator.WarmStartSettings("runs/1", ["encoder/"])
    """

    ckpt_to_initialize_from: str | os.PathLike[str]
    vars_to_warm_start: str | Sequence[str] | None = ".*"
    var_name_to_prev_var_name: Mapping[str, str] = field(default_factory=dict)

    def names(self, trainable: Mapping[str, bool]) -> dict[str, str]:
        """Return the names in the file, by the names of the variables that are warm-started. Local.

        Args:
            trainable: by the name of each variable.

        Raises:
            ValueError: a regular expression without a variable, or a variable that does not exist.
        """
        patterns, before = self.vars_to_warm_start, dict(self.var_name_to_prev_var_name)
        known = [name for name, trains in trainable.items() if trains or not isinstance(patterns, str)]
        chosen: dict[str, str] = {}
        for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
            found = [name for name in known if re.match(pattern, name)]
            if not found:
                raise ValueError(_no_variable("vars_to_warm_start", pattern, known))
            chosen |= {name: before.get(name, name) for name in found}
        for name, there in before.items():
            if name not in trainable:
                raise ValueError(_no_variable("var_name_to_prev_var_name", name, trainable))
            chosen[name] = there
        return chosen


def refuse_best_weights(argument: str, hooks: Sequence[Callback]) -> None:
    """Raise ValueError for an EarlyStopping that restores weights: an Estimator's files have those of their step."""
    if any(isinstance(hook, EarlyStopping) and hook.restore_best_weights for hook in hooks):
        expected, got = "restore_best_weights=False", "True"
        remedy = "Files have the weights of their step: a BestExporter keeps the best"
        raise ValueError(explain(argument, "hooks: EarlyStopping", expected=expected, got=got, remedy=remedy))


def _no_variable(argument: str, name: str, known: Iterable[str]) -> str:
    expected = f"a name of {', '.join(known) or 'no variable'}"
    return explain("WarmStartSettings", argument, expected=expected, got=repr(name))


@final
@dataclass(frozen=True)
class TrainSpec:
    """Settings of training for `train_and_evaluate`.

    Attributes:
        input_fn: returns a dataset of global batches; it may take mode, params, config and input_context.
        max_steps: the last step, counted over all runs; None to train until the data or a hook end it.
        hooks: callbacks; their `on_epoch_end` is called before each checkpoint with the training results.

    Raises:
        ValueError: max_steps is not positive.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        if self.max_steps is not None:
            _at_least("TrainSpec", "max_steps", self.max_steps, 1)


@final
@dataclass(frozen=True)
class EvalSpec:
    """Settings of evaluations for `train_and_evaluate`.

    Attributes:
        input_fn: as of `TrainSpec`; None on ranks that only train, next to an evaluator.
        steps: the number of batches; None for all.
        name: of this evaluation, if there are several; its results are in the folder `eval_NAME`.
        hooks: callbacks whose `on_epoch_end` gets the results of each evaluation: `EarlyStopping` here ends training,
            but not from a separate evaluator.
        exporters: called after each evaluation.
        start_delay_secs: the time before a separate evaluator starts.
        throttle_secs: least time between two evaluations; the last checkpoint is evaluated in any case.

    Raises:
        ValueError: a number is out of range.
    """

    input_fn: Callable[..., Any] | None = None
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Callback] = ()
    exporters: Sequence[Exporter] = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        if self.steps is not None:
            _at_least("EvalSpec", "steps", self.steps, 1)
        for name in ("start_delay_secs", "throttle_secs"):
            _at_least("EvalSpec", name, getattr(self, name), 0)


def _at_least(function: str, argument: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(explain(function, argument, expected=f"{least} or more", got=str(value)))


_BEST = "best.json"


class Exporter(ABC):
    """Base of exporters, which may export the model after an evaluation.

    Attributes:
        name: of its folder, `export/NAME` in the model's.
    """

    def __init__(self, name: str) -> None:
        if not name or "/" in name:
            raise ValueError(explain(type(self).__name__, "name", expected="the name of a folder", got=repr(name)))
        self.name = name

    @abstractmethod
    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        """Export the current model, or skip it. Collective over the ranks that evaluate.

        Args:
            estimator: the Estimator; call its `export`.
            export_path: the folder.
            checkpoint_path: the evaluated file, perhaps not complete yet if training ranks evaluate.
            eval_result: the results, with "global_step"; equal on all ranks.
            is_the_final_export: True if training has ended.

        Returns:
            The file; None if none was written.
        """


@final
class FinalExporter(Exporter):
    """An exporter at the end of training."""

    def __init__(self, name: str = "final") -> None:
        super().__init__(name)

    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        return _write(estimator, export_path, eval_result, 0) if is_the_final_export else None


@final
class LatestExporter(Exporter):
    """An exporter after each evaluation, which keeps the newest files."""

    def __init__(self, name: str = "latest", exports_to_keep: int = 5) -> None:
        super().__init__(name)
        self._keep = exports_to_keep

    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        return _write(estimator, export_path, eval_result, self._keep)


@final
class BestExporter(Exporter):
    """An exporter after an evaluation better than all before, also in earlier runs."""

    def __init__(
        self,
        name: str = "best_exporter",
        compare_fn: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] | None = None,
        exports_to_keep: int = 5,
    ) -> None:
        """Create an exporter.

        Args:
            name: of its folder.
            compare_fn: True if the second results, the new ones, are better than the first; default: a smaller "loss".
            exports_to_keep: the number of best files to keep; 0 for all.
        """
        super().__init__(name)
        self._better, self._keep = compare_fn or _smaller_loss, exports_to_keep

    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        strategy, best = estimator.strategy, Path(export_path) / _BEST
        text = best.read_text() if strategy.rank == 0 and best.exists() else ""
        text = strategy.broadcast_object(text)
        if text and not self._better(json.loads(text), eval_result):
            return None
        path = _write(estimator, export_path, eval_result, self._keep)
        if strategy.rank == 0:
            best.write_text(json.dumps({name: _number(value) for name, value in eval_result.items()}))
        return path


def _smaller_loss(best: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if "loss" not in now:
        text = explain(
            "BestExporter", "compare_fn", expected="a function, where no result is called loss", got=", ".join(now)
        )
        raise ValueError(text)
    return bool(now["loss"] < best["loss"])


def _number(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _write(estimator: Any, folder: str | os.PathLike[str], result: Mapping[str, Any], keep: int) -> Path:
    path = Path(folder) / f"step-{result['global_step']:010}.safetensors"
    if estimator.strategy.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    estimator.export(path)
    if keep and estimator.strategy.rank == 0:
        for old in sorted(path.parent.glob("step-*.safetensors"))[:-keep]:
            with contextlib.suppress(OSError):
                old.unlink()
    return path
