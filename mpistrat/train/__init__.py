"""Metrics over all replicas, callbacks, checkpoints and a training loop.

Each works alone, in a loop of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy

if TYPE_CHECKING:
    from ..launcher.survive import Job, survive
    from .callbacks import (
        Callback,
        EarlyStopping,
        LearningRateScheduler,
        Loop,
        ModelCheckpoint,
        ReduceLROnPlateau,
        TerminateOnNaN,
    )
    from .checkpoints import Checkpoints, checkpoints_iterator
    from .loggers import Logger, MLflow, Prometheus, WandB
    from .logs import CSVLogger, JSONLogger, Progress, TensorBoard, Timeline
    from .metric import Mean, MeanOf, Metric, Sum, results
    from .metrics import (
        AUC,
        Accuracy,
        BinaryAccuracy,
        BinaryCrossentropy,
        CategoricalAccuracy,
        CategoricalCrossentropy,
        CategoricalHinge,
        ConcordanceCorrelation,
        CosineSimilarity,
        F1Score,
        FalseNegatives,
        FalsePositives,
        FBetaScore,
        Hinge,
        IoU,
        KLDivergence,
        LogCoshError,
        MeanAbsoluteError,
        MeanAbsolutePercentageError,
        MeanIoU,
        MeanMetricWrapper,
        MeanSquaredError,
        MeanSquaredLogarithmicError,
        PearsonCorrelation,
        Poisson,
        Precision,
        R2Score,
        Recall,
        RootMeanSquaredError,
        SparseCategoricalAccuracy,
        SparseCategoricalCrossentropy,
        SparseTopKCategoricalAccuracy,
        SquaredHinge,
        TopKCategoricalAccuracy,
        TrueNegatives,
        TruePositives,
        get_metric,
    )
    from .monitor import Monitor
    from .preemption import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
    from .trainer import Trainer
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CSVLogger",
    "Callback",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "Checkpoints",
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "EarlyStopping",
    "F1Score",
    "FBetaScore",
    "FalseNegatives",
    "FalsePositives",
    "Hinge",
    "IoU",
    "JSONLogger",
    "Job",
    "KLDivergence",
    "LearningRateScheduler",
    "LogCoshError",
    "Logger",
    "Loop",
    "MLflow",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanIoU",
    "MeanMetricWrapper",
    "MeanOf",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Metric",
    "ModelCheckpoint",
    "Monitor",
    "PearsonCorrelation",
    "Poisson",
    "Precision",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "Progress",
    "Prometheus",
    "R2Score",
    "Recall",
    "ReduceLROnPlateau",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "SquaredHinge",
    "Sum",
    "TensorBoard",
    "TerminateOnNaN",
    "TerminationConfig",
    "Timeline",
    "TopKCategoricalAccuracy",
    "Trainer",
    "TrueNegatives",
    "TruePositives",
    "WandB",
    "checkpoints_iterator",
    "get_metric",
    "results",
    "survive",
]
