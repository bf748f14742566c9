"""Keras 3: your model under a strategy, with any backend. Needs the extra `keras`.

`distribute` makes a model's `fit`, `evaluate` and `predict` run over all ranks; loop, callbacks, metrics and files are Keras's
own.
"""

from __future__ import annotations

from ..base.errors import check_framework, missing_framework

try:
    import keras as _
except ModuleNotFoundError as error:
    raise missing_framework("keras", "Keras 3", error) from error
else:
    check_framework("mpistrat.keras", "keras", _.__version__, "3.12", "older versions fail in fit")

from .distribute import distribute

__all__ = ["distribute"]
