"""What an Estimator is told: how to run, what to train with, what to evaluate; and what its model function returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..base.errors import explain
from ..train import Callback, Metric
from .exporters import Exporter

__all__ = ["EstimatorSpec", "EvalSpec", "ModeKeys", "RunConfig", "TrainSpec"]


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
