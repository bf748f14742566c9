"""Keras 3: a model as it is under a strategy, with any backend. Needs the extra `keras`.

`distribute` makes a model's `fit`, `evaluate` and `predict` go over all ranks; loop, callbacks, metrics and files are
Keras's own.
"""

from __future__ import annotations

from ..errors import missing_framework

try:
    import keras as _  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework("keras", "Keras 3", error) from error

from .distribute import distribute

__all__ = ["distribute"]
