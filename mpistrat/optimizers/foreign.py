"""Rules of other libraries as optimizers, on blocks or on whole tensors, and a replica's share of a gradient."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..base import log
from ..variables import Variable
from . import Optimizer
from .rule import Block
from .whole_state import StateArray, require_whole

__all__ = ["ForeignRule", "WholeRule", "write_share"]


class WholeRule(ABC):
    """A rule that needs whole tensors. Every rank runs it after the sum; its state is in variables, so in files.

    Attributes:
        title: the optimizer, for an error.
        reason: why the rule does not run on blocks.
    """

    title: str
    reason: str

    @abstractmethod
    def begin(self, variables: Sequence[Variable]) -> None:
        """Create the variables of the state. Collective.

        Args:
            variables: those of the parameters, in the optimizer's order.
        """

    @abstractmethod
    def update(self, gradients: Mapping[str, Any], weights: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """Return new weights by name of variable; all arrays are whole. `store` writes the state."""

    @abstractmethod
    def new_state(self) -> Iterable[tuple[StateArray, np.ndarray]]:
        """Return the arrays of the state with their values after the last update."""

    def store(self) -> None:
        """Store this rank's part of the state after `update` has run on all ranks of the node."""
        # A new value may share memory with an old one, so all are copied first.
        for array, parts in [(array, array.parts_of(value)) for array, value in self.new_state()]:
            array.write(parts)


class ForeignRule(Optimizer):
    """A rule of another library as an optimizer: on blocks, else on whole tensors."""

    _function: ClassVar[str]  # the function that distributes it, for errors
    _remedy: ClassVar[str]
    _whole: WholeRule | None = None

    def serve(self, variables: Sequence[Variable]) -> None:
        """Start to update the variables of the parameters, in the optimizer's order. Collective.

        Raises:
            TypeError: the step of a rule on whole tensors fails.
            ValueError: a rule on whole tensors, and variables that are not whole on each node.
        """
        if self._whole is not None:
            require_whole(self._function, variables, self._whole.title, self._remedy)
            self._whole.begin(variables)
            text = "the optimizer runs whole on every rank, after the sum of gradients"
            log.once(logging.INFO, f"{self._function}: {text}: {self._whole.reason}")

    @property
    def _passes(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self._whole is None else ("whole",)

    @property
    def _on_wholes(self) -> bool:
        return self._whole is not None

    def update(self, *_: Any) -> None:
        """Raise NotImplementedError: steps call `update_block`."""
        raise NotImplementedError(f"{type(self).__name__}.update")

    def update_block(self, block: Block) -> None:
        """Update a block by the library; for a rule on whole tensors the gradient is the result of `_update_whole`."""
        if self._whole is None:
            self._update_by_library(block)
        else:
            block.weights[...] = block.gradient

    @abstractmethod
    def _update_by_library(self, block: Block) -> None:
        """Update the weights and slots of a block in place; the gradient may be overwritten."""

    def _update_whole(self, gradients: dict[str, Any], weights: dict[str, Any]) -> Mapping[str, Any]:
        assert self._whole is not None
        return self._whole.update(gradients, weights, self.iterations + 1)

    def _store_whole(self) -> None:
        assert self._whole is not None
        self._whole.store()


def write_share(gradient: Any, share: float, out: Any) -> None:
    """Write a gradient times a replica's share of the batch; zeros for a share of 0, because the mean over no rows is NaN."""
    if share:
        np.multiply(gradient, share, out=out)
    else:
        out[...] = 0
