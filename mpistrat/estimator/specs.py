"""What an Estimator is told: how to run, what to train with, what to evaluate; and what its model function returns.

Exporters: which of the evaluated models are written as files for other programs, and which of them stay.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ..base.errors import explain
from ..train import Callback, Metric

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
]


@final
class ModeKeys:
    """What a model function is called for: TRAIN, EVAL or PREDICT, with TensorFlow's texts."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@final
@dataclass(frozen=True)
class EstimatorSpec:
    """What a model function returns: the steps of a model, and what they update.

    TensorFlow's has tensors of a graph; here are the functions that compute them, as `ms.train.Trainer` takes them.

    Attributes:
        mode: the one that the model function was called with.
        train_step: called with features and labels of this replica's rows, in replica context.
        test_step: the same, for evaluation; it updates metrics.
        predict_step: returns a row for each row of its batch.
        optimizer: whose learning rate hooks may change.
        metrics: of `ms.train`, updated by the steps.
    """

    mode: str
    train_step: Callable[..., Any] | None = None
    test_step: Callable[..., Any] | None = None
    predict_step: Callable[..., Any] | None = None
    optimizer: Any = None
    metrics: Sequence[Metric] = ()


@final
@dataclass(frozen=True)
class RunConfig:
    """How and where an Estimator runs.

    Attributes:
        model_dir: the folder of checkpoints, results and exports, on a file system that all ranks see.
        save_checkpoints_steps: after so many steps there is a file, and an evaluation where it is due. TensorFlow's default
            counts seconds, which differ between ranks.
        keep_checkpoint_max: how many files stay; 0 for all.
        train_distribute: makes the strategy for the communicator of the ranks that train: `lambda comm:
            ms.MirroredStrategy(comm=comm)`; or a strategy, in a job without an evaluator. Default:
            `ms.strategy_from_environment`.
        eval_distribute: the same for the evaluator; default OneDeviceStrategy.

    Raises:
        ValueError: a number is out of range.
    """

    model_dir: str | os.PathLike[str] | None = None
    save_checkpoints_steps: int = 1000
    keep_checkpoint_max: int = 5
    train_distribute: Any = None
    eval_distribute: Any = None

    def __post_init__(self) -> None:
        _at_least("RunConfig", "save_checkpoints_steps", self.save_checkpoints_steps, 1)
        _at_least("RunConfig", "keep_checkpoint_max", self.keep_checkpoint_max, 0)


@final
@dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains with.

    Attributes:
        input_fn: returns a dataset of global batches; it may take mode, params, config and input_context.
        max_steps: with which training ends, counted over all runs; None until the data or a hook end it.
        hooks: callbacks of the loop; their `on_epoch_end` is called before each checkpoint with the training results.

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
    """What `train_and_evaluate` evaluates, and when.

    Attributes:
        input_fn: as of `TrainSpec`.
        steps: how many batches; None for all.
        name: of this evaluation, where there are several; its results are in the folder `eval_NAME`.
        hooks: callbacks whose `on_epoch_end` gets the results of each evaluation: `EarlyStopping` here ends training,
            but not from an evaluator of its own.
        exporters: called after each evaluation.
        start_delay_secs: an evaluator of its own waits so long at first.
        throttle_secs: least time between two evaluations; the last checkpoint is evaluated in any case.

    Raises:
        ValueError: a number is out of range.
    """

    input_fn: Callable[..., Any]
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
    """Decides after an evaluation whether the model is exported.

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
        """Export the model as it is now, or not. Collective over the ranks that evaluate.

        Args:
            estimator: the Estimator; call its `export`.
            export_path: the folder.
            checkpoint_path: the file that was evaluated; in place it may be written still.
            eval_result: the results, with "global_step"; the same on all ranks.
            is_the_final_export: whether training has ended.

        Returns:
            The file; None where none was written.
        """


@final
class FinalExporter(Exporter):
    """Exports once, when training has ended."""

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
    """Exports after each evaluation, and keeps the newest files."""

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
    """Exports after an evaluation that is better than all before, in earlier runs, too."""

    def __init__(
        self,
        name: str = "best_exporter",
        compare_fn: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] | None = None,
        exports_to_keep: int = 5,
    ) -> None:
        """Compare.

        Args:
            name: of its folder.
            compare_fn: whether the second results, of now, are better than the first, the best ones; default: a smaller "loss".
            exports_to_keep: how many of the best stay; 0 for all.
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
