"""What a training loop needs around its steps: metrics of all replicas, callbacks, checkpoints, and the loop itself.

Each piece works alone, in a loop of your own.
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
    from .logs import CSVLogger, JSONLogger, Progress, TensorBoard, Timeline
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
    "Checkpoints",
    "checkpoints_iterator",
    "EarlyStopping",
    "JSONLogger",
    "Job",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "Loop",
    "Mean",
    "MeanAbsoluteError",
    "MeanOf",
    "MeanSquaredError",
    "Metric",
    "Monitor",
    "Precision",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
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
    "TerminationConfig",
    "Timeline",
    "TopKCategoricalAccuracy",
    "Trainer",
    "results",
    "survive",
]
