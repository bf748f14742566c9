"""tf.estimator's shape on our steps: a model function, a folder, and train_and_evaluate with an evaluator of its own.

Names, arguments and defaults are TensorFlow's (https://www.tensorflow.org/api_docs/python/tf/estimator); where one is not, its
docstring says why. Beneath is `ms.train.Trainer`.
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
    "split_evaluator",
    "train_and_evaluate",
]
