"""Observers of training steps: objects that see the arguments of `strategy.run`, gradients and updated variables.

A strategy and an optimizer call each registered observer. The list is empty unless a part such as `shadow/` adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["OBSERVERS", "Observer", "Parameter"]


class Parameter(NamedTuple):
    """A parameter of the program.

    Attributes:
        name: as the program knows it.
        value: its array or tensor, which shares its memory.
    """

    name: str
    value: Any


class Observer:
    """The calls that an observer gets, on every rank in the same order. This one ignores them."""

    def run(self, strategy: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Handle the arguments of a call of `strategy.run`. Local."""

    def gradients(
        self, strategy: Any, optimizer: Any, replicas: Sequence[Sequence[tuple[Any, Any]]], aggregate: bool
    ) -> None:
        """Handle the pairs of gradient and variable of each local replica, before they are summed if `aggregate`. Local."""

    def updated(self, strategy: Any, optimizer: Any, replicas: Sequence[Sequence[tuple[Any, Any]]]) -> None:
        """Handle the same pairs after the update. Collective: an error that it raises, it raises on every rank."""


OBSERVERS: list[Observer] = []
