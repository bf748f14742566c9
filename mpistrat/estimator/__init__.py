"""tf.estimator's interface: a model function, a folder, and train_and_evaluate, perhaps with an evaluator.

Names, arguments and defaults are TensorFlow's (https://www.tensorflow.org/api_docs/python/tf/estimator); docstrings say why
others differ. `ms.train.Trainer` runs the steps.
"""

from __future__ import annotations

from .estimator import Estimator, split_evaluator
from .specs import (
    BestExporter,
    EstimatorSpec,
    EvalSpec,
    Exporter,
    FinalExporter,
    LatestExporter,
    ModeKeys,
    RunConfig,
    TrainSpec,
    WarmStartSettings,
)
from .train_and_evaluate import train_and_evaluate

__all__ = [
    "BestExporter",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "ModeKeys",
    "RunConfig",
    "TrainSpec",
    "WarmStartSettings",
    "split_evaluator",
    "train_and_evaluate",
]
