"""What a training loop needs around its steps: metrics of all replicas, callbacks, checkpoints, and the loop itself.

Each piece works alone, in a loop of your own.
"""

from __future__ import annotations

from .callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    JSONLogger,
    LearningRateScheduler,
    Loop,
    ModelCheckpoint,
    Progress,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
)
from .checkpoints import Checkpoints, checkpoints_iterator
from .metric import Mean, MeanOf, Metric, Sum, results
from .metrics import (
    AUC,
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    MeanAbsoluteError,
    MeanSquaredError,
    Precision,
    Recall,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from .trainer import Trainer

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CSVLogger",
    "Callback",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "Checkpoints",
    "checkpoints_iterator",
    "EarlyStopping",
    "JSONLogger",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "Loop",
    "Mean",
    "MeanAbsoluteError",
    "MeanOf",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Progress",
    "Recall",
    "ReduceLROnPlateau",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TensorBoard",
    "TerminateOnNaN",
    "TopKCategoricalAccuracy",
    "Trainer",
    "results",
]
