"""A training step of one optimizer on one set of variables, as a strategy takes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .gradients import Pairs

__all__ = ["Step"]


class Step(ABC):
    """Made at the first step of an optimizer on some variables, used again at every other.

    Attributes:
        strategy: whose variables they are; opaque.
    """

    strategy: Any

    @abstractmethod
    def describe(self) -> None:
        """Say again what the optimizer is, after its numbers have changed."""

    @abstractmethod
    def place(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Take the gradients that the local replicas handed over.

        Args:
            replicas: each local replica's gradients and variables.
            key: tells one set of variables from another.
        """

    @abstractmethod
    def run(self, aggregate: bool) -> None:
        """Take the step; in cross-replica context. Collective over the replicas in sync.

        Args:
            aggregate: whether gradients are summed over the replicas; else they are equal on all already.
        """
