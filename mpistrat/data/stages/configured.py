"""Settings of a whole dataset, as a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chain import Source
from ..dataset import Dataset
from ..options import Options
from .stage import Stage

__all__ = ["Configured"]


class Configured(Stage):
    """The same elements, and settings that hold for the whole chain."""

    def __init__(self, parent: Dataset, options: Options) -> None:
        super().__init__(parent)
        self._options = options

    def options(self) -> Options:
        return super().options().merge(self._options)

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Source:
        return self._parent.source(epochs, positions)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self._parent.elements(epoch, start)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Configured(parents[0], self._options)

    def describe(self) -> str:
        return f"with_options({self._options})"
