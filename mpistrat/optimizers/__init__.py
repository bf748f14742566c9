"""Optimizers: gradients are summed over all replicas and applied in one pass; each rank updates its slice of the weights.

Arguments, defaults and formulae are those of Keras 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy

if TYPE_CHECKING:
    from . import schedules
    from .loss_scale import LossScaleOptimizer
    from .numpy_rules import Adadelta, Adafactor, Adamax, Ftrl, Lamb, Lion, Nadam
    from .optimizer import Optimizer
    from .rules import SGD, Adagrad, Adam, AdamW, Momentum, RMSProp
    from .rules import RMSProp as RMSprop  # Keras's spelling
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "LossScaleOptimizer",
    "Momentum",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "RMSprop",
    "SGD",
    "schedules",
]
