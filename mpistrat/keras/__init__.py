"""Keras 3: a model as it is under a strategy, with any backend. Needs the extra `keras`."""

from __future__ import annotations

from ..errors import missing_framework

try:
    import keras as _  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework("keras", "Keras 3", error) from error

__all__: list[str] = []
