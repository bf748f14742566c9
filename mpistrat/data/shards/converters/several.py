"""Several inputs of one kind as one: their rows one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np

from ..columns import Columns
from .converter import Converter, bad_input

__all__ = ["Several"]


@final
class Several(Converter):
    """The rows of several inputs, whose attributes must be equal; the writer compares their fields."""

    def __init__(self, paths: Sequence[Path], inputs: Sequence[Converter]) -> None:
        self._inputs = inputs
        self._starts = np.cumsum([0, *(each.rows for each in inputs)])
        self.rows = int(self._starts[-1])
        self.attributes = inputs[0].attributes
        for path, each in zip(paths, inputs, strict=True):
            if each.attributes != self.attributes:
                remedy = "Write each into a set of its own."
                raise bad_input(path, f"the attributes of {paths[0]}, {self.attributes}", each.attributes, remedy)
        self.notes = [f"{path}: {note}" for path, each in zip(paths, inputs, strict=True) for note in each.notes]

    @property
    def presumed(self) -> bool:
        return any(each.presumed for each in self._inputs)

    def settle(self) -> None:
        for each in self._inputs:
            each.settle()

    def why_text(self, name: str) -> str:
        return next((why for each in self._inputs if (why := each.why_text(name))), "")

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        for each, first in zip(self._inputs, self._starts[:-1].tolist(), strict=True):
            low, high = max(start - first, 0), min(stop - first, each.rows)
            if low < high:
                yield from each.batches(low, high)
