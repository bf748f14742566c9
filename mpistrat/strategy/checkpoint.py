"""All variables and all that optimizers keep, in one HDF5 file that any layout can restore."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .extended import StrategyExtended

__all__ = ["restore", "save"]


def save(extended: StrategyExtended, path: str) -> None:
    raise NotImplementedError


def restore(extended: StrategyExtended, path: str) -> None:
    raise NotImplementedError
