"""Optimizers: gradients summed over all replicas and applied in one pass, each rank to its slice of the weights.

Arguments, defaults and formulae are those of Keras 3.
"""

from __future__ import annotations

from . import schedules
from .adagrad import Adagrad
from .adam import Adam
from .adamw import AdamW
from .optimizer import Optimizer
from .rmsprop import RMSProp
from .sgd import SGD, Momentum

RMSprop = RMSProp  # Keras's spelling

__all__ = ["Adagrad", "Adam", "AdamW", "Momentum", "Optimizer", "RMSProp", "RMSprop", "SGD", "schedules"]
